"""Everything that NVML tells of this machine, for a person who wonders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from autotune.telemetry.fields import FIELDS, prepare
from autotune.telemetry.nvml import (
    Gpu,
    LostError,
    all_handles,
    answer,
    end,
    gpu_of,
    nvml,
    processes,
    start,
    text,
    used_bytes,
)
from autotune.telemetry.tenants import INVISIBLE_BYTES, is_descendant, told

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedGpu:
    """One GPU, or MIG slice; None or "" where it does not tell."""

    index: int
    """NVML's number, which need not be PyTorch's."""
    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    mig: bool
    gpm: bool
    """Whether SM activity is counted."""
    persistent: bool | None
    """Whether the driver stays loaded while nobody uses it."""
    power_limit_w: float | None
    others: str
    """Who uses it, in words."""
    readable: Mapping[str, str]
    """Title and unit of each field that can be read."""
    unread: tuple[str, ...]
    lost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What NVML tells of this machine, or the problem with it."""

    problem: str = ""
    driver: str = ""
    nvml: str = ""
    gpus: tuple[SurveyedGpu, ...] = ()


def survey() -> Survey:
    """Ask for everything, of every GPU that NVML sees, whatever PyTorch may see. Never raises."""
    if problem := start():
        return Survey(problem=problem)
    library = nvml()
    try:
        return Survey(
            driver=text(answer(library.nvmlSystemGetDriverVersion)),
            nvml=text(answer(library.nvmlSystemGetNVMLVersion)),
            gpus=tuple(_surveyed(*numbered) for numbered in enumerate(all_handles())),
        )
    except LostError as error:
        return Survey(problem=str(error))
    finally:
        end()


def _surveyed(index: int, handle: Any) -> SurveyedGpu:
    library, gpu = nvml(), gpu_of(index, handle)
    prepare(gpu)
    used = _asked(partial(used_bytes, gpu))
    limit = _asked(partial(library.nvmlDeviceGetEnforcedPowerLimit, handle))
    persistent = _asked(partial(library.nvmlDeviceGetPersistenceMode, handle))
    return SurveyedGpu(
        index=index,
        uuid=gpu.uuid,
        name=gpu.name,
        used_bytes=used,
        memory_bytes=gpu.total_bytes,
        mig=gpu.mig,
        gpm=gpu.gpm,
        persistent=None if persistent is None else bool(persistent),
        power_limit_w=None if limit is None else limit / 1000,
        others=users_of(gpu).told,
        readable={row.title: row.unit for row in FIELDS if row.name in gpu.ways},
        unread=tuple(row.title for row in FIELDS if row.name not in gpu.ways),
        lost=gpu.lost,
    )


def _asked(read: Callable[[], T]) -> T | None:
    with suppress(LostError):
        return answer(read)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Who else uses a GPU."""

    told: str
    """In words; "" if nobody does."""
    certain: bool
    """Whether one of them is a process that can be seen."""


def users_of(gpu: Gpu) -> Users:
    """Who uses a GPU while no probe runs: as listed, else as the memory in use betrays."""
    if gpu.lost:
        return Users(told="", certain=True)
    listed = _asked(partial(processes, gpu)) or []
    used = _asked(partial(used_bytes, gpu))
    kinship = {one.pid: is_descendant(one.pid) for one in listed}
    others = [one for one in listed if not kinship[one.pid]]
    hidden = used if used is not None and used > INVISIBLE_BYTES and not listed else None
    return Users(told=told(others, hidden), certain=False in kinship.values())
