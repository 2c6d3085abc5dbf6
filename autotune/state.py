"""All that is known of a run: what reports are made from, and what a run folder brings back."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotune import diagnosis, exporters, pareto, space, store
from autotune.evidence import judged
from autotune.knobs import KNOBS, Exactness
from autotune.options import Checked, restored
from autotune.runfolder import file_hash, read_content
from autotune.types import (
    Config,
    Estimate,
    Machine,
    ModelFacts,
    Trial,
    WorkloadFacts,
    write_atomically,
)


@dataclass
class RunState:
    """All that is known of a run; what reports are made from."""

    checked: Checked
    folder: Path
    machine: Machine
    model_facts: ModelFacts
    keys: Mapping[str, Any]
    space: space.Space | None = None
    trials: list[Trial] = field(default_factory=list)
    answer: pareto.Answer | None = None
    not_explored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped_because: str = ""
    tuning_s: float = 0.0

    @property
    def baseline(self) -> Config:
        """The user's own config."""
        assert self.space is not None
        return self.space.baseline

    @property
    def has_current(self) -> bool:
        """Whether the file says what the user trains with."""
        return self.model_facts.current is not None

    @property
    def baseline_name(self) -> str:
        """What to call the baseline: it is the user's own only if the file says so."""
        return "your config" if self.has_current else "PyTorch's defaults"

    def export(self, config: Config) -> exporters.Export:
        """The config, ready to be written in the user's words.

        Environment that the user has already, and did not name, is left out.
        """
        named = self.model_facts.current or {}
        kept = {
            name: value
            for name, value in config.items()
            if not KNOBS[name].environment or name in named or self.baseline.get(name) != value
        }
        return exporters.Export(
            values=kept,
            keys=self.keys,
            model=self.checked.model,
            device=self.machine.device.partition(":")[0],
        )


def write_answer(state: RunState, *, verified: bool) -> None:
    """best.yaml, overrides.txt and command.txt; overrides.txt only for a verified answer."""
    assert state.answer is not None
    export = state.export(state.answer.config)
    line = " ".join(exporters.overrides(export))
    write_atomically(state.folder / "best.yaml", exporters.best_yaml(export))
    write_atomically(state.folder / "command.txt", exporters.command(export) + "\n")
    if verified:
        write_atomically(state.folder / "overrides.txt", line + "\n")


def write_diagnosis(state: RunState) -> None:
    """diagnosis.json: what holds the baseline back."""
    found = [asdict(finding) for finding in diagnosis.diagnose(state.trials, state.baseline)]
    text = json.dumps({"findings": found}, indent=2)
    write_atomically(state.folder / "diagnosis.json", text + "\n")


def run_content(state: RunState, goal: space.Goal, status: str) -> dict[str, Any]:
    """What run.json says."""
    known = state.checked
    return {
        "status": status,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "folder": os.getcwd(),
        "model": {**asdict(known.model), "sha256": file_hash(known.model.path)},
        "options": asdict(known.options),
        "machine": asdict(state.machine),
        "versions": versions(),
        "space": {
            "name": known.options.space,
            "overrides": list(known.options.overrides),
            "choices": {name: c.values for name, c in known.request.choices.items()},
            "baseline": None if state.space is None else dict(state.baseline),
            "values": None if state.space is None else _listed(state.space),
            "global_batch": goal.size,
        },
        "current": state.model_facts.current,
        "keys": state.keys,
        "unit": state.model_facts.unit,
        "workload": None if state.space is None else asdict(state.space.facts),
        "notes": state.notes,
        "answer": answer_content(state),
    }


def answer_content(state: RunState) -> dict[str, Any] | None:
    """What run.json says of the answer."""
    answer = state.answer
    if answer is None or state.space is None:
        return None
    speedup = None if answer.speedup is None else asdict(answer.speedup)
    return {
        "keep": answer.keep,
        "overrides": " ".join(exporters.overrides(state.export(answer.config))),
        "speedup": speedup or {"value": None, "low": None, "high": None},
        "baseline_key": state.baseline.key,
        "best_key": answer.config.key,
        "verified": answer.verified,
        "reason": answer.reason,
        "stopped_because": state.stopped_because,
        "not_explored": state.not_explored,
        "global_batch_changed": state.space.global_batch(answer.config)
        != state.space.global_batch(state.baseline),
        "numerics_changed": numerics_changed(state, answer.config),
        "tuning_s": state.tuning_s,
    }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("autotune-torch", "torch", "optuna", "numpy", "lightning", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _listed(known: space.Space) -> dict[str, Any]:
    most = 40  # a held global batch allows every accumulation: of no use to a reader
    return {name: values[:most] for name, values in known.values.items()}


def numerics_changed(state: RunState, config: Config) -> list[str]:
    """Changed knobs that change what training computes, not only in which order."""
    assert state.space is not None
    facts = state.space.facts
    split_matters = facts.batch_norm or not facts.exact_split
    changed = config.changed_from(state.baseline)
    return [
        name
        for name in changed
        if KNOBS[name].exactness is Exactness.NUMERICS
        or (name in (space.BATCH, space.ACCUMULATION) and split_matters)
    ]


def load_state(folder: Path) -> RunState:
    """The run of a folder, as it was when it was written last.

    Raises:
        ResumeError: If the folder holds no run.
    """
    folder = folder.expanduser().resolve()
    content = read_content(folder)
    known = restored(content)
    facts = ModelFacts(
        current=content["current"],
        keys=content["keys"],
        unit=content["unit"],
        cacheable=False,
        fresh=False,
        own_loader=False,
        loader_accepts=(),
    )
    state = RunState(
        checked=known,
        folder=folder,
        machine=_machine(content["machine"]),
        model_facts=facts,
        keys=content["keys"],
        trials=judged(store.read_trials(folder)),
        notes=list(content["notes"]),
    )
    if content["workload"] is not None:
        state.space = space.resolve(
            known.request,
            content["current"],
            space.goal_of(known.options.global_batch, content["current"]),
            state.machine,
            WorkloadFacts(**content["workload"]),
        )
    _restore_answer(state, content["answer"])
    return state


def _restore_answer(state: RunState, content: Mapping[str, Any] | None) -> None:
    if content is None:
        return
    config = next(t.config for t in state.trials if t.config.key == content["best_key"])
    speedup = content["speedup"]
    known = speedup["value"] is not None
    state.answer = pareto.Answer(
        keep=content["keep"],
        config=config,
        speedup=Estimate(**speedup) if known else None,
        verified=content["verified"],
        reason=content["reason"],
    )
    state.stopped_because = content["stopped_because"]
    state.not_explored = list(content["not_explored"])
    state.tuning_s = content["tuning_s"]


def _machine(content: Mapping[str, Any]) -> Machine:
    lists = {name: tuple(content[name]) for name in ("devices", "capability")}
    return Machine(**{**content, **lists})
