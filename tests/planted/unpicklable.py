"""Known answer: four workers or more. Nothing here can be pickled, and forking needs no pickling.

The dataset holds an open file and a lambda, and its samples are of a local class; only what
`collate` makes of them travels from a worker. Each sample waits 4 ms.
"""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 16}


class Open(Dataset):
    def __init__(self):
        class Sample:
            def __init__(self, value):
                self.value = value

        self.file = open(__file__)  # noqa: SIM115 - stays open as long as the dataset lives
        self.make = lambda value: Sample(value)

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.004)
        return self.make(1.0)


def collate(samples):
    return torch.tensor([[sample.value] * 8 for sample in samples])


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return Open()


def compute_loss(model, batch):
    time.sleep(0.016)
    return model(batch).square().mean()
