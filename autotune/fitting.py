"""Which micro-batches fit into memory: the guard, fed with a run's rows and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune import guard
from autotune.guard import Guard, Judgement, Point
from autotune.knobs import KNOBS, Family
from autotune.metrics import Limit
from autotune.space import ACCUMULATION, BATCH, Space
from autotune.types import (
    DEVICE_MEMORY,
    GIB,
    Config,
    Measurement,
    Sink,
    Status,
    Suspect,
    Trial,
    whole,
)

MakePoint = Callable[[Measurement, int, int], Point | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A limit on one kind of memory, and how a row tells of that kind."""

    limit_bytes: float
    point: MakePoint
    held: Callable[[Measurement], int | None]


class Fitting:
    """What the micro-batches measured so far tell of others.

    Args:
        space: What the job and the machine are like.
        limits: The user's.
    """

    def __init__(self, space: Space, limits: Sequence[Limit]) -> None:
        self._space = space
        self._limits = limits
        self._rows: dict[tuple[int, int], Measurement] = {}

    def learn(self, trial: Trial, batch: int, steps: int) -> None:
        """Keep what a row tells, one of configs that differ in nothing but these two."""
        if trial.ok and trial.measurement is not None:
            self._rows[batch, steps] = trial.measurement

    def judge(self, batch: int, steps: int) -> Judgement:
        """What is known of a size before it is tried; without any limit all are safe."""
        judged = {known.judge(batch, accumulates=steps > 1) for known in self._guards()}
        for worst in (Judgement.REFUSED, Judgement.UNKNOWN):
            if worst in judged:
                return worst
        return Judgement.SAFE

    @property
    def largest_safe(self) -> int:
        """The largest size that is proven to fit; 0 where none is, or there is no limit."""
        return min((known.largest_safe for known in self._guards()), default=0)

    def why_refused(self, batch: int, steps: int) -> str:
        """The reason of the first limit that cannot be kept."""
        accumulates = steps > 1
        return next(
            known.why_refused(batch, accumulates=accumulates)
            for known in self._guards()
            if known.judge(batch, accumulates=accumulates) is Judgement.REFUSED
        )

    def used(self, measured: Measurement) -> float | None:
        """Share of the accelerator's memory that was in use."""
        total = self._space.machine.device_memory_bytes
        if not total or measured.memory_bytes is None:
            return None
        return (measured.memory_bytes + (measured.foreign_bytes or 0)) / total

    def _guards(self) -> Iterator[Guard]:
        newest = next(reversed(self._rows.values()), None)
        for bound in bounds(self._space, self._limits, newest):
            points = [bound.point(row, batch, steps) for (batch, steps), row in self._rows.items()]
            known = [point for point in points if point is not None]
            yield Guard.of(bound.limit_bytes, known)


def why_refused(
    config: Config, trials: Sequence[Trial], space: Space, limits: Sequence[Limit]
) -> str:
    """Why a config is predicted not to fit into memory, before it is tried ("" where it may).

    Rows tell of configs that differ from theirs in batch and loader alone: a size that ran out of
    memory rules out all above it, unless as much has run with another loader; and those that ran
    bound what larger ones need.
    """
    batch, steps = space.micro_batch(config), whole(config.get(ACCUMULATION, 1))
    alike = [t for t in trials if t.sink is Sink.TRAIN and _tells_of(t.config, config)]
    runs = max((space.micro_batch(t.config) for t in alike if t.ok), default=0)
    known = Fitting(space, limits)
    for trial in alike:
        size = space.micro_batch(trial.config)
        same_loader = set(trial.config.changed_from(config)) <= {BATCH, ACCUMULATION}
        if _ran_out(trial) and size <= batch and (size > runs or same_loader):
            return f"micro-batch {size} ran out of memory"
        known.learn(trial, size, whole(trial.config.get(ACCUMULATION, 1)))
    if known.judge(batch, steps) is Judgement.REFUSED:
        return known.why_refused(batch, steps)
    return ""


def _tells_of(config: Config, other: Config) -> bool:
    """Whether the two differ in nothing that decides how much memory a sample takes."""
    return all(
        name in (BATCH, ACCUMULATION) or KNOBS[name].family is Family.LOADER
        for name in config.changed_from(other)
    )


def _ran_out(trial: Trial) -> bool:
    """Whether it was memory that a smaller batch would leave; pinning has a remedy of its own."""
    suspect = None if trial.failure is None else trial.failure.suspect
    return trial.status is Status.OUT_OF_MEMORY and suspect is not Suspect.PINNING


def why_unfit(trial: Trial, space: Space, limits: Sequence[Limit]) -> str:
    """Why a row that ran is no answer, for its memory's sake ("" where it may be one).

    The user's own config is judged by the limits alone: it runs, as they know.
    """
    measured = trial.measurement
    if measured is None or trial.config == space.baseline:
        return ""
    if reason := guard.why_tight(measured):
        return reason
    still_grows = guard.LONGER_TO_COME if DEVICE_MEMORY in measured.unsettled else 1.0
    for bound in bounds(space, limits, measured):
        held, most = bound.held(measured), still_grows * bound.limit_bytes
        if held is not None and held > most:
            return f"holds {held / GIB:.3g} of {most / GIB:.3g} GiB"
    return ""


def bounds(space: Space, limits: Sequence[Limit], measured: Measurement | None) -> Iterator[Bound]:
    """Every limit on memory: the accelerator's own, and the user's."""
    share = guard.margin(space.facts)
    total = space.machine.device_memory_bytes
    if not space.machine.on_cpu and total:
        foreign = None if measured is None else measured.foreign_bytes
        most = guard.plannable_bytes(total, foreign)
        yield Bound(limit_bytes=share * most, point=guard.step_point, held=_step_bytes)
    for limit in limits:
        if limit.metric.name == "memory_gb":
            most = share * limit.bound * GIB
            yield Bound(limit_bytes=most, point=guard.step_point, held=_step_bytes)
        elif limit.metric.name == "host_memory_gb" and space.machine.on_cpu:
            most = share * limit.bound * GIB
            yield Bound(limit_bytes=most, point=guard.host_point, held=_host_bytes)


def _step_bytes(measured: Measurement) -> int | None:
    return measured.memory_bytes


def _host_bytes(measured: Measurement) -> int | None:
    return measured.host_memory_bytes
