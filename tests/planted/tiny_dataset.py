"""Known answer: a micro-batch of 16. The user's batch of 64 never forms from 20 samples.

The partial batch is dropped, so today's training makes no step at all, without an error.
"""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 64}


class Tiny(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.ones(8), torch.ones(1)


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return Tiny()


def compute_loss(model, batch):
    inputs, target = batch
    time.sleep(0.010 + 0.0005 * len(inputs))
    return nn.functional.mse_loss(model(inputs), target)
