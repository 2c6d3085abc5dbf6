"""The accelerator's memory: what this process may take of it, and what it took.

Readers and switches differ between kinds of accelerators: each one degrades alone to None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from autotune.types import GIB

T = TypeVar("T")

LARGEST_CONTEXT = GIB
"""What is in use on a device before anything was allocated is ours up to this, not another's."""


class DeviceMemory:
    """Watches the allocator of one probe's device; on the CPU there is none.

    Args:
        device: Where the probe trains.
        fraction: Share of its memory at which the allocator refuses.
    """

    def __init__(self, device: torch.device, fraction: float | None) -> None:
        self._device = device
        self._fraction = fraction
        self._context = self._outside()
        self._allocated: list[int] = []
        self._reserved: list[int] = []
        self._retries: int | None = None
        self.allow(0)

    def allow(self, surplus_bytes: int) -> None:
        """Refuse what goes beyond the fraction and a surplus that no real run holds.

        It turns a full device into an error that can be caught. Context and libraries do not count.
        """
        if self._fraction is None or self._device.type == "cpu":
            return
        total = total_bytes(self._device)
        surplus = surplus_bytes / total if total else 0.0
        kind = getattr(torch, self._device.type)
        share = min(1.0, self._fraction + surplus)
        _guarded(lambda: kind.set_per_process_memory_fraction(share, self._device))

    def begin_window(self) -> None:
        """Peaks of the first steps are kept; retries count from here."""
        stats = self._end_phase()
        self._retries = stats.get("num_alloc_retries")

    def facts(self, surplus_bytes: int) -> dict[str, Any]:
        """What `Measurement` says of the device's memory; empty on the CPU."""
        if self._device.type == "cpu":
            return {}
        stats = self._end_phase()
        retries = stats.get("num_alloc_retries")
        outside = self._outside()
        ours = None if self._context is None else min(self._context, LARGEST_CONTEXT)
        other = foreign = None
        if ours is not None and outside is not None and self._context is not None:
            foreign = self._context - ours
            other = max(0, outside - foreign)
        reserved = _most(self._reserved, surplus_bytes)
        return {
            "allocated_bytes": _most(self._allocated, surplus_bytes),
            "reserved_bytes": reserved,
            "memory_bytes": None if reserved is None else reserved + (other or 0),
            "other_bytes": other,
            "foreign_bytes": foreign,
            "alloc_retries": _growth(self._retries, retries),
        }

    def _end_phase(self) -> Mapping[str, int]:
        stats = self._stats()
        for peaks, name in ((self._allocated, "allocated"), (self._reserved, "reserved")):
            if (peak := stats.get(f"{name}_bytes.all.peak")) is not None:
                peaks.append(peak)
        if stats:
            _guarded(lambda: torch.accelerator.reset_peak_memory_stats(self._device))
        return stats

    def _stats(self) -> Mapping[str, int]:
        return allocator_stats(self._device)

    def _outside(self) -> int | None:
        """Bytes in use on the device that our allocator does not hold."""
        info = _info(self._device)
        if info is None:
            return None
        free, total = info
        return max(0, total - free - (self._stats().get("reserved_bytes.all.current") or 0))


def allocator_stats(device: torch.device) -> Mapping[str, int]:
    """What the allocator counts; empty on the CPU, and where this kind of device cannot tell."""
    if device.type == "cpu":
        return {}
    return _guarded(lambda: torch.accelerator.memory_stats(device)) or {}


def total_bytes(device: torch.device) -> int | None:
    """An accelerator's memory."""
    info = _info(device)
    return None if info is None else info[1]


def _info(device: torch.device) -> tuple[int, int] | None:
    if device.type == "cpu":
        return None
    return _guarded(lambda: torch.accelerator.get_memory_info(device))


def _most(peaks: list[int], surplus_bytes: int) -> int | None:
    return max(0, max(peaks) - surplus_bytes) if peaks else None


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _guarded(ask: Callable[[], T]) -> T | None:
    """What this build or this kind of device cannot tell is None."""
    try:
        return ask()
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError):
        return None
