"""Known answer: keep yours. All that a step costs is 2 ms for each of its samples."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 32}
BEST = CURRENT


class Ready(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return torch.ones(8), torch.ones(1)


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return Ready()


def compute_loss(model, batch):
    inputs, target = batch
    time.sleep(0.002 * len(inputs))
    return nn.functional.mse_loss(model(inputs), target)
