"""What this machine offers, what will limit tuning, and what to do about it.

A new check is a new row of `CHECKS`: a group, a name, and a function of what was found.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any

from autotune.checkup import Limits, Surroundings, look
from autotune.precision import AMPERE
from autotune.types import GIB

if TYPE_CHECKING:
    from autotune.telemetry import SurveyedGpu


FEW_SHM_BYTES = GIB
"""Containers get 64 MiB: some batches of images fill that."""
FEW_DISK_BYTES = GIB
FDS_APART = 256
FDS_PER_CPU = 32
"""A worker a CPU, 8 batches ahead of each, 4 tensors in a batch: a descriptor for each one."""
BUSY = 0.25
"""Share of the CPUs that others may keep busy before measuring suffers."""


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    LIMITS = "limits"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is there, and what to do about it if it limits tuning or makes it impossible."""

    value: str
    verdict: Verdict = Verdict.OK
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing to look at."""

    group: str
    name: str
    judge: Callable[[Surroundings], Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    group: str
    name: str
    value: str
    verdict: Verdict
    advice: str


def examine(limits: Limits | None = None) -> tuple[Check, ...]:
    """Look around and judge what is there."""
    return judged(look(limits))


def judged(found: Surroundings) -> tuple[Check, ...]:
    """Every row of the table, in order; a check that fails is a finding, too."""
    return tuple(_checked(row, found) for row in CHECKS)


def _checked(row: Row, found: Surroundings) -> Check:
    try:
        finding = row.judge(found)
    except Exception as error:  # noqa: BLE001 - one odd machine must not hide the other rows
        finding = _limits(f"could not be read: {type(error).__name__}: {error}", "")
    return Check(
        group=row.group,
        name=row.name,
        value=finding.value,
        verdict=finding.verdict,
        advice=finding.advice,
    )


def broken(checks: Sequence[Check]) -> tuple[str, ...]:
    """Why nothing can be tuned here; empty where it can."""
    return tuple(f"{c.name}: {c.value}" for c in checks if c.verdict is Verdict.BROKEN)


def text(checks: Sequence[Check], width: int = 80) -> str:
    """The checks as text, grouped, and their sum in the last line."""
    lines: list[str] = []
    for group, members in groupby(checks, key=lambda check: check.group):
        lines += ["", group] if lines else [group]
        for check in members:
            lines += _lines(check, width)
    return "\n".join([*lines, "", *textwrap.wrap(_sum(checks), width)])


def _lines(check: Check, width: int) -> Iterator[str]:
    margin = 27
    head = f"  {_MARKS[check.verdict]:<8}{check.name:<{margin - 10}}"
    for number, part in enumerate(check.value.splitlines() or [""]):
        first = head if number == 0 else " " * margin
        yield from textwrap.wrap(part, width, initial_indent=first, subsequent_indent=" " * margin)
    if check.advice:
        arrow = f"{' ' * margin}-> "
        hanging = " " * len(arrow)
        # Commands and options may be pasted: they are not broken at their hyphens.
        yield from textwrap.wrap(
            check.advice,
            width,
            initial_indent=arrow,
            subsequent_indent=hanging,
            break_on_hyphens=False,
        )


_MARKS = {Verdict.OK: "ok", Verdict.LIMITS: "limits", Verdict.BROKEN: "BROKEN"}


def _sum(checks: Sequence[Check]) -> str:
    if broken(checks):
        return "Nothing can be tuned here before what is BROKEN is mended."
    limits = [check.name for check in checks if check.verdict is Verdict.LIMITS]
    if not limits:
        return "This machine can tune; nothing here limits it."
    return f"This machine can tune; look at: {', '.join(limits)}."


# --- what the rows judge --------------------------------------------------------------------------


def _limits(value: str, advice: str) -> Finding:
    return Finding(value=value, verdict=Verdict.LIMITS, advice=advice)


def _breaks(value: str, advice: str) -> Finding:
    return Finding(value=value, verdict=Verdict.BROKEN, advice=advice)


def _python(found: Surroundings) -> Finding:
    version = ".".join(map(str, found.python))
    if found.python < (3, 11):
        return _breaks(version, "autotune needs Python 3.11 or newer")
    if found.python >= (3, 14):
        return _limits(
            f"{version}: loader workers start by forkserver",
            "datasets must be picklable; where yours is not, give the DataLoader "
            "multiprocessing_context='fork'",
        )
    return Finding(value=version)


def _packages(found: Surroundings) -> Finding:
    missing = [name for name, version in found.packages.items() if version is None]
    if missing:
        return _breaks(f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    others = [f"{name} {version}" for name, version in found.packages.items() if name != "torch"]
    return Finding(value=", ".join(others))


def _torch(found: Surroundings) -> Finding:
    torch = found.torch
    if not torch.imported:
        reason = torch.trouble or "was not imported: a package is missing"
        return _breaks(
            f"cannot be imported: {reason}" if torch.trouble else reason,
            "python -c 'import torch' must work in this environment: install torch anew, "
            "from https://pytorch.org/get-started",
        )
    build = _build(torch.told)
    value = f"{torch.told['version']}, {build}"
    if found.device_files and build == "built for the CPU only":
        return _limits(
            f"{value}, though there is an NVIDIA GPU",
            "install a CUDA build of torch: https://pytorch.org/get-started",
        )
    return Finding(value=value)


def _build(told: Mapping[str, Any]) -> str:
    for name, label in (("cuda", "CUDA"), ("hip", "ROCm")):
        if told.get(name):
            return f"built for {label} {told[name]}"
    return "built for the CPU only"


def _start(found: Surroundings) -> Finding:
    start = found.start
    if not found.torch.device:
        return Finding(value="not tried: torch does not compute here")
    if start.trouble:
        return _breaks(
            f"cannot start: {start.trouble}",
            "a process must be able to start and compute here: look at the limits of "
            "processes (ulimit -u) and memory, and that the temporary folder is writable",
        )
    if start.fallback:
        return _limits(start.fallback, "each probe takes seconds to start: give a larger --budget")
    return Finding(value=f"forked; the first is ready after {start.ready_s or 0:.1f} s")


def _compile(found: Surroundings) -> Finding:
    missing = []
    if found.compiler is None:
        missing.append("no C++ compiler (g++)")
    if not found.headers:
        missing.append("no Python headers (Python.h)")
    if found.torch.kind == "cuda" and not found.torch.told.get("triton"):
        missing.append("no Triton")
    if not missing:
        triton = ", Triton" if found.torch.told.get("triton") else ""
        return Finding(value=f"{found.compiler}{triton}")
    return _limits(
        ", ".join(missing),
        "rows of torch.compile will be not_applicable, all others are measured; to try it: "
        "apt install g++ python3-dev, or conda install gxx"
        + ("; pip install triton" if "no Triton" in missing else ""),
    )


def _devices(found: Surroundings) -> Finding:
    torch, device = found.torch, found.torch.device
    if torch.imported and not device:
        return _breaks(
            f"torch cannot compute: {torch.trouble or 'no reason given'}",
            "the driver or the device does not answer: look at nvidia-smi, restart; with "
            "CUDA_VISIBLE_DEVICES=-1 the CPU is tuned",
        )
    if not device:
        return Finding(value="not known: torch tells nothing")
    if torch.kind == "cpu":
        return _without_accelerator(found)
    lines = [_device_line(device, index) for index in range(int(device.get("count") or 0))]
    if any("bf16 emulated" in line for line in lines):
        return _limits(
            "\n".join(lines), "bf16 will be not_applicable and tf32 not offered: fp16 is tried"
        )
    return Finding(value="\n".join(lines))


def _without_accelerator(found: Surroundings) -> Finding:
    hidden = found.visible_devices is not None
    if not found.device_files or hidden or not found.torch.told.get("cuda"):
        return Finding(value="no accelerator: training runs on the CPU")
    return _limits(
        "there is an NVIDIA GPU, but torch cannot use it: training runs on the CPU",
        "look at nvidia-smi: the driver may be missing in this container, or too old for "
        f"CUDA {found.torch.told['cuda']}",
    )


def _device_line(device: Mapping[str, Any], index: int) -> str:
    def told(name: str) -> Any:
        values = device.get(name) or []
        return values[index] if index < len(values) else None

    parts = [f"{device['type']}:{index} {told('names') or 'of unknown name'}"]
    if uuid := told("uuids"):
        parts.append(uuid if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    if memory := told("total_memory"):
        parts.append(_size(memory))
    if capability := told("capabilities"):
        parts.append(f"capability {capability}")
        if device["type"] == "cuda":
            parts.append("bf16 native" if _native(capability) else "bf16 emulated")
    return ", ".join(parts)


def _native(capability: str) -> bool:
    major, _, minor = capability.partition(".")
    return (int(major), int(minor or 0)) >= AMPERE


def _visible(found: Surroundings) -> Finding:
    value, files = found.visible_devices, len(found.device_files)
    if value is None:
        return Finding(value=f"not set{f': all {files}' if files else ''}")
    seen = int(found.torch.device.get("count") or 0)
    told = f"{value!r}, of {files} device(s); torch sees {seen}"
    if files and not seen:
        return _limits(told, "it hides every GPU: unset CUDA_VISIBLE_DEVICES to train on one")
    return Finding(value=told)


def _nvml(found: Surroundings) -> Finding:
    survey = found.survey
    if survey is None or survey.problem:
        why = "a package is missing" if survey is None else survey.problem
        if found.torch.kind != "cuda":
            return Finding(value=f"not used: {why}")
        return _limits(
            why,
            "utilisation, power and energy stay empty: mount libnvidia-ml.so.1 into the "
            "container (NVIDIA_DRIVER_CAPABILITIES=utility,compute)",
        )
    value = f"driver {survey.driver or 'unknown'}, NVML {survey.nvml or 'unknown'}"
    missing = _of_each(survey.gpus, lambda gpu: gpu.lost or ", ".join(gpu.unread))
    if missing:
        return _limits(f"{value}; not readable: {missing}", "those columns stay empty")
    return Finding(value=value)


def _gpm(found: Surroundings) -> Finding:
    gpus = _gpus(found)
    if not gpus:
        return Finding(value="no NVIDIA GPU to ask")
    without = _of_each(gpus, lambda gpu: "" if gpu.gpm else "no")
    if without:
        return _limits(
            without, "sm_active_pct stays empty (Hopper and newer have it); timers decide instead"
        )
    return Finding(value="yes")


def _mig(found: Surroundings) -> Finding:
    gpus = _gpus(found)
    if not gpus:
        return Finding(value="no NVIDIA GPU to ask")
    on = _of_each(gpus, lambda gpu: "on" if gpu.mig else "")
    if on:
        return _limits(
            on, "a slice has no utilisation and no energy of its own: those columns stay empty"
        )
    return Finding(value="off")


def _tenants(found: Surroundings) -> Finding:
    gpus = _gpus(found)
    if not gpus:
        return Finding(value="no NVIDIA GPU to ask")
    others = _of_each(gpus, lambda gpu: gpu.others)
    if others:
        return _limits(
            others,
            "rows will be labelled contended: end them, or choose a free GPU by "
            "CUDA_VISIBLE_DEVICES",
        )
    used = ", ".join(_size(gpu.used_bytes) for gpu in gpus if gpu.used_bytes is not None)
    return Finding(value=f"none{f'; in use: {used}' if used else ''}")


def _power(found: Surroundings) -> Finding:
    gpus = _gpus(found)
    if not gpus:
        return Finding(value="no NVIDIA GPU to ask")
    value = _of_each(
        gpus,
        lambda gpu: (
            "limit not readable"
            if gpu.power_limit_w is None
            else f"at most {gpu.power_limit_w:.0f} W"
        ),
    )
    lazy = any(gpu.persistent is False for gpu in gpus)
    if lazy:
        return _limits(
            f"{value}; persistence mode off",
            "the driver may reload between processes: nvidia-smi -pm 1 (as root)",
        )
    return Finding(value=value)


def _gpus(found: Surroundings) -> Sequence[SurveyedGpu]:
    return found.survey.gpus if found.survey is not None else ()


def _of_each(gpus: Sequence[SurveyedGpu], tell: Callable[[SurveyedGpu], str]) -> str:
    """What each GPU has to tell, named only where there are several."""
    told = [(gpu.name, tell(gpu)) for gpu in gpus]
    if len(told) == 1:
        return told[0][1]
    return "; ".join(f"GPU {number}: {what}" for number, (_, what) in enumerate(told) if what)


def _cpus(found: Surroundings) -> Finding:
    if found.cpus is None:
        return Finding(value=f"{found.machine_cpus}, how many of them granted is not known")
    if found.cpus >= found.machine_cpus:
        return Finding(value=f"{found.cpus}, all granted")
    return _limits(
        f"{found.cpus} of {found.machine_cpus}, limited by {found.cpus_limit}",
        "workers and threads are tried up to what is granted: tune with what training will have "
        "(docker --cpus, taskset, srun --cpus-per-task)",
    )


def _load(found: Surroundings) -> Finding:
    if found.load is None:
        return Finding(value="not readable")
    value = f"{found.load:.1f} on {found.machine_cpus} CPUs in the last minute"
    if found.load > BUSY * found.machine_cpus:
        return _limits(value, "other processes compute here: intervals get wide; end or await them")
    return Finding(value=value)


def _memory(found: Surroundings) -> Finding:
    if found.memory_bytes is None or found.machine_bytes is None:
        return Finding(value="not readable")
    free = f", {_size(found.available_bytes)} free" if found.available_bytes is not None else ""
    if found.memory_bytes < found.machine_bytes:
        return _limits(
            f"{_size(found.memory_bytes)} of {_size(found.machine_bytes)} by the cgroup's "
            f"limit{free}",
            "a config that needs more is killed, and becomes a row: docker --memory, "
            "srun --mem raise it",
        )
    return Finding(value=f"{_size(found.memory_bytes)}{free}")


def _shm(found: Surroundings) -> Finding:
    if found.shm_bytes is None or found.shm_free_bytes is None:
        return _limits("none", "loader workers need it: mount a tmpfs there")
    value = f"{_size(found.shm_bytes)}, {_size(found.shm_free_bytes)} free"
    if found.shm_free_bytes < FEW_SHM_BYTES:
        return _limits(
            value,
            "batches on their way from workers lie there: docker run --ipc=host or "
            "--shm-size=8g (Kubernetes: an emptyDir with medium: Memory)",
        )
    return Finding(value=value)


def _open_files(found: Surroundings) -> Finding:
    if found.open_files is None:
        return Finding(value="not limited here")
    soft, hard = found.open_files
    wanted = FDS_APART + FDS_PER_CPU * (found.cpus or found.machine_cpus)
    value = "no limit" if soft < 0 else f"at most {soft}"
    if 0 <= soft < wanted:
        ceiling = "" if hard < 0 else f" (here up to {hard})"
        return _limits(
            value,
            f"with many workers 'Too many open files' ends a probe: ulimit -n {wanted}{ceiling}, "
            "or in the model file set_sharing_strategy('file_system') of torch.multiprocessing",
        )
    return Finding(value=value)


def _disk(found: Surroundings) -> Finding:
    free = found.disk_free_bytes
    value = f"{_size(free)} free in {found.folder}" if free is not None else found.folder
    if not found.writable:
        return _limits(f"{found.folder} is not writable", "name another folder by --output DIR")
    if free is not None and free < FEW_DISK_BYTES:
        return _limits(value, "logs and tables go there: name another folder by --output DIR")
    return Finding(value=value)


def _sandbox(found: Surroundings) -> Finding:
    if not found.sandbox:
        return Finding(value="none seen")
    value = ", ".join(found.sandbox)
    notes = [note for name, note in SANDBOX_NOTES.items() if name in found.sandbox]
    return _limits(value, "; ".join(notes)) if notes else Finding(value=value)


SANDBOX_NOTES = {
    "WSL": "NVML tells less under WSL, and pinned memory is scarce: some columns stay empty",
    "gVisor": "parts of /proc are missing in gVisor: host_memory_gb may stay empty",
}


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


CHECKS = (
    Row(group="Python and packages", name="python", judge=_python),
    Row(group="Python and packages", name="packages", judge=_packages),
    Row(group="Python and packages", name="torch", judge=_torch),
    Row(group="Python and packages", name="probes", judge=_start),
    Row(group="Python and packages", name="torch.compile", judge=_compile),
    Row(group="Devices", name="devices", judge=_devices),
    Row(group="Devices", name="visible devices", judge=_visible),
    Row(group="Devices", name="NVML", judge=_nvml),
    Row(group="Devices", name="GPM", judge=_gpm),
    Row(group="Devices", name="MIG", judge=_mig),
    Row(group="Devices", name="other users", judge=_tenants),
    Row(group="Devices", name="power", judge=_power),
    Row(group="Machine", name="CPUs", judge=_cpus),
    Row(group="Machine", name="load", judge=_load),
    Row(group="Machine", name="memory", judge=_memory),
    Row(group="Machine", name="/dev/shm", judge=_shm),
    Row(group="Machine", name="open files", judge=_open_files),
    Row(group="Machine", name="disk", judge=_disk),
    Row(group="Machine", name="sandbox", judge=_sandbox),
)
