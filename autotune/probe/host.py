"""What the operating system says of the probe's processes. Each reading degrades alone to None."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

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


def cpu_s() -> tuple[float, float]:
    """CPU seconds of this process, and of all its descendants together."""
    mine = os.times()
    # Workers that have ended already count, too: without persistence an epoch's end is theirs.
    workers = mine.children_user + mine.children_system
    for child in _descendants():
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        workers += times.user + times.system
    return mine.user + mine.system, workers


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


def shm_used_bytes() -> int:
    """Used bytes of /dev/shm; unlinked files, where batches in flight live, included."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def _descendants() -> Iterator[psutil.Process]:
    try:
        yield from psutil.Process().children(recursive=True)
    except psutil.Error:
        return


def _status_bytes(field: str) -> int | None:
    try:
        lines = (PROC / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
