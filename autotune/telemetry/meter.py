"""Asks one GPU for what several fields have in common, once a round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from autotune.readings import Sample
from autotune.telemetry.nvml import Gpu, LostError, answer, nvml, processes
from autotune.telemetry.tenants import Shares

PAIR_S = 0.11
"""The least time between two GPM samples that are compared."""
GPM_METRICS = (2, 3, 5, 10, 20, 21)
"""By NVML's numbers: SM active, SM occupancy, any tensor core, DRAM bandwidth, PCIe sent and
received (MiB/s)."""

T = TypeVar("T")


class Meter:
    """Asks one GPU; what several fields need is asked for once a round."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.since_us: dict[str, int] = {}
        """Until when what the driver keeps by itself has been taken over."""
        self.started_us = time.time_ns() // 1000
        self._shared: dict[str, Any] = {}
        self._gpm = answer(partial(Gpm, gpu)) if gpu.gpm else None

    def begin_round(self) -> None:
        """Forget what was asked before."""
        self._shared.clear()

    def gpm(self, metric: int) -> list[Sample]:
        """One GPM metric between the last round and this one."""
        if self._gpm is None:
            return []
        pair = self._once("gpm", self._gpm.compare)
        if pair is None or metric not in pair.values:
            return []
        return [Sample(pair.start_ns, pair.end_ns, pair.values[metric])]

    def shares(self) -> Shares:
        """Whose processes are on the GPU."""
        return self._once("processes", lambda: self.gpu.census.shares(processes(self.gpu)))

    def _once(self, name: str, read: Callable[[], T]) -> T:
        if name not in self._shared:
            self._shared[name] = read()
        value: T = self._shared[name]
        return value

    def close(self) -> None:
        """Give back what NVML lent."""
        if self._gpm is not None:
            self._gpm.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What was counted between two GPM samples, by metric."""

    start_ns: int
    end_ns: int
    values: Mapping[int, float]


class Gpm:
    """Two samples of a GPU's counters that take turns at being the newer one."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._samples = [nvml().nvmlGpmSampleAlloc() for _ in range(2)]
        self._taken_ns: int | None = None

    def compare(self) -> Pair | None:
        """Sample again; what was counted since the last time."""
        library, gpu = nvml(), self._gpu
        before_ns, now_ns = self._taken_ns, time.time_ns()
        if before_ns is not None and now_ns - before_ns < PAIR_S * 1e9:
            return None
        older, newer = self._samples
        if gpu.instance is None:
            library.nvmlGpmSampleGet(gpu.handle, older)
        else:
            library.nvmlGpmMigSampleGet(gpu.whole, gpu.instance, older)
        self._samples = [newer, older]
        self._taken_ns = time.time_ns()
        if before_ns is None:
            return None
        return Pair(start_ns=before_ns, end_ns=self._taken_ns, values=self._counted())

    def _counted(self) -> dict[int, float]:
        library = nvml()
        asked = library.c_nvmlGpmMetricsGet_t()
        asked.version = library.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(GPM_METRICS)
        asked.sample1, asked.sample2 = self._samples
        for place, metric in enumerate(GPM_METRICS):
            asked.metrics[place].metricId = metric
        library.nvmlGpmMetricsGet(asked)
        told = (asked.metrics[place] for place in range(len(GPM_METRICS)))
        return {
            one.metricId: one.value
            for one in told
            if not one.nvmlReturn and math.isfinite(one.value)
        }

    def close(self) -> None:
        """Free both."""
        for sample in self._samples:
            with suppress(LostError):
                answer(partial(nvml().nvmlGpmSampleFree, sample))
