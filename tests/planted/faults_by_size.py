"""Every fault in one job: the micro-batch names it, so that one template serves all probes.

Nothing happens with 8 samples. What `collate` does happens in a loader worker where there is one.
"""

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset, get_worker_info

CURRENT = {"loader.num_workers": 0, "train.batch_size": 8}
NCCL_WARNING = "host:1:1 [0] transport.cc:1 NCCL WARN Cuda failure 2 'out of memory'"

held = []
sizes = []


class PairError(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Unmakeable(Exception):  # noqa: N818 - the name is the test's
    """Cannot be made again from its text."""

    def __init__(self, text):
        super().__init__({"known": "its own text"}[text])


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def hang_at_exit():
    atexit.register(hang)


def leak_a_thread():
    if not held:
        held.append(threading.Thread(target=hang, daemon=False))
        held[0].start()


def read_address_zero():
    ctypes.string_at(0)


def open_too_many_files():
    most = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    while True:
        held.append(open(os.devnull))  # noqa: SIM115 - kept open on purpose


def need_more_than_there_is():
    torch.empty(10**16)


def fail_in_a_collective():
    sys.stderr.write(NCCL_WARNING + "\n")
    raise torch.distributed.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error")


def hold_much():
    held.append(torch.ones(16 * 2**20))


def raise_pair():
    raise PairError("one", "two")


def raise_unmakeable():
    raise Unmakeable("known")


def exit_in_a_worker():
    if get_worker_info() is not None:
        os._exit(3)


IN_THE_LOADER = {
    9: kill_itself,
    10: hang,
    11: raise_pair,
    12: raise_unmakeable,
    13: exit_in_a_worker,
}
IN_THE_LOSS = {
    19: kill_itself,
    20: hang,
    21: hang_at_exit,
    22: leak_a_thread,
    23: raise_pair,
    24: read_address_zero,
    25: open_too_many_files,
    26: fail_in_a_collective,
    27: hold_much,
}
IN_THE_STEP = {30: need_more_than_there_is}


def nothing():
    pass


def collate(samples):
    IN_THE_LOADER.get(len(samples), nothing)()
    return torch.utils.data.default_collate(samples)


class Planted(torch.optim.SGD):
    def step(self, closure=None):
        IN_THE_STEP.get(sizes[-1], nothing)()
        return super().step(closure)


def build_model():
    return nn.Linear(8, 1)


def build_dataset():
    return TensorDataset(torch.ones(512, 8), torch.ones(512, 1))


def build_optimizer(model):
    return Planted(model.parameters(), lr=0.01)


def compute_loss(model, batch):
    inputs, target = batch
    sizes.append(len(inputs))
    IN_THE_LOSS.get(len(inputs), nothing)()
    return nn.functional.mse_loss(model(inputs), target)
