"""Run folders: where a run may write, which one may be gone on with, and its run.json.

Imports nothing heavy, so that a folder that will not do is told at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.errors import OptionError, ResumeError
from autotune.options import Checked, Options, checked, refuse_several_tasks, restored
from autotune.types import Config, Machine, write_atomically

RUN_FILE = "run.json"
RUN_SCHEMA = 2
RESULTS = "results"
"""Where runs go that were given no folder, below the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run that may start: what is asked, where it goes, and the run that it goes on with."""

    checked: Checked
    folder: Path
    earlier: Mapping[str, Any] | None = None
    force: bool = False


def new_run(options: Options) -> Order:
    """A run of its own.

    Raises:
        InputError: If anything is wrong that can be seen without running the model file.
    """
    known = checked(options)
    return Order(checked=known, folder=new_folder(known))


def resumed_run(folder: Path, *, force: bool) -> Order:
    """An interrupted run, with the options that it was started with.

    Raises:
        InputError: If the folder holds none, or the model file has changed since.
    """
    refuse_several_tasks(os.environ)
    folder = folder.expanduser().resolve()
    content = read_content(folder)
    known = restored(content)
    path = known.model.path
    if not Path(path).is_file():
        raise ResumeError(f"no model file {path}, with which {folder} was measured")
    if content["model"]["sha256"] != file_hash(path) and not force:
        raise ResumeError(
            f"{path} has changed since {folder} was measured; "
            "start a new run, or go on all the same with --force"
        )
    return Order(checked=known, folder=folder, earlier=content, force=force)


def new_folder(known: Checked) -> Path:
    """The run's folder, not yet made.

    Raises:
        OptionError: If it holds another run, or nothing can be written there.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    given = known.options.output
    folder = Path(given) if given else Path(RESULTS) / f"{known.model.name}-{stamp}"
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(_taken(folder))
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"--output {folder}: {existing} is not writable")
    return folder


@contextmanager
def claimed(folder: Path, *, resumed: bool) -> Iterator[None]:
    """The run's folder, made, and kept from other runs: a study has one writer.

    Raises:
        OptionError: If the system refuses, or another run has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OptionError(f"--output {folder}: cannot be made: {error.strerror}") from None
    try:
        if not _is_free(descriptor):
            raise OptionError(f"{folder}: another run is at work in it")
        if not resumed and any(folder.iterdir()):
            raise OptionError(_taken(folder))
        yield
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Lock it if nobody else has: the system unlocks it when this process ends, however it does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _taken(folder: Path) -> str:
    return f"--output {folder}: is not an empty folder; choose another, or --resume it"


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
    """Let results/latest point at the newest run there, where links can be made."""
    latest = folder.parent / "latest"
    if folder.parent.name != RESULTS or (latest.exists() and not latest.is_symlink()):
        return
    part = folder.parent / f".latest.{os.getpid()}"
    try:
        part.symlink_to(folder.name)
        part.replace(latest)
    except OSError:
        part.unlink(missing_ok=True)


def read_content(folder: Path) -> Mapping[str, Any]:
    """The run.json of a run folder.

    Raises:
        ResumeError: If the folder holds no run that this version reads.
    """
    try:
        content = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ResumeError(f"{folder} holds no run (no readable run.json)") from None
    known = isinstance(content, dict) and content.get("schema") == RUN_SCHEMA
    if not known or not (folder / "study.db").exists():
        raise ResumeError(f"{folder} was written by another version, or has no study.db")
    return dict(content)


def write_content(folder: Path, content: Mapping[str, Any]) -> None:
    """Write run.json."""
    text = json.dumps(_finite({"schema": RUN_SCHEMA, **content}), indent=2, default=str)
    write_atomically(folder / RUN_FILE, text + "\n")


def probe_folder(number: int, config: Config) -> Path:
    """Where a probe's spec, result and log are, below the run's folder."""
    return Path("probes", f"{number:04d}-{config.key}")


def file_hash(path: str) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _shown(value: Any) -> str:
    return ", ".join(str(entry) for entry in _tuple(value)) or "none"


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Config | Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
