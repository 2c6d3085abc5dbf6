"""The launcher's ends of its processes: zygote, template, and the jobs that they fork."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from autotune.channel import Channel, Message
from autotune.errors import LaunchError, ModelFileError
from autotune.types import ModelFacts, ModelRef, decode

GONE_S = 8.0
"""How long to wait for the end of what was killed: longer than the forker itself waits."""

TICK_S = 0.1
"""How often a long wait looks whether it should stop."""

TAIL = 2000

ShouldStop = Callable[[], None]
"""Raises if the run is to end."""


def carry_on() -> None:
    """Nothing asks to stop."""


class EndedError(Exception):
    """A process that was to report something has ended instead; the text says how."""

    def __init__(self, code: int | None) -> None:
        super().__init__(how_it_ended(code))


class Forkserver:
    """One process that forks jobs on request."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._replies: dict[int, Message] = {}
        self._events: deque[Message] = deque()

    @property
    def alive(self) -> bool:
        """Whether somebody is at the other end."""
        try:
            while self._pump(0.0):
                pass
        except EOFError:
            return False
        return True

    def start(self, job: str, descriptor: int | None = None, **arguments: Any) -> ForkedJob:
        """Ask for a job. If nobody is there, waiting for it will tell."""
        number = next(self._numbers)
        message = {"id": number, "job": job, "descriptor": descriptor is not None, **arguments}
        with suppress(EOFError):
            self._channel.send(message, descriptor)
        return ForkedJob(self, number)

    def kill(self, number: int) -> None:
        """Have a job killed; waiting for it tells when it is gone."""
        self._channel.send({"kill": number})

    def event(self, timeout_s: float, should_stop: ShouldStop = carry_on) -> Message | None:
        """The next thing that the process itself tells, or None when time is up."""
        deadline_s = time.monotonic() + timeout_s
        while not self._events:
            should_stop()
            left_s = deadline_s - time.monotonic()
            if not self._pump(min(left_s, TICK_S)) and left_s <= 0:
                return None
        return self._events.popleft()

    def reply(self, number: int, key: str, timeout_s: float = 0.0) -> Any:
        """What it told about a job, or None when time is up."""
        deadline_s = time.monotonic() + timeout_s
        while key not in (known := self._replies.get(number, {})) and "refused" not in known:
            if not self._pump(deadline_s - time.monotonic()):
                return None
        if "refused" in known:
            raise LaunchError(f"no process could be forked: {known['refused']}")
        return known[key]

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _pump(self, timeout_s: float) -> bool:
        """Sort in one message."""
        message = self._channel.receive(timeout_s)
        if message is None:
            return False
        if "event" in message:
            self._events.append(message)
        else:
            self._replies.setdefault(message["id"], {}).update(message)
        return True


class ForkedJob:
    """A process forked on request, and everything that it starts."""

    def __init__(self, server: Forkserver, number: int) -> None:
        self._server = server
        self._number = number

    @property
    def pid(self) -> int | None:
        """Its process id, once that is known."""
        pid: int | None = self._server.reply(self._number, "pid")
        return pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code (negative: a signal) once nothing of it is left; None when time is up.

        Raises:
            EOFError: If the process that forked it has ended.
            LaunchError: If it could not be forked.
        """
        code: int | None = self._server.reply(self._number, "exit", timeout_s)
        return code

    def end(self) -> None:
        """Kill it with everything below it, and wait until that is gone."""
        try:
            self._server.kill(self._number)
            self.wait(GONE_S)
        except LaunchError:
            pass
        except EOFError:
            self._end_without_server()

    def _end_without_server(self) -> None:
        # The kernel has killed it together with its parent; its own workers are left.
        with suppress(EOFError):
            if pid := self._server.reply(self._number, "pid"):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


class SpawnedJob:
    """A process that was started anew, where forking cannot work."""

    def __init__(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self._process = start_python(arguments, log, variables)

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code (negative: a signal), or None when time is up."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._end_group()
        return code

    def end(self) -> None:
        """Kill it with everything below it, and wait until that is gone."""
        below = []
        with suppress(psutil.Error):
            below = psutil.Process(self._process.pid).children(recursive=True)
        self._end_group()
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(below, GONE_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)

    def _end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


Job = ForkedJob | SpawnedJob


class Zygote:
    """A Python process that has imported torch and forks from there."""

    def __init__(self, folder: Path, variables: Mapping[str, str], model: ModelRef) -> None:
        self.folder = folder
        self.log = folder / "zygote.log"
        folder.mkdir(parents=True)
        channel, far = Channel.with_far_end()
        with far:
            arguments = ["autotune.probe.zygote", str(far.fileno())]
            self._process = start_python(arguments, self.log, variables, far.fileno())
        self.server = Forkserver(channel)
        self._channel = channel
        self._model = model
        self._serves = False
        self._complete = False

    def prepare(self, preload: Sequence[str], timeout_s: float, should_stop: ShouldStop) -> Message:
        """Let it import; return its report.

        Raises:
            LaunchError: If it dies or takes too long.
        """
        try:
            self._channel.send(
                {
                    "path": import_path(),
                    "pythonpath": os.environ.get("PYTHONPATH"),
                    "argv": [self._model.path],
                    "preload": list(preload),
                    "folder": str(self.folder),
                }
            )
            ready = self.server.event(timeout_s, should_stop)
        except EOFError:
            raise LaunchError(
                f"the process that imports torch {how_it_ended(self._process.wait(GONE_S))}\n"
                f"{tail(self.log)}"
            ) from None
        if ready is None:
            raise LaunchError(f"importing torch took longer than {timeout_s:g} s")
        self._serves = True
        return ready

    def complete(self, timeout_s: float) -> None:
        """Let it import, once, what its jobs need; if it cannot, the first job will tell."""
        if self._complete:
            return
        self._complete = True
        with suppress(EOFError):
            self._channel.send({"complete": True})
            self.server.event(timeout_s)

    def close(self) -> None:
        """End it with everything below it."""
        self._channel.close()
        if self._serves:  # while it imports, it would not notice
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_S)
                return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(GONE_S)


class Template:
    """A process that has loaded the model file, and then builds what probes inherit."""

    def __init__(self, zygote: Zygote, model: ModelRef, seed: int, *, alone: bool = False) -> None:
        self.log = zygote.folder / "template.log"
        channel, far = Channel.with_far_end()
        with far:
            self._job = zygote.server.start(
                "template",
                far.fileno(),
                model=asdict(model),
                seed=seed,
                log=str(self.log),
                alone=alone,
            )
        self.server = Forkserver(channel)

    def facts(self, timeout_s: float, should_stop: ShouldStop) -> ModelFacts | None:
        """What the model file tells; None when time is up.

        Raises:
            ModelFileError: If it cannot be used.
            EndedError: If importing it ended the process.
        """
        event = self._expect(timeout_s, should_stop)
        return None if event is None else decode(ModelFacts, event["facts"])

    def built(self, timeout_s: float, should_stop: ShouldStop) -> Message | None:
        """The report that model and dataset are built; None when time is up.

        Raises:
            ModelFileError: If a builder raised.
            EndedError: If building ended the process.
        """
        return self._expect(timeout_s, should_stop)

    def close(self) -> None:
        """End it with everything below it."""
        self._job.end()
        self.forget()

    def forget(self) -> None:
        """Leave its end to the zygote."""
        self.server.close()

    def _expect(self, timeout_s: float, should_stop: ShouldStop) -> Message | None:
        try:
            event = self.server.event(timeout_s, should_stop)
        except EOFError:
            raise EndedError(self._code()) from None
        if event is not None and event["event"] == "model_error":
            raise ModelFileError(event["message"])
        return event

    def _code(self) -> int | None:
        with suppress(EOFError):
            return self._job.wait(GONE_S)
        return None


def canary(
    server: Forkserver, out: Path, timeout_s: float, *, alone: bool = False
) -> Message | None:
    """The device facts that a forked process wrote, or None if it could not compute.

    Args:
        server: Who forks it.
        out: The file for its facts.
        timeout_s: How long it may take.
        alone: Whether the process itself is to do it, instead of a forked one.
    """
    out.unlink(missing_ok=True)
    job = server.start("canary", out=str(out), log=str(out.with_suffix(".log")), alone=alone)
    try:
        if job.wait(timeout_s) is None and not alone:
            job.end()
    except (EOFError, LaunchError):
        pass
    if not out.exists():
        return None
    facts: Message = json.loads(out.read_text())
    return facts


def start_python(
    arguments: Sequence[str], log: Path, variables: Mapping[str, str], descriptor: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a module of ours, with the import path of this process, in a session of its own.

    Raises:
        LaunchError: If the system refuses.
    """
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(import_path())}
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                # -P: a file in the current folder must not stand in for a module of ours.
                [sys.executable, "-P", "-m", *arguments],
                env=environment,
                pass_fds=[] if descriptor is None else [descriptor],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise LaunchError(f"no process could be started: {error}") from error


def import_path() -> list[str]:
    """This process's import path, independent of its current folder."""
    return [os.path.abspath(entry) for entry in sys.path]


def how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"died by {known.get(-code, 'signal')} ({-code})"


def tail(log: Path, length: int = TAIL) -> str:
    """The end of a log, "" if there is none."""
    try:
        with log.open("rb") as file:  # a job may print gigabytes
            file.seek(max(0, log.stat().st_size - length))
            return file.read(length).decode(errors="replace").strip()
    except OSError:
        return ""
