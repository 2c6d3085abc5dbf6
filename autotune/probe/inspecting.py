"""The inspecting probe: what the model and its data are like, and which knobs apply."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autotune.probe.batches import leading, mapped, moved, size_bytes
from autotune.probe.setup import Setup
from autotune.probe.sinks import Train
from autotune.probe.sources import LoaderSource, NoBatchesError, plain_loader, stock_batch
from autotune.probe.workload import LOADER_ARGUMENTS, Workload, accepted
from autotune.types import ProbeSpec, WorkloadFacts

STOCK_S = 5.0
STOCK_MORE_S = 1.0
"""Where samples are slow, more of them than the parity check needs are not waited for."""
STOCK_BYTES = 256 * 1024**2
STOCK_LEAST = 512
STOCK_FILE = "samples.pkl"
PROBED_SAMPLES = 4
WORKERS_ONLY = ("prefetch_factor", "persistent_workers")
SPLIT_TOLERANCE = 1e-4
UNEQUAL = 1.05
"""Samples whose sizes differ more than this vary in length,"""
LABEL_BYTES = 32
"""unless it is by as little as a label may take."""


def inspect(workload: Workload, setup: Setup, spec: ProbeSpec) -> WorkloadFacts:
    """Look at everything once, on the baseline's settings.

    Raises whatever the user's code raises: a job that cannot make one step cannot be tuned.
    """
    refused: dict[str, str] = {}
    notes: list[str] = []
    device = torch.device(spec.device)
    if workload.iterable:
        refused.update(_sharding(workload, setup))
    # What reads in this process comes last: a dataset may open its files at the first sample,
    # and workers forked after that would share them.
    setup = _that_forms(workload, setup)
    delivered, batch_bytes = _first_batch(workload, setup, spec, refused)
    samples, sample_s, lengths = _stock(workload, setup, spec)
    train = Train(workload, setup, device)
    setup = _one_step(workload, setup, samples, train)
    exact = _splits_exactly(workload, setup, samples, train)
    model = train.model
    dtype = _common_dtype(model)
    if dtype in ("bfloat16", "float16"):
        refused["train.precision"] = f"built in {'bf16' if dtype == 'bfloat16' else 'fp16'}"
    notes += _notes(model, workload)
    return WorkloadFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        dataset_len=_length(workload),
        sample_bytes=batch_bytes / max(delivered, 1),
        sample_s=sample_s,
        delivered_batch=delivered,
        stock=len(samples),
        dtype=dtype,
        batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        exact_split=exact,
        default_threads=torch.get_num_threads(),
        step_batch=setup.batch_size,
        varies=_vary(lengths),
        longest_ratio=max(lengths) / fmean(lengths) if lengths else 1.0,
        not_applicable=refused,
        notes=tuple(notes),
    )


def as_plain(facts: WorkloadFacts) -> dict[str, Any]:
    """The facts as the result file carries them."""
    return asdict(facts)


def _first_batch(
    workload: Workload, setup: Setup, spec: ProbeSpec, refused: dict[str, str]
) -> tuple[float, int]:
    """Samples and bytes of a delivered batch; refuses the knobs that the loader ignores."""
    # Read without workers: a baseline whose workers hang is a row, not the end of the run.
    source = LoaderSource(workload, _without_workers(setup), spec)
    source.start()
    batch = source.draw()
    size = source.counted.size or leading(batch)
    if workload.defined["build_loader"] is not None:
        refused.update(_ignored(workload, setup, spec, size))
    return float(size), size_bytes(batch)


def _ignored(workload: Workload, setup: Setup, spec: ProbeSpec, size: int) -> dict[str, str]:
    """What the user's own loader does not take, or takes and ignores."""
    build_loader = workload.defined["build_loader"]
    assert build_loader is not None
    named = accepted(build_loader)
    refused = {
        _knob_of(name): f"build_loader takes no {name}"
        for name in LOADER_ARGUMENTS
        if name not in (*named, "shuffle", "drop_last")
    }
    asked = {**setup.loader, "num_workers": setup.workers + 1}
    workers = workload.loader(asked, torch.Generator()).num_workers
    if workers != setup.workers + 1:
        refused["loader.num_workers"] = (
            f"build_loader uses {workers} workers whatever it is asked for"
        )
    if "batch_size" not in named or _ignores_batch_size(workload, setup, spec, size):
        refused["train.batch_size"] = (
            f"the loader delivers {size} samples whatever the batch size; "
            "take batch_size in build_loader"
        )
    return refused


def _ignores_batch_size(workload: Workload, setup: Setup, spec: ProbeSpec, size: int) -> bool:
    if size == _length(workload):
        return False
    other = 1 if setup.batch_size > 1 else 2
    asked = replace(setup, loader={**setup.loader, "batch_size": other})
    source = LoaderSource(workload, _without_workers(asked), spec)
    source.start()
    delivered = source.counted.size or leading(source.draw())
    return size != setup.batch_size or delivered != other


def _without_workers(setup: Setup) -> Setup:
    loader = {name: setup.loader[name] for name in setup.loader if name not in WORKERS_ONLY}
    return replace(setup, loader={**loader, "num_workers": 0})


def _knob_of(argument: str) -> str:
    return "train.batch_size" if argument == "batch_size" else f"loader.{argument}"


def _sharding(workload: Workload, setup: Setup) -> dict[str, str]:
    """Whether two workers of an iterable dataset read the same samples."""
    arguments = {**setup.loader, "num_workers": 2, "prefetch_factor": 2, "batch_size": 1}
    arguments.pop("persistent_workers", None)
    loader = workload.loader(arguments, torch.Generator().manual_seed(0))
    loader.collate_fn = _digest
    try:
        digests = list(itertools.islice(loader, 2 * PROBED_SAMPLES))
    except Exception as error:  # noqa: BLE001 - whatever it raises, with fewer workers it may run
        reason = f"two workers cannot read the dataset: {type(error).__name__}"
        return {"loader.num_workers>1": reason}
    if len(digests) > 1 and digests[::2] == digests[1::2]:
        reason = "the dataset does not shard by get_worker_info(): every worker repeats it"
        return {"loader.num_workers>1": reason}
    return {}


def _digest(samples: Any) -> str:
    return hashlib.sha256(pickle.dumps(_values(samples))).hexdigest()


def _values(samples: Any) -> Any:
    return mapped(samples, lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf)


def _stock(workload: Workload, setup: Setup, spec: ProbeSpec) -> tuple[list[Any], float, list[int]]:
    """Store the dataset's first samples, in order, for parity and for the cached source.

    Returns the samples, seconds for each, and the bytes of each one.
    """
    wanted = max(3 * spec.global_batch, STOCK_LEAST)
    samples: list[Any] = []
    pickled: list[bytes] = []
    size, started = 0, time.perf_counter()
    for sample in itertools.islice(_in_order(workload, setup), wanted):
        try:
            pickled.append(pickle.dumps(mapped(sample, _without_the_rest)))
        except Exception:  # noqa: BLE001 - whatever the user's class raises: no stock then
            return [], 0.0, []
        samples.append(sample)
        size += len(pickled[-1])
        spent = time.perf_counter() - started
        needed = len(samples) < 3 * spec.global_batch
        if size > STOCK_BYTES or spent > (STOCK_S if needed else STOCK_MORE_S):
            break
    spent = time.perf_counter() - started
    _store(pickled, Path(spec.folder, STOCK_FILE))
    return samples, spent / max(len(samples), 1), [len(sample) for sample in pickled]


def _vary(lengths: list[int]) -> bool:
    """Whether samples differ by more than what a label or a path may make of them."""
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    return longest > UNEQUAL * shortest and longest - shortest > LABEL_BYTES


def _store(pickled: list[bytes], path: Path) -> None:
    """Write the stock; where the disk has no room for it, probes draw from the loader instead."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            pickle.dump(pickled, file)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)


def _without_the_rest(leaf: Any) -> Any:
    """A view's own values: with it, all of the tensor that it looks into would be stored."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    return leaf


def _in_order(workload: Workload, setup: Setup) -> Iterator[Any]:
    """Samples as the user's own sampler names them, unshuffled."""
    if workload.iterable:
        iterable: Any = workload.dataset
        yield from iterable
        return
    plain = {**setup.loader, "num_workers": 0, "pin_memory": False, "shuffle": False}
    loader: DataLoader[Any] = workload.loader(plain, torch.Generator().manual_seed(0))
    dataset: Any = workload.dataset
    for index in loader.sampler:
        yield dataset[index]


def _splits_exactly(workload: Workload, setup: Setup, samples: list[Any], train: Train) -> bool:
    """Whether loss(whole) is the mean of loss(halves): else micro-batch changes numerics."""
    half = min(setup.batch_size, len(samples)) // 2
    if half < 1:
        return True
    model = train.model.eval()
    loss = workload.loss_of(model)
    try:
        with torch.no_grad():
            losses = [
                float(loss(_stocked(workload, setup, samples, first, size, train)))
                for first, size in ((0, 2 * half), (0, half), (half, half))
            ]
    except Exception:  # noqa: BLE001 - some losses need training mode: then nothing is known
        return True
    finally:
        model.train()
    whole, parts = losses[0], (losses[1] + losses[2]) / 2
    return abs(whole - parts) <= SPLIT_TOLERANCE * max(abs(whole), 1e-6)


def _one_step(workload: Workload, setup: Setup, samples: list[Any], train: Train) -> Setup:
    """One whole optimizer step, with fewer samples where the user's micro-batch fails.

    What fails with a single sample, too, fails everywhere; the first error tells why.
    """
    first_error: Exception | None = None
    for shift in range(setup.batch_size.bit_length()):
        smaller = _of_size(setup, setup.batch_size >> shift)
        try:
            _step_on_stock(workload, smaller, samples, train)
        except Exception as error:  # noqa: BLE001 - out of memory is only the likeliest
            # Its frames hold every tensor of the step, for which the next try needs the memory.
            traceback.clear_frames(error.__traceback__)
            train.optimizer.zero_grad()
            first_error = first_error or error
        else:
            return smaller
    assert first_error is not None
    if setup.batch_size > 1:
        first_error.add_note("down to micro-batch 1, too")
    raise first_error


def _step_on_stock(workload: Workload, setup: Setup, samples: list[Any], train: Train) -> None:
    turn = itertools.count()
    size = setup.batch_size
    train.step(lambda: _stocked(workload, setup, samples, next(turn) * size, size, train))


def _that_forms(workload: Workload, setup: Setup) -> Setup:
    """A batch no larger than the dataset: a larger one never comes where partial ones drop."""
    length = _length(workload)
    return setup if not length else _of_size(setup, min(setup.batch_size, length))


def _of_size(setup: Setup, batch_size: int) -> Setup:
    if batch_size == setup.batch_size:
        return setup
    return replace(setup, loader={**setup.loader, "batch_size": batch_size})


def _stocked(
    workload: Workload, setup: Setup, samples: list[Any], first: int, size: int, train: Train
) -> Any:
    loader = plain_loader(workload, setup, 0)
    if not samples:
        for batch in loader:
            return moved(batch, train.device, non_blocking=False)
        raise NoBatchesError("0 batches")
    _, batch = stock_batch(workload, loader, samples, first, size)
    return moved(batch, train.device, non_blocking=False)


def _length(workload: Workload) -> int | None:
    try:
        return len(workload.dataset)  # type: ignore[arg-type]
    except TypeError:
        return None


def _common_dtype(model: nn.Module) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "none"


def _notes(model: nn.Module, workload: Workload) -> list[str]:
    notes = []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        notes.append("BatchNorm: its statistics change with the micro-batch")
    return notes
