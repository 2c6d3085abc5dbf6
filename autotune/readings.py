"""What a GPU told beside a probe, cut to the timed window: arithmetic only, without NVML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from autotune.types import DeviceReading, Label, Measurement

LEAST_ENERGY_S = 10.0
"""The energy counter ticks about every 100 ms: over 10 s that is 1 %."""
LEAST_SAMPLES = 3
"""A mean of fewer is not told: the window was too short."""
IDLE = 0x1
SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons for lower clocks that a job cannot be judged under: hardware slowdown, software
and hardware thermal slowdown, power brake. The software power cap (0x4) is normal at full load."""
SLOWER = 0.9
"""Below this share of what the clock was at first, it has been held back."""
BUSY_PCT = 5.0
"""Use of the SMs by other processes that disturbs a probe."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A value, and the time that it tells about: an interval, or one moment."""

    start_ns: int
    end_ns: int
    value: float


Series = Sequence[Sample]
Fold = Callable[[Series, int, int], float | None]
"""What a series says of the window from one time to another."""


def inside(series: Series, start_ns: int, end_ns: int) -> list[Sample]:
    """The samples that tell of nothing but the window."""
    return [sample for sample in series if start_ns <= sample.start_ns and sample.end_ns <= end_ns]


def mean(series: Series, start_ns: int, end_ns: int, *, least: int = LEAST_SAMPLES) -> float | None:
    """The mean, each sample by the length of its interval."""
    counted = inside(series, start_ns, end_ns)
    if len(counted) < least:
        return None
    lengths = [sample.end_ns - sample.start_ns for sample in counted]
    if not sum(lengths):
        return fmean(sample.value for sample in counted)
    return fmean([sample.value for sample in counted], lengths)


def mean_of_any(series: Series, start_ns: int, end_ns: int) -> float | None:
    """The mean of however few samples: of what is read rarely."""
    return mean(series, start_ns, end_ns, least=1)


def mean_over_time(series: Series, start_ns: int, end_ns: int) -> float | None:
    """The integral over the window by its length; the first and last value reach to its edges."""
    counted = inside(series, start_ns, end_ns)
    if len(counted) < LEAST_SAMPLES:
        return None
    points = [
        (start_ns, counted[0].value),
        *((sample.end_ns, sample.value) for sample in counted),
        (end_ns, counted[-1].value),
    ]
    pairs = zip(points, points[1:], strict=False)
    area = sum((later - at) * (value + after) / 2 for (at, value), (later, after) in pairs)
    return area / (end_ns - start_ns)


def increase(series: Series, start_ns: int, end_ns: int) -> float | None:
    """How much a counter grew in the window, interpolated at both edges.

    None where it was not read on both sides of each edge, stood still or ran backwards: a counter
    that does not move counts nothing.
    """
    first, last = _at(series, start_ns), _at(series, end_ns)
    if first is None or last is None or last <= first:
        return None
    return last - first


def _at(series: Series, moment_ns: int) -> float | None:
    """A counter's state at a moment between two samples."""
    before = [sample for sample in series if sample.end_ns <= moment_ns]
    after = [sample for sample in series if sample.end_ns >= moment_ns]
    if not before or not after:
        return None
    left, right = before[-1], after[0]
    if right.value < left.value:
        return None
    if right.end_ns == left.end_ns:
        return left.value
    share = (moment_ns - left.end_ns) / (right.end_ns - left.end_ns)
    return left.value + share * (right.value - left.value)


def peak(series: Series, start_ns: int, end_ns: int) -> float | None:
    """The largest value."""
    return max((sample.value for sample in inside(series, start_ns, end_ns)), default=None)


def count(series: Series, start_ns: int, end_ns: int) -> int | None:
    """The largest value, of what is counted in whole numbers."""
    most = peak(series, start_ns, end_ns)
    return None if most is None else int(most)


def size(series: Series, start_ns: int, end_ns: int) -> int | None:
    """The largest value, of what cannot be nothing."""
    return count(series, start_ns, end_ns) or None


def bits(series: Series, start_ns: int, end_ns: int) -> int | None:
    """Every bit that was set at any time."""
    counted = inside(series, start_ns, end_ns)
    found = 0
    for sample in counted:
        found |= int(sample.value)
    return found if counted else None


def mean_at_first(series: Series, start_ns: int, end_ns: int) -> float | None:
    """The mean over the first third."""
    return mean(series, start_ns, start_ns + (end_ns - start_ns) // 3)


def mean_later(series: Series, start_ns: int, end_ns: int) -> float | None:
    """The mean over the second third or the last, whichever is lower."""
    third = (end_ns - start_ns) // 3
    edges = (start_ns + third, start_ns + 2 * third, end_ns)
    means = [mean(series, left, right) for left, right in zip(edges, edges[1:], strict=False)]
    return min((value for value in means if value is not None), default=None)


def with_energy(reading: DeviceReading, window_s: float) -> DeviceReading:
    """Energy and power made to agree, as far as so short or long a window allows."""
    if window_s < LEAST_ENERGY_S:
        return replace(reading, energy_j=None)
    if reading.energy_j is not None:
        return replace(reading, power_w=reading.energy_j / window_s)
    if reading.power_w is not None:
        return replace(reading, energy_j=reading.power_w * window_s, estimated=True)
    return reading


def device_labels(measurement: Measurement) -> tuple[Label, ...]:
    """What the accelerators' state says about the row, in the table's order."""
    return tuple(
        label for label, holds in DEVICE_LABELS.items() if any(map(holds, measurement.devices))
    )


def is_contended(reading: DeviceReading) -> bool:
    """Whether somebody else used the device."""
    busy_pct = reading.others_util_pct or 0.0
    return bool(reading.others or reading.others_bytes) or busy_pct >= BUSY_PCT


def is_throttled(reading: DeviceReading) -> bool:
    """Whether its clocks were held back by heat or power, or fell while it had work."""
    reasons = reading.event_reasons or 0
    first, later = reading.sm_clock_first_mhz, reading.sm_clock_later_mhz
    fell = first is not None and later is not None and later < SLOWER * first
    return bool(reasons & SLOWDOWN) or (fell and not reasons & IDLE)


DEVICE_LABELS: dict[Label, Callable[[DeviceReading], bool]] = {
    Label.CONTENDED: is_contended,
    Label.THROTTLED: is_throttled,
    Label.ESTIMATED: lambda reading: reading.estimated,
}
