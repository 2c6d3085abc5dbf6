"""What the operating system says of the probe's processes. Each reading degrades alone to None."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PROC = Path("/proc/self")
WALL_SLACK = 512 * 1024**2
"""What a process may map beyond its limit, as not all of it is ever touched,"""
STACK = 16 * 1024**2
"""and for each CPU, as there may be threads."""
WALL_SHARE = 0.25
"""And this share of the limit: the launcher watches what is really held."""


def resident_bytes() -> int | None:
    """Resident memory of this process that no file backs."""
    anonymous = _status_bytes("RssAnon:")
    shared = _status_bytes("RssShmem:")
    return None if anonymous is None else anonymous + (shared or 0)


def reset_peak() -> bool:
    """Start the peak of resident memory anew; `ru_maxrss` would survive the fork."""
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """The highest resident memory since `reset_peak`, without the pages of files."""
    peak, files = _status_bytes("VmHWM:"), _status_bytes("RssFile:")
    return None if peak is None else peak - (files or 0)


def wall_in(process_limit: int | None, host_limit: int | None, inherited: int) -> None:
    """Let fail, as an error, what would grow past a limit faster than anybody could look.

    RLIMIT_DATA counts private memory that can be written to. Not RLIMIT_AS: shared libraries and
    files count there, too, and no accelerator starts under it.

    Args:
        process_limit: Bytes that this process may hold beyond what it inherited.
        host_limit: Bytes that all processes of the probe may hold.
        inherited: What it held before model and dataset were built.
    """
    limits = [limit for limit in (process_limit, host_limit) if limit is not None]
    mapped, held = _status_bytes("VmData:"), resident_bytes()
    if not limits or mapped is None or held is None:
        return
    limit = min(limits)
    room = max(0, limit - max(0, held - inherited))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    slack = WALL_SLACK + STACK * (os.cpu_count() or 1) + int(WALL_SHARE * limit)
    wall = mapped + room + slack
    if hard != resource.RLIM_INFINITY:
        wall = min(wall, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wall, hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a probe's processes, and the CPUs that they may run on, have done so far."""

    cpu_s: float
    """Of this process."""
    ended_cpu_s: float
    """Of its descendants that have ended: without persistence an epoch's end is the workers'."""
    worker_cpu_s: Mapping[int, float]
    """Of each living descendant, by pid."""
    storage_bytes: int | None
    """Read from storage, by all of them."""
    asked_bytes: int | None
    """Asked of the file system (or a pipe), by all of them."""
    busy_s: float | None
    """CPU time that anybody used, and what the hypervisor took."""
    idle_s: float | None

    @property
    def workers_cpu_s(self) -> float:
        """Of all descendants together."""
        return self.ended_cpu_s + sum(self.worker_cpu_s.values())


def usage() -> Usage:
    """What is used so far; the difference of two is what a window used."""
    mine = os.times()
    below = list(_descendants())
    workers = {}
    for child in below:
        with suppress(psutil.Error):
            times = child.cpu_times()
            workers[child.pid] = times.user + times.system
    pids = [os.getpid(), *workers]
    busy_s, idle_s = _machine_s()
    return Usage(
        cpu_s=mine.user + mine.system,
        ended_cpu_s=mine.children_user + mine.children_system,
        worker_cpu_s=workers,
        storage_bytes=_total(_io_bytes(pid, "read_bytes:") for pid in pids),
        asked_bytes=_total(_io_bytes(pid, "rchar:") for pid in pids),
        busy_s=busy_s,
        idle_s=idle_s,
    )


def spent(before: Usage, after: Usage) -> dict[str, Any]:
    """The difference, as the fields of a measurement."""
    mine = after.cpu_s - before.cpu_s
    workers = max(0.0, after.workers_cpu_s - before.workers_cpu_s)
    busy_s = _difference(before.busy_s, after.busy_s)
    return {
        "cpu_s": mine + workers,
        "worker_cpu_s": workers,
        "each_worker_cpu_s": tuple(
            round(after.worker_cpu_s[pid] - known, 3)
            for pid, known in before.worker_cpu_s.items()
            if pid in after.worker_cpu_s
        ),
        "storage_bytes": _difference(before.storage_bytes, after.storage_bytes),
        "asked_bytes": _difference(before.asked_bytes, after.asked_bytes),
        "others_cpu_s": None if busy_s is None else max(0.0, busy_s - mine - workers),
        "idle_cpu_s": _difference(before.idle_s, after.idle_s),
    }


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(after - before, 0)


def _total(values: Iterable[int | None]) -> int | None:
    """The sum; None where one of them cannot be read."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _io_bytes(pid: int, field: str) -> int | None:
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    return _number_after(text, field)


def _machine_s() -> tuple[float | None, float | None]:
    """Busy and idle seconds of the CPUs that this process may run on."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.split(" ", 1)[0] in ours]
        ticks = os.sysconf("SC_CLK_TCK")
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
        counts = [[int(word) for word in row[1:9]] for row in rows]
        idle = sum(row[3] + row[4] for row in counts)
        return (sum(map(sum, counts)) - idle) / ticks, idle / ticks
    except (OSError, AttributeError, ValueError, IndexError):
        return None, None


def proportional_bytes() -> int | None:
    """PSS of this process and its descendants: read once, it costs about 10 ms a gigabyte."""
    total = 0
    for pid in (os.getpid(), *(child.pid for child in _descendants())):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(
            (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")),
            0,
        )
    return total or None


def _descendants() -> Iterator[psutil.Process]:
    try:
        yield from psutil.Process().children(recursive=True)
    except psutil.Error:
        return


def _status_bytes(field: str) -> int | None:
    try:
        text = (PROC / "status").read_text()
    except OSError:
        return None
    known = _number_after(text, field)
    return None if known is None else known * 1024


def _number_after(text: str, field: str) -> int | None:
    lines = (line for line in text.splitlines() if line.startswith(field))
    return next((int(line.split()[1]) for line in lines), None)
