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
from autotune.options import read_budget
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
        wanted = (ask.config, ask.source, ask.sink, ask.stage)
        for trial in self.trials:
            if (trial.config, trial.source, trial.sink, trial.stage) == wanted:
                origin = trial.reused or self.folder.name
                return replace(trial, number=number, why=ask.why, probe_s=0.0, reused=origin)
        return None


def find(state: RunState) -> Earlier | None:
    """The newest finished run beside this one that is of the same job; else of one like it."""
    alike = None
    for folder, content in _finished(state.folder):
        try:
            found = _looked_at(state, folder, content)
        except Exception:  # noqa: BLE001 - whatever is wrong with another run, this one goes on
            continue
        if found is not None and found.same:
            return found
        alike = alike or found
    return alike


def _looked_at(state: RunState, folder: Path, content: Mapping[str, Any]) -> Earlier | None:
    if content["model"]["path"] != state.checked.model.path and not _same_file(state, content):
        return None
    trials = judged(read_trials(folder))
    key = content["answer"]["best_key"]
    answer = next((trial.config for trial in trials if trial.config.key == key), None)
    if not _is_same(state, content) or not (own := _own_rows(trials, state.baseline)):
        return Earlier(folder=folder, answer=answer, trials=())
    counting = [trial for trial in trials if _counts(trial)]
    return Earlier(folder=folder, answer=answer, trials=counting, baseline=own[-1])


def _own_rows(trials: Sequence[Trial], baseline: Config) -> list[Trial]:
    """What the user's own config made, loader and training together."""
    together = [t for t in trials if t.config == baseline and t.end_to_end and t.ok]
    return [trial for trial in together if trial.stage is not Stage.INSPECT]


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
        # A shorter run has measured in shorter windows: its rows are rougher than asked for now.
        and read_budget(content["options"]["budget"]) >= state.checked.budget_s
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON brings them back."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


def _counts(trial: Trial) -> bool:
    """Whether the row says something that a day does not change."""
    clear = trial.ok and not UNSURE & set(trial.labels)
    settled = trial.status in (Status.OUT_OF_MEMORY, Status.DOMINATED)
    return trial.stage in REUSED and (clear or settled)
