"""Knob values, numbers and durations in plain words."""

from __future__ import annotations

from collections.abc import Callable

from autotune.types import Config, Estimate, Value

_WORDS: dict[str, Callable[[Value], str]] = {
    "loader.num_workers": lambda v: f"{v} worker{'' if v == 1 else 's'}",
    "loader.prefetch_factor": lambda v: f"prefetch {v}",
    "loader.pin_memory": lambda v: "pinned" if v else "not pinned",
    "loader.persistent_workers": lambda v: "kept between epochs" if v else "new each epoch",
    "train.batch_size": lambda v: f"micro-batch {v}",
    "train.accumulation_steps": lambda v: f"accumulation {v}",
    "train.precision": lambda v: str(v),
    "host.threads": lambda v: f"{v} thread{'' if v == 1 else 's'}",
    "host.omp_wait_policy": lambda v: f"OpenMP {v}",
}


def change(config: Config, before: Config) -> str:
    """What is new in a config, such as `8 workers, pinned`."""
    # The baseline names no prefetch factor without workers: PyTorch's own is no change.
    unsaid = {"loader.prefetch_factor": 2, "loader.persistent_workers": False}
    return ", ".join(
        told(name, config[name])
        for name in config.changed_from(before)
        if name in config and before.get(name, unsaid.get(name)) != config[name]
    )


def told(name: str, value: Value) -> str:
    """One knob's value in words."""
    return _WORDS[name](value) if name in _WORDS else f"{name}={value}"


def number(value: float | None) -> str:
    """A number to four figures, thousands apart; a dash where it was not read."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.4g}" if abs(value) < 100 else f"{value:.0f}"


def rate(estimate: Estimate, unit: str = "samples") -> str:
    """`412 samples/s [405, 419]`."""
    return f"{number(estimate.value)} {unit}/s [{number(estimate.low)}, {number(estimate.high)}]"


def times(estimate: Estimate) -> str:
    """`4.1x [4.0, 4.2]`, with the digits that tell the ends apart."""
    digits = 1 if estimate.value >= 2 and estimate.high - estimate.low >= 0.1 else 2
    low, high = f"{estimate.low:.{digits}f}", f"{estimate.high:.{digits}f}"
    return f"{estimate.value:.{digits}f}x [{low}, {high}]"


def percent(value: float | None) -> str:
    """A share, without decimals; a dash where it was not read."""
    return "-" if value is None else f"{value:.0f} %"


def brief(value: float) -> str:
    """A number to two figures, and no fewer than it has before its point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """`45 s`, `2 min 5 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
