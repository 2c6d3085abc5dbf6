"""Where a probe's batches go: into whole optimizer steps, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autotune.precision import PRECISIONS
from autotune.probe.batches import touch
from autotune.probe.setup import Setup
from autotune.probe.workload import Workload

Draw = Callable[[], Any]


class Sink(Protocol):
    """Takes what one step needs from `draw`."""

    accumulation: int

    def step(self, draw: Draw) -> Tensor | None:
        """One step; its mean loss, if it has one."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps really taken."""


class Discard:
    """Reads each batch and drops it: the loader's ceiling."""

    accumulation = 1
    optimizer_steps = 0

    def step(self, draw: Draw) -> None:
        """Read one batch."""
        touch(draw())


class Train:
    """Whole optimizer steps of the global batch, as the user's loop makes them."""

    def __init__(self, workload: Workload, setup: Setup, device: torch.device) -> None:
        assert workload.model is not None
        self.workload = workload
        self.device = device
        self.accumulation = setup.accumulation
        self.model: nn.Module = workload.model.to(device).train()
        self.optimizer = workload.optimizer(self.model)
        self._loss = workload.loss_of(self.model)
        self._precision = PRECISIONS[setup.precision]
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._precision.scaled)
        self._steps = 0
        self.optimizer.register_step_post_hook(self._count)

    def step(self, draw: Draw) -> Tensor:
        """One optimizer step over `accumulation` micro-batches."""
        total: Tensor | None = None
        for _ in range(self.accumulation):
            batch = draw()
            with self._autocast():
                loss = self._loss(batch)
            part = loss if self.accumulation == 1 else loss / self.accumulation
            self._scaler.scale(part).backward()  # type: ignore[no-untyped-call]
            detached = loss.detach()
            total = detached if total is None else total + detached
        # Once per update, before the user's clipping: a second unscale_ would raise.
        self._scaler.unscale_(self.optimizer)
        self.workload.before_step(self.model, self.optimizer)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        assert total is not None
        return total if self.accumulation == 1 else total / self.accumulation

    @property
    def optimizer_steps(self) -> int:
        """Steps really taken: a skipped one does not call the hook; synchronises if fused."""
        # A fused optimizer is always called, and skips by itself.
        if self.scaled and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            states = self.optimizer.state.values()
            return max((int(state["step"]) for state in states if "step" in state), default=0)
        return self._steps

    @property
    def scaled(self) -> bool:
        """Whether steps may be skipped for the loss scale's sake."""
        return self._precision.scaled

    @property
    def resident_bytes(self) -> int:
        """Parameters, buffers and optimizer state: there during the whole step."""
        held = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            held += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision.autocast is None:
            return nullcontext()
        dtype = getattr(torch, self._precision.autocast)
        return torch.autocast(self.device.type, dtype=dtype)

    def _count(self, *_: Any) -> None:
        self._steps += 1
