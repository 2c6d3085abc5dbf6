"""Record a grid of configs on a GPU, in the format of scripts/recording.py.

    scripts/gpu_record [--device auto|cuda|cpu] [--model cnn|transformer|mlp] [--seconds 340]
                       [--workers 0,2,4,8] [--batches 64,256,1024] [--precisions default,bf16]
                       [--pins true,false] [--passes N]
                       [--seed 0] [--to FILE]

At most 96 configs. They are visited in random order, pass after pass, each time in a fresh process,
until the time is over: two passes where time allows. Each pass also records the halves by
themselves. The file goes to `$OUT` if that is set, else to results/recorded/; it is written anew
every few probes, so that an early end loses little.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from autotune.types import Value
from scripts.gpu_lab import (
    MODELS,
    Clock,
    OutOfTimeError,
    SkipError,
    choose_device,
    fingerprint,
    result_path,
    say,
)
from scripts.recording import PASSES, Grid, Order, record_grid

SECONDS = 340.0
MOST_CONFIGS = 96
WINDOW_S = 0.6
BLOCK_S = 0.05
"""Short windows: what is to be learnt must fit into the time that a machine is lent for."""

GRID: dict[str, str] = {
    "workers": "0,2,4,8",
    "batches": "64,256,1024",
    "precisions": "default,bf16",
    "pins": "true,false",
}
CPU_GRID = {
    **GRID,
    "workers": "0,1,2",
    "batches": "16,64",
    "precisions": "default",
    "pins": "false",
}
KNOBS = {
    "workers": "loader.num_workers",
    "batches": "train.batch_size",
    "precisions": "train.precision",
    "pins": "loader.pin_memory",
}
"""Option: the knob that it lists values of."""


def main(words: Sequence[str]) -> int:
    """Record until the time is over; 0 if anything was recorded."""
    given = _parser().parse_args(words)
    clock = Clock(given.seconds)
    try:
        device, facts = choose_device(given.device)
    except SkipError as error:
        say(f"gpu_record: {error}")
        return 1
    values = values_of(vars(given), CPU_GRID if device == "cpu" else GRID)
    path = given.to or result_path(f"gpu_record-{given.model}", device, facts, ".parquet")
    about = {"name": given.model, "made_on": fingerprint(facts), "seed": given.seed}
    with tempfile.TemporaryDirectory(prefix="gpu-record-") as name:
        order = Order(
            grid=Grid(model=MODELS[given.model], values=values),
            about=about,
            path=path,
            scratch=Path(name),
            device=device,
            passes=given.passes,
            window_s=WINDOW_S,
            block_s=BLOCK_S,
        )
        try:
            record = record_grid(order, clock)
        except (OutOfTimeError, RuntimeError) as error:
            say(f"gpu_record: {given.model} cannot be probed: {str(error) or 'no time left'}")
            return 1
    print(f"written to {path}: {record.told()}")
    return int(not record.probes)


def values_of(given: Mapping[str, Any], default: Mapping[str, str]) -> dict[str, tuple[Value, ...]]:
    """The values of each knob.

    Raises:
        SystemExit: If there are too many configs.
    """
    values = {
        knob: tuple(as_value(word) for word in (given[option] or default[option]).split(","))
        for option, knob in KNOBS.items()
    }
    if (count := len(list(product(*values.values())))) > MOST_CONFIGS:
        raise SystemExit(f"gpu_record: {count} configs; at most {MOST_CONFIGS} fit into the time")
    return values


def as_value(word: str) -> Value:
    """A truth value, a number, or the word."""
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.isdigit() else word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_record", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--model", default="cnn", choices=tuple(MODELS))
    add("--seconds", type=float, default=SECONDS, help="for all of it")
    for option, default in GRID.items():
        add(f"--{option}", metavar="A,B", help=f"values of {KNOBS[option]}; default {default}")
    add("--passes", type=int, default=PASSES, metavar="N")
    add("--seed", type=int, default=0)
    add("--to", type=Path, metavar="FILE", help="the parquet file")
    return parser
