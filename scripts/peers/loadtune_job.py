"""A model file as loadtune wants it: the environment's PEER_MODEL, its loss and AdamW."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from loadtune import Workload
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import ruler


def get_workload() -> Workload:
    """The job."""
    job = ruler.loaded(Path(os.environ["PEER_MODEL"]).resolve())
    compute_loss = getattr(job, "compute_loss", ruler.cross_entropy)

    def train_step(model: nn.Module, optimizer: Any, batch: Any, device: torch.device) -> Any:
        loss = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Workload(
        name="job",
        make_dataset=job.build_dataset,
        make_model=job.build_model,
        train_step=train_step,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        default_batch_size=job.CURRENT["train.batch_size"],
        collate_fn=getattr(job, "collate", None),
    )
