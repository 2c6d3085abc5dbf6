"""A small transformer that learns to write Python, byte by byte.

Its text is the source of Python's own standard library. Loading a sample is a slice of memory, so
the device does nearly all the work: batch size, precision and threads matter, loader workers do
not. It brings its own `compute_loss`, as a language model must.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 16}

CONTEXT = 128
VOCABULARY = 256  # every byte is a token
WIDTH, HEADS, LAYERS = 128, 4, 5  # about a million parameters


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Neighbouring stretches of the text, each with the same stretch one byte later as target."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        window = self.text[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and an MLP, each normalised before and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, time, width of a head)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        update: Tensor = self.mlp(x)
        return x + update


class LanguageModel(nn.Module):
    """Bytes (batch, time) to logits of the byte that follows each (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(text) + self.positions))
        return logits


def build_model() -> nn.Module:
    return LanguageModel()


def build_dataset() -> Dataset[tuple[Tensor, Tensor]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    return Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())
