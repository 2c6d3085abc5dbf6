"""What PyTorch is, and what it sees, on this machine: `python -m autotune.probe.checkup OUT`."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from autotune.probe.canary import check
from autotune.types import write_atomically


def build_facts() -> dict[str, Any]:
    """What is known without asking any device."""
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "triton": importlib.util.find_spec("triton") is not None,
    }


def main(out: Path) -> None:
    """Tell what is known at once, and then what the device says: a driver may never answer."""
    facts = build_facts()
    write_atomically(out, json.dumps(facts))
    facts["device"] = check(facts["threads"])
    write_atomically(out, json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
