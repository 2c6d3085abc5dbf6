"""What an exception in a probe becomes: a status, a text with the original in it, a suspicion."""

import errno
import os
import signal

import pytest
import torch
from torch import nn

from autotune import launcher
from autotune.launcher import End
from autotune.probe.failures import KINDS, failure_of
from autotune.probe.sources import NoBatchesError
from autotune.types import Failure, ModelRef, ProbeSpec, Sink, Source, Stage, Status, Suspect

REF = ModelRef(path="/nowhere/job.py")
OOM, ERROR = Status.OUT_OF_MEMORY, Status.ERROR
DEVICE, HOST, SIZE, PINNING = (
    Suspect.DEVICE_MEMORY,
    Suspect.HOST_MEMORY,
    Suspect.SIZE,
    Suspect.PINNING,
)

IN_A_WORKER = (
    "Caught {0} in {1}.\nOriginal Traceback (most recent call last):\n"
    '  File "/x/fetch.py", line 50, in fetch\n    data = f(possibly_batched_index)\n'
    "{0}: {2}\nCUDA kernel errors might be asynchronously reported at some other API call.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
IN_PIECES = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 15.77 GiB of which "
    "12.00 MiB is free. Of the allocated memory 9.10 GiB is allocated by PyTorch, and 5.51 GiB "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try"
)
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
SHM = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
BUS = (
    "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory."
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error, NCCL version 2.26.2"

TEXTS = [
    # class, text, status, suspect, what the row says
    (RuntimeError, CUBLAS, OOM, None, "device: RuntimeError: CUDA error: CUBLAS"),
    (torch.OutOfMemoryError, "no room", OOM, None, "device: OutOfMemoryError: no room"),
    (RuntimeError, "CUDA error: out of memory\nCUDA kernel errors", OOM, None, "device: "),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", OOM, None, "device: "),
    (RuntimeError, "cuFFT error: CUFFT_ALLOC_FAILED", OOM, None, "device: "),
    (RuntimeError, f"{NCCL}\nCuda failure 2 'out of memory'", OOM, None, "device: "),
    (RuntimeError, CPU, OOM, None, "host: RuntimeError: [enforce"),
    (MemoryError, "", OOM, None, "host: MemoryError"),
    (OSError, "[Errno 12] Cannot allocate memory", OOM, None, "host: "),
    (
        RuntimeError,
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        ERROR,
        DEVICE,
        "RuntimeError: cuDNN",
    ),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", ERROR, DEVICE, "RuntimeError: "),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", ERROR, DEVICE, "RuntimeError: "),
    (RuntimeError, "cuFFT error: CUFFT_INTERNAL_ERROR", ERROR, DEVICE, "RuntimeError: "),
    (RuntimeError, "an illegal memory access was encountered", ERROR, DEVICE, "RuntimeError: "),
    (RuntimeError, NCCL, ERROR, DEVICE, "RuntimeError: NCCL"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", ERROR, SIZE, "RuntimeError: cuDNN"),
    (ValueError, "label 9 out of memory range", ERROR, DEVICE, "ValueError: label 9"),
    (RuntimeError, SHM, ERROR, None, "shared memory (/dev/shm) is full"),
    (RuntimeError, BUS, ERROR, None, "shared memory (/dev/shm) is full"),
    (OSError, "[Errno 24] Too many open files: 'x'", ERROR, None, "too many open files (ulimit -n"),
    (RuntimeError, "received 0 items of ancdata", ERROR, None, "set_sharing_strategy"),
    (RuntimeError, "DataLoader worker (pid 3) is killed by signal: Killed.", ERROR, HOST, "fewer"),
    (RuntimeError, "DataLoader worker (pid(s) 3, 4) exited unexpectedly", ERROR, HOST, "fewer"),
    (RuntimeError, "stack expects each tensor to be equal size", ERROR, None, "padding collate"),
    (RuntimeError, "BCELoss are unsafe to autocast.", ERROR, None, "with_logits"),
    (RuntimeError, "Unsupported dtype BFloat16", ERROR, None, "RuntimeError: Unsupported dtype"),
    (ValueError, "Expected more than 1 value per channel when", ERROR, None, "two or more"),
    (RuntimeError, "Cannot re-initialize CUDA in forked subprocess", ERROR, None, "build_dataset"),
    (AssertionError, "Torch not compiled with CUDA enabled", ERROR, None, "has not; take the"),
    (TypeError, "cannot pickle '_io.TextIOWrapper' object", ERROR, None, "open files at the first"),
    (AttributeError, "Can't pickle local object 'f.<lambda>'", ERROR, None, "context='fork'"),
    (TypeError, "cannot move a batch of type Own to cuda:0", ERROR, None, "TypeError: cannot move"),
    (KeyError, "labels", ERROR, None, "KeyError: 'labels'"),
    (NoBatchesError, "0 batches", Status.INVALID, None, "0 batches"),
]


def raised(error, phase="window"):
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - any may be raised
        return failure_of(caught, phase, REF)


@pytest.mark.parametrize(("kind", "text", "status", "suspect", "told"), TEXTS)
def test_text_and_class_tell_what_is_certain(kind, text, status, suspect, told):
    failure = raised(kind(text) if text else kind())
    assert (failure.status, failure.suspect) == (status, suspect)
    assert told in failure.message
    original = text.splitlines()[0][:40] if text else kind.__name__
    assert original in failure.message


def test_every_kind_has_a_text():
    def first(kind, text):
        error = kind(text) if text else kind()
        return next(known for known in KINDS if known.fits(error, text))

    known = [first(kind, text) for kind, text, *_ in TEXTS]
    # Pinning and a full disk are known by more than a text, below.
    assert [kind.told for kind in KINDS if kind not in known] == [
        kind.told for kind in KINDS if kind.suspect is PINNING or kind.told.startswith("the disk")
    ]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "too many open files"),
        (errno.ENFILE, "too many open files"),
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, "the disk is full"),
    ],
)
def test_what_the_system_refuses_is_told_by_its_number(number, told):
    failure = raised(OSError(number, os.strerror(number), "/data/cache"))
    assert failure.status is ERROR
    assert failure.message.startswith(told)
    assert "/data/cache" in failure.message


def test_a_workers_own_error_is_told_by_its_class_and_first_line():
    text = IN_A_WORKER.format("PairError", "DataLoader worker process 0", "two of them")
    failure = raised(RuntimeError(text))
    assert failure.message == "PairError: two of them"


def test_pages_that_cannot_be_pinned_are_host_memory():
    text = IN_A_WORKER.format(
        "RuntimeError", "pin memory thread for device 0", "CUDA error: out of memory"
    )
    failure = raised(RuntimeError(text))
    assert (failure.status, failure.suspect) == (OOM, PINNING)
    assert failure.message.startswith("host: too little page-locked memory; loader.pin_memory=fal")
    assert failure.message.endswith("RuntimeError: CUDA error: out of memory")


def test_memory_in_pieces_names_the_allocators_setting():
    fragmented = raised(torch.OutOfMemoryError(IN_PIECES.format("20.00 MiB"))).message
    assert fragmented.startswith("device: 5.51 GiB is reserved but in pieces")
    assert "expandable_segments:True" in fragmented
    assert "Tried to allocate 20.00 MiB" in fragmented
    assert "in pieces" not in raised(torch.OutOfMemoryError(IN_PIECES.format("8.00 GiB"))).message


class Large(torch.optim.AdamW):
    """An optimizer whose state does not fit."""

    def _init_group(self, *_):
        torch.empty(10**16)


def test_the_first_optimizer_step_is_named_where_memory_ends_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # PyTorch would leave its own
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        Large(model.parameters()).step()
    failure = failure_of(caught.value, "first step", REF)
    assert (failure.status, failure.phase) == (OOM, "optimizer.step")
    assert failure.message.startswith("host: RuntimeError: ")
    assert failure.message.endswith(" in optimizer.step")
    assert raised(RuntimeError(CPU), "first step").phase == "first step"


def test_a_long_text_loses_its_end_and_not_its_place():
    error = RuntimeError("x" * 5000)
    error.add_note("down to micro-batch 1, too")
    message = raised(error).message
    assert len(message) <= 400
    assert message.endswith("(down to micro-batch 1, too)")


# --- what the launcher knows of a probe that could not tell ---


@pytest.fixture
def spec(tmp_path):
    return ProbeSpec(
        model=REF,
        config={},
        stage=Stage.SEARCH,
        source=Source.LOADER,
        sink=Sink.TRAIN,
        folder=str(tmp_path),
        device="cpu",
        seed=0,
        global_batch=8,
    )


def test_a_result_that_found_no_room_is_no_crash(spec, tmp_path, monkeypatch):
    ended = End(code=1)
    assert launcher._failure(spec, ended).status is Status.CRASH
    written = "in write_atomically\nOSError: [Errno 28] No space left on device"
    (tmp_path / "log.txt").write_text(written)
    failure = launcher._failure(spec, ended)
    assert (failure.status, failure.message[:16]) == (ERROR, "the disk is full")
    (tmp_path / "log.txt").write_text("my own words: No space left on device")
    assert launcher._failure(spec, ended).status is Status.CRASH
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0}))
    assert launcher._failure(spec, ended).message == failure.message


@pytest.mark.parametrize(
    ("number", "suspect", "told"),
    [
        (signal.SIGKILL, HOST, "died by SIGKILL (9)"),
        (signal.SIGBUS, HOST, "died by SIGBUS (7); /dev/shm may be full"),
        (signal.SIGSEGV, None, "died by SIGSEGV (11)"),
    ],
)
def test_signals_that_want_of_memory_sends_are_a_suspicion(spec, number, suspect, told):
    failure = launcher._failure(spec, End(code=-number))
    assert (failure.status, failure.suspect) == (Status.CRASH, suspect)
    assert failure.message == told


WARNED = "host:1:2 [0] misc/strongstream.cc:53 NCCL WARN Cuda failure 'out of memory'"


@pytest.mark.parametrize(
    ("log", "suspect", "status"),
    [
        (f"{WARNED}\n{'frame' * 2000}", DEVICE, OOM),
        (WARNED, None, ERROR),
        ("NCCL WARN Cuda failure 'invalid argument'", DEVICE, ERROR),
        ("my label is out of memory", DEVICE, ERROR),
    ],
)
def test_the_log_may_say_what_the_collectives_error_does_not(tmp_path, log, suspect, status):
    (tmp_path / "log.txt").write_text(log)
    failure = Failure(status=ERROR, message=NCCL, suspect=suspect)
    judged = launcher._with_collective(failure, tmp_path / "log.txt")
    assert judged.status is status
    assert judged.message.endswith(NCCL)
    assert ("out of memory" in judged.message) == (status is OOM)
