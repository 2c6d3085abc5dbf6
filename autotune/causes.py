"""Failed rows by their cause: what differs only in numbers, addresses and pids is one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autotune.runfolder import probe_folder
from autotune.types import FAILED, Trial

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d[\d.,]*\d|\d")
_PLACE = re.compile(r"(\.py:\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Rows that failed alike."""

    text: str
    trials: tuple[Trial, ...]

    @property
    def first(self) -> Trial:
        """The row that shows it first, with the original error."""
        return self.trials[0]

    @property
    def log(self) -> Path:
        """The first row's log, below the run's folder."""
        return log_of(self.first)

    def __str__(self) -> str:
        return f"{len(self.trials)} x {self.first.status}: {self.first.reason}"


def cause_of(trial: Trial) -> str:
    """Status and reason without what differs from row to row."""
    return f"{trial.status}: {plain(trial.reason)}"


def grouped(trials: Iterable[Trial]) -> list[Cause]:
    """The failed rows by cause, the most frequent first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.status in FAILED:
            groups.setdefault(cause_of(trial), []).append(trial)
    causes = [Cause(text=text, trials=tuple(group)) for text, group in groups.items()]
    return sorted(causes, key=lambda cause: (-len(cause.trials), cause.first.number))


def log_of(trial: Trial) -> Path:
    """What the probe printed, tracebacks included, below the run's folder."""
    return probe_folder(trial.number, trial.config) / "log.txt"


def last_frame(trial: Trial, path: str) -> str:
    """Where in the user's file it was raised, as the log shows it; "" if it does not."""
    lines = trial.failure.log_tail.splitlines() if trial.failure is not None else []
    at = [number for number, line in enumerate(lines) if line.startswith(f'  File "{path}", ')]
    if not at:
        return ""
    return "".join(f"  {line}\n" for line in lines[at[-1] : at[-1] + 2])


def plain(text: str) -> str:
    """A text without numbers; the place in the user's file stays, as it tells causes apart."""
    parts = _PLACE.split(" ".join(text.split()))
    return "".join(part if _PLACE.fullmatch(part) else _NUMBERS.sub("#", part) for part in parts)
