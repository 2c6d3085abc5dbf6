"""Check autotune on a machine with an NVIDIA GPU: one table, and a JSON file with every figure.

    scripts/gpu_check [--device auto|cuda|cpu] [--seconds 345] [--only NAME,NAME] [--to FILE]

Each check is a row of `ROWS`: passed, failed or skipped, with its reason and figures. A check that
fails or takes too long stops no other; the file is written anew after each one, so that what was
found survives an end that comes early. With `--device cpu` the same code runs with small settings,
and what only a GPU can tell is skipped.

The file goes to `$OUT` if that is set, else to results/recorded/:
{"format": 1, "machine": ..., "device": ..., "checks": [{name, status, reason, seconds, figures}]}
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.guard import CLOSE_ENOUGH, Guard, Point, step_point
from autotune.machine import cpus_granted
from autotune.metrics import METRICS, rate, throughput
from autotune.steady import spread
from autotune.types import Estimate, Measurement, Source, Status, Value
from scripts.gpu_lab import (
    MODELS,
    ROOT,
    Clock,
    Lab,
    Labs,
    OutOfTimeError,
    Reading,
    SkipError,
    Watcher,
    Wish,
    choose_device,
    command,
    fingerprint,
    mean_read,
    result_path,
    say,
    told_of,
    write_json,
)

FORMAT = 1
SECONDS = 345.0
LEAST_S = 4.0
"""With less time left a check is not begun."""
GIB = 1024**3

Figures = dict[str, Any]


@dataclass
class Bench:
    """What the checks work with."""

    device: str
    uuid: str
    labs: Labs
    folder: Path
    clock: Clock
    """The running check's."""

    @property
    def on_gpu(self) -> bool:
        """Whether there is something that only a GPU can tell."""
        return self.device != "cpu"

    def lab(self, model: str) -> Lab:
        """The model's lab."""
        return self.labs.of(model, self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check: it fills in figures, raises `CheckError` if they are wrong."""

    name: str
    share_s: float
    run: Callable[[Bench, Figures], None]
    gpu_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a check ended."""

    name: str
    status: str
    """passed, failed or skipped."""
    reason: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    """`in_short` is for the table."""


class CheckError(Exception):
    """What was found is not what was to be found."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise a `CheckError` if something does not hold."""
    if not holds:
        raise CheckError(otherwise)


# --- the run --------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Run the checks that are asked for; 0 if none failed."""
    given = _parser().parse_args(words)
    clock = Clock(given.seconds)
    rows = chosen(given.only)
    try:
        device, facts = choose_device(given.device)
    except SkipError as error:
        say(f"gpu_check: {error}")
        return 1
    path = given.to or result_path("gpu_check", device, facts)
    about = {"format": FORMAT, "machine": fingerprint(facts), "device": device}
    uuid = str((facts.device.get("uuids") or [""])[0])
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        with Labs(device, folder) as labs:
            for row in rows:
                bench = Bench(device, uuid, labs, folder, clock)
                results.append(attempt(row, bench, clock))
                say(line(results[-1]))
                write_json(path, {**about, "checks": [asdict(result) for result in results]})
    print(table(results))
    print(f"written to {path}")
    return int(any(result.status == "failed" for result in results))


def chosen(only: str | None) -> list[Row]:
    """The rows that are asked for, in the table's order.

    Raises:
        SystemExit: If a name is unknown.
    """
    if only is None:
        return list(ROWS)
    names = only.split(",")
    if unknown := set(names) - {row.name for row in ROWS}:
        known = ", ".join(row.name for row in ROWS)
        raise SystemExit(f"gpu_check: no check {', '.join(sorted(unknown))}; known: {known}")
    return [row for row in ROWS if row.name in names]


def attempt(row: Row, bench: Bench, clock: Clock) -> Result:
    """Run one check within its share of the time; whatever it raises is its result."""
    figures: Figures = {}
    started = time.monotonic()
    status, reason = "passed", ""
    try:
        if row.gpu_only and not bench.on_gpu:
            raise SkipError("no GPU")
        if clock.left_s < LEAST_S:
            raise SkipError("no time left")
        bench.clock = clock.part(row.share_s)
        row.run(bench, figures)
    except SkipError as skip:
        status, reason = "skipped", str(skip)
    except CheckError as error:
        status, reason = "failed", str(error)
    except OutOfTimeError as error:
        status, reason = "failed", f"not done within its time {error}".strip()
    except Exception as error:  # noqa: BLE001 - one check must not stop the others
        status, reason = "failed", f"{type(error).__name__}: {error}"
        figures["traceback"] = traceback.format_exc()[-2000:]
    seconds = round(time.monotonic() - started, 1)
    return Result(name=row.name, status=status, reason=reason, seconds=seconds, figures=figures)


def line(result: Result) -> str:
    """One result in one line."""
    told = "; ".join(filter(None, [result.reason, result.figures.get("in_short", "")]))
    return f"{result.name:<20}{result.status:<9}{result.seconds:>6.1f} s  {' '.join(told.split())}"


def table(results: Sequence[Result]) -> str:
    """All results, and their sum."""
    counts = Counter(result.status for result in results)
    told = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
    return "\n".join([*map(line, results), told])


# --- the command line and the tests ---------------------------------------------------------------


def doctor(bench: Bench, figures: Figures) -> None:
    """The doctor finds nothing broken, and what it finds is kept."""
    ran = command(["autotune", "doctor"], bench.clock)
    figures["text"] = ran.out
    figures["in_short"] = (ran.out.strip().rpartition("\n\n")[2] or "").replace("\n", " ")
    expect(ran.code == 0, f"exit code {ran.code}: {ran.err[-300:]}")


TESTS = ROOT / "tests"
MARK = "pytest.mark.gpu"


def gpu_tests(bench: Bench, figures: Figures) -> None:
    """The tests that need a GPU."""
    # Only their files: one that cannot be imported there for another reason would stop them all.
    files = [str(path) for path in sorted(TESTS.glob("test_*.py")) if MARK in path.read_text()]
    words = ["pytest", "-m", "gpu", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", *files]
    ran = command(words, bench.clock)
    lines = ran.out.strip().splitlines()
    figures["in_short"] = lines[-1] if lines else ran.err[-200:]
    figures["failures"] = [text for text in lines if text.startswith(("FAILED", "ERROR"))]
    figures["tail"] = ran.out[-6000:]
    expect(ran.code == 0, f"pytest ended with {ran.code}")
    expect("passed" in figures["in_short"], "none of them ran")


# --- launching ------------------------------------------------------------------------------------


def launching(bench: Bench, figures: Figures) -> None:
    """Probes fork from a template that built the model, and each one reaches its device."""
    lab = bench.lab("mlp")
    figures["notes"], figures["fallback"] = lab.notes, lab.launcher.fallback
    figures["probes"] = probes = []
    wish = Wish(window_s=0.3, min_blocks=2, block_s=0.1)
    for _ in range(3):
        probes.append(told_of(lab.probe({"train.batch_size": 64}, wish, bench.clock)))
    statuses = [probe["status"] for probe in probes]
    figures["device"] = lab.launcher.settle()
    expect(statuses == ["ok"] * 3, f"probes ended {statuses}: {probes[-1].get('message', '')}")
    startup_s = fmean(probe["startup_s"] for probe in probes[1:])
    first_s = fmean(probe["first_step_s"] for probe in probes[1:])
    figures["in_short"] = f"start-up {startup_s:.2f} s, first step {first_s:.2f} s"
    expect(not lab.launcher.fallback, f"not forked from a template: {lab.launcher.fallback}")
    kind = figures["device"].get("type")
    expect(kind == bench.device.partition(":")[0], f"the canary computed on {kind}")


# --- the guard ------------------------------------------------------------------------------------

FIRST_BATCH = 32
MOST_STEPS = 5


def guard(bench: Bench, figures: Figures) -> None:
    """Climb to the limit by safe steps: no step takes more memory than was predicted."""
    figures["limit_bytes"] = limit = (16 if bench.on_gpu else 0.25) * GIB
    climbs: dict[str, list[Figures]] = {}
    figures["climbs"] = climbs
    try:
        for model, precision in product(MODELS, ("default", "bf16")):
            steps: list[Figures] = []
            climbs[f"{model} {precision}"] = steps
            climb(bench, bench.lab(model), precision, limit, steps)
    finally:  # out of time, too: what was compared tells something
        judge_climbs(climbs, figures)
    judge_guard(figures, strict=bench.on_gpu)


def climb(bench: Bench, lab: Lab, precision: str, limit: float, steps: list[Figures]) -> None:
    """Probe larger and larger batches; each step is noted as soon as it is known."""
    batch, predicted = FIRST_BATCH, None
    points: list[Point] = []
    wish = Wish(source=Source.CACHED, window_s=0.2, min_blocks=2, block_s=0.1)
    for _ in range(MOST_STEPS):
        config: dict[str, Value] = {"train.batch_size": batch, "train.precision": precision}
        outcome = lab.probe(config, wish, bench.clock)
        step = {"batch": batch, "predicted_bytes": predicted, **told_of(outcome)}
        steps.append(step)
        point = None if outcome.measurement is None else step_point(outcome.measurement, batch, 1)
        if point is None:
            return
        points.append(point)
        known = Guard.of(limit, points)
        if known.largest_safe < CLOSE_ENOUGH * batch:
            return
        batch = known.largest_safe
        predicted = known.most_bytes(batch)


def judge_climbs(climbs: dict[str, list[Figures]], figures: Figures) -> None:
    """Count what was predicted, and how often more was taken."""
    predicted = [step for steps in climbs.values() for step in steps if step["predicted_bytes"]]
    known = [step for step in predicted if step.get("memory_bytes")]
    ratios = [step["memory_bytes"] / step["predicted_bytes"] for step in known]
    over = sum(ratio > 1 for ratio in ratios)
    over += sum(step["status"] == Status.OUT_OF_MEMORY for step in predicted)
    figures |= {"predictions": len(predicted), "overshoots": over}
    figures["real_of_predicted"] = [round(ratio, 4) for ratio in ratios]
    worst = f", real is {min(ratios):.2f} to {max(ratios):.2f} of predicted" if ratios else ""
    figures["in_short"] = f"{over} overshoots in {len(predicted)} predictions{worst}"
    figures["not_compared"] = [
        name for name, steps in climbs.items() if not any(step in known for step in steps)
    ]


def judge_guard(figures: Figures, *, strict: bool) -> None:
    """On the CPU memory is too noisy for the bound to be judged."""
    missing = figures["not_compared"]
    expect(not missing, f"no prediction could be compared: {', '.join(missing)}")
    expect(not (strict and figures["overshoots"]), "the bound was passed")


# --- tuning ---------------------------------------------------------------------------------------

TROUBLES = {Status.CRASH, Status.ERROR, Status.DEVICE_LOST, Status.TIMEOUT}
TOLD = ("samples_per_s", "data_wait_pct", "gpu_util_pct", "memory_gb", "power_w")


def tuning(model: str) -> Callable[[Bench, Figures], None]:
    """Tune a model by the command line: an answer, and no row that only a fault explains."""

    def run(bench: Bench, figures: Figures) -> None:
        folder = bench.folder / f"tune-{model}"
        budget = "25s" if bench.on_gpu else "10s"
        words = ["autotune", "--model", str(MODELS[model]), "--budget", budget]
        try:
            ran = command([*words, "--output", str(folder)], bench.clock)
        finally:
            figures |= told_by_run(folder)
        figures |= {"line": ran.out.strip(), "err": ran.err[-3000:]}
        expect(ran.code == 0, f"exit code {ran.code}: {ran.err[-300:]}")
        answer = figures["answer"]
        figures["in_short"] = (
            f"{'keep yours' if answer['keep'] else answer['speedup']}, "
            f"{sum(figures['statuses'].values())} rows in {answer['tuning_s']:.0f} s"
        )
        troubles = TROUBLES & set(figures["statuses"])
        expect(not troubles, f"rows that ended in {', '.join(sorted(troubles))}")

    return run


def told_by_run(folder: Path) -> Figures:
    """What a run's folder tells, however far it came."""
    found: Figures = {"statuses": {}}
    if (folder / "run.json").exists():
        found["answer"] = json.loads((folder / "run.json").read_text()).get("answer")
    if not (folder / "trials.csv").exists():
        return found
    with (folder / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found["statuses"] = dict(Counter(row["status"] for row in rows))
    found["reasons"] = [row["reason"][:200] for row in rows if row["status"] in TROUBLES]
    columns = ("trial", "stage", "status", "labels", *TOLD, "startup_s", "first_step_s", "probe_s")
    found["rows"] = [{name: row.get(name) for name in columns} for row in rows]
    return found


# --- short and long -------------------------------------------------------------------------------


CLOSE = 0.03
"""A difference, relative, that is no reason to worry, however sure it is."""
TELLING = 0.2
"""An interval wider than this tells nothing."""


def short_and_long(bench: Bench, figures: Figures) -> None:
    """Short probes tell what a long run tells."""
    lab = bench.lab("cnn")
    config: dict[str, Value] = {
        "loader.num_workers": min(8, cpus_granted()[0]),
        "loader.pin_memory": bench.on_gpu,
        "train.batch_size": 64,
        "train.precision": "bf16" if bench.on_gpu else "default",
    }
    long_s = 30.0 if bench.on_gpu else 2.0
    long = Wish(window_s=long_s, min_blocks=10**6)
    figures["config"], figures["rates"] = config, []
    for wish in (Wish(), Wish(), long, Wish(), Wish()):
        outcome = lab.probe(config, wish, bench.clock)
        measured = outcome.measurement
        known = throughput(measured) if measured is not None else None
        expect(known is not None, f"a probe ended {told_of(outcome)}")
        assert known is not None
        assert measured is not None
        labels = getattr(rate(measured), "labels", ())
        told = {"long": wish is long, "labels": labels, **asdict(known), **told_of(outcome)}
        figures["rates"].append({**told, "blocks": [asdict(block) for block in measured.blocks]})
    short = [told["value"] for told in figures["rates"] if not told["long"]]
    (whole,) = (told for told in figures["rates"] if told["long"])
    found = ratio_of(short, Estimate(**{name: whole[name] for name in ("value", "low", "high")}))
    figures["ratio"] = asdict(found)
    figures["in_short"] = f"short / long = {found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
    if bench.on_gpu:
        judge_ratio(found)


def judge_ratio(found: Estimate) -> None:
    """Short probes tell the same, and tell it surely enough."""
    close = found.low <= 1 <= found.high or abs(found.value - 1) <= CLOSE
    expect(close, "short probes tell something else")
    expect(found.high - found.low <= TELLING, "too noisy to tell")


def ratio_of(short: Sequence[float], long: Estimate) -> Estimate:
    """The mean of some rates over another rate, with the interval of both."""
    mean = fmean(short)
    half = math.hypot(spread(short) / mean, (long.high - long.low) / 2 / long.value)
    ratio = mean / long.value
    return Estimate(value=ratio, low=ratio * (1 - half), high=ratio * (1 + half))


# --- NVML -----------------------------------------------------------------------------------------

CONTEXT_BYTES = 4 * GIB
"""More than a context and its libraries take."""
ENERGY_S = 10.0


def nvml(bench: Bench, figures: Figures) -> None:
    """NVML sees what the probe itself counts: memory, busy time, and energy in a long window."""
    wish = Wish(source=Source.CACHED, window_s=ENERGY_S + 1, min_blocks=10**6)
    config: dict[str, Value] = {"train.batch_size": 32, "train.precision": "bf16"}
    lab = bench.lab("transformer")
    with Watcher(bench.uuid) as watcher:
        outcome = lab.probe(config, wish, bench.clock)
    measured = outcome.measurement
    figures["probe"] = told_of(outcome)
    figures["readings"] = [asdict(reading) for reading in watcher.readings]
    expect(measured is not None, f"the probe ended {figures['probe']}")
    assert measured is not None
    inside = watcher.within(measured.start_ns, measured.end_ns)
    compare(measured, inside, watcher.baseline, figures)


def compare(
    measured: Measurement, inside: Sequence[Reading], before: Reading | None, figures: Figures
) -> None:
    """Hold NVML's readings of a window against the probe's own counters."""
    wait_pct = METRICS["data_wait_pct"].compute(measured)
    busy = mean_read([reading.busy_pct for reading in inside])
    powers = [reading.power_w for reading in inside]
    figures |= {
        "busy_pct": {"nvml": busy, "events": None if wait_pct is None else 100 - wait_pct},
        "power_w": {"sensor": mean_read(powers), "energy": power_from_energy(inside)},
        "clock_mhz": mean_read([reading.clock_mhz for reading in inside]),
    }
    used = max((r.used_bytes for r in inside if r.used_bytes is not None), default=None)
    context = None
    if used is not None and before and before.used_bytes is not None and measured.memory_bytes:
        context = used - before.used_bytes - measured.memory_bytes
    figures["context_bytes"] = context
    figures["in_short"] = (
        f"busy {busy} % (NVML), {figures['busy_pct']['events']} % (events); "
        f"context {None if context is None else round(context / GIB, 2)} GiB"
    )
    expect(bool(inside), "no reading falls into the window")
    expect(context is None or 0 <= context <= CONTEXT_BYTES, "memory differs by no context")
    events = figures["busy_pct"]["events"]
    expect(busy is None or events is None or busy <= events + 15, "NVML is busier than the events")


def power_from_energy(inside: Sequence[Reading]) -> float | None:
    """Mean power by the energy counter; None where it does not tick or goes back."""
    known = [(r.at_ns, r.energy_j) for r in inside if r.energy_j is not None]
    if len(known) < 2 or any(later[1] < earlier[1] for earlier, later in pairwise(known)):
        return None
    seconds = (known[-1][0] - known[0][0]) / 1e9
    return (known[-1][1] - known[0][1]) / seconds if seconds > 0 else None


ROWS = (
    Row(name="doctor", share_s=25, run=doctor),
    Row(name="launching", share_s=30, run=launching),
    Row(name="gpu_tests", share_s=110, run=gpu_tests, gpu_only=True),
    Row(name="guard", share_s=70, run=guard),
    Row(name="tune_cnn", share_s=40, run=tuning("cnn")),
    Row(name="tune_transformer", share_s=40, run=tuning("transformer")),
    Row(name="short_and_long", share_s=60, run=short_and_long),
    Row(name="nvml", share_s=25, run=nvml, gpu_only=True),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--only", metavar="NAME,NAME", help="only these checks")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the JSON file")
    return parser
