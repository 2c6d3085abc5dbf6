"""Parallelism modes: how many ranks one probe has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One value of `parallel.mode`."""

    name: str
    ranks: int


MODES = {mode.name: mode for mode in (Mode(name="single", ranks=1),)}
