"""Whose processes are on a GPU: the run's own, or somebody else's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from autotune.types import GIB

INVISIBLE_BYTES = GIB
"""More than an idle driver keeps: a process that is not listed may hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One entry of the driver's list."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The driver's list, told apart."""

    own: tuple[Process, ...]
    others: tuple[Process, ...]


@dataclass
class Census:
    """Tells processes apart; remembers the run's own, which stay listed for a while.

    In a container the list may be empty, or hold numbers that mean nothing there: a number that
    appears with our probe and belongs to no process that can be seen is taken to be the probe's.
    """

    _ours: set[int] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    """Of ours, those that have been listed since the last probe began."""
    _strangers: set[int] = field(default_factory=set)

    def before(self, listed: Sequence[Process]) -> None:
        """While no probe runs: whoever is listed is somebody else, what is left of us apart."""
        self._strangers = {
            process.pid
            for process in listed
            if process.pid not in self._ours and is_descendant(process.pid) is not True
        }
        self._seen = set()

    def shares(self, listed: Sequence[Process]) -> Shares:
        """Whose the entries are."""
        new = [process.pid for process in listed if process.pid not in self._strangers]
        unknown = []
        for pid in new:
            if pid in self._ours:
                continue
            kin = is_descendant(pid)
            if kin:
                self._ours.add(pid)
            elif kin is None:
                unknown.append(pid)
        if unknown and not self._ours.intersection(new):
            self._ours.add(unknown[0])
        own = tuple(process for process in listed if process.pid in self._ours)
        self._seen.update(process.pid for process in own)
        others = tuple(process for process in listed if process.pid not in self._ours)
        return Shares(own=own, others=others)

    def is_other(self, pid: int) -> bool:
        """Whether it is certain that a process is somebody else's."""
        return pid in self._strangers or (pid not in self._ours and is_descendant(pid) is False)

    def are_gone(self, listed: Sequence[Process]) -> bool:
        """Whether the probe's processes were listed, and none is any more."""
        return bool(self._seen) and not any(process.pid in self._seen for process in listed)


def is_descendant(pid: int) -> bool | None:
    """Whether a process was started by this one, at any depth; None if it cannot be seen."""
    try:
        process: psutil.Process | None = psutil.Process(pid)
        while process is not None and process.pid > 1:
            if process.pid == os.getpid():
                return True
            process = process.parent()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return False
    return False


def total_bytes(processes: Sequence[Process]) -> int | None:
    """What they hold together; None where it is not told of one of them."""
    held = [process.memory_bytes for process in processes]
    known = [size for size in held if size is not None]
    return sum(known) if len(known) == len(held) else None


def told(others: Sequence[Process], unexplained_bytes: int | None) -> str:
    """What other processes hold, in words; "" if there are none."""
    if others:
        count = len(others)
        holds = "1 other process holds" if count == 1 else f"{count} other processes hold"
        held = total_bytes(others)
        return f"{holds} {'memory' if held is None else _gib(held)}"
    if unexplained_bytes:
        return f"another process may hold {_gib(unexplained_bytes)}"
    return ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
