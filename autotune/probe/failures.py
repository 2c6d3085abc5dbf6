"""An exception in a probe, as a value: which kind, and what to tell the user.

Only what is certain is decided here. What near the memory limit could be anything is marked as a
suspicion: the rows of other probes decide (`autotune/evidence.py`).
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from autotune.errors import ModelFileError
from autotune.probe.sources import NoBatchesError
from autotune.types import Failure, ModelRef, Status, Suspect

_LONGEST = 400

Fits = Callable[[BaseException, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A form that failures take: how it is known, and what the row says of it."""

    fits: Fits
    status: Status = Status.ERROR
    told: str = ""
    """What goes in front of the original text; {limit} is the most files that may be open."""
    suspect: Suspect | None = None


def failure_of(error: BaseException, phase: str, ref: ModelRef) -> Failure:
    """What the row says of the exception; the whole traceback is in the probe's log."""
    text = str(error)
    kind = next(kind for kind in KINDS if kind.fits(error, text))
    phase = _inner_phase(error) or phase
    where = f" in {phase}" if kind.status is Status.OUT_OF_MEMORY and phase in _INNER else ""
    told = kind.told.format(limit=_most_open_files())
    noted = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    place = f"{where}{_place(error, ref)}{noted}"
    message = f"{told}{_in_pieces(text)}{_told(error, text)}"
    return Failure(
        status=kind.status,
        message=f"{message[: _LONGEST - len(place)]}{place}",
        phase=phase,
        suspect=kind.suspect,
    )


# --- how a kind is known ---


def _of(*classes: type[BaseException]) -> Fits:
    return lambda error, _: isinstance(error, classes)


def _says(*patterns: str) -> Fits:
    """Whether one of the patterns is in the text."""
    any_of = re.compile("|".join(patterns))
    return lambda _, text: any_of.search(text) is not None


def _errno(*numbers: int) -> Fits:
    return lambda error, _: isinstance(error, OSError) and error.errno in numbers


def _either(*fits: Fits) -> Fits:
    return lambda error, text: any(one(error, text) for one in fits)


def _both(*fits: Fits) -> Fits:
    return lambda error, text: all(one(error, text) for one in fits)


def _in_file(ending: str) -> Fits:
    """Whether the exception came through a file of PyTorch's."""
    return lambda error, _: any(
        frame.filename.endswith(ending) for frame in traceback.extract_tb(error.__traceback__)
    )


_DEVICE_OUT_OF_MEMORY = _says(
    "CUDA out of memory",
    "CUDA error: out of memory",
    r"\w+_STATUS_ALLOC_FAILED",
    r"CUFFT_ALLOC_FAILED",
    r"Cuda failure.*out of memory",
)

KINDS = (
    Kind(fits=_of(NoBatchesError), status=Status.INVALID),
    Kind(
        fits=_both(
            _either(_says("in pin memory thread"), _in_file("pin_memory.py")),
            _either(_DEVICE_OUT_OF_MEMORY, _says("[cC]annot allocate memory")),
        ),
        status=Status.OUT_OF_MEMORY,
        told="host: too little page-locked memory; loader.pin_memory=false needs none: ",
        suspect=Suspect.PINNING,
    ),
    Kind(
        fits=_either(_of(torch.OutOfMemoryError), _both(_of(RuntimeError), _DEVICE_OUT_OF_MEMORY)),
        status=Status.OUT_OF_MEMORY,
        told="device: ",
    ),
    Kind(
        fits=_either(_of(MemoryError), _says("can't allocate memory", "[cC]annot allocate memory")),
        status=Status.OUT_OF_MEMORY,
        told="host: ",
    ),
    Kind(
        fits=_either(
            _errno(errno.EMFILE, errno.ENFILE),
            _says("Too many open files", "received 0 items of ancdata"),
        ),
        told="too many open files (ulimit -n is {limit}): raise it, use fewer workers, or "
        "torch.multiprocessing.set_sharing_strategy('file_system'): ",
    ),
    Kind(
        fits=_says("unable to allocate shared memory", r"</torch_", "[bB]us error"),
        told="shared memory (/dev/shm) is full; fewer workers or batches in flight: ",
    ),
    Kind(
        fits=_either(
            _errno(errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _says("No space left on device")
        ),
        told="the disk is full, or the limit on a file's size reached: ",
    ),
    Kind(
        fits=_either(
            _says(r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (is killed by signal|exited)"),
            _both(_in_file("resource_sharer.py"), _of(OSError, EOFError)),
        ),
        told="a loader worker died (too little host memory, or a fault in it; fewer workers or "
        "a smaller prefetch_factor need less): ",
        suspect=Suspect.HOST_MEMORY,
    ),
    Kind(fits=_says("CUDNN_STATUS_NOT_SUPPORTED"), suspect=Suspect.SIZE),
    Kind(
        fits=_says(
            r"(CUDNN|CUBLAS|CUSOLVER|CUSPARSE)_STATUS_\w+",
            r"CUFFT_\w+",
            "illegal memory access",
            "unspecified launch failure",
            "NCCL error",
            "unhandled (cuda|system) error",
            "(?i:out of memory)",
        ),
        suspect=Suspect.DEVICE_MEMORY,
    ),
    Kind(
        fits=_says("stack expects each tensor to be equal size"),
        told="samples differ in shape; define a padding collate(samples): ",
    ),
    Kind(
        fits=_says("unsafe to autocast"),
        told="this precision refuses the loss; its with_logits form runs: ",
    ),
    Kind(
        fits=_says("Expected more than 1 value per channel"),
        told="BatchNorm cannot train on a single sample; two or more a micro-batch, and "
        "drop_last where one is left over: ",
    ),
    Kind(
        fits=_says("Cannot re-initialize CUDA in forked"),
        told="CUDA was used before the probe was forked; keep it out of import, build_dataset "
        "and the workers: ",
    ),
    Kind(
        fits=_says("Torch not compiled with CUDA enabled", "Found no NVIDIA driver"),
        told="the model file asks for CUDA, which this machine has not; take the device "
        "from the batch or the model: ",
    ),
    Kind(
        fits=_says("[cC]an.?t pickle", "cannot pickle"),
        told="workers that are not forked must pickle dataset and collate; open files at the "
        "first sample, or train with multiprocessing_context='fork': ",
    ),
    Kind(fits=lambda *_: True),
)
"""From the most certain down: the first that fits is told."""


# --- what is told ---


def _told(error: BaseException, text: str) -> str:
    """Class and text in one line; for a worker's exception the original one."""
    if isinstance(error, NoBatchesError | ModelFileError):
        return " ".join(text.split())
    if "Original Traceback" in text:
        return _after_the_frames(text)
    first = text.strip().splitlines()[0] if text.strip() else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _after_the_frames(text: str) -> str:
    """The first line below a traceback's frames: an exception's text may have more of them."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    below = lines[frames[-1] + 1 :] if frames else []
    return (below or lines[-1:])[0]


def _most_open_files() -> str:
    with suppress(ImportError):
        import resource

        return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return "unknown"


_PIECES = re.compile(r"([\d.]+ [KMGT]?i?B) is reserved by PyTorch but unallocated")
_TRIED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _in_pieces(text: str) -> str:
    """What to do where enough memory is reserved for what was asked, only not in one piece."""
    tried, pieces = _TRIED.search(text), _PIECES.search(text)
    if tried is None or pieces is None or _size_bytes(pieces[1]) < _size_bytes(tried[1]):
        return ""
    return (
        f"{pieces[1]} is reserved but in pieces; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help: "
    )


def _size_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS.get(unit, 1)


_INNER = {
    "optimizer.step": ("torch/optim/", ("step", "wrapper")),
    "backward": ("torch/_tensor.py", ("backward",)),
}
"""Phases within a step: the file of PyTorch's, and its functions, that show them."""


def _inner_phase(error: BaseException) -> str:
    """The part of the step in which it was raised, where that shows."""
    frames = traceback.extract_tb(error.__traceback__)
    for phase, (file, functions) in _INNER.items():
        if any(file in frame.filename and frame.name in functions for frame in frames):
            return phase
    return ""


def _place(error: BaseException, ref: ModelRef) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == ref.path
    ]
    return f" ({ref.name}.py:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
