"""The examples run as they are, and building is paid for once."""

from pathlib import Path

import pytest

import autotune

ROOT = Path(__file__).parent.parent
EXAMPLES = ("digits", "jpeg", "text")

SLOW_TO_BUILD = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 8}

def build_model():
    return nn.Linear(8, 1)

def build_dataset():
    time.sleep(3.0)
    return TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
"""


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_tuned(name, tmp_path):
    run = autotune.tune(
        ROOT / "examples" / f"{name}.py", budget="40s", max_probes=2, output=str(tmp_path / "run")
    )
    assert list(run.trials.status[:2]) == ["ok", "ok"]
    assert run.baseline["samples_per_s"] > 0
    assert run.trials.parity_loss[1] > 0


def test_building_is_paid_once(tmp_path):
    model = tmp_path / "slow.py"
    model.write_text(SLOW_TO_BUILD)
    run = autotune.tune(model, budget="45s", output=str(tmp_path / "run"))
    ran = run.trials[~run.trials.status.isin(["not_applicable", "skipped"])]
    assert len(ran) >= 8
    # Only the last final repeat of the winner, and inspection, tell of building.
    assert (ran.build_s.fillna(0) > 2).sum() <= 2
