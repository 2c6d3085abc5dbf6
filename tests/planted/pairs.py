"""A loader and a device at a known ratio of their speeds, each by itself made of waiting.

`pairs.py:at_80` names the job whose loader, with four workers, makes 0.8 times the samples that its
device can train on: 0.8 x 400 samples/s. A ratio below one starves the device, and a prefetch queue
that was full at the start flatters the loader; near one neither half decides alone.
"""

import time
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

CONFIG = {"loader.num_workers": 4, "loader.prefetch_factor": 2, "train.batch_size": 8}
STEP_S = 0.020
RATIOS = (50, 80, 95, 105, 125, 200)
"""Hundredths."""


class Waiting(Dataset):
    """Samples that take their time, half to one and a half times the usual one."""

    def __init__(self, sample_s):
        self.sample_s = sample_s

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(self.sample_s * (0.5 + index * 7919 % 1000 / 1000))
        return torch.ones(8), torch.ones(1)


class Pair:
    """What a model file defines, for one ratio."""

    CURRENT = CONFIG

    def __init__(self, hundredths):
        device = CONFIG["train.batch_size"] / STEP_S
        self.sample_s = CONFIG["loader.num_workers"] / (device * hundredths / 100)

    def build_model(self):
        return nn.Linear(8, 1)

    def build_dataset(self):
        return Waiting(self.sample_s)

    def compute_loss(self, model, batch):
        inputs, target = batch
        time.sleep(STEP_S)
        return nn.functional.mse_loss(model(inputs), target)


at_50, at_80, at_95, at_105, at_125, at_200 = (partial(Pair, ratio) for ratio in RATIOS)
