"""Start, watch and end one probe's processes."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from autotune.errors import LaunchError, ModelFileError
from autotune.forkserver import TICK_S, Job, ShouldStop, carry_on, how_it_ended, tail
from autotune.home import Deadlines, Home, Plan
from autotune.hostwatch import Excess, HostWatch
from autotune.types import (
    Failure,
    Measurement,
    ModelFacts,
    ModelRef,
    ProbeSpec,
    Status,
    Suspect,
    decode,
    encode,
    write_atomically,
)

LINGER_S = 2.0
"""How long a process may take to end by itself once its result is written."""

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

RESULT = "result.json"
LOG = "log.txt"
LOG_BYTES = 64 * 1024
LONGEST_LINE = 160
ROOM_BYTES = 16 * 1024
"""With less free than this, a result cannot be expected to have found room."""
LOST = "the process that it was forked from ended"
OOM_KILLED = "host: killed by the kernel's OOM killer"
LINGERED = "its process did not end by itself after the result was written"

_NCCL_OUT_OF_MEMORY = re.compile(r"NCCL WARN .*out of memory", re.IGNORECASE)
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
_SIGNALS: Mapping[int, tuple[Suspect, str]] = MappingProxyType(
    {
        -signal.SIGKILL: (Suspect.HOST_MEMORY, ""),
        -signal.SIGBUS: (Suspect.HOST_MEMORY, "; /dev/shm may be full"),
    }
)
"""Ends by a signal that want of memory brings about, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one probe, a measurement or a failure, and how long all of it took."""

    measurement: Measurement | None = None
    failure: Failure | None = None
    probe_s: float


class Launcher:
    """Runs probes, each in a process of its own, forked where forking works.

    Args:
        model: Which model file.
        seed: What model and dataset are built with.
        preload: Modules to import before anything is forked (`source.third_party_imports`).
        say: Is told, in words for the user, what could not be done as planned.
        deadlines: How long to wait for what happens before the first probe.
    """

    def __init__(
        self,
        model: ModelRef,
        *,
        seed: int,
        preload: Sequence[str],
        say: Callable[[str], None],
        deadlines: Deadlines | None = None,
    ) -> None:
        self._plan = Plan(
            model=model,
            seed=seed,
            preload=tuple(preload),
            folder=Path(tempfile.mkdtemp(prefix="autotune-")),
            deadlines=deadlines or Deadlines(),
        )
        self._say = say
        self._homes: dict[frozenset[tuple[str, str]], Home] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fallback(self) -> str:
        """Why probes build for themselves; "" if they inherit the template's model and dataset."""
        return self._first.fallback

    @property
    def skipped_preloads(self) -> tuple[str, ...]:
        """The modules that must not be imported before forking."""
        return self._first.skipped

    @property
    def facts(self) -> ModelFacts:
        """What the model file told, and how its probes start."""
        facts = self._first.load()
        return replace(facts, fallback=self.fallback, skipped_preloads=self.skipped_preloads)

    def load(self, environment: Mapping[str, str] = NO_VARIABLES) -> ModelFacts:
        """Start the processes that probes come from, and import the model file in one of them.

        Args:
            environment: Variables that libraries read when they are loaded.

        Raises:
            ModelFileError: If the file cannot be used.
            LaunchError: If no process can be started.
        """
        return self._home(environment).load()

    def settle(self) -> dict[str, Any]:
        """Wait for model and dataset, and find out how probes can start; return device facts.

        Raises:
            ModelFileError: If a builder raises or takes too long.
            LaunchError: If no process can compute here.
        """
        return self._first.settle()

    def run(
        self,
        spec: ProbeSpec,
        environment: Mapping[str, str] = NO_VARIABLES,
        should_stop: ShouldStop = carry_on,
    ) -> Outcome:
        """Run one probe, start to end.

        Args:
            spec: What the probe is told; its folder is created.
            environment: Variables that libraries read when they are loaded.
            should_stop: Called several times a second; what it raises ends the probe.
        """
        home = self._home(environment)
        try:
            home.settle(should_stop)
        except (ModelFileError, LaunchError) as error:
            return Outcome(failure=Failure(status=Status.ERROR, message=str(error)), probe_s=0.0)
        spec = replace(
            spec,
            requested_s=time.monotonic(),
            default_threads=spec.default_threads or home.threads(spec),
        )
        kills = oom_kills()
        end = self._launch(home, spec, should_stop)
        probe_s = time.monotonic() - spec.requested_s
        result = _result(spec, end, out_of_memory=oom_kills() > kills)
        if isinstance(result, Failure):
            return Outcome(failure=result, probe_s=probe_s)
        return Outcome(measurement=result, probe_s=probe_s)

    def close(self) -> None:
        """End every process; nothing of the launcher stays."""
        for home in self._homes.values():
            home.close()
        shutil.rmtree(self._plan.folder, ignore_errors=True)

    @property
    def _first(self) -> Home:
        return next(iter(self._homes.values()), None) or self._home(NO_VARIABLES)

    def _home(self, environment: Mapping[str, str]) -> Home:
        """The home for these variables; all but the first work silently."""
        key = frozenset(environment.items())
        if key not in self._homes:
            say = _say_nothing if self._homes else self._say
            self._homes[key] = Home(self._plan, environment, say)
        return self._homes[key]

    def _launch(self, home: Home, spec: ProbeSpec, should_stop: ShouldStop) -> End:
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).unlink(missing_ok=True)
        write_atomically(folder / "spec.json", encode(spec))
        memory = HostWatch(spec)
        try:
            job = home.start(spec)
        except LaunchError as error:
            return End(trouble=str(error))
        try:
            return _watch(job, spec, memory, should_stop)
        except BaseException:
            job.end()
            raise


def _say_nothing(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a probe's process ended: by itself, or why it had to be ended."""

    code: int | None = None
    lingered: bool = False
    """It had written its result."""
    late: bool = False
    trouble: str = ""
    excess: Excess | None = None
    """The limit on memory that it had passed."""


def _watch(job: Job, spec: ProbeSpec, memory: HostWatch, should_stop: ShouldStop) -> End:
    """Wait for the end of a probe, and bring it about where it does not come by itself."""
    result = Path(spec.folder, RESULT)
    deadline_s = spec.requested_s + spec.timeout_s
    written = False
    while True:
        try:
            code = job.wait(TICK_S)
            excess = None if written else memory.excess(job)
        except (EOFError, LaunchError) as error:
            job.end()
            return End(trouble=LOST if isinstance(error, EOFError) else str(error))
        if code is not None:
            return End(code=code)
        should_stop()
        if excess is not None:
            job.end()
            return End(excess=excess)
        if not written and result.exists():
            written, deadline_s = True, time.monotonic() + LINGER_S
        if time.monotonic() > deadline_s:
            job.end()
            return End(lingered=written, late=not written)


def _result(spec: ProbeSpec, end: End, *, out_of_memory: bool) -> Measurement | Failure:
    """What the probe wrote, if it wrote anything; else what its end tells."""
    folder = Path(spec.folder)
    written = _written(folder / RESULT) if end.excess is None else None
    if isinstance(written, Measurement):
        return replace(written, notes=(*written.notes, LINGERED)) if end.lingered else written
    failure = _with_collective(written or _failure(spec, end), folder / LOG)
    # A worker that the kernel kills makes the user's code raise: the reason is memory all the same.
    if out_of_memory and failure.status in (Status.ERROR, Status.CRASH):
        message = f"{OOM_KILLED} ({failure.message})"
        failure = replace(failure, status=Status.OUT_OF_MEMORY, message=message)
    return replace(failure, log_tail=failure.log_tail or tail(folder / LOG))


def _with_collective(failure: Failure, log: Path) -> Failure:
    """NCCL says only in its log that what failed was an allocation."""
    if failure.suspect is not Suspect.DEVICE_MEMORY:
        return failure
    warned = next((line for line in _lines(log) if _NCCL_OUT_OF_MEMORY.search(line)), None)
    if warned is None:
        return failure
    message = f"device: {warned.strip()[:LONGEST_LINE]}: {failure.message}"
    return replace(failure, status=Status.OUT_OF_MEMORY, message=message, suspect=None)


def _lines(log: Path) -> list[str]:
    """The log's last lines, far enough back to hold what came before a long traceback."""
    return tail(log, LOG_BYTES).splitlines()


def _written(path: Path) -> Measurement | Failure | None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    try:
        raw = decode(dict[str, Any], text)
    except (ValueError, TypeError) as error:
        return Failure(status=Status.ERROR, message=f"its result cannot be read: {error}")
    result: Measurement | Failure | None = raw.get("measurement") or raw.get("failure")
    return result


def _failure(spec: ProbeSpec, end: End) -> Failure:
    """What is known of a probe that left no result."""
    phase = _phase(Path(spec.folder))
    if end.excess is not None:
        return Failure(status=Status.OUT_OF_MEMORY, message=str(end.excess), phase=phase)
    if end.late:
        last = f"; last phase: {phase}" if phase else ""
        message = f"no result after {spec.timeout_s:g} s{last}"
        return Failure(status=Status.TIMEOUT, message=message, phase=phase)
    if _disk_is_full(Path(spec.folder)):
        message = f"the disk is full: no result could be written to {spec.folder}"
        return Failure(status=Status.ERROR, message=message, phase=phase)
    message = end.trouble or how_it_ended(end.code)
    if end.code == 0:
        message += " without a result"
    suspect, hint = _SIGNALS.get(end.code or 0, (None, ""))
    return Failure(status=Status.CRASH, message=f"{message}{hint}", phase=phase, suspect=suspect)


def _disk_is_full(folder: Path) -> bool:
    """Whether a probe that left no result could not write it."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    said = tail(folder / LOG)
    unwritten = "in write_atomically" in said and any(text in said for text in _NO_ROOM)
    return free < ROOM_BYTES or unwritten


def _phase(folder: Path) -> str:
    try:
        return (folder / "phase").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended in this process's memory cgroup."""
    for path in _oom_counters():
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _oom_counters() -> Iterator[Path]:
    """Where the kernel may count: cgroup version 2, version 1, and for the whole machine."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield root / group[1:] / "memory.events"
            elif "memory" in controllers.split(","):
                yield root / "memory" / group[1:] / "memory.oom_control"
    # A container often sees its own group as the root.
    yield root / "memory.events"
    yield root / "memory" / "memory.oom_control"
    yield Path("/proc/vmstat")
