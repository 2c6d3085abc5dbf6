"""Planted jobs whose memory is known: the tuner climbs to a limit, and is not harmed beyond it."""

import json
import sys
from pathlib import Path

import pytest

import autotune
from autotune.errors import NothingRanError

PLANTED = Path(__file__).parent / "planted"
ONLY_BATCH = {"train": {"batch_size": "auto", "accumulation_steps": "auto"}}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")


@pytest.fixture
def tune(tmp_path):
    """Tune a planted job's batch into a folder of its own."""

    def run(factory, budget="20s", **options):
        space = tmp_path / "space.yaml"
        space.write_text(json.dumps(ONLY_BATCH))
        reference = f"{PLANTED / 'grows.py'}:{factory}"
        options = {"global_batch": "free", "space": str(space), **options}
        return autotune.tune(reference, budget=budget, output=str(tmp_path / "run"), **options)

    return run


def tried(run):
    rows = run.trials
    return rows[(rows.stage != "inspect") & ~rows.status.isin(["not_applicable", "skipped"])]


def test_a_size_that_passes_the_limit_is_a_row_and_the_run_goes_on(tune):
    run = tune("Jumps", budget="30s", limits=["host_memory_gb<=0.7"])
    failed = tried(run)[tried(run).status == "out_of_memory"]
    assert 1 <= len(failed) <= 4
    assert failed.reason.str.startswith("host: ").all()
    assert failed["train.batch_size"].min() > 40
    ran = tried(run)[tried(run).status == "ok"]
    assert 32 <= ran["train.batch_size"].max() <= 40
    assert run._answer.config["train.batch_size"] <= 40


def test_where_not_one_sample_fits_the_end_says_so(tune):
    with pytest.raises(NothingRanError) as error:
        tune("NeverFits")
    assert "it does not fit at batch 1" in str(error.value)
    assert "checkpoint" in str(error.value)
    assert "CUDA out of memory" in str(error.value)
