"""Known answer: micro-batch 48, the largest multiple of eight that runs.

Larger micro-batches pay (a step sleeps 4 ms, and 0.5 ms a sample) until the model fails above 48:
`OutOfMemory` as an accelerator does, `StartsAbove` with an error of its own, `Suspicious` with one
that does not say what was wanting. These two train with a batch that fails: their answer has no
speed-up, and the descent must find what runs.
"""

import time

from device_affine import Ready, collate  # a sibling of the model file
from torch import nn

LARGEST = 48
STEP_S = 0.004
SAMPLE_S = 0.0005


class OutOfMemory:
    CURRENT = {"loader.num_workers": 0, "train.batch_size": 8}
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def build_model(self):
        return nn.Linear(8, 1)

    def build_dataset(self):
        return Ready()

    def collate(self, samples):
        return collate(samples)

    def compute_loss(self, model, batch):
        inputs, target = batch
        time.sleep(STEP_S + SAMPLE_S * len(inputs))
        if len(inputs) > LARGEST:
            raise self.error
        return nn.functional.mse_loss(model(inputs), target)


class StartsAbove(OutOfMemory):
    CURRENT = {"loader.num_workers": 0, "train.batch_size": 256}
    error = ValueError("this model takes at most 48 samples")


class Suspicious(OutOfMemory):
    CURRENT = {"loader.num_workers": 0, "train.batch_size": 64}
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
