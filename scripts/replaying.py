"""Replays searches over a recorded grid, on a clock of their own.

Where a live run would start a probe, a replay takes a random stretch of a random recorded process
of that config, as long as the probe would have measured, and charges what it would have cost:
start, warm-up and all else that the recording spent, and the stretch. A failure costs its recorded
time. A config that was not recorded is an error: nothing is interpolated. The search sees only
such stretches; it is judged by the truth, the mean over all recorded time.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from autotune.budget import Budget
from autotune.course import Aim, Course
from autotune.ending import Enough
from autotune.evidence import Rows
from autotune.measuring import WINDOW_SHARE, effort_of, labels_of
from autotune.metrics import SPEED, throughput
from autotune.scene import Ask, Plan, Scene
from autotune.space import BATCH, Space
from autotune.steady import t_quantile
from autotune.types import (
    Block,
    Config,
    Failure,
    Measurement,
    Sink,
    Source,
    Stage,
    Status,
    Trial,
    whole,
)
from scripts.recording import PASSES, Record, failure_of, half_of, measurement_of

WITHIN = 0.02
"""How near to the optimum counts as found."""
SCALED = (
    "cpu_s",
    "worker_cpu_s",
    "others_cpu_s",
    "idle_cpu_s",
    "storage_bytes",
    "asked_bytes",
    "batches",
    "steps",
    "skipped_steps",
    "optimizer_steps",
)
"""Facts that are sums over a window: a stretch has its share of them."""


class OverError(Exception):
    """The time is over before the probe would have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One recorded process."""

    turn: int
    probe_s: float
    measured: Measurement | None
    failure: Failure | None


class Recorded:
    """A record as replays need it: its probes by kind and config, and what is true."""

    def __init__(self, record: Record) -> None:
        self.space: Space = record.space
        self.name = str(record.about["name"])
        self.startup_s = float(record.about["startup_s"])
        self.block_s = float(record.about["block_s"])
        self._probes: dict[tuple[str, str], list[Probe]] = defaultdict(list)
        for row in record.probes:
            probe = Probe(
                turn=row["turn"],
                probe_s=row["probe_s"],
                measured=measurement_of(row),
                failure=failure_of(row),
            )
            self._probes[row["kind"], row["key"]].append(probe)
        self.configs = list(self.space.grid())

    def probes(self, kind: str, config: Config) -> Sequence[Probe]:
        """The processes of a config.

        Raises:
            LookupError: If it was not recorded.
        """
        part = half_of(kind, config, self.space)
        found = self._probes.get((kind, part.key))
        if not found:
            raise LookupError(f"{self.name}: {kind} was not recorded for {dict(part)}")
        return found

    # --- what is true ---

    @cached_property
    def truth(self) -> Mapping[Config, float]:
        """Samples/s of each config that ran, in each of its processes.

        The best ones were measured again after they had been chosen: where that was done often
        enough, only that counts, as the best of many noisy figures is too high.
        """
        return {config: fmean(rates) for config, rates in self._rates.items()}

    @cached_property
    def _rates(self) -> Mapping[Config, Sequence[float]]:
        found = {}
        for config in self.configs:
            rates = [
                (probe.turn, speed.value)
                for probe in self.probes("both", config)
                if probe.measured is not None and (speed := throughput(probe.measured)) is not None
            ]
            again = [rate for turn, rate in rates if turn >= PASSES]
            if rates and not any(probe.failure for probe in self.probes("both", config)):
                often = len(again) > PASSES
                found[config] = again if often else [rate for _, rate in rates]
        return found

    @property
    def optimum(self) -> Config:
        """The best config."""
        return max(self.truth, key=lambda config: self.truth[config])

    @cached_property
    def half_width(self) -> float:
        """Of the 95 % interval of the optimum's rate, relative.

        What two processes of one config differ by is pooled over the best ones: no single config
        has enough processes to tell.
        """
        most = max(map(len, self._rates.values()))
        repeated = [rates for rates in self._rates.values() if len(rates) > most / 2]
        freedom = sum(len(rates) - 1 for rates in repeated)
        if not freedom:
            return math.inf
        squares = sum((len(rates) - 1) * (stdev(rates) / fmean(rates)) ** 2 for rates in repeated)
        spread = math.sqrt(squares / freedom)
        return t_quantile(0.975, freedom) * spread / math.sqrt(len(self._rates[self.optimum]))

    def share(self, config: Config) -> float:
        """A config's rate as a share of the optimum's; 0 for one that fails."""
        return self.truth.get(config, 0.0) / self.truth[self.optimum]

    @cached_property
    def grid_s(self) -> float:
        """Seconds of an exhaustive search: every config once, and the start."""
        costs = (fmean(p.probe_s for p in self.probes("both", c)) for c in self.configs)
        return self.startup_s + sum(costs)


# --- one probe, replayed --------------------------------------------------------------------------


def stretch(probe: Probe, enough: Enough, dice: random.Random) -> tuple[Measurement, float]:
    """What a probe with that much patience would have measured, and all its cost in seconds."""
    whole_window = probe.measured
    assert whole_window is not None
    blocks = whole_window.blocks
    total_s = sum(block.seconds for block in blocks)
    mean_s = total_s / len(blocks)
    needed = min(len(blocks), math.ceil(enough.max_window_s / mean_s))
    first = dice.randint(0, len(blocks) - needed)
    taken: list[Block] = []
    stopped, elapsed_s = "", 0.0
    for block in blocks[first:]:
        taken.append(block)
        elapsed_s += block.seconds
        if stopped := enough.reached(taken, elapsed_s, settled=not whole_window.unsettled):
            break
    wall_s = (whole_window.end_ns - whole_window.start_ns) / 1e9
    cost_s = probe.probe_s - wall_s * (1 - elapsed_s / total_s)
    return _part(whole_window, taken, stopped or "limit", elapsed_s / total_s), cost_s


def _part(
    measured: Measurement, blocks: Sequence[Block], stopped: str, share: float
) -> Measurement:
    parts: dict[str, Any] = {}
    for name in SCALED:
        value = getattr(measured, name)
        if value is not None:
            parts[name] = value * share if isinstance(value, float) else round(value * share)
    return replace(
        measured,
        **parts,
        each_worker_cpu_s=tuple(share * used_s for used_s in measured.each_worker_cpu_s),
        blocks=tuple(blocks),
        stopped=stopped,
        end_ns=measured.start_ns + int(share * (measured.end_ns - measured.start_ns)),
    )


def kind_of(ask: Ask) -> str:
    """Which recorded kind of probe an ask is about."""
    if ask.sink is Sink.DISCARD:
        return "loader"
    return "device" if ask.source is Source.CACHED else "both"


# --- one search, replayed -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """From when on a search reports which config."""

    at_s: float
    config: Config


@dataclass
class Run:
    """One search over a recorded grid."""

    recorded: Recorded
    budget_s: float
    seed: int
    moments: list[Moment] = field(default_factory=list)
    """What the search would have said at any time: its best row so far, at last its answer."""
    repeats: int = 0
    """Probes of configs that earlier ones had shown not to fit."""
    found: Config | None = None
    """The best row of the search, before it is asked whether a change is worth it."""
    asks_s: list[float] = field(default_factory=list)
    """Real seconds that the search took to think of each ask."""

    def __post_init__(self) -> None:
        self.now_s = self.recorded.startup_s
        self.dice = random.Random(self.seed)
        self.rows = Rows()
        self.budget = Budget(self.budget_s, None, self.rows.judged, 0.0, now=lambda: self.now_s)
        self.course = Course(
            space=self.recorded.space,
            aim=Aim(objective=SPEED),
            purse=self.budget,
            seed=self.seed,
            rows=self.rows,
        )
        self._returned_s = time.perf_counter()
        self._report(self.recorded.space.baseline)

    # --- searches ---

    def product(self, sampler: str) -> Run:
        """A search as the product runs it, finals and all."""
        baseline = Ask(config=self.recorded.space.baseline, stage=Stage.BASELINE, why="yours")
        try:
            if not self.course.ends_with(self.measure(baseline)):
                self.course.run(sampler, self.measure)
        except OverError:
            self.course.stopped_because = "the budget ended"
        self.found = self.moments[-1].config
        if (answer := self.course.decide()) is not None:
            self._report(answer.config)
        return self

    def plain(self, searcher: Callable[[Scene], Plan]) -> Run:
        """A general search: one probe after another until the time is over, the best row counts."""
        plan = searcher(self.course.scene)
        try:
            ask = next(plan)
            while True:
                ask = plan.send(self.measure(ask))
        except (OverError, StopIteration):
            return self

    def measure(self, ask: Ask) -> Trial:
        """The row of an ask, taken from the record.

        Raises:
            OverError: If it would have ended after the budget.
        """
        self.asks_s.append(time.perf_counter() - self._returned_s)
        try:
            return self._measured(ask)
        finally:
            self._returned_s = time.perf_counter()

    def _measured(self, ask: Ask) -> Trial:
        self.repeats += self._is_known_to_fail(ask)
        probe = self.dice.choice(self.recorded.probes(kind_of(ask), ask.config))
        measured, cost_s = None, probe.probe_s
        if probe.measured is not None:
            measured, cost_s = stretch(probe, self._enough(ask), self.dice)
        if self.now_s + cost_s > self.budget_s:
            self.now_s = self.budget_s
            raise OverError
        self.now_s += cost_s
        row = self.rows.take(
            Trial(
                number=len(self.rows.measured),
                config=ask.config,
                stage=ask.stage,
                source=ask.source,
                sink=ask.sink,
                measurement=measured,
                failure=probe.failure,
                labels=labels_of(measured),
                probe_s=cost_s,
                why=ask.why,
                round=ask.round,
            )
        )
        if row.ok and row.end_to_end and (best := self.course.scene.best()) is not None:
            self._report(best.config)
        return row

    def _enough(self, ask: Ask) -> Enough:
        effort = effort_of(ask.stage, self.budget.unit_s)
        return Enough(
            max_window_s=min(effort.window_s, WINDOW_SHARE * self.budget.timeout_s(ask.stage)),
            min_blocks=effort.blocks,
            block_s=self.recorded.block_s,
            want=effort.half_width,
            beat=ask.beat,
        )

    def _is_known_to_fail(self, ask: Ask) -> bool:
        """Whether as much or less of the same has run out of memory before."""
        return ask.sink is Sink.TRAIN and any(
            row.status is Status.OUT_OF_MEMORY
            and set(row.config.changed_from(ask.config)) <= {BATCH}
            and whole(row.config.get(BATCH)) <= whole(ask.config.get(BATCH))
            for row in self.rows.judged
        )

    def _report(self, config: Config) -> None:
        if not self.moments or self.moments[-1].config != config:
            self.moments.append(Moment(at_s=self.now_s, config=config))

    # --- how good it was ---

    def share_at(self, at_s: float) -> float:
        """What the config that it reports at a time makes, as a share of the optimum."""
        known = [moment for moment in self.moments if moment.at_s <= at_s]
        return self.recorded.share(known[-1].config) if known else 0.0

    def found_s(self, tolerance: float) -> float:
        """When it reported a config within the tolerance for good; infinite if it never did."""
        found = math.inf
        for moment in self.moments:
            if self.recorded.share(moment.config) < 1 - tolerance:
                found = math.inf
            elif math.isinf(found):
                found = moment.at_s
        return found

    def failures(self, *statuses: Status) -> int:
        """How many probes ended in one of these ways."""
        return sum(row.status in statuses for row in self.rows.judged)
