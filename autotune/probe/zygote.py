"""Import once, build once, fork each probe.

The zygote imports; the template, forked from it, loads the model file and builds; both fork jobs
on request. Neither computes or asks for a device: what they fork could not do so any more.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.channel import Channel, Message
from autotune.errors import ModelFileError
from autotune.probe.forker import PR_SET_PDEATHSIG, Forker, JobFunction, end_process, prctl
from autotune.types import ModelRef, encode, write_atomically

# torch is imported inside functions only: until `main` has asked to die with its parent, nothing
# would end a zygote whose driver was killed.
if TYPE_CHECKING:
    from autotune.probe.workload import Workload

NEEDED = (
    "autotune.probe.canary",
    "autotune.probe.run",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "torch._dynamo",
)
"""What every probe imports, at the latest when it makes an optimizer or starts a worker."""

LONGEST_SOCKET = 107
"""Bytes that the path of a Unix socket may have."""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
USERS_NVML_CHECK = os.environ.get(NVML_CHECK)


def main(descriptor: int) -> NoReturn:
    """Serve the launcher at the other end of an inherited socket until it is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel.inherited(descriptor)
    orders = channel.receive(None)  # raises if the driver was gone before prctl
    assert orders is not None
    look_like_the_driver(orders)
    meet_in(orders["folder"])
    ready = preload(orders["preload"])
    # From here on the socket tells, and better: the kernel's signal would also come when only the
    # driver's thread that started this process ends.
    prctl(PR_SET_PDEATHSIG, 0)
    channel.send(ready)
    # A file that is refused leaves nothing behind, not even its compiled code.
    sys.dont_write_bytecode = True
    threads = ready["default_threads"]
    functions: dict[str, JobFunction] = {
        "template": partial(run_template, threads),
        **jobs(threads, None),
    }
    Forker(channel, functions, complete=import_needed).serve()
    shutil.rmtree(orders["folder"], ignore_errors=True)
    with suppress(OSError):  # others of the launcher's are still in there
        os.rmdir(os.path.dirname(orders["folder"]))
    end_process(0)


def look_like_the_driver(orders: Message) -> None:
    """What is imported later must find the driver's paths, and no trace of this file."""
    sys.path[:] = orders["path"]
    sys.argv[:] = orders["argv"]
    set_variable("PYTHONPATH", orders["pythonpath"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Loader workers that are spawned would import this file again as their main module.
    main_module = sys.modules["__main__"]
    main_module.__spec__ = None
    main_module.__dict__.pop("__file__", None)


def meet_in(folder: str) -> None:
    """Let the loader workers of all probes meet in a folder that the launcher removes.

    A killed one could not remove its own.
    """
    from multiprocessing import process

    if len(os.fsencode(folder)) > LONGEST_SOCKET - len("/listener-12345678"):
        return
    # Where multiprocessing.util.get_temp_dir looks before it makes a folder.
    process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable, or remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def preload(modules: Iterable[str]) -> Message:
    """Import torch, our probe and the modules, on one thread; return the report."""
    started = time.perf_counter()
    # With it, a library that asks whether CUDA is there while imported does not initialise it.
    set_variable(NVML_CHECK, "1")
    import torch

    threads = torch.get_num_threads()
    # An OpenMP pool that was started before a fork makes every child hang.
    torch.set_num_threads(1)
    failed = [name for name in modules if not imports_well(name)]
    gc.freeze()
    return {
        "event": "ready",
        "default_threads": threads,
        "import_s": time.perf_counter() - started,
        "torch": torch.__version__,
        "failed": failed,
    }


def import_needed() -> None:
    """Import what every probe needs and no model file does.

    It takes as long as torch itself, and what is wrong with a model file shows without it: so the
    template loads the file first.
    """
    for name in NEEDED:
        imports_well(name)
    freeze_memory()


def imports_well(name: str) -> bool:
    """Whether a module could be imported; if not, the log tells why, and who needs it will."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit):  # noqa: BLE001 - a third party's code may raise anything
        traceback.print_exc()
        return False
    return True


def freeze_memory() -> None:
    """Keep the children's garbage collector from copying every page that they inherit."""
    gc.collect()
    gc.freeze()


def jobs(threads: int, workload: Workload | None) -> dict[str, JobFunction]:
    """What the zygote (without a workload) and the template can be asked to fork."""
    return {
        "canary": partial(run_canary, threads),
        "probe": partial(run_one_probe, threads, workload),
    }


def run_canary(threads: int, command: Message, _: int | None) -> None:
    """Compute on the device and report which devices there are."""
    from autotune.probe.canary import check

    ask_as_the_user_does()
    write_atomically(Path(command["out"]), json.dumps(check(threads)))


def run_one_probe(threads: int, workload: Workload | None, command: Message, _: int | None) -> None:
    """Run a probe with the threads that a process of the user's would have."""
    import torch

    from autotune.probe.run import run_probe

    ask_as_the_user_does()
    torch.set_num_threads(threads)
    run_probe(Path(command["spec"]), workload)


def ask_as_the_user_does() -> None:
    """Let torch look for devices in the way that it does in the user's own processes."""
    set_variable(NVML_CHECK, USERS_NVML_CHECK)


def run_template(threads: int, command: Message, descriptor: int | None) -> None:
    """Load the model file, build, and fork probes that inherit both."""
    from autotune.probe.workload import load

    assert descriptor is not None
    channel = Channel.inherited(descriptor)
    try:
        with recorded_threads() as asked:
            workload = load(ModelRef(**command["model"]))
            channel.send({"event": "loaded", "facts": encode(workload.facts())})
            if command.get("alone"):
                return
            import_needed()
            started = time.perf_counter()
            workload.build(command["seed"])
            build_s = time.perf_counter() - started
    except ModelFileError as error:
        channel.send({"event": "model_error", "message": str(error)})
        return
    freeze_memory()
    threads = asked[-1] if asked else threads
    channel.send({"event": "built", "build_s": build_s, "threads": threads})
    Forker(channel, jobs(threads, workload)).serve()


@contextmanager
def recorded_threads() -> Iterator[list[int]]:
    """The thread counts that the user's code asks torch for."""
    import torch

    original = torch.set_num_threads
    asked: list[int] = []

    def set_and_record(nthreads: int) -> None:
        original(nthreads)
        asked.append(nthreads)

    torch.set_num_threads = set_and_record
    try:
        yield asked
    finally:
        torch.set_num_threads = original


if __name__ == "__main__":
    # By its real name, so that nothing of it lives in a module called __main__.
    from autotune.probe import zygote

    zygote.main(int(sys.argv[1]))
