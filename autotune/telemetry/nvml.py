"""NVML: the bindings, what an answer is, and which of its devices are those that PyTorch sees.

The only file that knows the bindings' package. Nothing here raises but `LostError`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import ArgumentError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.telemetry.tenants import Census, Process

if TYPE_CHECKING:
    from autotune.telemetry.fields import Way

T = TypeVar("T")


class LostError(Exception):
    """A GPU does not answer any more, and will not before it is reset."""


@dataclass(kw_only=True)
class Gpu:
    """One device as PyTorch numbers it, or a MIG slice of one."""

    index: int
    handle: Any
    whole: Any
    """The GPU that a MIG slice is part of; else the same."""
    uuid: str = ""
    name: str = ""
    mig: bool = False
    instance: int | None = None
    """Which MIG slice."""
    gpm: bool = False
    """Whether it counts what its SMs do (Hopper and newer)."""
    total_bytes: int | None = None
    idle_bytes: int | None = None
    """In use while nobody uses it."""
    lost: str = ""
    """What it said last, if it does not answer any more."""
    census: Census = field(default_factory=Census)
    ways: dict[str, Way] = field(default_factory=dict)
    """How each field is read here; those that cannot be read are missing."""

    def unexplained(self, used_bytes: int | None) -> int | None:
        """What is in use although nobody is known who would use it; 0 if that is little."""
        if used_bytes is None or self.idle_bytes is None:
            return None
        more = used_bytes - self.idle_bytes
        return more if more > (self.total_bytes or 0) / 100 else 0


# --- asking ---------------------------------------------------------------------------------------


def nvml() -> Any:
    """The bindings."""
    import pynvml

    return pynvml


def answer(read: Callable[[], T]) -> T | None:
    """What NVML says; None where this driver, GPU or version of the bindings does not say it.

    Raises:
        LostError: If the GPU is lost.
    """
    library = nvml()
    try:
        return read()
    except library.NVMLError as error:
        if error.value in (library.NVML_ERROR_GPU_IS_LOST, library.NVML_ERROR_RESET_REQUIRED):
            raise LostError(_sentence(error)) from None
    except (AttributeError, TypeError, ValueError, LookupError, OSError, ArgumentError):
        pass  # other bindings of the same name, older or newer
    return None


def _sentence(error: Exception) -> str:
    return str(error).strip().rstrip(".")


def start() -> str:
    """Open NVML; why that cannot be done, "" if it is."""
    try:
        with warnings.catch_warnings():
            # Another package of the same name warns about itself: of no use to who tunes a job.
            warnings.simplefilter("ignore")
            library = nvml()
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return f"NVML cannot be opened: {_sentence(error)}"
    except (AttributeError, OSError) as error:
        return f"NVML cannot be opened: {error}"
    return ""


def end() -> None:
    """Let go of NVML."""
    with suppress(LostError):
        answer(lambda: nvml().nvmlShutdown())


def find(facts: Mapping[str, Any], index: int, *, alone: bool) -> Gpu | None:
    """The device that PyTorch numbers so."""
    uuid, pci = text(_entry(facts, "uuids", index)), _entry(facts, "pci_ids", index)
    for look in (_by_uuid(uuid), _by_pci(text(pci)), _by_search(uuid), _by_number(alone=alone)):
        try:
            handle = answer(look)
        except LostError as error:
            return Gpu(index=index, handle=None, whole=None, uuid=uuid, lost=str(error))
        if handle is not None:
            return gpu_of(index, handle)
    return None


def _entry(facts: Mapping[str, Any], name: str, index: int) -> Any:
    values = facts.get(name) or ()
    return values[index] if index < len(values) else None


def text(value: Any) -> str:
    """A text of NVML's or ours: bytes from old bindings, filled up with zeros perhaps."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return str(value or "").rstrip("\0").strip()


PREFIXES = ("GPU-", "MIG-")
LEAST_SHARED = 4
"""Digits of a UUID by which a GPU may be known."""


def _by_uuid(uuid: str) -> Callable[[], Any]:
    def look() -> Any:
        library = nvml()
        names = [uuid] if uuid.startswith(PREFIXES) else [prefix + uuid for prefix in PREFIXES]
        for name in names if uuid else ():
            with suppress(library.NVMLError_NotFound, library.NVMLError_InvalidArgument):
                return library.nvmlDeviceGetHandleByUUID(name)
        return None

    return look


def _by_pci(pci: str) -> Callable[[], Any]:
    return lambda: nvml().nvmlDeviceGetHandleByPciBusId(pci) if pci else None


def _by_search(uuid: str) -> Callable[[], Any]:
    """The one GPU whose UUID begins like this one: some lose what follows a byte of zero."""

    def look() -> Any:
        wanted = _bare(uuid).split("\0")[0].rstrip("-")
        handles = all_handles() if len(wanted) >= LEAST_SHARED else []
        fits = [h for h in handles if _bare(_uuid_of(h)).startswith(wanted)]
        return fits[0] if len(fits) == 1 else None

    return look


def _by_number(*, alone: bool) -> Callable[[], Any]:
    """Where there is one GPU on both sides, they are the same (Jetson tells neither name)."""

    def look() -> Any:
        handles = all_handles() if alone else []
        return handles[0] if len(handles) == 1 else None

    return look


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def all_handles() -> list[Any]:
    """Every GPU that NVML sees, in its own order."""
    library = nvml()
    found = [
        answer(partial(library.nvmlDeviceGetHandleByIndex, place))
        for place in range(answer(library.nvmlDeviceGetCount) or 0)
    ]
    return [handle for handle in found if handle is not None]


def _uuid_of(handle: Any) -> str:
    return text(answer(lambda: nvml().nvmlDeviceGetUUID(handle)))


def gpu_of(index: int, handle: Any) -> Gpu:
    """What NVML tells once and for all."""
    library = nvml()
    gpu = Gpu(index=index, handle=handle, whole=handle)
    try:
        gpu.uuid = _uuid_of(handle)
        gpu.name = text(answer(lambda: library.nvmlDeviceGetName(handle)))
        is_slice = answer(lambda: library.nvmlDeviceIsMigDeviceHandle(handle).value)
        if is_slice:
            whole = answer(lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
            gpu.whole = whole or handle
            gpu.instance = answer(lambda: library.nvmlDeviceGetGpuInstanceId(handle))
        mode = answer(lambda: library.nvmlDeviceGetMigMode(gpu.whole)[0])
        gpu.mig = bool(is_slice or mode)
        support = answer(lambda: library.nvmlGpmQueryDeviceSupport(gpu.whole).isSupportedDevice)
        gpu.gpm = bool(support) and gpu.mig == (gpu.instance is not None)
    except LostError as error:
        gpu.lost = str(error)
    return gpu


def used_bytes(gpu: Gpu) -> int | None:
    """Memory in use on it, by whomever.

    Version 1 of the call counts what the driver keeps for itself as used, so version 2 comes first.
    """
    library = nvml()
    try:
        told = library.nvmlDeviceGetMemoryInfo(gpu.handle, version=library.nvmlMemory_v2)
    except (library.NVMLError, TypeError, AttributeError):
        told = library.nvmlDeviceGetMemoryInfo(gpu.handle)
    if not told.total:
        return None
    gpu.total_bytes = int(told.total)
    return int(told.used)


def processes(gpu: Gpu) -> list[Process]:
    """The driver's list of who computes on it, in the newest version that it has."""
    library = nvml()
    try:
        told = library.nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle)
    except (library.NVMLError, AttributeError):
        told = library.nvmlDeviceGetComputeRunningProcesses_v2(gpu.handle)
    return [Process(pid=one.pid, memory_bytes=one.usedGpuMemory) for one in told]
