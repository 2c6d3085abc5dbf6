"""The recorded grids: which configs of which job. A new one is a new row."""

from __future__ import annotations

from autotune.types import Value
from scripts.gpu_lab import ROOT
from scripts.recording import Grid

ASLEEP: dict[str, tuple[Value, ...]] = {
    "loader.num_workers": (0, 1, 2, 4, 8, 16),
    "loader.prefetch_factor": (2, 4),
    "loader.persistent_workers": (False, True),
    "train.batch_size": (8, 16, 32, 64, 128, 256),
    "train.precision": ("default", "bf16"),
}
"""Of the jobs that sleep: 252 configs."""

MANY: dict[str, tuple[Value, ...]] = ASLEEP | {
    "loader.num_workers": (0, 1, 2, 3, 4, 6, 8, 12, 16, 24),
    "loader.prefetch_factor": (2, 4, 8),
    "train.batch_size": (8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
}
"""1,100 configs of the same."""

GRIDS = {
    "jpeg": Grid(
        model=ROOT / "examples" / "jpeg.py",
        values={
            "loader.num_workers": (0, 1, 2, 4),
            "loader.persistent_workers": (False, True),
            "train.batch_size": (16, 32, 64, 128),
            "train.precision": ("default", "bf16"),
            "host.threads": (1, 2),
        },
    ),
    "text": Grid(
        model=ROOT / "examples" / "text.py",
        values={
            "loader.num_workers": (0, 1, 2),
            "train.batch_size": (4, 8, 16, 32, 64),
            "train.precision": ("default", "bf16"),
            "host.threads": (1, 2),
            "host.omp_wait_policy": ("default", "passive"),
        },
    ),
    "balanced": Grid(
        model=ROOT / "scripts" / "sleepers" / "balanced.py",
        values=ASLEEP,
        at_once=6,
    ),
    "failing": Grid(
        model=ROOT / "scripts" / "sleepers" / "failing.py",
        values=ASLEEP,
        at_once=6,
    ),
    "many": Grid(
        model=ROOT / "scripts" / "sleepers" / "balanced.py",
        values=MANY,
        at_once=6,
    ),
}

HELD_OUT = frozenset({"text", "failing"})
"""Not looked at while the search was being tuned."""
