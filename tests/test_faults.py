"""Whatever a probe does to itself is a row with a reason; no process, file or row is lost.

Faults of one probe are planted in one job whose micro-batch names them; a few whole runs show that
the search goes on, or ends early with the cause.
"""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
import pytest
from conftest import MODEL, write
from made_up import trial

import autotune
from autotune import store
from autotune.launcher import Launcher
from autotune.metrics import read_objectives
from autotune.types import (
    FAILED,
    Config,
    ModelRef,
    ProbeSpec,
    Sink,
    Source,
    Stage,
    Status,
    Suspect,
    write_atomically,
)

PLANTED = Path(__file__).parent / "planted"
JOB = PLANTED / "faults_by_size.py"
WELL = 8

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")


# --- one probe after the other, from one template ---


class Runner:
    """Probes of the planted job, and the processes that they come from."""

    def __init__(self, launcher, folder):
        self.launcher = launcher
        self._folders = (folder / str(number) for number in count())
        self.processes = None

    def run(self, size, workers=0, timeout_s=30.0):
        config = Config({"loader.num_workers": workers, "train.batch_size": size})
        spec = ProbeSpec(
            model=ModelRef(path=str(JOB)),
            config=config,
            stage=Stage.SEARCH,
            source=Source.LOADER,
            sink=Sink.TRAIN,
            folder=str(next(self._folders)),
            device="cpu",
            seed=1,
            global_batch=size,
            max_window_s=0.1,
            min_blocks=4,
            block_s=0.01,
            timeout_s=timeout_s,
        )
        self.folder = Path(spec.folder)
        return self.launcher.run(spec)

    def fail(self, size, workers=0, timeout_s=30.0):
        outcome = self.run(size, workers, timeout_s)
        assert outcome.failure is not None, outcome.measurement
        return outcome.failure


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with Launcher(ModelRef(path=str(JOB)), seed=1, preload=(), say=print) as launcher:
        launcher.load()
        launcher.settle()
        yield Runner(launcher, tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def goes_on(request):
    """After each fault: the same processes as before, and a probe that runs."""
    if "runner" not in request.fixturenames:
        yield
        return
    runner = request.getfixturevalue("runner")
    before = below()
    yield
    assert below() == before
    assert runner.run(WELL).failure is None


def below():
    return {process.pid for process in psutil.Process().children(recursive=True)}


@dataclass(frozen=True)
class Fault:
    size: int
    status: Status
    told: str
    workers: int = 0
    timeout_s: float = 30.0
    suspect: Suspect | None = None


OOM, ERROR, CRASH, TIMEOUT = Status.OUT_OF_MEMORY, Status.ERROR, Status.CRASH, Status.TIMEOUT
HOST = Suspect.HOST_MEMORY

FAULTS = {
    "a worker killed": Fault(9, ERROR, "a loader worker died", workers=1, suspect=HOST),
    "a worker that exits": Fault(13, ERROR, "a loader worker died", workers=1, suspect=HOST),
    "the probe killed in the loader": Fault(9, CRASH, "died by SIGKILL (9)", suspect=HOST),
    "the probe killed": Fault(19, CRASH, "died by SIGKILL (9)", suspect=HOST),
    "a hang in a worker": Fault(10, TIMEOUT, "last phase: loader", workers=1, timeout_s=1.5),
    "a hang in the step": Fault(20, TIMEOUT, "last phase: first step", timeout_s=1.5),
    "an error that cannot be unpickled": Fault(23, ERROR, "PairError: one and two"),
    "the same in a worker": Fault(11, ERROR, "PairError: one and two", workers=1),
    "an error that cannot be made": Fault(12, ERROR, "Unmakeable: its own text", workers=1),
    "a segfault": Fault(24, CRASH, "died by SIGSEGV (11)"),
    "too many open files": Fault(25, ERROR, "too many open files (ulimit -n is "),
    "memory in the optimizer's step": Fault(30, OOM, " in optimizer.step"),
    "memory in a collective": Fault(26, OOM, "NCCL WARN Cuda failure 2 'out of memory'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_row_with_its_reason(runner, name):
    fault = FAULTS[name]
    failure = runner.fail(fault.size, fault.workers, fault.timeout_s)
    assert (failure.status, failure.suspect) == (fault.status, fault.suspect)
    assert fault.told in failure.message
    if fault.status in (ERROR, OOM):
        assert "Traceback" in failure.log_tail


def test_where_memory_ended_is_the_phase(runner):
    assert runner.fail(30).phase == "optimizer.step"
    assert runner.fail(24).phase != "optimizer.step"


@pytest.mark.parametrize("size", [21, 22], ids=["a hang at exit", "a thread that does not end"])
def test_what_happens_after_the_result_costs_nothing(runner, size):
    outcome = runner.run(size, timeout_s=20.0)
    assert outcome.failure is None
    assert outcome.measurement.steps > 0


def test_what_one_probe_keeps_is_not_there_in_the_next(runner):
    before = runner.run(WELL).measurement.memory_bytes
    kept = runner.run(27).measurement.memory_bytes
    after = runner.run(WELL).measurement.memory_bytes
    assert kept > before + 2**27
    assert after < kept / 2


# --- files that cannot be written ---


@contextmanager
def files_at_most(size):
    """No file may grow beyond so many bytes, as on a full disk; needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_takes_no_room(tmp_path):
    (tmp_path / "run.json").write_text("old")
    with files_at_most(4096), pytest.raises(OSError, match="File too large") as caught:
        write_atomically(tmp_path / "run.json", "x" * 10_000)
    assert store.is_full(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "old"


def test_a_study_that_cannot_grow_keeps_what_it_holds(tmp_path):
    kept = store.Store(tmp_path, read_objectives("samples_per_s,memory_gb"))
    row = trial({"train.batch_size": 8}, blocks=200)
    kept.add(row)
    with files_at_most((tmp_path / "study.db").stat().st_size + 8192):
        added, error = added_until_it_fails(kept, row)
        known = store.read_trials(tmp_path)
    assert store.is_full(error)
    assert known == [row] * (1 + added)
    kept.add(row)
    assert len(kept.trials()) == len(known) + 1
    kept.close()


def added_until_it_fails(kept, row):
    for added in range(50):
        try:
            kept.add(row)
        except Exception as error:  # noqa: BLE001 - which one, the test looks at
            return added, error
    return 50, None


def test_other_errors_are_no_full_disk():
    assert not store.is_full(None)
    assert not store.is_full(ValueError("disk"))
    assert not store.is_full(OSError(2, "No such file"))


# --- whole runs ---


def test_evidence_is_told_alike_everywhere(tmp_path):
    """A cuDNN error above 48 samples: the search goes below it, and every file says why."""
    space = {"train": {"batch_size": "auto", "accumulation_steps": "auto"}}
    (tmp_path / "space.yaml").write_text(json.dumps(space))
    run = autotune.tune(
        PLANTED / "fails_above.py:Suspicious",
        budget="20s",
        space=str(tmp_path / "space.yaml"),
        global_batch="free",
        output=str(tmp_path / "run"),
        max_probes=8,
    )
    assert dict(run._answer.config)["train.batch_size"] <= 48
    failed = run.trials[run.trials.status.isin(FAILED)]
    assert len(failed) >= 1
    assert set(failed.status) == {"out_of_memory"}
    assert failed.reason.str.contains("suspected, as micro-batch").all()
    assert failed.reason.str.contains("CUDNN_STATUS_INTERNAL_ERROR").all()
    again = autotune.load_run(run.folder)
    assert list(again.trials.reason) == list(run.trials.reason)
    assert list(again.trials.status) == list(run.trials.status)
    table = store.pd.read_csv(Path(run.folder) / "failed.csv")
    assert list(table.reason) == list(failed.reason)
    assert all((Path(run.folder) / log).is_file() for log in table.log)
    assert {one.status for one in store.read_trials(Path(run.folder)) if one.failure} == {ERROR}
    assert "out_of_memory: device: suspected" in " ".join(run.verdict.split())
    assert table.log[0] in run.verdict


def test_a_fault_that_hits_every_config_ends_the_run(cli, tmp_path):
    words = ("--model", PLANTED / "breaks_later.py", "--budget", "60s", "--output", "run")
    ran = cli(*words)
    assert (ran.code, ran.out) == (1, "")
    last = ran.err[ran.err.index("autotune: no config ran") :].splitlines()
    assert "3 x error: RuntimeError: record " in last[1]
    assert any("raise RuntimeError" in line for line in last[2:5])
    log = last[-1].removeprefix("log: ")
    assert "RuntimeError: record" in Path(log).read_text()
    table = store.pd.read_csv(tmp_path / "run" / "failed.csv")
    assert list(table["count"]) == [3, 3, 3]
    assert table["reason"].nunique() == 3
    assert table["cause"].nunique() == 1
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["status"] == "finished"


def in_a_namespace(folder, mount, script, **variables):
    """Run a shell script with a file system of its own, which no other process sees."""
    command = f"mount -t tmpfs {mount} && {script}"
    try:
        allowed = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("mounting needs a privilege")
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        cwd=folder,
        env={**os.environ, **variables, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )


LARGE = """
import torch
from torch import nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 1, "train.batch_size": 2}

class Large(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(2**18), torch.ones(1)

def build_model():
    return nn.Linear(2**18, 1)

def build_dataset():
    return Large()
"""


def test_shared_memory_that_is_too_small_is_told(tmp_path):
    """Batches of 2 MiB, 1 MiB of shared memory; without workers the job runs."""
    write(tmp_path / "job.py", LARGE)
    done = in_a_namespace(
        tmp_path,
        "-o size=1m tmpfs /dev/shm",
        "$PYTHON -m autotune --model job.py --budget 40s --max-probes 5 --output run",
    )
    assert done.returncode == 0, done.stderr
    table = store.pd.read_csv(tmp_path / "run" / "trials.csv")
    baseline = table[table.stage == "baseline"].iloc[0]
    assert baseline.status == "error"
    assert baseline.reason.startswith("shared memory (/dev/shm) is full; fewer workers")
    assert "loader.num_workers=0" in done.stdout


READ = "import autotune; r = autotune.load_run('disk/run'); print(r.trials.status.value_counts())"


def test_a_disk_that_fills_up_ends_the_run_with_what_is_known(tmp_path):
    write(tmp_path / "job.py", MODEL + FILLS)
    (tmp_path / "disk").mkdir()
    done = in_a_namespace(
        tmp_path,
        "-o size=4m tmpfs disk",
        "$PYTHON -m autotune --model job.py --budget 30s --output disk/run; echo code $?;"
        f'$PYTHON -c "{READ}"; ls -A disk/run',
        RUN=str(tmp_path / "disk" / "run"),
    )
    assert "code 1" in done.stdout, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("autotune: ")]
    assert len(told) == 1
    assert "the disk is full; 3 finished rows are kept" in told[0]
    assert "Traceback" not in done.stderr
    assert "ok " in done.stdout, done.stderr
    assert ".part" not in done.stdout


FILLS = """
import os
from pathlib import Path

def compute_loss(model, batch):
    run = Path(os.environ["RUN"])
    if len(list((run / "probes").iterdir())) > 3:
        fill(run / "filler")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def fill(path):
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
"""
