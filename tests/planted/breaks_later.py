"""Known answer: none. The tenth step of every process fails, with another number each time.

The inspecting probe makes fewer steps, so that only the probes after it show the fault.
"""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 16}

steps = 0


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return TensorDataset(torch.ones(2000, 8), torch.ones(2000, 1))


def compute_loss(model, batch):
    global steps
    steps += 1
    if steps == 10:
        raise RuntimeError(f"record {os.getpid()} is broken")
    inputs, target = batch
    return nn.functional.mse_loss(model(inputs), target)
