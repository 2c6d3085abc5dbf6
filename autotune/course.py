"""One search as it goes: what it may ask for, how its rows are judged, what they add up to.

It knows nothing of processes and files: whoever measures gives it the rows. A live run and the
replay of a recorded one are the same course.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune import causes, pareto, search
from autotune.budget import probed
from autotune.evidence import Rows
from autotune.fitting import why_unfit
from autotune.metrics import SPEED, Limit, Metric
from autotune.scene import Ask, Scene, speed_of
from autotune.space import BATCH, Space
from autotune.steady import t_quantile
from autotune.types import Config, Sink, Stage, Status, Trial, whole

NOTHING_PAYS = "nothing more can pay"
SAME_FAULT = 3
"""Failures of the first probes, all with one cause, that end the run."""


class Purse(Protocol):
    """Says what can still be paid for."""

    turned_down: str
    """Why something that was worth a probe was not given one."""
    rounds_wanted: Callable[[], int]
    """How many rounds of finals to keep something back for."""

    def affords(self, stage: Stage, count: int) -> bool:
        """Whether so many more probes of the stage can be paid for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What counts as better, and what is allowed."""

    objective: Metric
    limits: tuple[Limit, ...] = ()
    min_gain: float = 0.02
    """The least gain, as a share, that is worth a change."""


@dataclass
class Course:
    """The rows of one search in one space, and the decisions that rest on them."""

    space: Space
    aim: Aim
    purse: Purse
    seed: int = 0
    rows: Rows = field(default_factory=Rows)
    not_explored: list[str] = field(default_factory=list)
    guesses: tuple[Config, ...] = ()
    """What was best for a job like this one."""
    stopped_because: str = ""
    lost: bool = False
    """Whether the device is gone, so that nothing can be measured any more."""

    def __post_init__(self) -> None:
        self.purse.rounds_wanted = self.rounds_wanted

    @property
    def trials(self) -> list[Trial]:
        """The rows so far, as they let each other be judged."""
        return self.rows.judged

    @property
    def scene(self) -> Scene:
        """What a searcher may look at."""
        return Scene(
            space=self.space,
            objective=self.aim.objective,
            limits=self.aim.limits,
            seed=self.seed,
            affords=self.purse.affords,
            ambiguous=self.is_ambiguous,
            answer=self._answer_so_far,
            trials=self.trials,
            not_explored=self.not_explored,
            guesses=self.guesses,
        )

    def run(self, sampler: str, measure: Callable[[Ask], Trial]) -> None:
        """Ask for what the searcher wants until it has enough, or nothing more makes sense.

        Args:
            sampler: A name in `search.SAMPLERS`.
            measure: Makes the row of an ask, and adds it to `rows`.
        """
        plan = search.plan(sampler, self.scene)
        try:
            ask = next(plan)
            while True:
                trial = measure(ask)
                if self.ends_with(trial):
                    return
                ask = plan.send(trial)
        except StopIteration:
            self.stopped_because = self.stopped_because or self.purse.turned_down or NOTHING_PAYS

    # --- the end ---

    def ends_with(self, trial: Trial) -> bool:
        """Whether no probe after this one can make sense; why is noted."""
        if trial.status is Status.DEVICE_LOST:
            self.lost = True
            self.stopped_because = f"the device was lost ({trial.reason})"
            self.not_explored.append("what was left to measure when the device was lost")
        elif self._is_hopeless():
            self.stopped_because = f"every probe fails: {trial.reason}"
        return bool(self.stopped_because)

    def _is_hopeless(self) -> bool:
        """Whether everything so far failed for the same reason, and no knob can help it."""
        trials = probed(self.trials)
        ran = [t for t in trials if t.stage is not Stage.INSPECT and t.sink is Sink.TRAIN]
        if len(ran) < SAME_FAULT or any(t.ok for t in ran):
            return False
        if len({causes.cause_of(t) for t in ran}) > 1:
            return False
        return not depends_on_size(ran[0]) or self._failed_at_the_smallest(ran)

    def _failed_at_the_smallest(self, ran: Sequence[Trial]) -> bool:
        sizes = [whole(value) for value in self.space.values.get(BATCH, ()) if value]
        return min(self.space.micro_batch(t.config) for t in ran) <= min(sizes, default=1)

    # --- the answer ---

    def decide(self) -> pareto.Answer | None:
        """What the rows so far stand behind; None when nothing can be recommended."""
        aim, trials = self.aim, self.trials
        unfit = {t.config for t in trials if t.end_to_end and why_unfit(t, self.space, aim.limits)}
        allowed = {
            trial.config: self.space.admits(trial.config) and trial.config not in unfit
            for trial in trials
        }
        return pareto.decide(
            trials,
            self.space.baseline,
            allowed,
            objective=aim.objective,
            limits=aim.limits,
            min_gain=aim.min_gain,
        )

    def is_ambiguous(self) -> bool:
        """Whether the interval of the speed-up holds the least gain worth a change."""
        finals = {t.config for t in self.trials if t.stage is Stage.FINAL}
        for config in finals - {self.space.baseline}:
            gain = pareto.ratio(self.trials, config, self.space.baseline, self.aim.objective)
            if gain is not None and gain.low <= 1 + self.aim.min_gain < gain.high:
                return True
        return False

    def rounds_wanted(self) -> int:
        """Rounds of finals that should tell the best row from the baseline, as noisy as they are.

        Decided by the rows' own intervals, before a final has shown how much processes differ.
        """
        best, own = self.scene.best(), self.scene.row_of(self.space.baseline)
        if best is None or own is None or best.config == own.config:
            return pareto.ROUNDS
        reached, before = speed_of(best), speed_of(own)
        if self.aim.objective is not SPEED or reached is None or before is None:
            return pareto.ROUNDS
        margin = math.log(reached.value / before.value) - math.log1p(self.aim.min_gain)
        spread = math.hypot(*((s.high - s.low) / 4 / s.value for s in (reached, before)))
        for rounds in range(pareto.ROUNDS, search.MOST_ROUNDS):
            if t_quantile(0.975, rounds - 1) * spread / math.sqrt(rounds) <= margin:
                return rounds
        return search.MOST_ROUNDS if margin > 0 else pareto.ROUNDS

    def best_so_far(self) -> pareto.Answer | None:
        """The best row, where the run ends before anything is verified."""
        objective = self.aim.objective
        known = {
            config: value
            for config, point in pareto.pool(self.trials).items()
            if self.space.admits(config)
            and all(limit.holds(point.value(limit.metric)) for limit in self.aim.limits)
            and (value := point.value(objective)) is not None
        }
        if not known:
            return None
        return pareto.Answer(
            keep=False,
            config=min(known, key=lambda config: objective.cost(known[config])),
            speedup=None,
            verified=False,
            reason="interrupted: the best row so far, not verified",
        )

    def _answer_so_far(self) -> Config:
        answer = self.decide()
        return self.space.baseline if answer is None else answer.config


def depends_on_size(trial: Trial) -> bool:
    """Whether a smaller micro-batch may run although this one does not."""
    suspect = None if trial.failure is None else trial.failure.suspect
    return trial.status is Status.OUT_OF_MEMORY or suspect is not None
