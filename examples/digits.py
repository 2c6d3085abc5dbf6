"""The smallest real job: a CNN on scikit-learn's handwritten digits.

Everything is in memory and a sample costs next to nothing, so what counts here is the fixed cost
of each step: larger batches win, and loader workers only get in the way.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 32}


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def build_dataset() -> Dataset[tuple[Tensor, ...]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)  # (N, 1, 8, 8)
    return TensorDataset(images, torch.tensor(digits.target))
