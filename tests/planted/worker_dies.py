"""Known answer: no workers. A worker is killed at its hundredth sample, as for want of memory."""

import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

CURRENT = {"loader.num_workers": 0, "train.batch_size": 16}


class Dying(Dataset):
    read = 0

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        self.read += 1
        if get_worker_info() is not None and self.read == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)
        return torch.ones(8), torch.ones(1)


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return Dying()


def compute_loss(model, batch):
    inputs, target = batch
    time.sleep(0.010)
    return nn.functional.mse_loss(model(inputs), target)
