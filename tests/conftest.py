"""What all tests share: a command line to start, files to start it with, and a look at what stays.

A test fails that leaves anything behind: a process, a thread, an open file, an environment
variable, a temporary file, or a tensor in shared memory.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

MARK = "AUTOTUNE_TEST"
"""A variable by which every process that a test started, at any depth, is known."""
GRACE_S = 6.0
"""How long what ends by itself may take to do so."""
KEPT_OUT = (
    "WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "PYTHONDONTWRITEBYTECODE",
)

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 32}

def build_model():
    return nn.Linear(16, 4)

def build_dataset():
    numbers = torch.Generator().manual_seed(0)
    samples = torch.randn(512, 16, generator=numbers)
    return TensorDataset(samples, torch.randint(0, 4, (512,), generator=numbers))
"""
"""The smallest job that trains."""


# A busy machine makes any example slow.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "outlived: what the test starts belongs to a fixture that outlives it"
    )


# --- what a test may not leave behind -------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_left(request, tmp_path_factory):
    """Fail the test if it leaves something behind."""
    if request.node.get_closest_marker("outlived"):
        yield
        return
    with leaving_nothing(tmp_path_factory.mktemp("temporary")):
        yield


@contextmanager
def leaving_nothing(temporary):
    """Fail at the end if what was started inside has left something behind."""
    own = {MARK: uuid.uuid4().hex, "TMPDIR": str(temporary)}
    kept = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    tempfile.tempdir = None
    before = Snapshot(own[MARK], temporary)
    yield
    found = before.leaks()
    deadline_s = time.monotonic() + GRACE_S
    while found and time.monotonic() < deadline_s:
        gc.collect()  # what only garbage holds is let go; too slow to do where nothing is held
        time.sleep(0.05)
        found = before.leaks()
    end_processes(own[MARK])
    for name, value in kept.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    assert not found, f"left behind: {'; '.join(found)}"


class Snapshot:
    """What there was before the test, to be compared with what there is later."""

    def __init__(self, mark, temporary):
        self.mark = mark
        self.temporary = temporary
        self.children = children()
        self.threads = set(threading.enumerate())
        self.files = open_files()
        self.variables = variables()
        self.shared_memory = set(shared_memory())

    def leaks(self):
        """What the test has left, in words."""
        return [
            *(f"process {known}" for known in marked(self.mark)),
            *(f"child {pid}" for pid in children() - self.children),
            *(f"thread {thread.name}" for thread in set(threading.enumerate()) - self.threads),
            *(f"open file {file}" for file in open_files() - self.files),
            *(f"variable {name}" for name, _ in variables() ^ self.variables),
            *(f"temporary file {name}" for name in temporary_files(self.temporary)),
            *(f"shared memory {name}" for name in self.orphaned_memory()),
        ]

    def orphaned_memory(self):
        """New pieces whose owner has ended; those with a living owner are somebody else's."""
        new = [name for name in shared_memory() if name not in self.shared_memory]
        return [name for name in new if not any(psutil.pid_exists(pid) for pid in numbers_in(name))]


def marked(mark):
    """The processes of a test, itself apart, as "pid: command"."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid == os.getpid() or process.environ().get(MARK) != mark:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:80]}")
    return found


def end_processes(mark):
    """End what a test has left, so that only this test fails."""
    for known in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(int(known.partition(":")[0]), signal.SIGKILL)


def children():
    with suppress(psutil.Error):
        return {child.pid for child in psutil.Process().children()}
    return set()


def open_files():
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add((entry.name, os.readlink(entry)))
    return found


def variables():
    return {(name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def temporary_files(folder):
    # PyTorch's cache of compiled code is meant to stay.
    names = {path.name for path in folder.iterdir()}
    return {name for name in names if not name.startswith("torchinductor_")}


def shared_memory():
    """What programs that run PyTorch put there."""
    with suppress(OSError):
        return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("torch_")]
    return []


def numbers_in(name):
    return [int(part) for part in name.split("_") if part.isdigit()]


# --- the command line -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def line(self):
        """The one line on stdout."""
        (line,) = self.out.splitlines()
        return line


@dataclass
class CommandLine:
    """Starts `python -m autotune` in a folder, as a person would."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def __call__(self, *words, env=None, within_s=120.0):
        """Run a command to its end."""
        process = self.start(*words, env=env)
        out, err = process.communicate(timeout=within_s)
        return Ran(process.returncode, out, err)

    def start(self, *words, env=None):
        """Start a command."""
        clean = {k: v for k, v in os.environ.items() if k not in KEPT_OUT}
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *map(str, words)],
            cwd=self.folder,
            env={**clean, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def cli(tmp_path):
    """The command line, started in the test's own folder."""
    command_line = CommandLine(tmp_path)
    yield command_line
    command_line.close()


def write(path, text):
    """Write a file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def job(tmp_path):
    """The smallest job's model file."""
    return write(tmp_path / "job.py", MODEL)


def wait_for(condition, within_s=60.0):
    """Wait until something is so; whether it became so."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
