"""Known answer: no workers. In a worker the first sample never comes.

As with a lock that was held when the worker was forked. `InUse` trains with workers today, so that
its baseline hangs, too.
"""

import time

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info


class Hanging(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        if get_worker_info() is not None:
            time.sleep(3600)
        time.sleep(0.001)
        return torch.ones(8), torch.ones(1)


class Unused:
    CURRENT = {"loader.num_workers": 0, "train.batch_size": 16}

    def build_model(self):
        return nn.Linear(8, 1)

    def build_dataset(self):
        return Hanging()

    def compute_loss(self, model, batch):
        inputs, target = batch
        time.sleep(0.010)
        return nn.functional.mse_loss(model(inputs), target)


class InUse(Unused):
    CURRENT = {"loader.num_workers": 2, "train.batch_size": 16}
