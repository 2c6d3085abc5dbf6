"""What a running probe holds of the host's memory: cheap enough to be read ten times a second."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from autotune.shm import shm_used
from autotune.types import GIB, ProbeSpec

CLEARLY = 1.02
"""A reading is above a limit only from here on: it is cheap, not exact."""
PROC = Path("/proc")
_HELD = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that was passed, and the highest reading."""

    held_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"host: reached {self.held_bytes / GIB:.3g} GiB of the "
            f"{self.limit_bytes / GIB:.3g} GiB that --limit allows"
        )


class Led(Protocol):
    """A job, as far as it matters here."""

    @property
    def pid(self) -> int | None:
        """The process that leads it, once that is known."""


@dataclass
class HostWatch:
    """Compares what a probe's processes hold, beyond what they inherited, with its limits.

    A page that a fork shares is counted for each process that maps it, so what a process had when
    it was first seen is taken off, at most as much as its parent held. Batches on their way are in
    no process: shared memory in use tells.
    """

    spec: ProbeSpec
    shm_before: int = field(default_factory=lambda: shm_used())
    _inherited: dict[int, int] = field(default_factory=dict)

    def excess(self, job: Led) -> Excess | None:
        """The limit that the probe clearly passes now, if any."""
        limited = self.spec.memory_limit_bytes, self.spec.host_limit_bytes
        if limited == (None, None) or (pid := job.pid) is None:
            return None
        own = self._own_bytes(pid, self._parent_bytes(pid))
        everything = own + max(0, shm_used() - self.shm_before)
        everything += sum(self._own_bytes(below, held_bytes(pid)) for below in descendants(pid))
        for held, limit in zip((own, everything), limited, strict=True):
            if limit is not None and held > CLEARLY * limit:
                return Excess(held_bytes=held, limit_bytes=limit)
        return None

    def _own_bytes(self, pid: int, parent_bytes: int) -> int:
        held = held_bytes(pid)
        inherited = self._inherited.setdefault(pid, min(held, parent_bytes))
        return max(0, held - inherited)

    def _parent_bytes(self, pid: int) -> int:
        """What the process that forked it held; nothing for one that was started anew."""
        if pid in self._inherited:
            return self._inherited[pid]
        parent = parent_of(pid)
        return 0 if parent in (None, os.getpid()) else held_bytes(parent)


def held_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs; 0 once it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_bytes()
    except OSError:
        return 0
    return sum(int(kilobytes) * 1024 for kilobytes in _HELD.findall(text))


def parent_of(pid: int) -> int | None:
    """The parent's id."""
    with suppress(OSError, ValueError, IndexError):
        # The command's name, in brackets, may hold blanks and brackets.
        rest = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2]
        return int(rest.split()[1])
    return None


def descendants(pid: int) -> list[int]:
    """All processes below this one, by the kernel's own lists where it keeps them."""
    try:
        (PROC / str(pid) / "task" / str(pid) / "children").read_bytes()
    except OSError:
        return _listed_by_psutil(pid)
    found: list[int] = []
    new = [pid]
    while new:
        new = [child for parent in new for child in _children(parent)]
        found += new
    return found


def _children(pid: int) -> Iterable[int]:
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_bytes().split())


def _listed_by_psutil(pid: int) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
