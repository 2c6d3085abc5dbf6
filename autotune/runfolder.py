"""Run folders: where a run may write, which one may be gone on with, what run.json says."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotune.errors import OptionError, ResumeError
from autotune.options import Checked
from autotune.space import Goal, Space
from autotune.state import RunState, answer_content, read_content
from autotune.types import Machine


def new_folder(known: Checked) -> Path:
    """The run's folder, not yet made.

    Raises:
        OptionError: If it holds another run, or nothing can be written there.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    given = known.options.output
    folder = Path(given) if given else Path("results") / f"{known.model.name}-{stamp}"
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(
            f"--output {folder}: is not an empty folder; choose another, or --resume it"
        )
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"--output {folder}: {existing} is not writable")
    return folder


def earlier_run(folder: Path, known: Checked, *, force: bool) -> Mapping[str, Any]:
    """The run.json of the run to go on with.

    Raises:
        ResumeError: If the folder holds none, or the model file has changed since.
    """
    content = read_content(folder)
    if content["model"]["sha256"] != file_hash(known.model.path) and not force:
        raise ResumeError(
            f"{known.model.path} has changed since {folder} was measured; "
            "start a new run, or go on all the same with --force"
        )
    return content


def check_machine(earlier: Mapping[str, Any], machine: Machine, *, force: bool) -> None:
    """Refuse to mix figures of two machines.

    The machine is its accelerators, driver, torch and CPU count, not its name.

    Raises:
        ResumeError: If one of them has changed.
    """
    then, now = earlier["machine"], asdict(machine)
    changed = [
        f"{name}: {_shown(then.get(name))} then, {_shown(now[name])} now"
        for name in ("devices", "driver_major", "torch", "cpus")
        if list(_tuple(then.get(name))) != list(_tuple(now[name]))
    ]
    if changed and not force:
        raise ResumeError(
            f"the machine has changed ({'; '.join(changed)}); "
            "start a new run, or go on all the same with --force"
        )


def point_latest(folder: Path) -> None:
    """results/latest points at the newest run; where links cannot be made, nothing does."""
    latest = folder.parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return
    part = folder.parent / f".latest.{os.getpid()}"
    try:
        part.symlink_to(folder.name)
        part.replace(latest)
    except OSError:
        part.unlink(missing_ok=True)


def run_content(state: RunState, goal: Goal, status: str) -> dict[str, Any]:
    """What run.json says."""
    known = state.checked
    return {
        "schema": 1,
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


def file_hash(path: str) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("autotune-torch", "torch", "optuna", "numpy", "lightning", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _listed(known: Space) -> dict[str, Any]:
    most = 40  # a held global batch allows every accumulation: of no use to a reader
    return {name: values[:most] for name, values in known.values.items()}


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _shown(value: Any) -> str:
    return ", ".join(str(entry) for entry in _tuple(value)) or "none"
