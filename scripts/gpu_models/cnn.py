"""Pictures decoded as JPEG files are, by numpy, into a small convolutional network.

A sample costs some milliseconds of one CPU: cosine coefficients are drawn, each block of 8 x 8 is
transformed back, and the picture is shrunk. Where workers are few, the loader decides the speed.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 32}

SMALL = os.environ.get("GPU_MODELS") == "small"
"""Whether a CPU must be able to train it."""
BLOCKS = 10 if SMALL else 40
"""Blocks along each side of a picture, before it is shrunk to a half."""
WIDTH = 8 if SMALL else 64
CLASSES = 10
SAMPLES = 1024 if SMALL else 20_000

Sample = tuple[Tensor, int]


def cosines() -> np.ndarray:
    """The basis of a block, (8, 8), orthonormal."""
    places = np.arange(8)
    basis = np.cos(np.pi / 8 * np.outer(places, places + 0.5))
    basis[0] /= np.sqrt(2)
    return (basis / 2).astype(np.float32)


class Pictures(Dataset[Sample]):
    """Pictures (3, height, width) and their class, the same at each visit."""

    basis = cosines()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        dice = np.random.default_rng(index)
        coefficients = dice.standard_normal((3, BLOCKS, BLOCKS, 8, 8), dtype=np.float32)
        blocks = self.basis.T @ coefficients @ self.basis
        picture = blocks.transpose(0, 1, 3, 2, 4).reshape(3, 8 * BLOCKS, 8 * BLOCKS)
        half = picture.reshape(3, 4 * BLOCKS, 2, 4 * BLOCKS, 2).mean(axis=(2, 4))
        return torch.from_numpy(half), index % CLASSES


def stage(before: int, after: int) -> nn.Sequential:
    """Half the height and width, other channels."""
    return nn.Sequential(
        nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def build_model() -> nn.Module:
    """Three stages and a linear head."""
    return nn.Sequential(
        stage(3, WIDTH),
        stage(WIDTH, 2 * WIDTH),
        stage(2 * WIDTH, 4 * WIDTH),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, CLASSES),
    )


def build_dataset() -> Dataset[Sample]:
    """Pictures that nothing has to be downloaded for."""
    return Pictures()
