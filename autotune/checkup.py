"""What this machine offers, as facts. Looking changes nothing; what cannot be read is None."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.telemetry import Survey

REQUIRED = {
    "torch": "torch",
    "optuna": "optuna",
    "pynvml": "nvidia-ml-py",
    "hydra": "hydra-core",
    "numpy": "numpy",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "psutil": "psutil",
    "rich": "rich",
    "yaml": "pyyaml",
}
"""Module: the package it comes in."""

COMPILERS = ("g++", "clang++", "c++")
"""What torch.compile may build with, unless the variable CXX names another."""

MODEL = """
from torch import nn

def build_model():
    return nn.Linear(4, 4)

def build_dataset():
    return [0]
"""
"""The job whose processes show whether probes can start here."""

GVISOR = ("4.4.0", "2016")
"""The release, and a part of the version, that gVisor gives as the kernel's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the processes that look around may take."""

    torch_s: float = 90.0
    fork_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What a process that imported torch told."""

    told: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    """Why it told nothing, or not all."""

    @property
    def imported(self) -> bool:
        """Whether torch can be imported at all."""
        return "version" in self.told

    @property
    def device(self) -> Mapping[str, Any]:
        """The devices; empty where they did not answer."""
        known: Mapping[str, Any] = self.told.get("device") or {}
        return known

    @property
    def kind(self) -> str:
        """cpu, cuda, ...; "" where it is not known."""
        return str(self.device.get("type") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """How probes start here."""

    ready_s: float | None = None
    fallback: str = ""
    trouble: str = ""
    """Why none can start, or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """All that the checks look at."""

    python: tuple[int, int, int]
    packages: Mapping[str, str | None]
    """Package: its version, or None where it is missing."""
    torch: TorchFacts
    start: StartFacts
    survey: Survey | None
    """None where a package is missing that would ask."""
    device_files: tuple[str, ...]
    visible_devices: str | None
    compiler: str | None
    headers: bool
    cpus: int | None
    cpus_limit: str
    machine_cpus: int
    load: float | None
    memory_bytes: int | None
    available_bytes: int | None
    machine_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: tuple[int, int] | None
    """The limit in force and the one that it can be raised to; -1 is none."""
    folder: str
    disk_free_bytes: int | None
    writable: bool
    sandbox: tuple[str, ...]


def look(limits: Limits | None = None, folder: Path | None = None) -> Surroundings:
    """Look around; takes as long as importing torch a few times.

    Args:
        limits: How long that may take.
        folder: Where results are to be kept; default: the current folder.
    """
    limits = limits or Limits()
    folder = folder or Path.cwd()
    packages = {name: _version(module, name) for module, name in REQUIRED.items()}
    load = _load()  # before our own processes are a part of it
    complete = packages["psutil"] is not None
    torch, start = TorchFacts(), StartFacts()
    if complete and packages["torch"]:
        torch = torch_facts(limits.torch_s)
    if torch.device:
        start = start_facts(limits.fork_s)
    cpus, cpus_limit, memory = _granted() if complete else (None, "", None)
    shm, shm_free = _space("/dev/shm")
    return Surroundings(
        python=sys.version_info[:3],
        packages=packages,
        torch=torch,
        start=start,
        survey=_survey(),
        device_files=tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        compiler=compiler(),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        cpus=cpus,
        cpus_limit=cpus_limit,
        machine_cpus=os.cpu_count() or 1,
        load=load,
        memory_bytes=memory,
        available_bytes=_memory("MemAvailable:"),
        machine_bytes=_memory("MemTotal:"),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        open_files=_open_files(),
        folder=str(folder),
        disk_free_bytes=_space(str(folder))[1],
        writable=os.access(folder, os.W_OK),
        sandbox=tuple(_sandbox()),
    )


def torch_facts(limit_s: float) -> TorchFacts:
    """What torch is and sees: asked of a process of its own, which may die or hang."""
    try:
        return _told_by_torch(limit_s)
    except OSError as error:  # no temporary folder, say
        return TorchFacts(trouble=str(error))


def _told_by_torch(limit_s: float) -> TorchFacts:
    from autotune.errors import LaunchError
    from autotune.forkserver import SpawnedJob, how_it_ended, tail

    with tempfile.TemporaryDirectory(prefix="autotune-") as name:
        out, log = Path(name, "facts.json"), Path(name, "log.txt")
        try:
            job = SpawnedJob(["autotune.probe.checkup", str(out)], log, {})
        except LaunchError as error:
            return TorchFacts(trouble=str(error))
        code = None
        try:
            code = job.wait(limit_s)
        finally:
            if code is None:
                job.end()
        told = json.loads(out.read_text()) if out.exists() else {}
        if code == 0:
            return TorchFacts(told=told)
        last = tail(log).rpartition("\n")[2]
        how = f"no answer within {limit_s:g} s" if code is None else last or how_it_ended(code)
        return TorchFacts(told=told, trouble=how)


def start_facts(limit_s: float) -> StartFacts:
    """Start the processes that a run's probes come from, and let them compute."""
    from autotune.errors import AutotuneError
    from autotune.home import Deadlines
    from autotune.launcher import Launcher
    from autotune.types import ModelRef

    deadlines = Deadlines(start_s=limit_s, import_s=limit_s, build_s=limit_s, canary_s=limit_s)
    with tempfile.TemporaryDirectory(prefix="autotune-") as name:
        model = Path(name, "doctor.py")
        model.write_text(MODEL)
        started = time.monotonic()
        with Launcher(
            ModelRef(path=str(model)),
            seed=0,
            preload=(),
            say=lambda text: None,
            deadlines=deadlines,
        ) as launcher:
            try:
                launcher.settle()
            except AutotuneError as error:
                return StartFacts(trouble=str(error).partition("\n")[0])
            ready_s = time.monotonic() - started
            return StartFacts(ready_s=ready_s, fallback=launcher.fallback)


def compiler() -> str | None:
    """The C++ compiler that torch.compile would call; None where there is none."""
    asked = os.environ.get("CXX", "").split()[:1]
    return next((found for name in asked or COMPILERS if (found := shutil.which(name))), None)


def _survey() -> Survey | None:
    try:
        from autotune.telemetry import survey
    except ImportError:
        return None
    return survey()


def _version(module: str, package: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _granted() -> tuple[int, str, int]:
    from autotune.machine import cpus_granted, memory_granted

    return (*cpus_granted(), memory_granted())


def _load() -> float | None:
    with suppress(OSError):
        return os.getloadavg()[0]
    return None


def _memory(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _space(folder: str) -> tuple[int | None, int | None]:
    """Size and free bytes of the file system that a folder lies in."""
    try:
        stat = os.statvfs(folder)
    except (AttributeError, OSError):
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(-1 if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]


def _sandbox() -> list[str]:
    """What stands between this process and the machine, as far as it is cheap to tell."""
    release, version = platform.release(), platform.version()
    signs = {
        "WSL": "microsoft" in release.lower(),
        "gVisor": release == GVISOR[0] and GVISOR[1] in version,
        "Kubernetes": "KUBERNETES_SERVICE_HOST" in os.environ,
        "a container": any(Path(sign).exists() for sign in ("/.dockerenv", "/run/.containerenv")),
        "Slurm": "SLURM_JOB_ID" in os.environ,
    }
    return [name for name, seen in signs.items() if seen]
