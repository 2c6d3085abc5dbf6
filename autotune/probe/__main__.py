"""One probe in a process of its own, where forking cannot work: SPEC.json to result.json."""

import os
import sys
from pathlib import Path

from autotune.probe.forker import end_process, settle_in

if __name__ == "__main__":
    settle_in(parent=os.getppid())
    # Some training scripts read the command line when they are imported.
    spec = Path(sys.argv.pop())
    from autotune.probe.run import run_probe

    run_probe(spec, None)
    end_process(0)
