"""What qualifies an ok row besides its own blocks: the state that the machine was in.

A new label is a new row of `LABELS`. Labelled rows are kept: their interval grows instead.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.readings import device_labels
from autotune.types import Label, Measurement

OTHERS_SHARE = 0.10
"""CPU time used by others, as a share of all there is, above which they may matter ..."""
IDLE_SHARE = 0.10
"""... where less than this is left idle: else they took nothing that was wanted."""
COLD_SHARE = 0.05
"""Share of what was read that came from storage, above which the page cache was cold."""
COLD_BYTES = 2**20
BALANCED = (0.05, 0.95)
"""Shares of batches that nothing lay ready for: full queues show almost none, empty ones all."""
UNSURE = frozenset({Label.CONTENDED, Label.THROTTLED, Label.COLD, Label.NOT_STEADY})
"""Labels of a ceiling that bounds nothing: in another state more may be possible."""


def outside_labels(measurement: Measurement) -> tuple[Label, ...]:
    """The labels that hold: the host's state first, then the accelerators'."""
    own = (label for label, holds in LABELS.items() if holds(measurement))
    return tuple(dict.fromkeys((*own, *device_labels(measurement))))


def _is_contended(measurement: Measurement) -> bool:
    others, idle = measurement.others_cpu_s, measurement.idle_cpu_s
    if others is None or idle is None or measurement.cpu_s is None:
        return False
    everything = others + idle + measurement.cpu_s
    return others > OTHERS_SHARE * everything and idle < IDLE_SHARE * everything


def _is_cold(measurement: Measurement) -> bool:
    stored, asked = measurement.storage_bytes, measurement.asked_bytes
    if stored is None or asked is None or stored < COLD_BYTES:
        return False
    # Files that are mapped are read from storage without having been asked for.
    return stored > COLD_SHARE * max(stored, asked)


def _is_balanced(measurement: Measurement) -> bool:
    """Loader and device are about as fast as each other: which one waits is chance."""
    if not measurement.workers or not measurement.batches:
        return False
    starved = sum(block.starved for block in measurement.blocks) / measurement.batches
    return BALANCED[0] < starved < BALANCED[1]


LABELS: dict[Label, Callable[[Measurement], bool]] = {
    Label.BALANCED: _is_balanced,
    Label.NOT_STEADY: lambda measurement: bool(measurement.unsettled),
    Label.CONTENDED: _is_contended,
    Label.COLD: _is_cold,
}
