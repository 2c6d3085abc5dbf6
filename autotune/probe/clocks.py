"""Clocks for timed blocks, the host's on a CPU, timing events on accelerators; and counters.

An accelerator works behind the host's back: a host clock at a block's edge would either need a
synchronisation, which drains the device, or measure how fast kernels are launched.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from autotune.probe.memory import allocator_stats
from autotune.types import DEVICE_MEMORY

RUN_AHEAD = 2
"""Steps that the host may be ahead of the device."""


class Clock(Protocol):
    """When blocks begin and end, and how long the device waited for data."""

    lag: int
    """Blocks after which a block's edges may be read without draining the device."""

    def before_draw(self) -> None:
        """Called before each batch is asked for."""

    def after_copy(self) -> None:
        """Called when a batch has been sent to the device."""

    def after_step(self) -> None:
        """Called when a step has been sent to the device."""

    def edge(self) -> Any:
        """A mark between two blocks."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""

    def take_gaps(self) -> Any:
        """The device's waits for data since the last call, to be read by `gap_s`."""

    def gap_s(self, gaps: Any) -> float | None:
        """Seconds that the device waited; None where the host's own waiting is all of it."""

    def settle(self) -> None:
        """Wait until the device has done everything."""


class HostClock:
    """On a CPU the step is over when the call returns."""

    lag = 0

    def before_draw(self) -> None:
        """Nothing runs ahead."""

    def after_copy(self) -> None:
        """Nothing is copied."""

    def after_step(self) -> None:
        """The step is over."""

    def edge(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start

    def take_gaps(self) -> None:
        """The host knows all waits."""

    def gap_s(self, gaps: None) -> float | None:
        """None: the host knows."""
        return None

    def settle(self) -> None:
        """Nothing is left to wait for."""


class DeviceClock:
    """Timing events in the device's own stream."""

    lag = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead: deque[torch.Event] = deque()
        self._idle_from: torch.Event | None = None
        self._gaps: list[tuple[torch.Event, torch.Event]] = []

    def before_draw(self) -> None:
        """Let the host run ahead by two steps at most; pinned buffers stay few, too."""
        while len(self._ahead) > RUN_AHEAD:
            self._ahead.popleft().synchronize()
        # Passed when all work sent so far is done: from there on the device waits for this batch.
        self._idle_from = self._event()

    def after_copy(self) -> None:
        """The device can go on: its wait for data is over."""
        if self._idle_from is not None:
            self._gaps.append((self._idle_from, self._event()))
            self._idle_from = None

    def after_step(self) -> None:
        """Remember where the step ends: the host may run ahead of it, but not far."""
        self._ahead.append(self._event())

    def edge(self) -> torch.Event:
        """A timing event in the device's stream."""
        return self._event()

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        """Seconds of device time between two events."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def take_gaps(self) -> list[tuple[torch.Event, torch.Event]]:
        """The waits since the last call, unread."""
        gaps, self._gaps = self._gaps, []
        return gaps

    def gap_s(self, gaps: list[tuple[torch.Event, torch.Event]]) -> float | None:
        """Seconds that the device waited."""
        return sum(self.seconds(start, end) for start, end in gaps)

    def settle(self) -> None:
        """Synchronise."""
        torch.accelerator.synchronize(self._device)

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device) -> Clock:
    """The clock that fits the device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


Counters = Callable[[], dict[str, int]]

ALLOCATORS = {
    DEVICE_MEMORY: "reserved_bytes.all.current",
    "allocator retries": "num_alloc_retries",
}
"""Of what the allocator counts: our name, and its."""


def counters_for(device: torch.device) -> Counters:
    """Reads what must stand still in a steady state."""

    def read() -> dict[str, int]:
        stats = allocator_stats(device)
        known = {name: stats[field] for name, field in ALLOCATORS.items() if field in stats}
        return {"compiled graphs": _compiled_graphs(), **known}

    return read


def _compiled_graphs() -> int:
    """How many graphs were compiled in this process; none where nothing can have been."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
