"""Earlier runs of the same job: whose rows count here too, and who only tells where to look first.

Rows of another day count only where nothing that a row depends on has changed, and only after a
probe of the user's own config has shown that it makes what it made then. Finals are never taken
over: what is recommended is measured now, beside the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import ResumeError
from autotune.evidence import judged
from autotune.labels import UNSURE
from autotune.runfolder import file_hash, read_content
from autotune.scene import Ask, speed_of
from autotune.state import RunState, versions
from autotune.store import read_trials
from autotune.types import Config, Stage, Status, Trial

AGREES = 0.05
"""How far the baseline may lie from what it made then, relative, its intervals apart."""
MOST_LOOKED_AT = 50
REUSED = frozenset(
    {Stage.LOADER, Stage.DEVICE, Stage.VERIFY, Stage.CLIMB, Stage.LOCAL, Stage.SEARCH}
)
MACHINE = ("device", "devices", "driver_major", "torch", "python", "cpus", "memory_bytes")
WORKLOAD = ("parameters", "dataset_len", "dtype", "delivered_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """An earlier run of this job, or of one like it."""

    folder: Path
    answer: Config | None
    trials: Sequence[Trial]
    """Those that count here too if the baseline agrees; none of a job that is only alike."""
    baseline: Trial | None = None

    @property
    def same(self) -> bool:
        """Whether nothing that a row depends on has changed."""
        return self.baseline is not None

    def agrees(self, trial: Trial) -> bool:
        """Whether the baseline makes what it made then: the probe that verifies the rows."""
        if self.baseline is None:
            return False
        then, now = speed_of(self.baseline), speed_of(trial)
        if then is None or now is None:
            return False
        overlap = then.low <= now.high and now.low <= then.high
        return overlap or abs(math.log(now.value / then.value)) <= AGREES

    def row_for(self, ask: Ask, number: int) -> Trial | None:
        """The row that the ask would measure again; it costs nothing now."""
        for trial in self.trials:
            same = (trial.config, trial.source, trial.sink, trial.stage)
            if same == (ask.config, ask.source, ask.sink, ask.stage):
                return replace(
                    trial, number=number, why=ask.why, probe_s=0.0, reused=self.folder.name
                )
        return None


def find(state: RunState) -> Earlier | None:
    """The newest finished run beside this one that is of the same job; else of one like it."""
    alike: tuple[Path, Mapping[str, Any]] | None = None
    for folder, content in _finished(state.folder):
        if content["model"]["path"] != state.checked.model.path and not _same_file(state, content):
            continue
        if _is_same(state, content):
            return _same(folder, content)
        alike = alike or (folder, content)
    return None if alike is None else _alike(*alike)


def _finished(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Runs in the folder's parent that ended with an answer, the newest first."""
    try:
        beside = [one for one in folder.parent.iterdir() if one != folder and not one.is_symlink()]
        files = [one / "run.json" for one in beside if (one / "run.json").is_file()]
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    except OSError:
        return
    for file in files[:MOST_LOOKED_AT]:
        try:
            content = read_content(file.parent)
        except ResumeError:
            continue
        if content["status"] == "finished" and content["answer"] is not None:
            yield file.parent, content


def _same_file(state: RunState, content: Mapping[str, Any]) -> bool:
    return bool(content["model"]["sha256"] == file_hash(state.checked.model.path))


def _is_same(state: RunState, content: Mapping[str, Any]) -> bool:
    """Whether a row of that run says what the same probe would say now."""
    assert state.space is not None
    machine, facts = _plain(asdict(state.machine)), _plain(asdict(state.space.facts))
    then_machine, then_facts = content["machine"], content["workload"]
    own = state.checked.options
    return (
        _same_file(state, content)
        and content["model"]["factory"] == state.checked.model.factory
        and all(then_machine.get(name) == machine[name] for name in MACHINE)
        and all(then_facts.get(name) == facts[name] for name in WORKLOAD)
        and content["versions"] == versions()
        and content["space"]["baseline"] == dict(state.baseline)
        and content["options"]["seed"] == own.seed
        and list(content["options"]["limits"]) == list(own.limits)
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON brings them back."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


def _same(folder: Path, content: Mapping[str, Any]) -> Earlier | None:
    trials = judged(read_trials(folder))
    baseline = Config(content["space"]["baseline"])
    measured = [t for t in trials if t.config == baseline and t.end_to_end and t.ok]
    measured = [t for t in measured if t.stage is not Stage.INSPECT]
    if not measured:
        return _alike(folder, content)
    return Earlier(
        folder=folder,
        answer=_answer(trials, content),
        trials=[trial for trial in trials if _counts(trial)],
        baseline=measured[-1],
    )


def _alike(folder: Path, content: Mapping[str, Any]) -> Earlier:
    answer = _answer(read_trials(folder), content)
    return Earlier(folder=folder, answer=answer, trials=())


def _counts(trial: Trial) -> bool:
    """Whether the row says something that a day does not change."""
    clear = trial.ok and not UNSURE & set(trial.labels)
    settled = trial.status in (Status.OUT_OF_MEMORY, Status.DOMINATED)
    return trial.stage in REUSED and (clear or settled)


def _answer(trials: Sequence[Trial], content: Mapping[str, Any]) -> Config | None:
    key = content["answer"]["best_key"]
    return next((trial.config for trial in trials if trial.config.key == key), None)
