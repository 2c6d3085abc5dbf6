"""Wide layers and a cheap sample: matrix products are nearly all that happens."""

import os

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 64}

SMALL = os.environ.get("GPU_MODELS") == "small"
"""Whether a CPU must be able to train it."""
FEATURES, CLASSES = 256, 10
WIDTH = 128 if SMALL else 4096
LAYERS = 6
SAMPLES = 4096 if SMALL else 65_536


class Rows(Dataset[tuple[Tensor, int]]):
    """Features (256,) and their class."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)
        self.rows = torch.randn(SAMPLES, FEATURES, generator=dice)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index % CLASSES


def build_model() -> nn.Module:
    """Six wide layers and a head."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.GELU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def build_dataset() -> Dataset[tuple[Tensor, int]]:
    """Rows that nothing has to be downloaded for."""
    return Rows()
