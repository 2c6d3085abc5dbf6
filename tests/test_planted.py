"""Jobs whose best configuration is known by construction: the tuner must find it, short as it runs.

Their time is spent in `sleep`, so that a noisy machine does not matter. Where speed itself is
claimed, an independent ruler measures it, side by side with the known best.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest
import ruler
from conftest import leaving_nothing

import autotune
from autotune import exporters

PLANTED = Path(__file__).parent / "planted"
MOST_END_TO_END = 25
ROOT = Path(__file__).parent.parent
WIDENED = 0.05
"""What the claimed interval may be missed by, on a machine that others use, too."""
CLOSE = 0.97
"""Share of the known best's speed that an answer must reach, give or take the ruler's noise."""

ONLY_BATCH = {"train": {"batch_size": "auto", "accumulation_steps": "auto"}}
ONLY_PRECISION = {"train": {"precision": ["default", "fp16"]}}

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks"),
    pytest.mark.outlived,
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is tuned, for how long, with which options."""

    model: str
    budget: str
    options: dict = field(default_factory=dict)


def job(model, budget, **options):
    return Job(model=model, budget=budget, options=options)


JOBS = {
    "waits": job("waiting_loader", "45s", space="loader"),
    "bucket": job("token_bucket", "35s", space="loader"),
    "held": job("device_affine", "40s"),
    "free": job("device_affine", "40s", space=ONLY_BATCH, global_batch="free"),
    "nothing": job("no_knob_matters", "30s"),
    "full": job("fails_above:OutOfMemory", "35s", space=ONLY_BATCH, global_batch="free"),
    "starts above": job("fails_above:StartsAbove", "30s", space=ONLY_BATCH, global_batch="free"),
    "tiny": job("tiny_dataset", "30s", space=ONLY_BATCH, max_probes=6),
    "hangs, unused": job("hangs_in_worker:Unused", "30s", space="loader", max_probes=8),
    "hangs, in use": job("hangs_in_worker:InUse", "30s", space="loader", max_probes=8),
    "dies": job("worker_dies", "25s", space="loader"),
    "fp16": job("fp16_overflow", "30s", space=ONLY_PRECISION),
    "unpicklable": job("unpicklable", "30s", space="loader", max_probes=9),
    "repeats, unused": job("iterable_duplicates:Unused", "30s", space="loader", max_probes=8),
    "repeats, in use": job("iterable_duplicates:InUse", "30s", space="loader", max_probes=6),
}
"""In the order of the tests."""


class Ahead:
    """Tunes the job that is asked for and the next one, side by side: both mostly sleep."""

    def __init__(self, folder):
        self.folder = folder
        self.runs = {}
        self.pool = ThreadPoolExecutor(2)

    def __call__(self, name):
        names = list(JOBS)
        for one in names[names.index(name) :][:2]:
            if one not in self.runs:
                self.runs[one] = self.pool.submit(self.tuned, JOBS[one])
        run = self.runs[name].result()
        assert len(end_to_end(run)) <= MOST_END_TO_END
        return run

    def tuned(self, known):
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        options = {"output": str(folder / "run"), **known.options}
        if isinstance(options.get("space"), dict):
            (folder / "space.yaml").write_text(json.dumps(options["space"]))
            options["space"] = str(folder / "space.yaml")
        model, _, factory = known.model.partition(":")
        reference = f"{PLANTED / model}.py" + (f":{factory}" if factory else "")
        return autotune.tune(reference, budget=known.budget, **options)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The run of a planted job, by name."""
    with leaving_nothing(tmp_path_factory.mktemp("temporary")):
        ahead = Ahead(tmp_path_factory.mktemp("planted"))
        yield ahead
        ahead.pool.shutdown()


def end_to_end(run):
    rows = run.trials
    together = (rows.source == "loader") & (rows.sink == "train") & (rows.stage != "inspect")
    return rows[together & ~rows.status.isin(["not_applicable", "skipped"])]


def answer(run):
    """The answer's knobs, as numbers and words."""
    return dict(run._answer.config)


def rows_with(run, **knobs):
    """The launched rows with these values; a name's underscores stand for dots, once."""
    rows = run.trials[~run.trials.status.isin(["not_applicable", "skipped"])]
    for name, value in knobs.items():
        rows = rows[rows[name.replace("_", ".", 1)] == value]
    return rows


def is_close_to_the_best(name, config):
    model = str(PLANTED / f"{name}.py")
    best = runpy.run_path(model)["BEST"]
    if all(config.get(knob) == value for knob, value in best.items()):
        return True
    rates = ruler.compare(model, {"answer": config, "best": best}, seconds=1.5, rounds=2)
    return ruler.ratio(rates, "answer", "best") >= CLOSE - ruler.noise(rates)


def the_printed_line_does_what_was_claimed(run, folder):
    """The user's own training, given the printed lines, is as much faster as was said."""
    model = PLANTED / "waiting_loader.py"
    lines = {"answer": run.overrides("hydra"), "baseline": baseline_line(run)}
    rates = {name: [] for name in lines}
    for name in ("baseline", "answer", "answer", "baseline"):
        rates[name].append(trained(model, lines[name], folder))
    ratio = fmean(rates["answer"]) / fmean(rates["baseline"])
    assert run.speedup.low * (1 - WIDENED) <= ratio <= run.speedup.high * (1 + WIDENED)


def baseline_line(run):
    state = run._state
    return " ".join(exporters.overrides(state.export(state.baseline)))


def trained(model, line, folder):
    """Samples/s that the Hydra application logs when it is given a printed line."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), f"model={model}", "json=true"]
    done = subprocess.run(
        [*command, "seconds=5", *line.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env={**os.environ, "HYDRA_FULL_ERROR": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])["samples_per_s"]


# The right knob is found


def test_workers_that_wait_are_many_more_than_the_cores(tuned, tmp_path):
    run = tuned("waits")
    assert not run.keep
    assert answer(run)["loader.num_workers"] >= 8
    assert run.speedup.low > 5
    assert run.diagnosis[0].bottleneck == "data-starved: storage"
    assert is_close_to_the_best("waiting_loader", answer(run))
    the_printed_line_does_what_was_claimed(run, tmp_path)


def test_storage_is_asked_by_few_workers(tuned):
    run = tuned("bucket")
    assert not run.keep
    assert answer(run)["loader.num_workers"] in (1, 2)
    assert run.speedup.low > 1.2


def test_a_held_global_batch_is_made_without_accumulation(tuned):
    run = tuned("held")
    assert answer(run)["train.batch_size"] == 32
    assert answer(run)["train.accumulation_steps"] == 1
    assert answer(run).get("loader.num_workers") == 0
    assert run.speedup.low > 1.5
    assert is_close_to_the_best("device_affine", answer(run))


def test_a_free_global_batch_grows_until_it_gains_no_more(tuned):
    run = tuned("free")
    assert answer(run)["train.batch_size"] in (128, 256)
    assert answer(run)["train.accumulation_steps"] == 1
    assert run.speedup.value > 2


def test_where_no_knob_matters_yours_are_kept(tuned):
    run = tuned("nothing")
    assert run.keep
    assert answer(run)["train.batch_size"] == 32
    assert answer(run)["loader.num_workers"] == 0
    assert run.speedup.value == 1.0


# What fails is a row with a reason, and the run goes on


def test_the_batch_stops_below_the_size_that_fails(tuned):
    run = tuned("full")
    assert answer(run)["train.batch_size"] == 48
    failing = rows_with(run, train_batch_size=64)
    assert set(failing.status) == {"out_of_memory"}
    assert failing.reason.str.startswith("device: ").all()


def test_a_batch_of_yours_that_fails_is_descended_from(tuned):
    run = tuned("starts above")
    assert answer(run)["train.batch_size"] == 48
    assert run.speedup is None
    assert not run.keep
    baseline = run.trials[run.trials.stage == "baseline"].iloc[0]
    assert baseline.status == "error"
    assert "this model takes at most 48 samples" in baseline.reason
    assert len(run.trials[run.trials.status == "error"]) <= 4


def test_a_dataset_smaller_than_the_batch_is_told_and_left_behind(tuned):
    run = tuned("tiny")
    baseline = run.trials[run.trials.stage == "baseline"].iloc[0]
    assert baseline.status == "invalid"
    assert baseline.reason.startswith("0 batches: a dataset of 20 samples")
    assert answer(run)["train.batch_size"] == 16
    assert answer(run)["train.accumulation_steps"] == 4
    assert run.speedup is None


@pytest.mark.parametrize("workers", ["unused", "in use"])
def test_a_worker_that_hangs_costs_one_probe(tuned, workers):
    run = tuned(f"hangs, {workers}")
    assert answer(run)["loader.num_workers"] == 0
    hung = run.trials[run.trials.status == "timeout"]
    assert 1 <= len(hung) <= 3
    assert hung.reason.str.startswith("no result after").all()
    assert (run.trials.status == "ok").sum() >= 3
    assert run.keep == (workers == "unused")


def test_a_worker_that_dies_leaves_the_job_without_workers(tuned):
    run = tuned("dies")
    assert run.keep
    assert answer(run)["loader.num_workers"] == 0
    failed = run.trials[run.trials["loader.num_workers"] > 0]
    assert len(failed) >= 1
    assert set(failed.status) == {"error"}
    assert failed.reason.str.contains("worker died").all()


def test_fp16_that_skips_every_step_is_invalid(tuned):
    run = tuned("fp16")
    skipped = rows_with(run, train_precision="fp16")
    assert set(skipped.status) == {"invalid"}
    assert skipped.reason.str.contains("fp16").all()
    assert run.keep


def test_a_loss_that_is_no_number_ends_the_run(cli, tmp_path):
    run = cli("--model", PLANTED / "nan_loss.py", "--budget", "30s", "--output", "run")
    assert run.code == 1
    assert run.out == ""
    assert "invalid: non-finite loss" in run.err
    assert (tmp_path / "run" / "failed.csv").exists()
    assert not (tmp_path / "run" / "overrides.txt").exists()


def test_what_cannot_be_pickled_is_forked(tuned):
    run = tuned("unpicklable")
    assert set(run.trials.status) <= {"ok", "dominated", "not_applicable"}
    assert answer(run)["loader.num_workers"] >= 4


@pytest.mark.parametrize("workers", ["unused", "in use"])
def test_workers_that_repeat_the_data_never_win(tuned, workers):
    run = tuned(f"repeats, {workers}")
    assert answer(run)["loader.num_workers"] <= 1
    refused = run.trials[run.trials.status == "not_applicable"]
    assert refused.reason.str.contains("every worker repeats it").any()
    assert not run.keep
