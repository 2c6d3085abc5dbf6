"""What this process may use of the machine: CPUs, memory, devices."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from autotune.shm import shm_free
from autotune.types import Machine

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""The files of a group's limit and use, in either version."""


def machine_of(device_facts: Mapping[str, Any], index: int = 0) -> Machine:
    """What may be used here, with the devices as a child process found them.

    Args:
        device_facts: What it reported.
        index: Which of the devices is used.
    """
    cpus, limit = cpus_granted()
    major, _, minor = str(_entry(device_facts, "capabilities", index) or "0.0").partition(".")
    kind = str(device_facts.get("type") or "cpu")
    return Machine(
        cpus=cpus,
        cpu_limited_by=limit,
        memory_bytes=memory_granted(),
        shm_bytes=shm_free(),
        device_memory_bytes=int(_entry(device_facts, "total_memory", index) or 0),
        device="cpu" if kind == "cpu" else f"{kind}:{index}",
        devices=tuple(str(name) for name in device_facts.get("names") or ()),
        capability=(int(major), int(minor or 0)),
        driver_major=str(device_facts.get("driver") or "").partition(".")[0],
        torch=version("torch"),
        python=platform.python_version(),
        default_threads=int(device_facts.get("default_threads") or cpus),
    )


def cpus_granted() -> tuple[int, str]:
    """CPUs that this process can keep busy, and what limits them.

    The smaller of the affinity mask and the cgroup's quota, over all ancestor groups: PyTorch
    and DataLoader know only the mask.
    """
    everything = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everything
    quota = min((math.ceil(value) for value in _quotas()), default=everything)
    granted = max(1, min(everything, mask, quota))
    if granted == everything:
        return granted, "the machine's CPUs"
    return granted, "CPU affinity" if mask <= quota else "the cgroup's CPU quota"


def memory_granted() -> int:
    """Bytes of memory that this process may use: the machine's, or the cgroup's limit."""
    limits = [int(psutil.virtual_memory().total)]
    for folder in _groups("memory"):
        for limit, _ in CGROUP_MEMORY:
            text = _read(folder / limit)
            if text.isdigit():
                limits.append(int(text))
    return min(limits)


def memory_free() -> int:
    """Bytes of memory that could be taken now: the machine's, or what the cgroup's limit leaves."""
    free = [int(psutil.virtual_memory().available)]
    for folder in _groups("memory"):
        for limit, usage in CGROUP_MEMORY:
            most, used = _read(folder / limit), _read(folder / usage)
            if most.isdigit() and used.isdigit():
                free.append(max(0, int(most) - int(used) + _reclaimable(folder)))
    return min(free)


def _reclaimable(group: Path) -> int:
    """Cached pages of files, which the kernel gives up first."""
    found = re.search(
        r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE
    )
    return int(found[1]) if found else 0


def _quotas() -> Iterator[float]:
    for folder in _groups("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0:
            yield int(quota) / int(period)


def _groups(controller: str) -> Iterator[Path]:
    """This process's control group and all above it, in either version's layout."""
    for line in _read(MEMBERSHIP).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controllers
        else:
            continue
        folder = root / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if root in (group, *group.parents))


def _entry(device_facts: Mapping[str, Any], name: str, index: int) -> Any:
    values = device_facts.get(name) or ()
    return values[index] if index < len(values) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
