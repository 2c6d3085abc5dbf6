"""Precisions: which switches, autocast and loss scaling each one means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.types import Machine

AMPERE = (8, 0)
"""The first CUDA capability with TF32 and bf16 units; older ones emulate bf16, slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One value of `train.precision`.

    `matmul` and `cudnn_tf32` go through the legacy setters, which never raise and leave every
    getter of both generations readable; None leaves the switch as PyTorch and the model set it.
    """

    name: str
    autocast: str | None = None
    scaled: bool = False
    matmul: str | None = None
    cudnn_tf32: bool | None = None
    refuses: Callable[[Machine], str] = lambda machine: ""
    pays_on: Callable[[Machine], bool] = lambda machine: True
    """Whether the machine has what could make it faster: only then it is tried unasked."""


def _needs_ampere(machine: Machine) -> str:
    if machine.device.startswith("cuda") and machine.capability >= AMPERE:
        return ""
    return "needs a CUDA device of capability 8.0 or newer"


def _bf16_emulated(machine: Machine) -> str:
    if machine.device.startswith("cuda") and machine.capability < AMPERE:
        return "this device emulates bf16 (capability below 8.0)"
    return ""


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="default", pays_on=lambda machine: False),
        Precision(name="fp32", matmul="highest", cudnn_tf32=False, pays_on=lambda machine: False),
        Precision(name="tf32", matmul="high", cudnn_tf32=True, refuses=_needs_ampere),
        Precision(name="bf16", autocast="bfloat16", refuses=_bf16_emulated),
        Precision(
            name="fp16",
            autocast="float16",
            scaled=True,
            pays_on=lambda machine: not machine.on_cpu,
        ),
    )
}
