"""How much memory may be used: which batch sizes are safe to try, and what a probe must find free.

A step's peak is the largest of several sums `a + c * batch`, none of them below what is resident
all the time (parameters, buffers, optimizer state). So it is convex in the batch: a line through
two small sizes is a lower bound of a larger one, never a forecast, and the line through a measured
size and what is resident is an upper bound (METHODS 2.3). Where a law is not of that kind, growth
is capped, and every attempt runs in a process of its own that may fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from autotune.types import GIB, Measurement, Trial, WorkloadFacts

MOST_USED = 0.92
"""Share of a device's memory that is planned with: the rest is for what no allocator counts."""
LEAST_FRAGMENTED = 1.02
"""Reserved over allocated memory is taken to be this at least."""
CLOSE_ENOUGH = 1.03
"""A proven size that is not larger than the last one by this factor is not worth a probe."""
LEAP = 4.0
"""No size is proven further away than this: the law itself is only an assumption."""
CAP = 1.5
"""The same where memory grows faster than in proportion to the batch."""
BENT = 1.25
"""Two slopes in a row that grow by this show such a law; one kink does too, and costs little."""
UNEVEN = 1.02
"""What is not resident may grow by this more than the batch does before it shows one, too."""
LONGER_TO_COME = 0.9
"""Share of a limit that is used where batches vary and not all samples have been seen."""
SPILLED = 0.5
"""A larger batch that makes less than this share of a smaller one's rate, the memory being full."""
COLLAPSED = 0.25
"""The same whatever the memory in use."""
UNSURE_BYTES = 16 * 1024**2
"""What two readings of one process's peak differ by, all else being equal."""
MOST_IN_FLIGHT = 0.5
"""Share of free memory that the batches made ahead by all workers may fill (METHODS, b)."""


class Judgement(StrEnum):
    """What is known of a batch size before it is tried."""

    SAFE = "safe"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The peak of whole optimizer steps at one micro-batch."""

    batch: int
    allocated_bytes: float
    reserved_bytes: float | None = None
    resident_bytes: float = 0.0
    """Parameters, buffers and optimizer state: in memory during the whole step."""
    other_bytes: float = 0.0
    """Memory of ours that no allocator counts: context and libraries."""
    accumulates: bool = False
    """Whether gradients of an earlier micro-batch are there, too."""
    unsure_bytes: float = 0.0
    """How far the reading may be off: no process's pages are counted as exactly as a device's."""

    @property
    def base_bytes(self) -> float:
        """What surely does not grow with the batch."""
        return min(self.resident_bytes, self.allocated_bytes)

    @property
    def least_bytes(self) -> float:
        """The peak, if the reading is as much too high as it may be."""
        return self.allocated_bytes - self.unsure_bytes

    @property
    def fragmented(self) -> float:
        """Reserved over allocated memory."""
        if self.reserved_bytes is None or self.allocated_bytes <= 0:
            return LEAST_FRAGMENTED
        return max(LEAST_FRAGMENTED, self.reserved_bytes / self.allocated_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What the sizes measured so far prove about others, under one limit."""

    limit_bytes: float
    points: tuple[Point, ...] = ()
    """By micro-batch, each size once."""

    @classmethod
    def of(cls, limit_bytes: float, points: Sequence[Point]) -> Guard:
        """A guard over points in any order."""
        by_batch = {point.batch: point for point in points}
        return cls(
            limit_bytes=limit_bytes, points=tuple(by_batch[batch] for batch in sorted(by_batch))
        )

    @property
    def largest_safe(self) -> int:
        """The largest size that must fit; 0 where nothing is proven."""
        if not self.points:
            return 0
        # Of a law as assumed the largest size proves most, and of another one the least wrong.
        largest = self.points[-1]
        leap = CAP if self.bends else LEAP
        farthest = max(largest.batch + 1, math.floor(leap * largest.batch))
        return min(self._proven_by(largest), farthest)

    @property
    def bends(self) -> bool:
        """Whether memory grows faster than a law that is linear in the batch allows."""
        per_sample = [(p.allocated_bytes - p.base_bytes) / p.batch for p in self.points]
        if any(after > UNEVEN * before for before, after in pairwise(per_sample)):
            return True
        slopes = [_slope(a, b) for a, b in pairwise(self.points)][-2:]
        return len(slopes) == 2 and slopes[0] > 0 and slopes[1] > BENT * slopes[0]

    def least_bytes(self, batch: int, *, accumulates: bool = False) -> float:
        """What this size needs at least."""
        below = [p for p in self.points if p.batch <= batch and p.accumulates == accumulates]
        if not below:
            return 0.0
        lines = [
            high.least_bytes + (batch - high.batch) * _least_slope(low, high)
            for low, high in pairwise(below)
        ]
        return max(lines, default=below[-1].least_bytes) + below[-1].other_bytes

    def most_bytes(self, batch: int) -> float:
        """What this size needs at most, if what is not resident grows at most in proportion."""
        point = self.points[-1]
        grows = (point.allocated_bytes - point.base_bytes) * batch / point.batch
        return point.other_bytes + point.fragmented * (point.base_bytes + grows)

    def judge(self, batch: int, *, accumulates: bool = False) -> Judgement:
        """Whether a size must fit, cannot fit, or may be tried where failing does no harm."""
        if self.points and batch <= self.largest_safe:
            return Judgement.SAFE
        if self.least_bytes(batch, accumulates=accumulates) > self.limit_bytes:
            return Judgement.REFUSED
        return Judgement.UNKNOWN

    def why_refused(self, batch: int, *, accumulates: bool = False) -> str:
        """The reason, in words."""
        least = self.least_bytes(batch, accumulates=accumulates)
        return f"needs at least {_of(least, self.limit_bytes)}"

    def _proven_by(self, point: Point) -> int:
        """`m(k b) <= k m(b) - (k - 1) A0`, solved for the size that just fits."""
        fits = (self.limit_bytes - point.other_bytes) / point.fragmented
        if fits < point.allocated_bytes:
            # It does not fit itself, with its margin: only smaller ones may.
            return 0
        grows = point.allocated_bytes - point.base_bytes
        if grows <= 0:
            return math.floor(LEAP * point.batch)
        # Rounding must not make of an exact fit a size that does not.
        proven = point.batch * (fits - point.base_bytes) / grows * (1 - 1e-12)
        return max(point.batch, math.floor(proven))


def _slope(low: Point, high: Point) -> float:
    return (high.allocated_bytes - low.allocated_bytes) / (high.batch - low.batch)


def _least_slope(low: Point, high: Point) -> float:
    grew = high.least_bytes - (low.allocated_bytes + low.unsure_bytes)
    return max(0.0, grew / (high.batch - low.batch))


# --- from what a probe measured -------------------------------------------------------------------


def step_point(measured: Measurement, batch: int, accumulation: int) -> Point | None:
    """The memory of the training process: the device's, or the CPU process's own."""
    if measured.memory_bytes is None or measured.resident_bytes is None:
        return None
    peak, reserved, unsure = measured.memory_bytes, None, UNSURE_BYTES
    if measured.allocated_bytes is not None:
        peak, reserved, unsure = measured.allocated_bytes, measured.reserved_bytes, 0
    return Point(
        batch=batch,
        allocated_bytes=peak,
        reserved_bytes=reserved,
        resident_bytes=measured.resident_bytes,
        other_bytes=measured.other_bytes or 0,
        accumulates=accumulation > 1,
        unsure_bytes=unsure,
    )


def host_point(measured: Measurement, batch: int, accumulation: int) -> Point | None:
    """The memory of all processes where training runs on the CPU.

    Theirs is read when the window is over; the step's own peak lies within it.
    """
    if measured.host_memory_bytes is None or measured.resident_bytes is None:
        return None
    return Point(
        batch=batch,
        allocated_bytes=max(measured.host_memory_bytes, measured.memory_bytes or 0),
        resident_bytes=measured.resident_bytes,
        accumulates=accumulation > 1,
        unsure_bytes=UNSURE_BYTES,
    )


def beside_the_allocator(trials: Sequence[Trial]) -> tuple[int | None, int | None]:
    """Device memory of other processes, and of our context and libraries, when last read."""
    for trial in reversed(trials):
        measured = trial.measurement
        if measured is not None and measured.other_bytes is not None:
            return measured.foreign_bytes, measured.other_bytes
    return None, None


def plannable_bytes(total_bytes: int, foreign_bytes: int | None) -> float:
    """Device memory that may be planned with, beside what other processes hold."""
    return MOST_USED * total_bytes - (foreign_bytes or 0)


def allocator_share(total_bytes: int, allowed_bytes: float, other_bytes: int | None) -> float:
    """The share of a device's memory at which its allocator is to refuse."""
    return min(1.0, max(0.01, (allowed_bytes - (other_bytes or 0)) / total_bytes))


def margin(facts: WorkloadFacts) -> float:
    """Share of a limit on memory that may be used: longer samples may be still to come."""
    seen_all = facts.dataset_len is not None and facts.stock >= facts.dataset_len
    return LONGER_TO_COME if facts.varies and not seen_all else 1.0


def why_tight(measured: Measurement) -> str:
    """Why a row that ran is no proof that its config fits ("" where it is one)."""
    if measured.alloc_retries:
        return f"the allocator had to retry {measured.alloc_retries} times"
    return ""


def has_spilled(rate: float, smaller_rate: float, used: float | None) -> bool:
    """Whether a larger batch is so slow that its memory seems to lie on the host.

    Args:
        rate: Samples/s of the larger batch.
        smaller_rate: Samples/s of the best smaller one.
        used: Share of the device's memory in use; None where it is not known.
    """
    if rate < COLLAPSED * smaller_rate:
        return True
    return used is not None and used > MOST_USED and rate < SPILLED * smaller_rate


# --- the host, before a probe starts --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free on the host. 0 where shared memory could not be read."""

    free_bytes: float
    shm_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a probe surely holds on the host."""

    workers: int
    prefetch: int
    batch_bytes: float
    resident_bytes: float = 0.0
    ranks: int = 1

    @property
    def in_flight_bytes(self) -> float:
        """Batches that the workers make ahead; they lie in shared memory."""
        return self.ranks * self.workers * self.prefetch * self.batch_bytes

    @property
    def total_bytes(self) -> float:
        """Those, the batch in use, and what each rank holds."""
        return self.in_flight_bytes + self.ranks * (self.batch_bytes + self.resident_bytes)


def shortage(need: Need, room: Room) -> str:
    """Why a probe must not be started ("" where it may)."""
    ahead = f"{need.workers} workers x {need.prefetch} batches of {_size(need.batch_bytes)}"
    if room.shm_bytes and need.in_flight_bytes > room.shm_bytes:
        return (
            f"shared memory (/dev/shm): {ahead} need {_of(need.in_flight_bytes, room.shm_bytes)} "
            "that are free"
        )
    if need.total_bytes > room.free_bytes:
        held = f"{_size(need.ranks * need.resident_bytes)} of parameters"
        return (
            f"host memory: {ahead} and {held} need at least "
            f"{_of(need.total_bytes, room.free_bytes)} that are free"
        )
    return ""


def most_workers(prefetch: int, batch_bytes: float, room: Room) -> float:
    """Workers whose batches ahead leave room in shared memory, and in memory at all."""
    least = min(bytes_ for bytes_ in (room.shm_bytes or math.inf, room.free_bytes or math.inf))
    each = prefetch * batch_bytes
    return math.inf if not each else MOST_IN_FLIGHT * least / each


def _of(need: float, limit: float) -> str:
    return f"{need / GIB:.3g} of {limit / GIB:.3g} GiB"


def _size(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 1024**2:.3g} MiB"
