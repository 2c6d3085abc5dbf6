"""Where a probe's batches come from: the user's loader, or a ring of real batches."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from autotune.probe.batches import leading, mapped, moved, size_bytes, tensors_of
from autotune.probe.memory import total_bytes
from autotune.probe.setup import Setup
from autotune.probe.workload import Workload
from autotune.types import ProbeSpec

RING = 8
RING_SHARE = 0.02
"""Share of the step's memory that the ring may hold beside the batch in use."""


class NoBatchesError(Exception):
    """The loader ends before its first batch."""


class Counted:
    """The user's collate, counting samples where batches are made.

    It holds nothing that a loader with spawned workers could not pickle. One slot per worker in
    shared memory and no lock: a worker killed inside one would block everybody else.
    """

    def __init__(
        self, collate: Callable[[Any], Any], workload: Workload, *, batched: bool, workers: int
    ) -> None:
        self.collate = collate
        self.count_samples = workload.defined["count_samples"]
        self.batched = batched
        self.size = 0
        """Samples of the last batch that was made in this process."""
        self.made = torch.zeros(1 + workers, dtype=torch.int64)
        self.made.share_memory_()  # type: ignore[no-untyped-call]
        self._slots: Any = None
        """The same memory without tensors around it: counting must cost next to nothing."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": None}  # a view does not travel

    def __call__(self, samples: Any) -> tuple[int, Any]:
        """The batch, and how many samples it holds."""
        batch = self.collate(samples)
        self.size = len(samples) if self.batched else leading(batch)
        counted = self.size
        if self.count_samples is not None:
            counted = int(self.count_samples(batch))
        worker = get_worker_info()
        slot = 0 if worker is None else 1 + worker.id
        self._numbers()[slot] += counted
        return counted, batch

    @property
    def produced(self) -> int:
        """Samples made so far, by all workers."""
        return sum(self._numbers())

    def _numbers(self) -> Any:
        if self._slots is None:
            self._slots = self.made.numpy().data
        return self._slots


class LoaderSource:
    """The user's loader, epoch after epoch, with each border timed by itself."""

    def __init__(self, workload: Workload, setup: Setup, spec: ProbeSpec) -> None:
        generator = torch.Generator().manual_seed(spec.seed)
        torch.manual_seed(spec.seed)
        self.loader = workload.loader(setup.loader, generator)
        self.counted = Counted(
            self.loader.collate_fn,
            workload,
            batched=_is_batched(self.loader),
            workers=self.loader.num_workers,
        )
        self.loader.collate_fn = self.counted
        self.workers = self.loader.num_workers
        self.non_blocking = bool(self.loader.pin_memory)
        self.waited_s = 0.0
        self.starved = 0
        """Batches that were asked for while none lay ready."""
        self.consumed = 0
        self.restarts_s: list[float] = []
        self.epoch_samples: int | None = None
        self._epoch_start = 0
        self._drawn = 0
        self._iterator: Iterator[tuple[int, Any]] | None = None
        self._held: tuple[int, Any] | None = None

    def start(self) -> float:
        """Start the workers and hold the first batch; seconds of it that later epochs pay, too."""
        started = time.perf_counter()
        self._iterator = iter(self.loader)
        if self.loader.persistent_workers:
            started = time.perf_counter()  # they are there from now on
        try:
            self._held = next(self._iterator)
        except StopIteration:
            raise NoBatchesError(_why_no_batches(self.loader)) from None
        return time.perf_counter() - started

    def drain(self) -> None:
        """Take what was made ahead: a window that begins with it would flatter the loader."""
        for _ in range(self.workers * (self.loader.prefetch_factor or 0)):
            if self.produced <= self.consumed:
                return
            self.draw()

    def draw(self) -> Any:
        """The next batch; the time blocked for it is waiting, an epoch's border is not."""
        asked = time.perf_counter()
        if self._held is not None:
            (count, batch), self._held = self._held, None
        else:
            assert self._iterator is not None
            self.starved += self.produced <= self.consumed
            try:
                count, batch = next(self._iterator)
            except StopIteration:
                count, batch = self._restarted(asked)
            else:
                self.waited_s += time.perf_counter() - asked
        self.consumed += count
        self._drawn += 1
        return batch

    def _restarted(self, asked: float) -> tuple[int, Any]:
        self.epoch_samples = self.consumed - self._epoch_start
        self._epoch_start = self.consumed
        self._iterator = iter(self.loader)
        try:
            first: tuple[int, Any] = next(self._iterator)
        except StopIteration:
            raise NoBatchesError(_why_no_batches(self.loader)) from None
        self.restarts_s.append(time.perf_counter() - asked)
        return first

    @property
    def produced(self) -> int:
        """Samples that the workers made so far."""
        return self.counted.produced

    @property
    def idle_workers(self) -> int:
        """Workers that have made nothing, although each had its turn."""
        delivered = self.counted.made[1 : self.workers + 1] > 0
        return self.workers - int(delivered.sum()) if self._drawn > self.workers else 0


class CachedSource:
    """A ring of real batches that lie on the device already."""

    workers = 0
    idle_workers = 0
    starved = 0
    non_blocking = False
    epoch_samples: int | None = None

    def __init__(self, workload: Workload, setup: Setup, spec: ProbeSpec) -> None:
        self.waited_s = 0.0
        self.consumed = 0
        self.restarts_s: list[float] = []
        self._device = torch.device(spec.device)
        self._ring = ring_of(workload, setup, spec, self._device)
        self._turn = itertools.cycle(range(len(self._ring)))
        self._clone = False
        self._versions: list[list[int]] = [_versions(batch) for _, batch in self._ring]

    def start(self) -> float:
        """Nothing to start."""
        return 0.0

    def drain(self) -> None:
        """A ring holds no more than it gives."""

    def draw(self) -> Any:
        """A copy at container level: the user's loss may pop keys or work in place."""
        index = next(self._turn)
        count, batch = self._ring[index]
        if not self._clone and _versions(batch) != self._versions[index]:
            self._clone = True
        self.consumed += count
        return mapped(batch, _cloned if self._clone else _handed_out)

    @property
    def produced(self) -> int:
        """A ring makes what is taken."""
        return self.consumed

    @property
    def extra_bytes(self) -> int:
        """Device memory of the ring that no real run holds."""
        return sum(size_bytes(batch) for _, batch in self._ring[1:])


SOURCES: dict[str, type[LoaderSource] | type[CachedSource]] = {
    "loader": LoaderSource,
    "cached": CachedSource,
}


def read_stock(spec: ProbeSpec) -> list[Any]:
    """The dataset's first samples, in order, as the inspecting probe stored them."""
    return [pickle.loads(sample) for sample in _pickled(spec)]


def longest_first(spec: ProbeSpec) -> list[Any]:
    """The same samples, those first that take most bytes."""
    return [pickle.loads(sample) for sample in sorted(_pickled(spec), key=len, reverse=True)]


def _pickled(spec: ProbeSpec) -> list[bytes]:
    if spec.stock is None:
        return []
    with Path(spec.stock).open("rb") as file:
        samples: list[bytes] = pickle.load(file)
    return samples


def plain_loader(workload: Workload, setup: Setup, seed: int) -> DataLoader[Any]:
    """The user's loader in this process, nothing pinned."""
    plain = {**setup.loader, "num_workers": 0, "pin_memory": False}
    return workload.loader(plain, torch.Generator().manual_seed(seed))


def stock_batch(
    workload: Workload, loader: DataLoader[Any], samples: list[Any], first: int, size: int
) -> tuple[int, Any]:
    """A batch of `size` stocked samples from `first` on, going round."""
    if not _is_batched(loader):
        batch = loader.collate_fn(samples[first % len(samples)])
        return workload.count(batch) or leading(batch), batch
    chosen = [samples[(first + offset) % len(samples)] for offset in range(size)]
    batch = loader.collate_fn(chosen)
    return workload.count(batch) or size, batch


def ring_of(
    workload: Workload, setup: Setup, spec: ProbeSpec, device: torch.device
) -> list[tuple[int, Any]]:
    """Up to eight batches; as many as the stock fills, at least one."""
    samples = read_stock(spec)
    loader = plain_loader(workload, setup, spec.seed)
    if not samples:
        drawn = itertools.islice(_endless(loader), RING)
        batches = [(workload.count(batch) or leading(batch), batch) for batch in drawn]
    else:
        size = setup.batch_size
        batches = [stock_batch(workload, loader, samples, 0, size)]
        most = _most_in_ring(_room(spec, device), size_bytes(batches[0][1]))
        count = min(most, len(samples) // size)
        batches += [
            stock_batch(workload, loader, samples, turn * size, size) for turn in range(1, count)
        ]
    return [(count, moved(batch, device, non_blocking=False)) for count, batch in batches]


def _room(spec: ProbeSpec, device: torch.device) -> int | None:
    """Bytes that the ring shares with the step, where they are bounded."""
    if device.type != "cpu":
        return total_bytes(device)
    limits = (spec.memory_limit_bytes, spec.host_limit_bytes)
    return min((limit for limit in limits if limit is not None), default=None)


def _most_in_ring(room: int | None, batch_bytes: int) -> int:
    """Batches of a ring that does not make a size fail which fits by itself."""
    if room is None or not batch_bytes:
        return RING
    return min(RING, 1 + int(RING_SHARE * room / batch_bytes))


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise NoBatchesError(_why_no_batches(loader))


def _is_batched(loader: DataLoader[Any]) -> bool:
    """Whether collate gets a list of samples, not one sample."""
    return loader.batch_sampler is not None or loader.batch_size is not None


def _handed_out(leaf: Any) -> Any:
    """Tensors as they are; an object of the user's with attributes of its own."""
    if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__dict__"):
        return leaf
    return copy.copy(leaf)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _versions(batch: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(batch)]


def _why_no_batches(loader: DataLoader[Any]) -> str:
    try:
        size = f"a dataset of {len(loader.dataset)} samples"  # type: ignore[arg-type]
    except TypeError:
        size = "the dataset"
    dropped = ", the partial batch dropped" if loader.drop_last else ""
    return f"0 batches: {size} at batch size {loader.batch_size}{dropped}"
