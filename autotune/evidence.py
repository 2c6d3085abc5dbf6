"""Whether a failure is what its text makes it look like: decided by the rows of other probes.

An error near the memory limit seldom says so. What tells it from any other one is that a smaller
micro-batch runs, in a fresh process. Nothing stored is changed: rows are judged when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.causes import plain
from autotune.space import ACCUMULATION, BATCH, PERSISTENT, PINNING, PREFETCH, WORKERS
from autotune.types import Failure, Status, Suspect, Trial, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a suspicion becomes once a config runs that differs only in less of one knob."""

    suspect: Suspect
    less: str
    """The knob of which the config that runs has less."""
    free: frozenset[str] = frozenset()
    """Knobs that may differ, too."""
    status: Status | None = None
    """What the row becomes; None: what it is."""
    told: str
    """What goes in front of the original text; {value} is the knob's in the config that runs."""


_FRESH = "suspected, as micro-batch {value} runs in a fresh process: "

RULES = (
    Rule(
        suspect=Suspect.PINNING,
        less=PINNING,
        told="host: pinning is the cause, as the same runs with loader.pin_memory=false: ",
    ),
    Rule(
        suspect=Suspect.DEVICE_MEMORY,
        less=BATCH,
        free=frozenset({ACCUMULATION}),
        status=Status.OUT_OF_MEMORY,
        told=f"device: {_FRESH}",
    ),
    Rule(
        suspect=Suspect.SIZE,
        less=BATCH,
        free=frozenset({ACCUMULATION}),
        told="does not run at this size, micro-batch {value} does: ",
    ),
    # Before the batch: what a worker lacks, fewer of them leave to the others.
    Rule(
        suspect=Suspect.HOST_MEMORY,
        less=WORKERS,
        free=frozenset({PREFETCH, PERSISTENT, PINNING}),
        told="with {value} loader workers it runs: ",
    ),
    Rule(
        suspect=Suspect.HOST_MEMORY,
        less=BATCH,
        free=frozenset({ACCUMULATION}),
        status=Status.OUT_OF_MEMORY,
        told=f"host: {_FRESH}",
    ),
)


class Rows:
    """Rows as they were measured, and as all of them together let each one be judged.

    Args:
        judged: Is filled in place: search and budget look at this very list.
    """

    def __init__(self, judged: list[Trial] | None = None) -> None:
        self.measured: list[Trial] = []
        self.judged: list[Trial] = [] if judged is None else judged

    def take(self, trial: Trial) -> Trial:
        """A new row, as it is judged now."""
        self.measured.append(trial)
        self.judged[:] = judged(self.measured)
        return self.judged[-1]


def judged(trials: Sequence[Trial]) -> list[Trial]:
    """The rows, with every suspicion decided by what all of them show.

    Args:
        trials: Rows as they were measured; a row judged before would be judged twice.
    """
    ran = [trial for trial in trials if trial.ok]
    return [_decided(trial, trials, ran) for trial in trials]


def _decided(trial: Trial, trials: Sequence[Trial], ran: Sequence[Trial]) -> Trial:
    failure, suspect = trial.failure, _suspicion(trial)
    if failure is None or suspect is None:
        return trial
    for rule in RULES:
        if rule.suspect is suspect and (witness := _witness(rule, trial, ran)) is not None:
            return _told(trial, failure, rule, witness)
    sizes = _same_at(trial, failure, trials)
    if suspect is Suspect.DEVICE_MEMORY and len(sizes) > 1:
        message = f"the same from micro-batch {sizes[0]} to {sizes[-1]}: {failure.message}"
        return replace(trial, failure=replace(failure, message=message))
    return trial


def _suspicion(trial: Trial) -> Suspect | None:
    """What the probe suspected; on whatever ran out of memory while pinning, that."""
    if trial.failure is None:
        return None
    pinned = trial.status is Status.OUT_OF_MEMORY and bool(trial.config.get(PINNING))
    return trial.failure.suspect or (Suspect.PINNING if pinned else None)


def _witness(rule: Rule, trial: Trial, ran: Sequence[Trial]) -> Trial | None:
    """The row that runs with the most of what the failed one has more of."""
    fit = [
        other
        for other in ran
        if other.sink is trial.sink
        and whole(other.config.get(rule.less)) < whole(trial.config.get(rule.less))
        and set(other.config.changed_from(trial.config)) <= {rule.less, *rule.free}
    ]
    return max(fit, key=lambda other: whole(other.config.get(rule.less)), default=None)


def _told(trial: Trial, failure: Failure, rule: Rule, witness: Trial) -> Trial:
    told = rule.told.format(value=whole(witness.config.get(rule.less)))
    # The probe may have taken it for another kind of memory.
    original = failure.message.removeprefix("device: ").removeprefix("host: ")
    status = rule.status or failure.status
    return replace(trial, failure=replace(failure, status=status, message=f"{told}{original}"))


def _same_at(trial: Trial, failure: Failure, trials: Sequence[Trial]) -> list[int]:
    """The micro-batches that fail with the same text, in order."""
    same = plain(failure.message)
    sizes = {
        whole(other.config.get(BATCH))
        for other in trials
        if other.failure is not None
        and other.sink is trial.sink
        and plain(other.failure.message) == same
    }
    return sorted(sizes)
