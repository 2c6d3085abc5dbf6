"""Fork a process per job; report its end once nothing of it is left. Knows nothing of torch."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from autotune.channel import Channel, Message, wait_readable

JobFunction = Callable[[Message, int | None], None]

GONE_S = 5.0
"""How long the end of a job waits for killed processes to vanish."""
SAFETY_S = 2.0
"""How often a forker looks after its jobs although no signal came."""

MOST_KILLABLE = 1000
OOM_SCORES = {"template": 500}
"""Whom the kernel ends when memory runs out: probes first, then the template, never the driver."""

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Job:
    """One forked process, the leader of its own group."""

    id: int
    pid: int
    code: int | None = None
    deadline_s: float = 0.0


class Forker:
    """Serves a launcher: forks what it asks for, and ends what it wants ended.

    Args:
        channel: To the launcher.
        functions: What the jobs do, by their names.
        complete: What to do when asked to import the rest; an event tells that it is done.
    """

    def __init__(
        self,
        channel: Channel,
        functions: Mapping[str, JobFunction],
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._functions = functions
        self._complete = complete
        self._running: dict[int, Job] = {}
        self._dead: set[int] = set()
        self._helpers: set[int] = set()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    def serve(self) -> None:
        """Obey until the other end is closed; then end everything below this process."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # What libraries and the user's builders have started stays: it belongs to no job.
        self._helpers = children_of(os.getpid(), processes())
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with suppress(EOFError):
            while True:
                self._turn()
        end_descendants()

    def _turn(self) -> None:
        while (command := self._channel.receive()) is not None:
            self._obey(command)
        self._reap()
        self._report()
        wait_readable([self._channel.fileno(), self._wake_reader], self._pause_s())
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 1024)

    def _pause_s(self) -> float | None:
        if any(job.code is not None for job in self._running.values()):
            return 0.01
        return SAFETY_S if self._running else None

    def _obey(self, command: Message) -> None:
        if "complete" in command:
            self._complete()
            self._channel.send({"event": "complete"})
        elif "kill" not in command:
            self._start(command)
        else:
            self._end(command["kill"])

    def _end(self, number: int) -> None:
        for job in self._running.values():
            if job.id == number and job.code is None:
                end_group(job.pid)

    def _start(self, command: Message) -> None:
        descriptor = self._channel.take_descriptor() if command["descriptor"] else None
        parent = os.getpid()
        flush()
        try:
            # Where forking cannot work, this process itself becomes the job.
            pid = 0 if command.get("alone") else os.fork()
        except OSError as error:
            self._channel.send({"id": command["id"], "refused": str(error)})
        else:
            if pid == 0:
                self._become(command, descriptor, os.getppid() if command.get("alone") else parent)
            self._running[pid] = Job(id=command["id"], pid=pid)
            self._channel.send({"id": command["id"], "pid": pid})
        if descriptor is not None:
            os.close(descriptor)

    def _become(self, command: Message, descriptor: int | None, parent: int) -> NoReturn:
        code = 1
        try:
            if not command.get("alone"):
                self._leave()
            settle_in(parent, OOM_SCORES.get(command["job"], MOST_KILLABLE))
            write_output_to(command["log"])
            self._functions[command["job"]](command, descriptor)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - whatever the user's code raised, end here
            traceback.print_exc()
        end_process(code)

    def _leave(self) -> None:
        """Forget that this process was a forker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _reap(self) -> None:
        for pid, code in ended_children():
            if job := self._running.get(pid):
                job.code = code
                job.deadline_s = time.monotonic() + GONE_S
            self._helpers.discard(pid)
            self._dead.add(pid)

    def _report(self) -> None:
        """Report the jobs that ended and of which nothing is left."""
        for job in [job for job in self._running.values() if job.code is not None]:
            if self._end_remains(job) and time.monotonic() < job.deadline_s:
                continue
            remove_shared_memory(self._dead)
            self._dead.clear()
            del self._running[job.pid]
            self._channel.send({"id": job.id, "exit": job.code})

    def _end_remains(self, job: Job) -> bool:
        """Kill what an ended job has left behind; whether there was anything."""
        known = processes()
        group = {pid for pid, process in known.items() if process.group == job.pid}
        # Every job adopts its own orphans while it lives, so a new child here was this one's.
        strays = children_of(os.getpid(), known) - self._helpers - self._running.keys()
        remains = with_descendants(group | strays, known)
        kill(remains)
        return bool(remains)


def settle_in(parent: int, oom_score: int = MOST_KILLABLE) -> None:
    """Become a job: own session, default signals, gone with the parent and before the driver."""
    with suppress(PermissionError):  # a spawned process leads its session already
        os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_process(1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(oom_score))
    faulthandler.enable(2)


def write_output_to(log: str) -> None:
    """Send what this process prints, from C too, to a file."""
    flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def flush() -> None:
    """Write out what Python and C hold back: it would be lost, or come once per fork."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    LIBC.fflush(None)


def end_process(code: int) -> NoReturn:
    """End now: no exit handler or destructor of the user's may hang or undo the result."""
    flush()
    os._exit(code)


def prctl(option: int, value: int) -> None:
    """Change how the kernel treats this process, where the system can."""
    with suppress(AttributeError):
        LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


class Process(NamedTuple):
    """Where a process belongs."""

    parent: int
    group: int


def processes() -> dict[int, Process]:
    """All processes, those too that ended and were not waited for."""
    known = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The command's name, in brackets, may hold blanks and brackets.
            _, _, rest = (folder / "stat").read_bytes().rpartition(b")")
            _, parent, group = rest.split()[:3]
            known[int(folder.name)] = Process(int(parent), int(group))
    return known


def children_of(parent: int, known: Mapping[int, Process]) -> set[int]:
    """The processes right below this one."""
    return {pid for pid, process in known.items() if process.parent == parent}


def with_descendants(roots: set[int], known: Mapping[int, Process]) -> set[int]:
    """The processes and all below them."""
    found: set[int] = set()
    new = roots
    while new:
        found |= new
        new = {pid for pid, process in known.items() if process.parent in new} - found
    return found


def kill(pids: Iterable[int]) -> None:
    """Kill what is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_group(leader: int) -> None:
    """Kill a job's group, or the leader alone if it has made none yet."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    kill([leader])


def ended_children() -> list[tuple[int, int]]:
    """Pid and exit code (negative: the signal) of each child that ended."""
    ended = []
    with suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((status[0], os.waitstatus_to_exitcode(status[1])))
    return ended


def end_descendants() -> None:
    """Kill everything below this process, and wait until it is gone."""
    deadline_s = time.monotonic() + GONE_S
    me, dead = os.getpid(), set()
    while below := with_descendants({me}, processes()) - {me}:
        if time.monotonic() > deadline_s:
            break
        kill(below)
        dead |= {pid for pid, _ in ended_children()}
        time.sleep(0.005)
    remove_shared_memory(dead)


def remove_shared_memory(pids: set[int]) -> None:
    """Remove the tensors that killed processes have left in shared memory."""
    for path in Path("/dev/shm").glob("torch_*_*"):
        owner = path.name.split("_")[1]
        if owner.isdigit() and int(owner) in pids:
            path.unlink(missing_ok=True)
