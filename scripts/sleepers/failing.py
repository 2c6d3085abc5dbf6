"""A job that sleeps, more than half of whose configs fail, most of them next to the best one.

A sample waits 4 ms in its worker. A step takes 16 ms, and 0.4 ms for each of its samples, 0.3 ms
under bf16: larger micro-batches pay. More than 32 samples do not fit into the device's memory, 64
under bf16. With sixteen workers one of them dies, as where the kernel wants its memory back; with
eight, where their queues hold more than 2,048 samples.
"""

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

CURRENT = {"loader.num_workers": 0, "train.batch_size": 8, "host.threads": 1}

LOAD_S = 0.004
STEP_S = 0.016
SAMPLE_S = 0.0004
BF16_SAMPLE_S = 0.0003
LARGEST, LARGEST_BF16 = 32, 64
TOO_MANY_WORKERS = 16
MOST_QUEUED = 2048


class Waiting(Dataset[Any]):
    """A batch's samples come together, after the time that each of them takes."""

    queued = 0

    def __len__(self) -> int:
        return 12_288

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[int]:
        time.sleep(LOAD_S * len(indices))
        worker = get_worker_info()
        workers = 0 if worker is None else worker.num_workers
        is_last = worker is not None and worker.id == workers - 1
        if is_last and (workers >= TOO_MANY_WORKERS or self.queued > MOST_QUEUED):
            os.kill(os.getpid(), signal.SIGKILL)
        return indices


def collate(samples: list[int]) -> tuple[Tensor, Tensor]:
    return torch.ones(len(samples), 8), torch.ones(len(samples), 1)


def build_model() -> nn.Module:
    return nn.Linear(8, 1)


def build_dataset() -> Dataset[Any]:
    return Waiting()


def build_loader(dataset: Dataset[Any], **arguments: Any) -> DataLoader[Any]:
    workers, prefetch = arguments["num_workers"], arguments.get("prefetch_factor") or 0
    dataset.queued = workers * prefetch * arguments["batch_size"]  # type: ignore[attr-defined]
    return DataLoader(dataset, collate_fn=collate, **arguments)


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, target = batch
    half = torch.is_autocast_enabled("cpu")
    time.sleep(STEP_S + (BF16_SAMPLE_S if half else SAMPLE_S) * len(inputs))
    if len(inputs) > (LARGEST_BF16 if half else LARGEST):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return nn.functional.mse_loss(model(inputs).float(), target)
