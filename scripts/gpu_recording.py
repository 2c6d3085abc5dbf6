"""Record a grid of configs, each in several fresh processes, as raw series for replaying searches.

    scripts/gpu_record [--device auto|cuda|cpu] [--model cnn|transformer|mlp] [--seconds 340]
                       [--workers 0,2,4,8] [--batches 64,256,1024] [--precisions default,bf16]
                       [--pins true,false] [--passes N]
                       [--seed 0] [--to FILE]

At most 96 configs. They are visited in random order, pass after pass, each time in a fresh process,
until the time is over: two passes where time allows. The first pass also records the halves by
themselves: the device (cached batches) for each batch and precision, the loader (batches dropped)
for each number of workers and pinning.

Two files go to `$OUT` if that is set, else to results/recorded/; they are written anew every few
probes, so that an early end loses little.

FILE.json: `{"format": 1, "machine": ..., "device": ..., "model": ..., "seed": ..., "wish": ...,
"grid": {knob: [values]}, "configs": N, "passes": [configs visited in each pass], "probes": [...]}`.
A probe:

    number        its place in time
    pass          0 is the first
    kind          both (loader and training), device, loader
    config        knob: value; key: eight hex digits of it
    status        ok, out_of_memory, timeout, crash, error, invalid; message, phase if not ok
    probe_s, build_s, startup_s, first_step_s
    restarts_s    seconds of each epoch's border; epoch_samples: samples between two of them
    batches, steps, skipped_steps, optimizer_steps, workers, finite, parity_loss
    memory_bytes, resident_bytes, host_memory_bytes, cpu_s, worker_cpu_s, start_ns, end_ns
    facts, notes  what else the probe told
    blocks        [{seconds, consumed, produced, wait_s, steps}], in order

What could not be read is null. FILE.parquet has the same blocks as a flat table: number, pass,
kind, key, status, one column per knob, block (0 is the first), seconds, consumed, produced, wait_s,
steps. Nothing is averaged and nothing is left out: warm-up, restarts and steadiness are judged by
who reads it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from autotune.launcher import Outcome
from autotune.types import Config, Sink, Source, Value
from scripts.gpu_lab import (
    MODELS,
    Clock,
    Lab,
    OutOfTimeError,
    SkipError,
    Wish,
    choose_device,
    fingerprint,
    result_path,
    say,
    write_json,
)

FORMAT = 1
SECONDS = 340.0
MOST_CONFIGS = 96
WRITE_EVERY = 10
WISH = Wish(window_s=0.6, min_blocks=10**6, block_s=0.05)
"""Short windows suffice where fresh processes repeat them; no window ends early."""

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

KINDS = {
    "both": WISH,
    "device": replace(WISH, source=Source.CACHED),
    "loader": replace(WISH, sink=Sink.DISCARD),
}

Grid = dict[str, list[Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One probe that is to be made."""

    turn: int
    kind: str
    config: Config


def main(words: Sequence[str]) -> int:
    """Record until the time is over; 0 if anything was recorded."""
    given = _parser().parse_args(words)
    clock = Clock(given.seconds)
    try:
        device, facts = choose_device(given.device)
    except SkipError as error:
        say(f"gpu_record: {error}")
        return 1
    grid = grid_of(vars(given), CPU_GRID if device == "cpu" else GRID)
    path = given.to or result_path(f"gpu_record-{given.model}", device, facts)
    record: dict[str, Any] = {
        "format": FORMAT,
        "machine": fingerprint(facts),
        "device": device,
        "model": given.model,
        "seed": given.seed,
        "wish": asdict(WISH),
        "grid": grid,
        "configs": len(configs_of(grid)),
        "passes": [],
        "probes": [],
    }
    with tempfile.TemporaryDirectory(prefix="gpu-record-") as name:
        try:
            lab = Lab(given.model, device, Path(name), clock)
        except (OutOfTimeError, RuntimeError) as error:
            say(f"gpu_record: {given.model} cannot be probed: {str(error) or 'no time left'}")
            return 1
        try:
            plan = takewhile(
                lambda visit: given.passes is None or visit.turn < given.passes,
                visits(grid, given.seed),
            )
            fill(record, lab, plan, clock, path)
        finally:
            lab.close()
            write(record, path)
    say(told(record))
    print(f"written to {path} and {path.with_suffix('.parquet').name}")
    return int(not record["probes"])


def grid_of(given: Mapping[str, Any], default: Mapping[str, str]) -> Grid:
    """The values of each knob.

    Raises:
        SystemExit: If there are too many configs.
    """
    grid = {
        knob: [as_value(word) for word in (given[option] or default[option]).split(",")]
        for option, knob in KNOBS.items()
    }
    if (count := len(configs_of(grid))) > MOST_CONFIGS:
        raise SystemExit(f"gpu_record: {count} configs; at most {MOST_CONFIGS} fit into the time")
    return grid


def as_value(word: str) -> Value:
    """A truth value, a number, or the word."""
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.isdigit() else word


def configs_of(grid: Grid) -> list[Config]:
    """Every combination."""
    return [Config(dict(zip(grid, values, strict=True))) for values in product(*grid.values())]


def visits(grid: Grid, seed: int) -> Iterator[Visit]:
    """Pass after pass without end, each one in an order of its own; the halves in the first."""
    dice = random.Random(seed)
    turn = 0
    while True:
        one = [Visit(turn=turn, kind="both", config=config) for config in configs_of(grid)]
        if turn == 0:
            one += [Visit(turn=0, kind=kind, config=c) for kind, c in halves(grid)]
        dice.shuffle(one)
        yield from one
        turn += 1


def halves(grid: Grid) -> Iterator[tuple[str, Config]]:
    """The device for each of its settings, the loader for each of its own at the middle batch."""
    batches = grid["train.batch_size"]
    plain = Config({name: values[0] for name, values in grid.items()})
    for batch, precision in product(batches, grid["train.precision"]):
        yield "device", plain.but({"train.batch_size": batch, "train.precision": precision})
    middle = plain.but({"train.batch_size": batches[len(batches) // 2]})
    for workers, pin in product(grid["loader.num_workers"], grid["loader.pin_memory"]):
        yield "loader", middle.but({"loader.num_workers": workers, "loader.pin_memory": pin})


def fill(record: dict[str, Any], lab: Lab, plan: Iterator[Visit], clock: Clock, path: Path) -> None:
    """Make one probe after another until the clock stops; the one in flight then is dropped."""
    passes, probes = record["passes"], record["probes"]
    for visit in plan:
        try:
            outcome = lab.probe(visit.config, KINDS[visit.kind], clock)
        except OutOfTimeError:
            return
        if len(passes) <= visit.turn:
            passes.append(0)
        passes[visit.turn] += visit.kind == "both"
        probes.append(probe_of(len(probes), visit, outcome))
        if len(probes) % WRITE_EVERY == 0:
            write(record, path)
            say(f"{told(record)}; {clock.left_s:.0f} s left")


def probe_of(number: int, visit: Visit, outcome: Outcome) -> dict[str, Any]:
    """One probe's entry: what it told, as it told it."""
    found: dict[str, Any] = {
        "number": number,
        "pass": visit.turn,
        "kind": visit.kind,
        "key": visit.config.key,
        "config": dict(visit.config),
        "probe_s": outcome.probe_s,
        "blocks": [],
    }
    if outcome.failure is not None:
        return {**found, **asdict(outcome.failure)}
    assert outcome.measurement is not None
    return {**found, "status": "ok", **asdict(outcome.measurement)}


def rows_of(probes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a flat table; a probe without any has no row."""
    names = ("number", "pass", "kind", "key", "status")
    return [
        {**{name: probe[name] for name in names}, **probe["config"], "block": place, **block}
        for probe in probes
        for place, block in enumerate(probe["blocks"])
    ]


def write(record: Mapping[str, Any], path: Path) -> None:
    """Both files, whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_json(path, record)
    if rows := rows_of(record["probes"]):
        part = path.with_suffix(".parquet.part")
        pq.write_table(pa.Table.from_pylist(rows), part)
        part.replace(path.with_suffix(".parquet"))


def told(record: Mapping[str, Any]) -> str:
    """How far it is."""
    probes = record["probes"]
    statuses = Counter(str(probe["status"]) for probe in probes)
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    passes = " + ".join(map(str, record["passes"]))
    return f"{record['configs']} configs, {len(probes)} probes ({counts}), passes {passes or 0}"


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
    add("--passes", type=int, metavar="N", help="at most; default as many as fit into the time")
    add("--seed", type=int, default=0)
    add("--to", type=Path, metavar="FILE", help="the JSON file")
    return parser
