"""An exception in a probe, as a value: which kind, and what to tell the user."""

from __future__ import annotations

import re
import traceback

import torch

from autotune.errors import ModelFileError
from autotune.probe.sources import NoBatchesError
from autotune.types import Failure, ModelRef, Status

_DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_HOST_MEMORY = ("can't allocate memory", "Cannot allocate memory", "cannot allocate memory")
_SHARED_MEMORY = ("unable to allocate shared memory", "No space left on device", "bus error")
_WORKER_GONE = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (is killed by signal|exited)"
)
_LONGEST = 400


def failure_of(error: BaseException, phase: str, ref: ModelRef) -> Failure:
    """What the row says of the exception; the whole traceback is in the probe's log."""
    text = str(error)
    status, prefix = _judged(error, text)
    message = f"{prefix}{_told(error, text)}{_place(error, ref)}"
    return Failure(status=status, message=message[:_LONGEST], phase=phase)


def _judged(error: BaseException, text: str) -> tuple[Status, str]:
    if isinstance(error, NoBatchesError):
        return Status.INVALID, ""
    if isinstance(error, torch.OutOfMemoryError) or any(word in text for word in _DEVICE_MEMORY):
        return Status.OUT_OF_MEMORY, "device: "
    if isinstance(error, MemoryError) or any(word in text for word in _HOST_MEMORY):
        return Status.OUT_OF_MEMORY, "host: "
    if any(word in text for word in _SHARED_MEMORY):
        return (
            Status.ERROR,
            "shared memory (/dev/shm) is full; fewer workers or batches in flight: ",
        )
    if _WORKER_GONE.search(text) or _lost_a_worker(error):
        return Status.ERROR, "a loader worker died (too little host memory, or a fault in it): "
    if "stack expects each tensor to be equal size" in text:
        return Status.ERROR, "samples differ in shape; define a padding collate(samples): "
    return Status.ERROR, ""


def _lost_a_worker(error: BaseException) -> bool:
    """Whether a batch was to be fetched from a worker that is not there any more."""
    frames = traceback.extract_tb(error.__traceback__)
    fetching = any(frame.filename.endswith("resource_sharer.py") for frame in frames)
    return fetching and isinstance(error, OSError | EOFError)


def _told(error: BaseException, text: str) -> str:
    """Class and text in one line; for a worker's exception the original one."""
    if isinstance(error, NoBatchesError | ModelFileError):
        return " ".join(text.split())
    if "Original Traceback" in text:
        return text.strip().splitlines()[-1]
    first = text.strip().splitlines()[0] if text.strip() else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _place(error: BaseException, ref: ModelRef) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == ref.path
    ]
    return f" ({ref.name}.py:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
