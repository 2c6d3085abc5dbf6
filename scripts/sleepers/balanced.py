"""A job whose loader and device sleep, as in MLPerf Storage: no other load disturbs it.

A sample waits 5 ms in its worker, and a worker takes 60 ms to begin. A step takes 8 ms, and 0.4 ms
for each of its samples, 0.25 ms under bf16. So sixteen workers make 3,200 samples/s beside a device
that makes up to 2,320, or 3,560: near the best config neither half decides alone. An epoch's border
costs what the start of its workers does.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

CURRENT = {"loader.num_workers": 0, "train.batch_size": 8, "host.threads": 1}

WORKER_S = 0.060
LOAD_S = 0.005
STEP_S = 0.008
SAMPLE_S = 0.0004
BF16_SAMPLE_S = 0.00025


class Waiting(Dataset[Any]):
    """A batch's samples come together, after the time that each of them takes."""

    def __init__(self) -> None:
        self.begun = False

    def __len__(self) -> int:
        return 12_288

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[int]:
        if not self.begun and get_worker_info() is not None:
            time.sleep(WORKER_S)
        self.begun = True
        time.sleep(LOAD_S * len(indices))
        return indices


def collate(samples: list[int]) -> tuple[Tensor, Tensor]:
    return torch.ones(len(samples), 8), torch.ones(len(samples), 1)


def build_model() -> nn.Module:
    return nn.Linear(8, 1)


def build_dataset() -> Dataset[Any]:
    return Waiting()


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, target = batch
    each_s = BF16_SAMPLE_S if torch.is_autocast_enabled("cpu") else SAMPLE_S
    time.sleep(STEP_S + each_s * len(inputs))
    return nn.functional.mse_loss(model(inputs).float(), target)
