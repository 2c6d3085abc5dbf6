"""What knobs act on: the settings that a probe turns into behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.knobs import KNOBS
from autotune.precision import PRECISIONS, Precision
from autotune.types import Value


@dataclass
class Setup:
    """The loader's arguments and the step's settings, as the knobs left them."""

    loader: dict[str, Any]
    accumulation: int = 1
    precision: str = "default"
    threads: int | None = None

    @property
    def workers(self) -> int:
        """Loader workers."""
        return int(self.loader["num_workers"])

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""
        return int(self.loader["batch_size"])


def setup_of(config: Mapping[str, Value], delivered_batch: int) -> Setup:
    """Let each knob of the config act."""
    # A `build_loader` that takes an argument gets it, also where the knob does not apply.
    setup = Setup({"batch_size": delivered_batch, "num_workers": 0, "pin_memory": False})
    for name, value in config.items():
        KNOBS[name].act(setup, value)
    return setup


def set_switches(precision: Precision) -> None:
    """Set the precision's process-wide switches.

    By the legacy setters: they never raise and leave the getters of both generations readable,
    which the user's libraries may call.
    """
    if precision.matmul is not None:
        torch.set_float32_matmul_precision(precision.matmul)
    if precision.cudnn_tf32 is not None:
        torch.backends.cudnn.allow_tf32 = precision.cudnn_tf32


def apply_to_process(setup: Setup) -> None:
    """Set what holds for the whole process: threads and precision switches."""
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    set_switches(PRECISIONS[setup.precision])
