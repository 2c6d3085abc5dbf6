"""The metrics: unit, direction, and the formula over a probe's raw facts.

A new metric is a new row of `METRICS`. No other file compares two values of a metric.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from autotune.errors import OptionError
from autotune.labels import outside_labels
from autotune.steady import Rate, rate_of
from autotune.types import GIB, DeviceReading, Estimate, Measurement

BETWEEN_PROCESSES = 0.015
"""What two fresh processes of one config differ by, relative, at 95 %: no window shows it.
Measured on planted jobs against a minute of a plain loop (scripts/bench_accuracy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a probe gives."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    compute: Callable[[Measurement], float | None]
    """The value, or None where it could not be read: never 0 for "not read"."""
    objective: bool = True
    """Whether it makes sense to optimise it."""

    def cost(self, value: float) -> float:
        """The value, turned so that lower is better."""
        return -value if self.better == "higher" else value

    def gain(self, value: float, over: float) -> float:
        """How many times better the value is than the other."""
        return value / over if self.better == "higher" else over / value


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A bound on a metric; its direction is the metric's."""

    metric: Metric
    bound: float

    def holds(self, value: float | None) -> bool:
        """Whether the value keeps the bound; an unread value does."""
        return value is None or self.metric.cost(value) <= self.metric.cost(self.bound)

    def __str__(self) -> str:
        return f"{self.metric.name}{_SIGNS[self.metric.better]}{self.bound:g}"


_SIGNS = {"higher": ">=", "lower": "<="}


def metric_named(name: str, where: str) -> Metric:
    """The metric of that name.

    Raises:
        OptionError: If there is none; the text suggests the nearest and lists all.
    """
    if name in METRICS:
        return METRICS[name]
    near = difflib.get_close_matches(name, METRICS, n=1)
    nearest = f" Did you mean {near[0]}?" if near else ""
    raise OptionError(f"{where}: unknown metric {name!r}.{nearest} Known: {', '.join(METRICS)}")


def read_limit(text: str) -> Limit:
    """A limit such as `memory_gb<=40` or `memory_gb=40`.

    Raises:
        OptionError: If it is no such text, or its sign contradicts the metric's direction.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=)\s*([-+.\deE]+)\s*", text)
    if match is None:
        raise OptionError(f"--limit {text!r}: write it like 'memory_gb<=40'")
    name, sign, number = match.groups()
    metric = metric_named(name, "--limit")
    if sign not in ("=", _SIGNS[metric.better]):
        raise OptionError(
            f"--limit {text!r}: {name} is better {metric.better}, "
            f"so only {_SIGNS[metric.better]} bounds it"
        )
    try:
        return Limit(metric=metric, bound=float(number))
    except ValueError:
        raise OptionError(f"--limit {text!r}: {number!r} is not a number") from None


def rate(measurement: Measurement) -> Rate | None:
    """The probe's sustained rate between loader restarts, samples/s."""
    per_batch = _samples(measurement) / measurement.batches if measurement.batches else 0.0
    # Workers that finish in step make a whole round at once; which side of a block's edge it
    # falls on means nothing.
    slack = (measurement.workers + 1) * per_batch if measurement.workers else 0.0
    return rate_of(measurement.blocks, slack, outside_labels(measurement))


def throughput(measurement: Measurement) -> Estimate | None:
    """Samples/s over whole epochs, with the restart of the loader charged to each."""
    steady = rate(measurement)
    if steady is None:
        return None
    share = restart_s_per_sample(measurement)
    within = Estimate(
        value=1 / (1 / steady.estimate.value + share),
        low=1 / (1 / steady.estimate.low + share),
        high=1 / (1 / steady.estimate.high + share),
    )
    between = BETWEEN_PROCESSES * within.value
    return Estimate(
        value=within.value,
        low=within.value - min(math.hypot(within.value - within.low, between), within.value),
        high=within.value + math.hypot(within.high - within.value, between),
    )


def restart_s_per_sample(measurement: Measurement) -> float:
    """Seconds of an epoch's border that fall on each of its samples."""
    if not measurement.restarts_s or not measurement.epoch_samples:
        return 0.0
    return fmean(measurement.restarts_s) / measurement.epoch_samples


def _samples(measurement: Measurement) -> int:
    return sum(block.consumed for block in measurement.blocks)


def _seconds(measurement: Measurement) -> float:
    return sum(block.seconds for block in measurement.blocks)


def _samples_per_s(measurement: Measurement) -> float | None:
    estimate = throughput(measurement)
    return None if estimate is None else estimate.value


def _step_s(measurement: Measurement) -> float | None:
    value = _samples_per_s(measurement)
    if not value or not measurement.steps:
        return None
    return _samples(measurement) / measurement.steps / value


def _data_wait_pct(measurement: Measurement) -> float | None:
    seconds = _seconds(measurement)
    samples = _samples(measurement)
    if seconds <= 0 or not samples or not measurement.steps:
        return None
    restarts = restart_s_per_sample(measurement) * samples
    waited = sum(block.wait_s for block in measurement.blocks) + restarts
    return 100 * min(1.0, waited / (seconds + restarts))


def _gigabytes(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _cpu_util_pct(measurement: Measurement) -> float | None:
    wall_s = (measurement.end_ns - measurement.start_ns) / 1e9
    if measurement.cpu_s is None or wall_s <= 0:
        return None
    return 100 * measurement.cpu_s / wall_s / measurement.cpus


def _device_s_per_sample(measurement: Measurement) -> float | None:
    value = _samples_per_s(measurement)
    return 1 / value if value else None


Read = Callable[[DeviceReading], float | None]


def _over_devices(read: Read) -> Callable[[Measurement], float | None]:
    """The mean over the devices that told it."""
    return lambda measurement: mean_of([read(device) for device in measurement.devices])


def _of_all_devices(measurement: Measurement, read: Read) -> float | None:
    """The sum; None where one of them is missing from it."""
    values = [read(device) for device in measurement.devices]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _power_w(measurement: Measurement) -> float | None:
    return _of_all_devices(measurement, lambda device: device.power_w)


def _joules_per_sample(measurement: Measurement) -> float | None:
    energy_j = _of_all_devices(measurement, lambda device: device.energy_j)
    samples = _samples(measurement)
    return None if energy_j is None or not samples else energy_j / samples


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(name="samples_per_s", unit="samples/s", better="higher", compute=_samples_per_s),
        Metric(name="step_s", unit="s", better="lower", compute=_step_s, objective=False),
        Metric(
            name="data_wait_pct", unit="%", better="lower", compute=_data_wait_pct, objective=False
        ),
        Metric(
            name="gpu_util_pct",
            unit="%",
            better="higher",
            compute=_over_devices(lambda device: device.gpu_util_pct),
            objective=False,
        ),
        Metric(
            name="sm_active_pct",
            unit="%",
            better="higher",
            compute=_over_devices(lambda device: device.sm_active_pct),
            objective=False,
        ),
        Metric(
            name="memory_gb",
            unit="GiB",
            better="lower",
            compute=lambda measurement: _gigabytes(measurement.memory_bytes),
        ),
        Metric(
            name="host_memory_gb",
            unit="GiB",
            better="lower",
            compute=lambda measurement: _gigabytes(measurement.host_memory_bytes),
        ),
        Metric(name="power_w", unit="W", better="lower", compute=_power_w),
        Metric(name="joules_per_sample", unit="J", better="lower", compute=_joules_per_sample),
        Metric(
            name="cpu_util_pct", unit="%", better="higher", compute=_cpu_util_pct, objective=False
        ),
        Metric(name="device_s_per_sample", unit="s", better="lower", compute=_device_s_per_sample),
    )
}

SPEED = METRICS["samples_per_s"]


def read_objectives(text: str) -> tuple[Metric, ...]:
    """The metrics of a comma-separated list, the first one leading.

    Raises:
        OptionError: If one is unknown, named twice, or no objective.
    """
    named = [metric_named(word.strip(), "--objectives") for word in text.split(",")]
    if len({metric.name for metric in named}) < len(named):
        raise OptionError(f"--objectives {text!r}: names a metric twice")
    for metric in named:
        if not metric.objective:
            allowed = ", ".join(name for name, known in METRICS.items() if known.objective)
            raise OptionError(
                f"--objectives: {metric.name} says how busy the machine is, not how good a config "
                f"is; allowed: {allowed}"
            )
    return tuple(named)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the values that were read; None when none was."""
    read = [value for value in values if value is not None]
    return fmean(read) if read else None
