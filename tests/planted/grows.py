"""Known answer: micro-batch 32 of 8, 32 and 64, under a limit of 0.7 GiB on the host's memory.

Larger micro-batches pay: a step sleeps 40 ms, and 0.1 ms a sample. Each sample takes 1 MiB of the
host's memory while the step lasts; `Jumps` takes 1 GiB more, all of a sudden, above 40.
"""

import time

import torch
from device_affine import Ready, collate  # a sibling of the model file
from torch import nn

SAMPLE_BYTES = 1024**2
JUMP_BYTES = 1024**3
JUMPS_ABOVE = 40
STEP_S = 0.04
SAMPLE_S = 0.0001


class Grows:
    CURRENT = {"loader.num_workers": 0, "train.batch_size": 8}

    def build_model(self):
        return nn.Linear(8, 1)

    def build_dataset(self):
        return Ready()

    def collate(self, samples):
        return collate(samples)

    def held_bytes(self, batch):
        return SAMPLE_BYTES * batch

    def compute_loss(self, model, batch):
        inputs, target = batch
        held = torch.ones(self.held_bytes(len(inputs)), dtype=torch.uint8)
        time.sleep(STEP_S + SAMPLE_S * len(inputs))
        return nn.functional.mse_loss(model(inputs), target) + 0 * held[0]


class Jumps(Grows):
    def held_bytes(self, batch):
        return super().held_bytes(batch) + (JUMP_BYTES if batch > JUMPS_ABOVE else 0)


class NeverFits(Grows):
    def compute_loss(self, model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
