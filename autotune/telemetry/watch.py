"""Reads some GPUs beside one probe, from a thread; tells afterwards of exactly the timed window."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from autotune.readings import Sample, with_energy
from autotune.telemetry.fields import FIELDS, RARELY
from autotune.telemetry.meter import Meter
from autotune.telemetry.nvml import Gpu, LostError, answer, processes, used_bytes
from autotune.types import DeviceReading

TICK_S = 0.2
"""How often a watched GPU is read."""
KEPT = 5000
"""Samples of one field that are kept: those of a quarter of an hour."""
READY_S = 1.0
ANSWER_S = 5.0
"""How long the thread may take to end: NVML can hang when a GPU falls off the bus."""


class Watched:
    """One GPU during one watch."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.used_before_bytes: int | None = None
        self._meter = Meter(gpu)
        self._series: dict[str, deque[Sample]] = {name: deque(maxlen=KEPT) for name in gpu.ways}

    def look(self) -> None:
        """See what is there before the probe is."""
        gpu = self.gpu
        gpu.census.before(answer(partial(processes, gpu)) or ())
        used = self.used_before_bytes = answer(partial(used_bytes, gpu))
        if used is not None and gpu.idle_bytes is not None:
            gpu.idle_bytes = min(gpu.idle_bytes, used)

    def round(self, tick: int, *, edge: bool) -> None:
        """Read what is due; at the edges of a watch all but what takes long."""
        self._meter.begin_round()
        for name, way in self.gpu.ways.items():
            due = (tick + way.every // 2) % way.every == 0
            if due or (edge and way.every < RARELY):
                self._series[name].extend(answer(partial(way.read, self._meter)) or ())

    def reading(self, start_ns: int, end_ns: int) -> DeviceReading:
        """What lies in the window."""
        values: dict[str, Any] = {
            name: fold(tuple(self._series.get(row.name, ())), start_ns, end_ns)
            for row in FIELDS
            for name, fold in row.gives.items()
        }
        held = (values["others_bytes"], self.gpu.unexplained(self.used_before_bytes))
        values["others_bytes"] = max((size for size in held if size is not None), default=None)
        reading = DeviceReading(
            index=self.gpu.index,
            uuid=self.gpu.uuid,
            used_before_bytes=self.used_before_bytes,
            **values,
        )
        return with_energy(reading, (end_ns - start_ns) / 1e9)

    def is_free_again(self) -> bool:
        """Whether the probe's memory is back, as far as can be told."""
        used = answer(partial(used_bytes, self.gpu))
        before = self.used_before_bytes
        if used is None or before is None or used <= before + (self.gpu.total_bytes or 0) / 100:
            return True
        listed = answer(partial(processes, self.gpu))
        return listed is not None and self.gpu.census.are_gone(listed)

    def close(self) -> None:
        """Give back what NVML lent."""
        self._meter.close()


class Watch:
    """Reads while it is entered; never raises."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.lost = ""
        """Which GPU was lost meanwhile, in words; "" if none was."""
        self.stuck = False
        """Whether NVML did not come back from a call."""
        self.watched: list[Watched] = []
        self._gpus = tuple(gpus)
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        if self._gpus:
            self._thread.start()
            self._ready.wait(READY_S)  # the probe is not to be part of what was there before it
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._gpus:
            self._thread.join(ANSWER_S)
            self.stuck = self._thread.is_alive()

    def readings(self, start_ns: int, end_ns: int) -> tuple[DeviceReading, ...]:
        """What the GPUs told of exactly this time; nothing where there was no timed window."""
        if end_ns <= start_ns or self.stuck:
            return ()
        return tuple(one.reading(start_ns, end_ns) for one in self.watched)

    def _run(self) -> None:
        try:
            self._read()
        except LostError as error:
            self.lost = str(error)
        finally:
            self._ready.set()
            for one in self.watched:
                one.close()

    def _read(self) -> None:
        for gpu in self._gpus:
            if gpu.lost:
                raise LostError(_told(gpu))
            self.watched.append(Watched(gpu))
        self._each(Watched.look)
        self._each(partial(Watched.round, tick=0, edge=True))
        self._ready.set()
        tick = 0
        while not self._over.wait(TICK_S):
            tick += 1
            self._each(partial(Watched.round, tick=tick, edge=False))
        self._each(partial(Watched.round, tick=tick, edge=True))

    def _each(self, act: Callable[[Watched], None]) -> None:
        for one in self.watched:
            try:
                act(one)
            except LostError as error:
                one.gpu.lost = str(error)
                raise LostError(_told(one.gpu)) from None


def _told(gpu: Gpu) -> str:
    """Which GPU was lost, and what NVML says."""
    return f"GPU {gpu.index} ({gpu.name}): {gpu.lost}"
