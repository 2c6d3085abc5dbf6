"""Recorded grids, and searches replayed over them."""

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from made_up import CPU, FACTS, asking
from oracle import Job, Law

from autotune.launcher import Outcome
from autotune.metrics import throughput
from autotune.scene import Ask
from autotune.search import SAMPLERS
from autotune.space import BATCH, WORKERS
from autotune.types import Failure, Sink, Source, Stage, Status
from scripts.comparators import COMPARATORS, chance_of_random, expected_of_random
from scripts.gpu_lab import Clock, OutOfTimeError
from scripts.grids import GRIDS, HELD_OUT
from scripts.recording import (
    BEST_PASSES,
    FORMAT,
    PASSES,
    Crew,
    Order,
    Record,
    Visit,
    best_again,
    failure_of,
    half_of,
    halves,
    measurement_of,
    one_pass,
    space_of,
)
from scripts.replaying import OverError, Recorded, Run, stretch

ROOT = Path(__file__).resolve().parent.parent

VALUES = {
    "loader.num_workers": [0, 1, 2, 4, 8],
    "loader.prefetch_factor": [2, 4],
    "train.batch_size": [8, 16, 32, 64],
    "train.precision": ["default", "bf16"],
}
LAW = Law(load_s=2e-3, launch_s=4e-3, sample_s=2e-4, speedups={("train.precision", "bf16"): 1.3})
FAILS = replace(LAW, fails_above=16)
KINDS = {"both": {}, "device": {"source": Source.CACHED}, "loader": {"sink": Sink.DISCARD}}


def about(**changes):
    known = {
        "format": FORMAT,
        "name": "made up",
        "seed": 0,
        "values": VALUES,
        "block_s": 0.25,
        "startup_s": 2.0,
        "current": {WORKERS: 0, BATCH: 8},
        "machine": asdict(CPU),
        "facts": asdict(FACTS),
    }
    return json.loads(json.dumps({**known, **changes}))


def recorded(law=LAW, *, passes=PASSES, noise=0.003):
    """A record of a job whose laws are known."""
    record = Record(about(), [])
    job = made_up_job(law, noise)
    for turn in range(passes):
        for visit in one_pass(record.space, turn, 0):
            record.add(visit, outcome(job, visit))
    for turn in range(passes, BEST_PASSES):
        for visit in best_again(record, turn):
            record.add(visit, outcome(job, visit))
    return record


def made_up_job(law, noise=0.003):
    request = asking(**{n.replace(".", "__"): tuple(v) for n, v in VALUES.items()})
    return Job(law=law, request=request, current={WORKERS: 0, BATCH: 8}, noise=noise)


def outcome(job, visit):
    ask = Ask(config=visit.config, stage=Stage.SEARCH, why="", **KINDS[visit.kind])
    found = job.outcome(ask)
    if isinstance(found, Failure):
        return Outcome(failure=found, probe_s=1.0)
    return Outcome(measurement=found, probe_s=4.0)


@pytest.fixture(scope="module")
def record():
    return recorded()


@pytest.fixture(scope="module")
def grid(record):
    return Recorded(record)


@pytest.fixture(scope="module")
def failing():
    return Recorded(recorded(FAILS))


# --- what is visited ------------------------------------------------------------------------------


def test_a_pass_visits_every_config_and_every_half_once_in_an_order_of_its_own():
    space = space_of(about())
    configs = list(space.grid())
    assert len(configs) == (1 + 4 * 2) * 4 * 2
    passes = [one_pass(space, turn, seed=3) for turn in range(2)]
    for visits in passes:
        assert Counter(v.config for v in visits if v.kind == "both") == Counter(configs)
    kinds = Counter(visit.kind for visit in passes[0])
    assert kinds == {"both": 72, "device": 4 * 2, "loader": 1 + 4 * 2}
    assert [v.config for v in passes[0]] != [v.config for v in passes[1]]
    assert passes[0] == one_pass(space, 0, seed=3)


def test_every_config_finds_its_halves():
    space = space_of(about())
    known = set(halves(space))
    for config in space.grid():
        assert ("device", half_of("device", config, space)) in known
        own = config.but({BATCH: 8})
        assert ("loader", half_of("loader", own, space)) in known


def test_the_best_are_visited_again(record):
    rates = record.rates()
    again = [visit.config.key for visit in best_again(record, turn=7)]
    assert len(again) == 4
    assert min(rates[key] for key in again) >= sorted(rates.values())[-4]
    counts = record.done()
    assert Counter(counts["both", key] for key in rates)[PASSES] >= len(rates) - 12
    assert max(counts.values()) == BEST_PASSES


def test_a_record_brings_back_what_was_measured(record, tmp_path):
    failure = Failure(status=Status.OUT_OF_MEMORY, message="device: no room", phase="first step")
    visit = Visit(turn=0, kind="both", config=next(record.space.grid()))
    one = Record(record.about, list(record.probes))
    one.add(visit, Outcome(failure=failure, probe_s=1.5))
    one.write(tmp_path / "grid.parquet")
    again = Record.read(tmp_path / "grid.parquet")
    assert again.about == record.about
    assert len(again.probes) == len(one.probes)
    for before, after in zip(one.probes, again.probes, strict=True):
        assert measurement_of(before) == measurement_of(after)
        assert failure_of(before) == failure_of(after)
    assert failure_of(again.probes[-1]) == failure
    assert again.probes[-1]["probe_s"] == 1.5


def test_another_format_is_refused(record, tmp_path):
    Record({**record.about, "format": FORMAT - 1}, record.probes).write(tmp_path / "old.parquet")
    with pytest.raises(ValueError, match="no record of format"):
        Record.read(tmp_path / "old.parquet")


@pytest.mark.parametrize("name", GRIDS)
def test_the_named_grids_can_be_recorded(name):
    grid = GRIDS[name]
    assert grid.model.is_file()
    space = space_of(about(values={knob: list(values) for knob, values in grid.values.items()}))
    assert 80 <= len(list(space.grid())) <= (1200 if name == "many" else 256)
    assert not space.refusals


def test_one_real_and_one_sleeping_grid_are_held_out():
    assert len(HELD_OUT & set(GRIDS)) == 2
    assert {GRIDS[name].at_once > 1 for name in HELD_OUT} == {True, False}


class MadeUpLab:
    """Probes a job whose laws are known, until its time is over."""

    def __init__(self, job, most):
        self.job = job
        self.left = most

    def probe(self, config, wish, clock):
        if not self.left:
            raise OutOfTimeError
        self.left -= 1
        kind = next(name for name, known in SHAPES.items() if known == (wish.source, wish.sink))
        return outcome(self.job, Visit(turn=0, kind=kind, config=config))


SHAPES = {
    "both": (Source.LOADER, Sink.TRAIN),
    "device": (Source.CACHED, Sink.TRAIN),
    "loader": (Source.LOADER, Sink.DISCARD),
}


def test_recording_goes_on_where_it_ended(tmp_path):
    order = Order(
        grid=GRIDS["balanced"], about={"seed": 0}, path=tmp_path / "grid.parquet",
        scratch=tmp_path, device="cpu",
    )  # fmt: skip
    record = Record(about(), [])
    job = made_up_job(LAW)
    visits = one_pass(record.space, 0, 0)
    with pytest.raises(OutOfTimeError):
        Crew([MadeUpLab(job, 40), MadeUpLab(job, 7)], Clock(60), record, order).visit(visits)
    assert 7 <= len(record.probes) < len(visits)  # one lab's end is every lab's
    record.write(order.path)
    again = Record.read(order.path)
    Crew([MadeUpLab(job, 1000)], Clock(60), again, order).visit(visits)
    assert set(again.done().values()) == {1}
    assert len(again.probes) == len(visits)
    assert [probe["number"] for probe in again.probes] == list(range(len(visits)))
    Crew([MadeUpLab(job, 0)], Clock(60), again, order).visit(visits)  # nothing is left to do


# --- replaying ------------------------------------------------------------------------------------


def test_a_stretch_is_contiguous_and_costs_what_it_lasts(grid):
    probe = grid.probes("both", grid.optimum)[0]
    run = Run(grid, 60.0, seed=0)
    ask = Ask(config=grid.optimum, stage=Stage.VERIFY, why="")
    enough = replace(run._enough(ask), max_window_s=1.0, min_blocks=100)
    firsts = set()
    for _ in range(40):
        part, cost_s = stretch(probe, enough, run.dice)
        first = probe.measured.blocks.index(part.blocks[0])
        firsts.add(first)
        assert part.blocks == probe.measured.blocks[first : first + len(part.blocks)]
        lasted = sum(block.seconds for block in part.blocks)
        assert 1.0 <= lasted < 1.3
        whole = sum(block.seconds for block in probe.measured.blocks)
        assert cost_s == pytest.approx(probe.probe_s - whole + lasted, rel=1e-6)
        assert part.cpu_s == pytest.approx(probe.measured.cpu_s * lasted / whole)
    assert len(firsts) > 3


def test_a_stretch_that_cannot_win_is_cut_short(grid):
    run = Run(grid, 60.0, seed=0)
    slow = min(grid.truth, key=grid.truth.get)
    beaten = Ask(config=slow, stage=Stage.VERIFY, why="", beat=grid.truth[grid.optimum])
    part, _ = stretch(grid.probes("both", slow)[0], run._enough(beaten), run.dice)
    assert part.stopped == "dominated"


def test_what_was_not_recorded_is_an_error(grid):
    with pytest.raises(LookupError, match="was not recorded"):
        grid.probes("both", grid.optimum.but({BATCH: 48}))


def test_the_truth_of_the_best_is_measured_after_they_were_chosen():
    noisy = Recorded(recorded(noise=0.05))
    best = noisy.probes("both", noisy.optimum)
    later = [throughput(p.measured).value for p in best if p.turn >= PASSES]
    assert noisy.truth[noisy.optimum] == pytest.approx(sum(later) / len(later))
    assert 0 < noisy.half_width < 0.5


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_is_replayed_within_its_budget(grid, sampler):
    run = Run(grid, 0.3 * grid.grid_s, seed=1).product(sampler)
    assert run.now_s <= run.budget_s
    assert run.moments[0].config == grid.space.baseline
    assert 0 < run.share_at(math.inf) <= 1
    again = Run(grid, 0.3 * grid.grid_s, seed=1).product(sampler)
    assert [row.config for row in again.rows.judged] == [row.config for row in run.rows.judged]
    assert again.moments == run.moments


def test_the_default_search_finds_the_best_of_a_replayed_grid(grid):
    shares = [
        Run(grid, 0.25 * grid.grid_s, seed).product("staged").share_at(math.inf)
        for seed in range(10)
    ]
    assert sorted(shares)[1] > 0.97


def test_no_sampler_repeats_what_is_known_not_to_fit(failing):
    for sampler in SAMPLERS:
        run = Run(failing, 0.5 * failing.grid_s, seed=2).product(sampler)
        assert run.repeats == 0, sampler
        assert run.share_at(math.inf) > 0
    careless = Run(failing, 0.5 * failing.grid_s, seed=2).plain(COMPARATORS["local"])
    assert careless.failures(Status.OUT_OF_MEMORY) > 0


def test_a_probe_that_ends_after_the_budget_does_not_count(grid):
    run = Run(grid, grid.startup_s + 1.0, seed=0)
    with pytest.raises(OverError):
        run.measure(Ask(config=grid.space.baseline, stage=Stage.BASELINE, why=""))
    assert run.rows.judged == []
    assert run.now_s == run.budget_s


# --- what it is compared with ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in COMPARATORS if name != "GP"])
def test_every_comparator_searches_within_its_budget(failing, name):
    run = Run(failing, 0.3 * failing.grid_s, seed=3).plain(COMPARATORS[name])
    assert run.now_s <= run.budget_s
    assert run.share_at(math.inf) >= failing.share(failing.space.baseline)
    if name != "default":
        assert run.share_at(math.inf) > failing.share(failing.space.baseline)


def test_random_search_is_calculated():
    shares = [0.0, 0.0, 0.5, 0.8, 0.97, 0.99, 1.0]
    assert chance_of_random(shares, 0, 0.98) == 0
    assert chance_of_random(shares, 1, 0.98) == pytest.approx(2 / 7)
    assert chance_of_random(shares, 7, 0.98) == 1
    assert expected_of_random(shares, 7) == 1.0
    assert expected_of_random(shares, 1) == 0.8


def test_the_benchmark_tells_and_writes_what_it_found(record, tmp_path):
    record.write(tmp_path / "grid.parquet")
    words = ["--grid", tmp_path / "grid.parquet", "--seeds", "2", "--processes", "1"]
    words += ["--only", "staged,default,local", "--to", tmp_path / "found"]
    command = [sys.executable, ROOT / "scripts" / "bench_search", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (grid,) = json.loads(done.stdout)["grids"]
    assert (grid["configs"], grid["failing"], grid["held_out"]) == (72, 0, False)
    staged, default = grid["searches"]["staged"], grid["searches"]["default"]
    assert default["10%"]["mean"] == grid["baseline"] < staged["10%"]["mean"]
    assert staged["10%"]["repeats"] == 0
    assert staged["ask_ms"]["median"] > 0
    assert "made up: 72 configs" in done.stderr
    names = {path.name for path in (tmp_path / "found").iterdir()}
    assert names == {"bench_search.json", "grid.html"}
