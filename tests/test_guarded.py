"""Planted jobs whose memory is known: a limit is kept while a probe runs."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up import FACTS, space, trial

import autotune
from autotune.errors import NothingRanError
from autotune.report import verdict

PLANTED = Path(__file__).parent / "planted"
SIZES = {"train": {"batch_size": [64, 8, 32]}}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")


@pytest.fixture
def tune(tmp_path):
    """Try three sizes of a planted job, the largest first."""

    def run(factory, **options):
        sizes = tmp_path / "space.yaml"
        sizes.write_text(json.dumps(SIZES))
        reference = f"{PLANTED / 'grows.py'}:{factory}"
        options = {"global_batch": "free", "space": str(sizes), **options}
        return autotune.tune(
            reference,
            budget="40s",
            max_probes=5,
            sampler="grid",
            output=str(tmp_path / "run"),
            **options,
        )

    return run


def tried(run):
    rows = run.trials
    return rows[(rows.stage != "inspect") & ~rows.status.isin(["not_applicable", "skipped"])]


def test_a_size_that_passes_the_limit_is_a_row_and_the_run_goes_on(tune):
    run = tune("Jumps", limits=["host_memory_gb<=0.7"])
    (failed,) = tried(run)[tried(run).status == "out_of_memory"].to_dict("records")
    assert failed["train.batch_size"] == 64
    assert failed["reason"].startswith("host: reached ")
    assert failed["reason"].endswith(" GiB of the 0.7 GiB that --limit allows")
    ran = tried(run)[tried(run).status == "ok"]
    assert set(ran["train.batch_size"]) == {8, 32}
    assert run._answer.config["train.batch_size"] <= 40


def test_where_not_one_sample_fits_the_end_says_so(tune):
    with pytest.raises(NothingRanError) as error:
        tune("NeverFits")
    assert "it does not fit at batch 1" in str(error.value)
    assert "checkpoint" in str(error.value)
    assert "CUDA out of memory" in str(error.value)


@pytest.mark.parametrize(
    ("facts", "seen", "told"),
    [
        ({"varies": False}, 0, ""),
        ({"varies": True}, 512, "on the longest of 512 samples seen; 10 % of each limit"),
        ({"varies": True, "dataset_len": 512}, 512, "on the longest of 512 samples seen."),
        ({"varies": True}, 0, "on typical samples only; 10 % of each limit on memory stays free"),
    ],
)
def test_the_verdict_says_which_samples_memory_was_measured_on(facts, seen, told):
    known = space(facts=replace(FACTS, **facts))
    row = trial(known.baseline, longest_of=seen)
    state = SimpleNamespace(
        answer=SimpleNamespace(config=known.baseline), space=known, trials=[row]
    )
    text = " ".join(verdict._memory(state))
    assert told in text
    assert bool(text) == facts["varies"]
