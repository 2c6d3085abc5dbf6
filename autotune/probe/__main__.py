"""One probe in a process of its own, where forking cannot work: SPEC.json to result.json."""

import os
import shutil
import sys
from multiprocessing.util import get_temp_dir
from pathlib import Path

from autotune.probe.forker import end_process, settle_in

if __name__ == "__main__":
    settle_in(parent=os.getppid())
    # Some training scripts read the command line when they are imported.
    spec = Path(sys.argv.pop())
    from autotune.probe.run import run_probe

    sockets = get_temp_dir()  # where loader workers meet; a killed one could not remove its own
    run_probe(spec, None)
    shutil.rmtree(sockets, ignore_errors=True)
    end_process(0)
