"""What a GPU may tell, a row each. A new field is a new row, and one in `types.DeviceReading`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autotune import readings
from autotune.readings import Fold, Sample
from autotune.telemetry.meter import GPM_METRICS, PAIR_S, Meter
from autotune.telemetry.nvml import Gpu, LostError, answer, nvml, processes, used_bytes
from autotune.telemetry.tenants import INVISIBLE_BYTES, Shares, total_bytes

OFTEN, SELDOM, RARELY = 2, 5, 50
"""In ticks: what tells of the time since it was read; what changes slowly; what takes 20 ms."""
FRESH_S = 10.0
"""A driver's buffered samples older than this are on another clock, or stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to read a field."""

    functions: tuple[str, ...]
    """The NVML functions that it needs."""
    read: Callable[[Meter], Sequence[Sample]]
    any_of: bool = False
    """Whether one of the functions is enough: another version of the same."""
    every: int = 1
    """Ticks."""
    of_the_whole: bool = False
    """Whether it tells about a whole GPU even where MIG has cut it in slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Something that a GPU tells: in words, how it can be read, and what a window makes of it."""

    name: str
    unit: str
    title: str
    ways: tuple[Way, ...]
    gives: Mapping[str, Fold]
    """Fields of a `DeviceReading`."""


def _polled(
    ask: Callable[[Gpu], float | None],
    *functions: str,
    covers_s: float = 0.0,
    every: int = 1,
    of_the_whole: bool = False,
) -> Way:
    """A value of the moment, or of the time just before it."""

    def read(meter: Meter) -> Sequence[Sample]:
        value = ask(meter.gpu)
        now_ns = time.time_ns()
        return [] if value is None else [Sample(now_ns - int(covers_s * 1e9), now_ns, value)]

    return Way(functions=functions, read=read, every=every, of_the_whole=of_the_whole)


def _buffered(kind: int) -> Way:
    """The samples that the driver took by itself, with their own times."""
    key = f"samples {kind}"

    def read(meter: Meter) -> Sequence[Sample]:
        since_us = meter.since_us.get(key, 0)
        value_type, told = nvml().nvmlDeviceGetSamples(meter.gpu.handle, kind, since_us)
        values = sorted(
            (one.timeStamp, float(getattr(one.sampleValue, VALUE_TYPES[value_type])))
            for one in told
            if one.timeStamp > since_us
        )
        if not values or abs(time.time_ns() / 1000 - values[-1][0]) > FRESH_S * 1e6:
            return []
        meter.since_us[key] = values[-1][0]
        starts = [since_us or values[0][0], *(at_us for at_us, _ in values)]
        return [
            Sample(1000 * start_us, 1000 * at_us, value)
            for start_us, (at_us, value) in zip(starts, values, strict=False)
        ]

    return Way(functions=("nvmlDeviceGetSamples",), read=read, every=SELDOM)


VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of NVML's union by the number of its type."""


def _gpm(metric: int) -> Way:
    functions = ("nvmlGpmSampleGet", "nvmlGpmMetricsGet")
    return Way(functions=functions, read=lambda meter: meter.gpm(metric), every=OFTEN)


def _rate(kind: str) -> Way:
    # The driver's figure is about the last sixth of a second to second, depending on the product.
    return _polled(
        lambda gpu: float(getattr(nvml().nvmlDeviceGetUtilizationRates(gpu.handle), kind)),
        "nvmlDeviceGetUtilizationRates",
        covers_s=1.0,
    )


def _clock(kind: int, every: int) -> Way:
    return _polled(
        lambda gpu: nvml().nvmlDeviceGetClockInfo(gpu.whole, kind) or None,
        "nvmlDeviceGetClockInfo",
        every=every,
    )


def _pcie(counter: int) -> Way:
    return _polled(
        lambda gpu: nvml().nvmlDeviceGetPcieThroughput(gpu.whole, counter) / 1024,
        "nvmlDeviceGetPcieThroughput",
        covers_s=0.02,
        every=RARELY,
        of_the_whole=True,
    )


def _of_processes(value: Callable[[Shares], int | None]) -> Way:
    def read(meter: Meter) -> Sequence[Sample]:
        now_ns = time.time_ns()
        found = value(meter.shares())
        return [] if found is None else [Sample(now_ns, now_ns, found)]

    return Way(functions=PROCESS_LISTS, read=read, any_of=True, every=SELDOM)


PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)


MEMORY_INFOS = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")


def _use_by_others(meter: Meter) -> Sequence[Sample]:
    """Use of the SMs by processes that are certainly not ours."""
    library, now_ns = nvml(), time.time_ns()
    since_us = meter.since_us.get("others", meter.started_us)
    try:
        told = library.nvmlDeviceGetProcessUtilization(meter.gpu.handle, since_us)
    except library.NVMLError as error:
        if error.value not in (library.NVML_SUCCESS, library.NVML_ERROR_NOT_FOUND):
            raise
        told = []  # that is how it says that nobody did anything
    meter.since_us["others"] = max((one.timeStamp for one in told), default=since_us)
    use: dict[int, int] = {}
    for one in told:
        if one.timeStamp > since_us and one.smUtil <= 100 and meter.gpu.census.is_other(one.pid):
            use[one.pid] = max(use.get(one.pid, 0), one.smUtil)
    return [Sample(now_ns, now_ns, float(sum(use.values())))]


def _reasons(function: str) -> Way:
    return _polled(lambda gpu: getattr(nvml(), function)(gpu.whole), function)


FIELDS: tuple[Field, ...] = (
    Field(
        name="gpu_util_pct",
        unit="%",
        title="GPU utilisation",
        ways=(_buffered(1), _rate("gpu")),
        gives={"gpu_util_pct": readings.mean},
    ),
    Field(
        name="memory_util_pct",
        unit="%",
        title="memory utilisation",
        ways=(_buffered(2), _rate("memory")),
        gives={"memory_util_pct": readings.mean},
    ),
    Field(
        name="sm_active_pct",
        unit="%",
        title="SM activity",
        ways=(_gpm(2),),
        gives={"sm_active_pct": readings.mean},
    ),
    Field(
        name="sm_occupancy_pct",
        unit="%",
        title="SM occupancy",
        ways=(_gpm(3),),
        gives={"sm_occupancy_pct": readings.mean},
    ),
    Field(
        name="tensor_active_pct",
        unit="%",
        title="tensor core activity",
        ways=(_gpm(5),),
        gives={"tensor_active_pct": readings.mean},
    ),
    Field(
        name="dram_active_pct",
        unit="%",
        title="DRAM bandwidth",
        ways=(_gpm(10),),
        gives={"dram_active_pct": readings.mean},
    ),
    Field(
        name="energy_j",
        unit="J",
        title="energy",
        ways=(
            _polled(
                lambda gpu: nvml().nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000,
                "nvmlDeviceGetTotalEnergyConsumption",
                of_the_whole=True,
            ),
        ),
        gives={"energy_j": readings.increase},
    ),
    Field(
        name="power_w",
        unit="W",
        title="power",
        ways=(
            _polled(
                # Ampere and newer tell the mean of the last second.
                lambda gpu: nvml().nvmlDeviceGetPowerUsage(gpu.handle) / 1000 or None,
                "nvmlDeviceGetPowerUsage",
                covers_s=1.0,
                every=OFTEN,
                of_the_whole=True,
            ),
        ),
        gives={"power_w": readings.mean_over_time},
    ),
    Field(
        name="sm_clock_mhz",
        unit="MHz",
        title="SM clock",
        ways=(_clock(1, every=1),),
        gives={
            "sm_clock_mhz": readings.mean,
            "sm_clock_first_mhz": readings.mean_at_first,
            "sm_clock_later_mhz": readings.mean_later,
        },
    ),
    Field(
        name="memory_clock_mhz",
        unit="MHz",
        title="memory clock",
        ways=(_clock(2, every=SELDOM),),
        gives={"memory_clock_mhz": readings.peak},
    ),
    Field(
        name="event_reasons",
        unit="bits",
        title="reasons for lower clocks",
        ways=(
            _reasons("nvmlDeviceGetCurrentClocksEventReasons"),
            _reasons("nvmlDeviceGetCurrentClocksThrottleReasons"),
        ),
        gives={"event_reasons": readings.bits},
    ),
    Field(
        name="temperature_c",
        unit="deg C",
        title="temperature",
        ways=(
            _polled(
                lambda gpu: nvml().nvmlDeviceGetTemperatureV(gpu.whole, 0),
                "nvmlDeviceGetTemperatureV",
                every=SELDOM,
            ),
            _polled(
                lambda gpu: nvml().nvmlDeviceGetTemperature(gpu.whole, 0),
                "nvmlDeviceGetTemperature",
                every=SELDOM,
            ),
        ),
        gives={"temperature_c": readings.peak},
    ),
    Field(
        name="pcie_tx_mib_per_s",
        unit="MiB/s",
        title="PCIe sent",
        ways=(_gpm(20), _pcie(0)),
        gives={"pcie_tx_mib_per_s": readings.mean_of_any},
    ),
    Field(
        name="pcie_rx_mib_per_s",
        unit="MiB/s",
        title="PCIe received",
        ways=(_gpm(21), _pcie(1)),
        gives={"pcie_rx_mib_per_s": readings.mean_of_any},
    ),
    Field(
        name="used_bytes",
        unit="bytes",
        title="memory in use",
        ways=(
            replace(
                _polled(used_bytes, *MEMORY_INFOS, every=SELDOM),
                any_of=True,
            ),
        ),
        gives={"used_bytes": readings.size},
    ),
    Field(
        name="process_bytes",
        unit="bytes",
        title="memory by process",
        ways=(_of_processes(lambda shares: total_bytes(shares.own)),),
        gives={"process_bytes": readings.size},
    ),
    Field(
        name="others",
        unit="processes",
        title="other processes",
        ways=(_of_processes(lambda shares: len(shares.others)),),
        gives={"others": readings.count},
    ),
    Field(
        name="others_bytes",
        unit="bytes",
        title="memory of other processes",
        ways=(_of_processes(lambda shares: total_bytes(shares.others)),),
        gives={"others_bytes": readings.count},
    ),
    Field(
        name="others_util_pct",
        unit="%",
        title="use by other processes",
        ways=(
            Way(
                functions=("nvmlDeviceGetProcessUtilization",),
                read=_use_by_others,
                every=SELDOM,
            ),
        ),
        gives={"others_util_pct": readings.peak},
    ),
)


def prepare(gpu: Gpu) -> None:
    """Find out how each field can be read here, and what is in use while nobody uses it."""
    if gpu.lost:
        return
    try:
        used = answer(partial(used_bytes, gpu))
        if used is not None:
            gpu.idle_bytes = used if used <= INVISIBLE_BYTES else 0
        gpu.census.before(answer(partial(processes, gpu)) or ())
        _choose_ways(gpu)
    except LostError as error:
        gpu.lost = str(error)


def _choose_ways(gpu: Gpu) -> None:
    """Try every way once."""
    meter = Meter(gpu)
    if gpu.gpm:
        answer(partial(meter.gpm, GPM_METRICS[0]))
        time.sleep(PAIR_S)
        meter.begin_round()
    for row in FIELDS:
        for way in row.ways:
            if gpu.mig and way.of_the_whole:
                continue
            samples = answer(partial(way.read, meter))
            if samples:
                gpu.ways[row.name] = way
                break
    meter.close()
