"""What a searcher may look at, and what it may ask for.

A searcher is a generator: it yields what to measure and receives the row that came of it. So it
reads downwards like the method it implements, and a resumed run replays it with stored rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from autotune.fitting import why_refused, why_unfit
from autotune.metrics import METRICS, Limit, Metric, throughput
from autotune.space import Space
from autotune.types import Config, Estimate, Sink, Source, Stage, Trial

MOST_END_TO_END = 25
"""Where the structure holds: local search, where it does not, has the rest of the budget."""
TOO_LARGE = "sizes that are predicted not to fit"
CLOSING = 11
"""End-to-end probes that are kept for finals and path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One probe that a searcher wants."""

    config: Config
    stage: Stage
    why: str
    source: Source = Source.LOADER
    sink: Sink = Sink.TRAIN
    beat: float | None = None
    """Samples/s of the incumbent's lower end: a probe clearly below it may stop early."""
    fresh: bool = False
    round: int = 0


Plan = Generator[Ask, Trial, None]
Climb = Generator[Ask, Trial, Trial | None]


@dataclass
class Scene:
    """What a searcher may look at: the space, the rows so far, and how much time is left."""

    space: Space
    objective: Metric
    limits: tuple[Limit, ...]
    seed: int
    affords: Callable[[Stage, int], bool]
    """Whether so many more probes of a stage can be paid for; finals keep their reserve."""
    ambiguous: Callable[[], bool]
    """Whether one more round of finals could change the answer."""
    answer: Callable[[], Config]
    """The answer that the rows so far stand behind."""
    trials: list[Trial] = field(default_factory=list)
    not_explored: list[str] = field(default_factory=list)
    """What was left out, and why, in words for the verdict."""
    guesses: tuple[Config, ...] = ()
    """What was best for a job like this one: to be tried before anything else."""

    @property
    def end_to_end(self) -> list[Trial]:
        """The rows of loader and training together."""
        return [t for t in self.trials if t.end_to_end and t.stage is not Stage.INSPECT]

    def best(self) -> Trial | None:
        """The best ok end-to-end row that pins and limits allow."""
        fit = [t for t in self.end_to_end if t.ok and self.fits(t)]
        return max(fit, key=self.score) if fit else None

    def fits(self, trial: Trial) -> bool:
        """Whether the row's config could be the answer."""
        return (
            self.space.admits(trial.config)
            and self.keeps(trial, *METRICS)
            and not why_unfit(trial, self.space, self.limits)
        )

    def keeps(self, trial: Trial, *metrics: str) -> bool:
        """Whether the row was measured and keeps the limits on these metrics."""
        measured = trial.measurement
        return measured is not None and all(
            limit.holds(limit.metric.compute(measured))
            for limit in self.limits
            if limit.metric.name in metrics
        )

    def score(self, trial: Trial) -> float:
        """The leading objective, turned so that higher is better; below all where unread."""
        value = self.objective.compute(trial.measurement) if trial.measurement else None
        return float("-inf") if value is None else -self.objective.cost(value)

    def row_of(self, config: Config) -> Trial | None:
        """The newest end-to-end row of a config."""
        rows = [t for t in self.end_to_end if t.config == config]
        return rows[-1] if rows else None

    def to_beat(self) -> float | None:
        """What the incumbent makes at least, where speed is what counts."""
        best = self.best()
        if best is None or best.measurement is None or self.objective.name != "samples_per_s":
            return None
        speed = throughput(best.measurement)
        return None if speed is None else speed.low

    def rules_out(self, config: Config) -> bool:
        """Whether the rows so far predict that the config does not fit; the verdict says so."""
        reason = why_refused(config, self.trials, self.space, self.limits)
        if reason and not any(told.startswith(TOO_LARGE) for told in self.not_explored):
            self.leave_out(f"{TOO_LARGE}: {reason}")
        return bool(reason)

    def leave_out(self, what: str) -> None:
        """Remember, for the verdict, what is not explored and why."""
        if what not in self.not_explored:
            self.not_explored.append(what)

    def may_probe(self, stage: Stage) -> bool:
        """Whether one more probe can be paid for; without any answer yet, by the finals' share."""
        needed = 1 if stage is Stage.VERIFY else 2  # what is measured for it must follow
        return self.affords(stage, 1) or (self.best() is None and self.affords(Stage.PATH, needed))

    def may_measure(self, stage: Stage) -> bool:
        """Whether one more end-to-end probe fits the count and the time."""
        return self.has_room(1 + CLOSING) and self.may_probe(stage)

    def may_search(self, stage: Stage) -> bool:
        """Whether one more end-to-end probe can be paid for, however many there were."""
        return self.affords(stage, 1)

    def has_room(self, count: int) -> bool:
        """Whether so many more end-to-end probes are not too many, local search apart."""
        planned = [trial for trial in self.end_to_end if trial.stage is not Stage.LOCAL]
        return len(planned) + count <= MOST_END_TO_END


def first_guesses(scene: Scene, stage: Stage) -> Plan:
    """What was best in an earlier run, where it may be tried here."""
    for config in scene.guesses:
        known = scene.row_of(config) is not None or scene.rules_out(config)
        if scene.space.admits(config) and not known and scene.may_probe(stage):
            yield Ask(config=config, stage=stage, why="best of an earlier run")


def device_ask(config: Config, why: str) -> Ask:
    """The device by itself on a ring of real batches."""
    return Ask(config=config, stage=Stage.DEVICE, source=Source.CACHED, why=why)


def speed_of(trial: Trial) -> Estimate | None:
    """Samples/s of an ok row."""
    if not trial.ok or trial.measurement is None:
        return None
    return throughput(trial.measurement)


def gain(scene: Scene, trial: Trial, over: Trial) -> float:
    """How many times better one row is than another in the leading objective."""
    assert trial.measurement is not None
    assert over.measurement is not None
    a = scene.objective.compute(trial.measurement)
    b = scene.objective.compute(over.measurement)
    return scene.objective.gain(a, b) if a and b else 1.0


def data_wait(trial: Trial) -> float:
    """Share of time that the step waits for data; all of it where that is not known."""
    waited = METRICS["data_wait_pct"].compute(trial.measurement) if trial.measurement else None
    return 1.0 if waited is None else waited / 100
