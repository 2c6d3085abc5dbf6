"""The study on disk, and its trials as a table. Only this file and `search.py` know Optuna.

`study.db` is the record: every other file of a run folder is derived from it and `run.json`.
"""

from __future__ import annotations

import errno
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import URL

from autotune.causes import cause_of, log_of
from autotune.knobs import KNOBS, Knob
from autotune.metrics import METRICS, Metric, throughput
from autotune.pareto import Pooled
from autotune.types import (
    FAILED,
    Trial,
    Value,
    decode,
    encode,
    write_atomically,
)

RAW = "raw"
"""The user attribute that holds the whole trial, raw facts included."""
LARGEST = 2**31 - 1

HEAD = ("trial", "key", "stage", "source", "sink", "status", "labels", "reason")
INTERVAL = ("samples_per_s", "samples_per_s_low", "samples_per_s_high")
PHASES = (
    "parity_loss",
    "build_s",
    "startup_s",
    "first_step_s",
    "probe_s",
    "optimizer_steps",
)
COLUMNS = (
    *HEAD,
    *KNOBS,
    *INTERVAL,
    *(name for name in METRICS if name != "samples_per_s"),
    *PHASES,
)


class Store:
    """One writer's view of a run folder's study."""

    def __init__(self, folder: Path, objectives: Sequence[Metric]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self._objectives = tuple(objectives)
        name = _study_name(folder)
        self._storage = RDBStorage(_url(folder))
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=name,
            directions=["maximize" if m.better == "higher" else "minimize" for m in objectives],
            load_if_exists=True,
        )

    def add(self, trial: Trial) -> None:
        """Put one finished row on disk, before the next probe starts."""
        read = [self._value(metric, trial) for metric in self._objectives]
        values = [value for value in read if value is not None and not _is_empty(value)]
        all_read = len(values) == len(read)
        complete = trial.ok and trial.end_to_end and all_read
        state = _STATES.get(trial.status, TrialState.PRUNED)
        params = {name: value for name, value in trial.config.items() if value is not None}
        row = {name: value for name, value in row_of(trial).items() if not _is_empty(value)}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE if complete else state,
                values=values if complete else None,
                params=params,
                distributions={name: _distribution(KNOBS[name]) for name in params},
                user_attrs={**row, RAW: encode(trial)},
            )
        )

    def trials(self) -> list[Trial]:
        """Every stored row, in order."""
        return _decoded(self._study.get_trials(deepcopy=False))

    def close(self) -> None:
        """Let go of the file; rows are on disk already."""
        _close(self._storage)

    @staticmethod
    def _value(metric: Metric, trial: Trial) -> float | None:
        return metric.compute(trial.measurement) if trial.measurement is not None else None


_STATES = dict.fromkeys(FAILED, TrialState.FAIL)


def read_trials(folder: Path) -> list[Trial]:
    """Every row of a run folder, without writing to it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = _study_name(folder)
    with _opened(folder) as storage:
        study = optuna.load_study(study_name=name, storage=storage)
        return _decoded(study.get_trials(deepcopy=False))


def is_full(error: BaseException | None) -> bool:
    """Whether what was raised, or what that came of, is want of room on the disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        if isinstance(error, sqlite3.OperationalError) and "disk" in str(error):
            return True  # "database or disk is full"; "disk I/O error" beyond a quota
        error = error.__cause__ or error.__context__
    return False


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _study_name(folder: Path) -> str:
    """The folder's name; the study's own if the folder has been renamed since."""
    if not (folder / "study.db").exists():
        return folder.name
    with _opened(folder) as storage:
        return next(iter(optuna.get_all_study_names(storage)), folder.name)


@contextmanager
def _opened(folder: Path) -> Iterator[RDBStorage]:
    """The folder's study.db, closed again: a notebook reads many runs."""
    storage = RDBStorage(_url(folder))
    try:
        yield storage
    finally:
        _close(storage)


def _close(storage: RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()


def _url(folder: Path) -> str:
    # A folder's name may hold what means something in a URL.
    return URL.create("sqlite", database=str(folder / "study.db")).render_as_string()


def _decoded(frozen: Iterable[optuna.trial.FrozenTrial]) -> list[Trial]:
    return [decode(Trial, one.user_attrs[RAW]) for one in frozen if RAW in one.user_attrs]


def _distribution(knob: Knob) -> BaseDistribution:
    # Optuna wants one distribution a parameter for the whole study, whatever is tried.
    if knob.domain.least is not None:
        return IntDistribution(low=knob.domain.least, high=LARGEST)
    return CategoricalDistribution(choices=knob.domain.words)


def row_of(trial: Trial) -> dict[str, Any]:
    """The trial as one row of the table; None where a value could not be read."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row.update(
        trial=trial.number,
        key=trial.config.key,
        stage=str(trial.stage),
        source=str(trial.source),
        sink=str(trial.sink),
        status=str(trial.status),
        labels=",".join(trial.labels),
        reason=trial.reason,
        probe_s=trial.probe_s or None,
    )
    row.update({name: value for name, value in trial.config.items() if name in KNOBS})
    measured = trial.measurement
    if measured is None:
        return row
    row.update({name: metric.compute(measured) for name, metric in METRICS.items()})
    if (speed := throughput(measured)) is not None:
        row.update(samples_per_s_low=speed.low, samples_per_s_high=speed.high)
    row.update({name: getattr(measured, name) for name in PHASES if name != "probe_s"})
    if not measured.blocks:
        row["optimizer_steps"] = None  # nothing was timed, so nothing was counted
    return row


def table(trials: Sequence[Trial]) -> pd.DataFrame:
    """The trials as a table: one row per probe or refusal, the documented columns."""
    frame = pd.DataFrame([row_of(trial) for trial in trials], columns=list(COLUMNS))
    numbers = [*INTERVAL, *(n for n in METRICS if n not in INTERVAL), *PHASES[:-1]]
    frame[numbers] = frame[numbers].astype("float64")
    for name in ("trial", "optimizer_steps"):
        frame[name] = frame[name].astype("Int64")
    for name, knob in KNOBS.items():
        frame[name] = frame[name].astype(_dtype(knob))
    return frame


def _dtype(knob: Knob) -> Any:
    if knob.domain.least is not None:
        return "Int64"
    return "boolean" if all(isinstance(word, bool) for word in knob.domain.words) else "string"


def pareto_table(front: Sequence[Pooled]) -> pd.DataFrame:
    """The front, one row per config, finals pooled."""
    rows = []
    for point in front:
        row: dict[str, Any] = {"key": point.config.key, "repeats": len(point.trials)}
        row.update({name: point.config.get(name) for name in KNOBS})
        row.update({name: point.value(metric) for name, metric in METRICS.items()})
        row.update(samples_per_s_low=point.speed.low, samples_per_s_high=point.speed.high)
        rows.append(row)
    columns = ["key", "repeats", *KNOBS, *INTERVAL, *(n for n in METRICS if n not in INTERVAL)]
    return pd.DataFrame(rows, columns=columns)


def failed_table(trials: Sequence[Trial]) -> pd.DataFrame:
    """The failed rows: each with its cause, how many share it, and where its log is."""
    failed = [trial for trial in trials if trial.status in FAILED]
    counts = Counter(cause_of(trial) for trial in failed)
    frame = table(failed)
    frame["cause"] = [cause_of(trial) for trial in failed]
    frame["count"] = [counts[cause_of(trial)] for trial in failed]
    frame["log"] = [log_of(trial).as_posix() for trial in failed]
    return frame


def write_tables(folder: Path, trials: Sequence[Trial], front: Sequence[Pooled]) -> None:
    """trials.csv, trials.parquet, failed.csv and pareto.csv."""
    frame = table(trials)
    write_csv(frame, folder / "trials.csv")
    part = folder / ".trials.parquet.part"
    frame.to_parquet(part, index=False)
    part.replace(folder / "trials.parquet")
    write_csv(failed_table(trials), folder / "failed.csv")
    write_csv(pareto_table(front), folder / "pareto.csv")


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """A table as text, whole or not at all."""
    write_atomically(path, frame.to_csv(index=False))


def _is_empty(value: Value) -> bool:
    if value is None:
        return True
    return isinstance(value, float) and not math.isfinite(value)
