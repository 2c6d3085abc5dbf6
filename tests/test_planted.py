"""Jobs whose best configuration is known by construction: the tuner must find it, short as it runs.

Their time is spent in `sleep`, so that a noisy machine does not matter. Where speed itself is
claimed, an independent ruler measures it, side by side with the known best.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import ruler

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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")


@pytest.fixture
def tune(tmp_path):
    """Tune a planted job into a folder of its own."""

    def run(name, budget, *, space="default", **options):
        model, _, factory = name.partition(":")
        reference = f"{PLANTED / model}.py" + (f":{factory}" if factory else "")
        if not isinstance(space, str):
            (tmp_path / "space.yaml").write_text(json.dumps(space))
            space = str(tmp_path / "space.yaml")
        folder = str(tmp_path / "run")
        done = autotune.tune(reference, budget=budget, space=space, output=folder, **options)
        assert len(end_to_end(done)) <= MOST_END_TO_END
        return done

    return run


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


def test_workers_that_wait_are_many_more_than_the_cores(tune, tmp_path):
    run = tune("waiting_loader", "45s", space="loader")
    assert not run.keep
    assert answer(run)["loader.num_workers"] >= 8
    assert run.speedup.low > 5
    assert run.diagnosis[0].bottleneck == "data-starved: storage"
    assert is_close_to_the_best("waiting_loader", answer(run))
    the_printed_line_does_what_was_claimed(run, tmp_path)


def test_storage_is_asked_by_few_workers(tune):
    run = tune("token_bucket", "35s", space="loader")
    assert not run.keep
    assert answer(run)["loader.num_workers"] in (1, 2)
    assert run.speedup.low > 1.2


def test_a_held_global_batch_is_made_without_accumulation(tune):
    run = tune("device_affine", "40s")
    assert answer(run)["train.batch_size"] == 32
    assert answer(run)["train.accumulation_steps"] == 1
    assert answer(run).get("loader.num_workers") == 0
    assert run.speedup.low > 1.5
    assert is_close_to_the_best("device_affine", answer(run))


def test_a_free_global_batch_grows_until_it_gains_no_more(tune):
    run = tune("device_affine", "40s", space=ONLY_BATCH, global_batch="free")
    assert answer(run)["train.batch_size"] in (128, 256)
    assert answer(run)["train.accumulation_steps"] == 1
    assert run.speedup.value > 2


def test_where_no_knob_matters_yours_are_kept(tune):
    run = tune("no_knob_matters", "30s")
    assert run.keep
    assert answer(run)["train.batch_size"] == 32
    assert answer(run)["loader.num_workers"] == 0
    assert run.speedup.value == 1.0


# What fails is a row with a reason, and the run goes on


def test_the_batch_stops_below_the_size_that_fails(tune):
    run = tune("fails_above:OutOfMemory", "35s", space=ONLY_BATCH, global_batch="free")
    assert answer(run)["train.batch_size"] == 48
    failing = rows_with(run, train_batch_size=64)
    assert set(failing.status) == {"out_of_memory"}
    assert failing.reason.str.startswith("device: ").all()


def test_a_batch_of_yours_that_fails_is_descended_from(tune):
    run = tune("fails_above:StartsAbove", "25s", space=ONLY_BATCH, global_batch="free")
    assert answer(run)["train.batch_size"] == 48
    assert run.speedup is None
    assert not run.keep
    baseline = run.trials[run.trials.stage == "baseline"].iloc[0]
    assert baseline.status == "error"
    assert "this model takes at most 48 samples" in baseline.reason
    assert len(run.trials[run.trials.status == "error"]) <= 4


def test_a_dataset_smaller_than_the_batch_is_told_and_left_behind(tune):
    run = tune("tiny_dataset", "25s", space=ONLY_BATCH, max_probes=6)
    baseline = run.trials[run.trials.stage == "baseline"].iloc[0]
    assert baseline.status == "invalid"
    assert baseline.reason.startswith("0 batches: a dataset of 20 samples")
    assert answer(run)["train.batch_size"] == 16
    assert answer(run)["train.accumulation_steps"] == 4
    assert run.speedup is None


@pytest.mark.parametrize("workers", ["unused", "in use"])
def test_a_worker_that_hangs_costs_one_probe(tune, workers):
    variant = {"unused": "Unused", "in use": "InUse"}[workers]
    run = tune(f"hangs_in_worker:{variant}", "25s", space="loader", max_probes=8)
    assert answer(run)["loader.num_workers"] == 0
    hung = run.trials[run.trials.status == "timeout"]
    assert 1 <= len(hung) <= 3
    assert hung.reason.str.startswith("no result after").all()
    assert (run.trials.status == "ok").sum() >= 3
    assert run.keep == (workers == "unused")


def test_a_worker_that_dies_leaves_the_job_without_workers(tune):
    run = tune("worker_dies", "20s", space="loader")
    assert run.keep
    assert answer(run)["loader.num_workers"] == 0
    failed = run.trials[run.trials["loader.num_workers"] > 0]
    assert len(failed) >= 1
    assert set(failed.status) == {"error"}
    assert failed.reason.str.contains("worker died").all()


def test_fp16_that_skips_every_step_is_invalid(tune):
    run = tune("fp16_overflow", "25s", space=ONLY_PRECISION)
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


def test_what_cannot_be_pickled_is_forked(tune):
    run = tune("unpicklable", "25s", space="loader", max_probes=9)
    assert set(run.trials.status) <= {"ok", "dominated", "not_applicable"}
    assert answer(run)["loader.num_workers"] >= 4


@pytest.mark.parametrize("workers", ["unused", "in use"])
def test_workers_that_repeat_the_data_never_win(tune, workers):
    variant = {"unused": "Unused", "in use": "InUse"}[workers]
    most = {"unused": 8, "in use": 6}[workers]
    run = tune(f"iterable_duplicates:{variant}", "25s", space="loader", max_probes=most)
    assert answer(run)["loader.num_workers"] <= 1
    refused = run.trials[run.trials.status == "not_applicable"]
    assert refused.reason.str.contains("every worker repeats it").any()
    assert not run.keep
