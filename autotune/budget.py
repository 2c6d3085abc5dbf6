"""The budget: how much time and how many probes are left, and what they are kept for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from autotune.pareto import ROUNDS
from autotune.types import REFUSED, Sink, Stage, Trial

WRITING_S = 1.0
"""Kept back for the files at the end."""
ONE_ROUND = 2
"""Baseline and one finalist, once each: what the first candidate may not take from the finals."""
LEAST_TIMEOUT_S = 20.0
LEAST_WINDOW_S = 0.75
"""Three blocks: fewer carry no interval."""
LIKE_FINALS = 3
"""The newest probes, from whose cost that of the finals is foreseen."""
CLOSING = frozenset({Stage.FINAL, Stage.PATH})
"""Stages that the reserve is there for."""


def probed(trials: Sequence[Trial]) -> list[Trial]:
    """The rows for which something ran in this run."""
    return [trial for trial in trials if trial.status not in REFUSED and not trial.reused]


class Budget:
    """Time and probes of one run.

    Args:
        total_s: Seconds that the run may take.
        most: Probes that may be launched, the inspecting one apart; None for any number.
        trials: The run's rows, which grow while it goes on.
        started_s: When it began, on that clock.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        total_s: float,
        most: int | None,
        trials: Sequence[Trial],
        started_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_s = total_s
        self.turned_down = ""
        """Why something that was worth a probe was not given one."""
        self.spent_before_s = 0.0
        """What an interrupted run had spent already."""
        self.least_final_s = 0.0
        """What a final takes at least, before one has shown it."""
        self.rounds_wanted: Callable[[], int] = lambda: ROUNDS
        """How many rounds of finals the noise so far asks for."""
        self._most = most
        self._trials = trials
        self._started_s = started_s
        self._now = now

    @property
    def spent_s(self) -> float:
        """Seconds spent, those of an interrupted run included."""
        return self._now() - self._started_s + self.spent_before_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.total_s - self.spent_s

    @property
    def unit_s(self) -> float:
        """The timed window of a simple probe: the shorter the budget, the shorter."""
        return min(max(self.total_s / 60, LEAST_WINDOW_S), 5.0)

    def affords(self, stage: Stage, count: int) -> bool:
        """Whether so many more probes of the stage can be paid for, the finals' share kept."""
        if not self._counts_allow(stage, count):
            self.turned_down = "--max-probes allows no more probes"
            return False
        reserve_s = WRITING_S + self._finals_s(stage)
        if self.left_s >= reserve_s + count * self._cost_s(stage):
            return True
        self.turned_down = "the budget pays for no more probes"
        return False

    def timeout_s(self, stage: Stage) -> float:
        """Several times what a probe should cost, and never beyond the deadline."""
        ran = [trial.probe_s for trial in probed(self._trials) if trial.ok]
        usual_s = max(ran, default=self._first_probe_s)
        limit_s = max(min(LEAST_TIMEOUT_S, self.total_s / 4), 5 * usual_s)
        if stage in (Stage.INSPECT, Stage.BASELINE):
            limit_s = max(limit_s, self.total_s / 3)
        return max(1.0, min(self.left_s - WRITING_S, limit_s))

    def _counts_allow(self, stage: Stage, count: int) -> bool:
        if self._most is None:
            return True
        launched = sum(trial.stage is not Stage.INSPECT for trial in probed(self._trials))
        kept_back = 0 if stage in CLOSING else min(self._finals_reserved, self._most // 2)
        if self._is_first_candidate(stage):
            kept_back = min(kept_back, ONE_ROUND)
        return launched + count + kept_back <= self._most

    def _finals_s(self, stage: Stage) -> float:
        """What the finals' share is; without a candidate there is nothing to repeat."""
        if stage in CLOSING or self._is_first_candidate(stage):
            return 0.0
        return min(self._finals_reserved * self._cost_s(Stage.FINAL), self.total_s / 2)

    @property
    def _finals_reserved(self) -> int:
        return ONE_ROUND * self.rounds_wanted()

    def _is_first_candidate(self, stage: Stage) -> bool:
        """Whether nothing but the baseline has been measured end to end."""
        measured = {trial.stage for trial in self._trials if trial.ok and trial.end_to_end}
        return stage is Stage.VERIFY and not measured - {Stage.INSPECT, Stage.BASELINE}

    def _cost_s(self, stage: Stage) -> float:
        """What a probe of the stage cost so far, or what the baseline did."""
        ran = [trial for trial in probed(self._trials) if trial.ok]
        same = [trial.probe_s for trial in ran if trial.stage is stage]
        baseline = [trial.probe_s for trial in ran if trial.stage is Stage.BASELINE]
        usual_s = median(same or baseline or [self._first_probe_s])
        if stage is not Stage.FINAL or same:
            return usual_s
        # Half of the finals are the candidate's, and the last probes were of its like.
        others = [trial.probe_s for trial in ran if trial.sink is Sink.TRAIN][-LIKE_FINALS:]
        mean_s = (usual_s + max(usual_s, median(others or [usual_s]))) / 2
        return max(mean_s, self.least_final_s)

    @property
    def _first_probe_s(self) -> float:
        """What a probe is taken to cost before one has run."""
        return 2 * self.unit_s + 0.5
