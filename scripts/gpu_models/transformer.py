"""A small decoder that learns made-up text: attention, wide layers, and large logits."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 8}

SMALL = os.environ.get("GPU_MODELS") == "small"
"""Whether a CPU must be able to train it."""
CONTEXT, VOCABULARY = (32, 256) if SMALL else (512, 8192)
WIDTH, HEADS, LAYERS = (32, 2, 2) if SMALL else (512, 8, 8)
SAMPLES = 1024 if SMALL else 8192

Sample = tuple[Tensor, Tensor]


class Sentences(Dataset[Sample]):
    """Tokens (time,), and the same tokens one place later as target."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=dice)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Block(nn.Module):
    """Causal self-attention and two wide layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Activations (batch, time, WIDTH), in and out."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, time, width of a head)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        update: Tensor = self.wide(x)
        return x + update


class Decoder(nn.Module):
    """Tokens (batch, time) to logits of the next one (batch, time, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        """Tokens in, logits out."""
        logits: Tensor = self.head(self.blocks(self.tokens(text) + self.places))
        return logits


def build_model() -> nn.Module:
    """The decoder."""
    return Decoder()


def build_dataset() -> Dataset[Sample]:
    """Sentences that nothing has to be downloaded for."""
    return Sentences()


def compute_loss(model: nn.Module, batch: Sample) -> Tensor:
    """Cross-entropy of each next token."""
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())
