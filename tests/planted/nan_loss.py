"""Known answer: none. The loss is not a number, whatever the config: no speed means anything."""

import torch
from torch import nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 16}


class Ready(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return torch.ones(8), torch.ones(1)


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return Ready()


def compute_loss(model, batch):
    inputs, _ = batch
    return (model(inputs) * float("nan")).sum()
