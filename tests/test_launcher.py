"""Processes are started, watched and ended for real; only what a probe does is scripted."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import psutil
import pytest

from autotune import forkserver, home
from autotune.errors import ModelFileError, StoppedError
from autotune.home import Deadlines, longest_sound
from autotune.launcher import LOST, Launcher
from autotune.source import third_party_imports
from autotune.types import Config, ModelRef, ProbeSpec, Sink, Source, Stage, Status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
needs_two_cores = pytest.mark.skipif(
    sys.platform == "linux" and len(os.sched_getaffinity(0)) < 2,
    reason="one thread starts no pool that a fork could break",
)

ACTS = '''
"""What a probe does, by its config's "act", in place of measuring. Takes effect when imported."""
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
import torch
import autotune.probe.run
from autotune.types import Measurement, ProbeSpec, decode, encode, write_atomically

def run_probe(path, workload):
    first_s = time.monotonic()
    spec = decode(ProbeSpec, path.read_text())
    globals()[spec.config["act"]](spec, workload, first_s - spec.requested_s)

def report(spec, workload, startup_s):
    facts = {
        "pid": os.getpid(),
        "inherited": workload is not None and workload.model is not None,
        "threads": torch.get_num_threads(),
        "policy": os.environ.get("OMP_WAIT_POLICY"),
        "nvml_check": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
        "argv": sys.argv,
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "oom_score": int(Path("/proc/self/oom_score_adj").read_text()),
        "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
    }
    torch.sigmoid(torch.randn(400_000))  # would hang if an OpenMP pool had been inherited
    measured = Measurement(blocks=(), stopped="limit", startup_s=startup_s, facts=facts)
    write_atomically(Path(spec.folder, "result.json"), encode({"measurement": measured}))

def segfault(spec, workload, _):
    print("about to fall", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(spec, workload, _):
    os._exit(3)

def forget(spec, workload, _):
    pass

def raise_exit(spec, workload, _):
    raise SystemExit(4)

def hang(spec, workload, _):
    """With a worker, one that left the session, and one that left its parent, too."""
    code = "import time; time.sleep(600)"
    known = [subprocess.Popen([sys.executable, "-c", code])]
    known.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
    leave = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
        f"{code!r}], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    orphan = int(subprocess.check_output([sys.executable, "-c", leave]))
    pids = [os.getpid(), orphan, *(process.pid for process in known)]
    Path(spec.folder, "pids").write_text(" ".join(map(str, pids)))
    write_atomically(Path(spec.folder, "phase"), "warm-up")
    time.sleep(600)

def linger(spec, workload, startup_s):
    report(spec, workload, startup_s)
    time.sleep(600)

def die_after(spec, workload, startup_s):
    report(spec, workload, startup_s)
    os.kill(os.getpid(), signal.SIGKILL)

def litter(spec, workload, startup_s):
    Path(f"/dev/shm/torch_{os.getpid()}_1234_0").write_text("tensor")
    report(spec, workload, startup_s)

def kill_zygote(spec, workload, startup_s):
    template = Path("/proc", str(os.getppid()), "stat").read_text().rpartition(")")[2].split()
    os.kill(int(template[1]), signal.SIGKILL)
    time.sleep(600)

def grow(spec, workload, startup_s):
    """By one of three ways, up to 200 MiB, and stay there."""
    where, size = spec.config.get("where"), 200 * 1024**2
    write_atomically(Path(spec.folder, "phase"), "window")
    if where == "child" and os.fork():
        time.sleep(600)
    if where == "shm":
        with Path(f"/dev/shm/torch_{os.getpid()}_1_0").open("wb") as file:
            for _ in range(200):
                file.write(b"1" * (size // 200))
    else:
        held = bytearray(b"1" * size)
    time.sleep(600)

def print_in_c(spec, workload, startup_s):
    print("from Python", end="")
    ctypes.CDLL(None).puts(b"from C")
    report(spec, workload, startup_s)

autotune.probe.run.run_probe = run_probe
'''

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Linear(8, 3)

def build_dataset():
    return [(torch.zeros(8), torch.tensor(0))] * 64
"""

QUICK = Deadlines(canary_s=30.0, later_canary_s=3.0)


@pytest.fixture(scope="module")
def acts(tmp_path_factory):
    """The folder with the scripted probes, importable by every process."""
    folder = tmp_path_factory.mktemp("acts")
    (folder / "acts.py").write_text(ACTS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def write_model(folder, extra=""):
    path = folder / "job.py"
    path.write_text(MODEL + textwrap.dedent(extra))
    return ModelRef(path=str(path))


class Runner:
    """A launcher, and what it said."""

    def __init__(self, model, folder, preload=("acts",), deadlines=QUICK):
        self.said = []
        self.model = model
        self.launcher = Launcher(
            model, seed=1, preload=preload, say=self.said.append, deadlines=deadlines
        )
        self._folders = (folder / f"probe-{number}" for number in count())

    def spec(self, act, **changes):
        fields = {"device": "cpu", "seed": 1, "global_batch": 32, "timeout_s": 60.0, **changes}
        return ProbeSpec(
            model=self.model,
            config=Config({"act": act}),
            stage=Stage.SEARCH,
            source=Source.LOADER,
            sink=Sink.TRAIN,
            folder=str(next(self._folders)),
            **fields,
        )

    def run(self, act, environment=None, **changes):
        return self.launcher.run(self.spec(act, **changes), environment or {})

    def run_really(self, workers=0):
        """A probe that measures, for launchers without the scripted ones."""
        config = Config({"train.batch_size": 8, "loader.num_workers": workers})
        spec = self.spec("measure", max_window_s=0.2)
        return self.launcher.run(replace(spec, config=config))


@contextmanager
def running(*arguments, **options):
    runner = Runner(*arguments, **options)
    with runner.launcher:
        yield runner


@pytest.fixture(scope="module")
def runner(acts, tmp_path_factory):
    """One launcher for all tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("shared")
    with running(write_model(folder), folder) as runner:
        runner.launcher.load()
        runner.launcher.settle()
        yield runner


def eventually(condition, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_in(spec):
    return [int(word) for word in Path(spec.folder, "pids").read_text().split()]


# What a probe inherits


def test_a_probe_inherits_model_and_dataset(runner):
    outcome = runner.run("report")
    facts = outcome.measurement.facts
    assert outcome.failure is None
    assert facts["inherited"]
    assert runner.launcher.fallback == ""
    assert runner.said == []
    assert 0 < outcome.measurement.startup_s < outcome.probe_s


def test_a_probe_is_a_process_of_its_own(runner):
    facts = runner.run("report").measurement.facts
    assert facts["leads"]
    assert facts["oom_score"] == 1000
    assert facts["nvml_check"] is None
    assert facts["main"] is None
    assert facts["argv"] == [runner.model.path]
    assert facts["pid"] != runner.run("report").measurement.facts["pid"]


def test_settling_tells_the_devices_and_the_threads(runner):
    facts = runner.launcher.settle()
    assert facts["type"]
    assert facts["torch"]
    assert facts["default_threads"] == runner.run("report").measurement.facts["threads"]


def test_a_fresh_probe_builds_for_itself(runner):
    assert not runner.run("report", fresh=True).measurement.facts["inherited"]


def test_what_is_printed_in_c_is_in_the_log_once(runner):
    spec = runner.spec("print_in_c")
    assert runner.launcher.run(spec).measurement
    log = Path(spec.folder, "log.txt").read_text()
    assert log.count("from C") == 1
    assert log.count("from Python") == 1


@pytest.mark.outlived
def test_variables_that_libraries_read_when_loaded_get_a_zygote_of_their_own(runner):
    passive = {"OMP_WAIT_POLICY": "passive"}
    first = runner.run("report", passive)
    assert first.measurement.facts["policy"] == "passive"
    assert first.measurement.facts["inherited"]
    assert runner.run("report").measurement.facts["policy"] == os.environ.get("OMP_WAIT_POLICY")
    again = psutil.Process().children()
    runner.run("report", passive)
    assert psutil.Process().children() == again


# How a probe ends


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("segfault", "died by SIGSEGV (11)"),
        ("leave", "exited with code 3"),
        ("raise_exit", "exited with code 4"),
        ("forget", "exited with code 0 without a result"),
    ],
)
def test_an_end_without_a_result_is_a_crash_with_its_reason(runner, act, message):
    failure = runner.run(act).failure
    assert failure.status is Status.CRASH
    assert failure.message == message


def test_the_log_tail_goes_with_a_failure(runner):
    assert "about to fall" in runner.run("segfault").failure.log_tail


def test_a_timeout_ends_everything_that_the_probe_started(runner):
    spec = runner.spec("hang", timeout_s=1.5)
    failure = runner.launcher.run(spec).failure
    assert failure.status is Status.TIMEOUT
    assert failure.message == "no result after 1.5 s; last phase: warm-up"
    assert failure.phase == "warm-up"
    assert len(pids_in(spec)) == 4
    assert not [pid for pid in pids_in(spec) if alive(pid)]
    assert runner.run("report").measurement


MIB = 1024**2


@pytest.mark.parametrize("where", ["leader", "child", "shm"])
def test_a_probe_that_passes_its_limit_on_host_memory_is_ended(runner, where):
    spec = runner.spec("grow", host_limit_bytes=100 * MIB)
    spec = replace(spec, config=Config({"act": "grow", "where": where}))
    failure = runner.launcher.run(spec).failure
    assert failure.status is Status.OUT_OF_MEMORY
    assert failure.phase == "window"
    told = re.fullmatch(
        r"host: reached (0.\d+) GiB of the 0.0977 GiB that --limit allows", failure.message
    )
    assert 0.0977 < float(told[1]) < 1


def test_what_a_probe_inherited_does_not_count_against_its_limits(runner):
    assert runner.run("report", host_limit_bytes=100 * MIB).measurement


def test_a_limit_on_the_step_leaves_its_workers_alone(runner):
    in_child = Config({"act": "grow", "where": "child"})
    spec = runner.spec("grow", memory_limit_bytes=100 * MIB, timeout_s=1.5)
    assert runner.launcher.run(replace(spec, config=in_child)).failure.status is Status.TIMEOUT
    failure = runner.run("grow", memory_limit_bytes=100 * MIB).failure
    assert failure.status is Status.OUT_OF_MEMORY


def test_a_result_counts_although_its_process_lingers(runner):
    outcome = runner.run("linger")
    assert outcome.failure is None
    assert "did not end by itself" in outcome.measurement.notes[-1]
    assert not alive(outcome.measurement.facts["pid"])


def test_a_result_counts_although_its_process_is_killed(runner):
    assert runner.run("die_after").measurement


def test_tensors_of_dead_processes_are_removed_from_shared_memory(runner):
    pid = runner.run("litter").measurement.facts["pid"]
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


def test_an_interrupt_ends_the_probe_and_goes_on(runner):
    spec = runner.spec("hang")

    def interrupt():
        if Path(spec.folder, "phase").exists():
            raise StoppedError(signal.SIGINT)

    with pytest.raises(StoppedError):
        runner.launcher.run(spec, should_stop=interrupt)
    assert not [pid for pid in pids_in(spec) if alive(pid)]
    assert runner.run("report").measurement


@pytest.mark.outlived
def test_an_interrupt_is_heeded_while_processes_for_other_variables_start(runner):
    def interrupt():
        raise StoppedError(signal.SIGINT)

    before = psutil.Process().children()
    with pytest.raises(StoppedError):
        runner.launcher.run(runner.spec("report"), {"OMP_WAIT_POLICY": "active"}, interrupt)
    assert psutil.Process().children() == before


def test_a_killed_process_that_the_kernel_counts_ran_out_of_memory(runner, monkeypatch):
    kills = count()
    monkeypatch.setattr("autotune.launcher.oom_kills", lambda: next(kills))
    failure = runner.run("segfault").failure
    assert failure.status is Status.OUT_OF_MEMORY
    assert failure.message.startswith("host: killed by the kernel's OOM killer")


# Model files that cannot be used, or not ahead


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("raise KeyError('oops')", "oops"),
        ("import os; os._exit(7)", "exited with code 7"),
        ("import time; time.sleep(600)", "guard training code with if __name__"),
    ],
)
def test_a_bad_model_file_is_told_at_once(tmp_path, extra, message):
    limits = Deadlines(import_s=1.0 if "sleep" in extra else 60.0)
    model = write_model(tmp_path, extra)
    with (
        running(model, tmp_path, preload=(), deadlines=limits) as runner,
        pytest.raises(ModelFileError, match=re.escape(message)),
    ):
        runner.launcher.load()


def test_a_builder_that_raises_is_the_model_files_fault(tmp_path):
    model = write_model(tmp_path, "def build_model(): raise KeyError('oops')")
    with running(model, tmp_path, preload=()) as runner:
        runner.launcher.load()
        with pytest.raises(ModelFileError, match="oops"):
            runner.launcher.settle()


@needs_two_cores
def test_a_build_on_several_threads_is_done_in_each_probe(acts, tmp_path):
    extra = """
        def build_model():
            torch.set_num_threads(2)
            torch.sigmoid(torch.randn(400_000))
            return nn.Linear(8, 3)
    """
    with running(write_model(tmp_path, extra), tmp_path) as runner:
        runner.launcher.load()
        runner.launcher.settle()
        assert "threads" in runner.launcher.fallback
        assert runner.launcher.facts.fallback == runner.launcher.fallback
        assert not runner.run("report").measurement.facts["inherited"]


def test_a_build_that_crashes_is_left_to_the_probes(acts, tmp_path):
    extra = """
        def build_model():
            import os, signal
            os.kill(os.getpid(), signal.SIGSEGV)
    """
    with running(write_model(tmp_path, extra), tmp_path) as runner:
        runner.launcher.load()
        runner.launcher.settle()
        assert "SIGSEGV" in runner.launcher.fallback
        assert runner.run("report").measurement


def test_threads_set_by_the_model_file_outlive_a_lost_template(acts, tmp_path):
    model = write_model(tmp_path, "torch.set_num_threads(3)")
    with running(model, tmp_path) as runner:
        assert not runner.launcher.load().fresh
        runner.launcher.settle()
        assert runner.run("report").measurement.facts["threads"] == 3
        kill_template()
        assert runner.run("report").measurement.facts["inherited"]
        failure = runner.run("kill_zygote").failure
        assert failure.status is Status.CRASH
        assert failure.message == LOST
        assert not runner.run("report").measurement.facts["inherited"]
        assert runner.launcher.fallback == home.LOST
        assert len(runner.said) == 1


def kill_template():
    zygote = max(psutil.Process().children(), key=psutil.Process.create_time)
    (template,) = zygote.children()
    template.kill()
    assert eventually(lambda: not alive(template.pid))


# Modules that cannot be imported ahead


@needs_two_cores
def test_a_module_that_breaks_forking_is_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    breaker = "import torch; torch.set_num_threads(2); torch.sigmoid(torch.randn(400_000))"
    (tmp_path / "breaker.py").write_text(breaker)
    limits = Deadlines(canary_s=3.0, later_canary_s=1.5)
    with running(write_model(tmp_path), tmp_path, ("breaker",), limits) as runner:
        runner.launcher.load()
        runner.launcher.settle()
        assert runner.launcher.skipped_preloads == ("breaker",)
        assert "breaker" in runner.said[0]
        assert runner.launcher.fallback == ""
        measurement = runner.run_really(workers=1).measurement
        assert measurement.workers == 1
        assert measurement.steps > 0


@pytest.mark.parametrize("bad", [{"a"}, {"c"}, {"h"}, {"a", "b"}, {"b", "f", "h"}])
def test_the_longest_sound_preload_is_found_in_few_tries(bad):
    names = list("abcdefgh")
    tries = []

    def works(part):
        tries.append(part)
        return not bad & set(part)

    assert longest_sound(names, works) == tuple(name for name in names if name not in bad)
    assert len(tries) <= 4 * len(bad)


FAKE_TRITON = {
    "__init__": "from triton import backends, compiler, language, runtime; __version__ = '3.4.0'",
    "language": "class dtype: pass",
    "backends/__init__": "from triton.backends import compiler",
    "backends/compiler": "",
    "compiler/__init__": "from triton.compiler import compiler",
    "compiler/compiler": "",
    "runtime/__init__": """
        import sys
        def __getattr__(name):
            if not name.startswith("__"):
                sys.stderr.write("asked triton for " + name)
            raise AttributeError(name)
    """,
}


def test_the_zygotes_imports_ask_for_no_device(tmp_path):
    for name, text in FAKE_TRITON.items():
        path = tmp_path / "triton" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    script = """
        import os, sys
        import torch
        def asked(*_):
            sys.stderr.write("asked for devices"); sys.stderr.flush()
            raise RuntimeError("asked for devices")
        for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getCurrentRawStream"):
            setattr(torch._C, name, asked)
        from autotune.probe.zygote import import_needed, preload
        failed = preload(["numpy", "sklearn.datasets", "PIL.Image"])["failed"]
        assert not failed, failed
        import_needed()
        assert "triton.runtime" in sys.modules
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "asked" not in ran.stderr


def test_third_party_imports_are_those_that_run_with_the_file(tmp_path):
    (tmp_path / "pandas.py").write_text("")
    path = tmp_path / "job.py"
    path.write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            import os, numpy as np, no_such_module
            import torch.nn as nn
            import pandas  # a file of the user's own
            from typing import TYPE_CHECKING
            from . import sibling
            from sklearn.datasets import load_digits
            try:
                import yaml
            except ImportError:
                def rescue():
                    import rich
            if TYPE_CHECKING:
                import psutil
            def build_model():
                import optuna
            if __name__ == "__main__":
                import plotly
            """
        )
    )
    assert third_party_imports(path) == ["numpy", "sklearn.datasets", "yaml"]
    path.write_text("import numpy\nthis is no Python")
    assert third_party_imports(path) == []
    assert third_party_imports(tmp_path / "nowhere.py") == []


# Nothing is left


def test_where_forking_cannot_work_probes_are_spawned(tmp_path, monkeypatch):
    monkeypatch.setattr(home, "CAN_FORK", False)
    others = psutil.Process().children(recursive=True)
    with running(write_model(tmp_path), tmp_path, preload=()) as runner:
        assert runner.launcher.load().current is None
        assert runner.launcher.settle()["type"]
        assert runner.launcher.fallback == home.SPAWNED
        assert runner.run_really().measurement.steps > 0
    assert psutil.Process().children(recursive=True) == others


def test_closing_leaves_no_process_descriptor_or_file(acts, tmp_path):
    before = os.listdir("/proc/self/fd")
    others = psutil.Process().children(recursive=True)
    with running(write_model(tmp_path), tmp_path) as runner:
        runner.launcher.load()
        runner.launcher.settle()
        runner.run("report")
        folder = runner.launcher._plan.folder
        below = [one for one in psutil.Process().children(recursive=True) if one not in others]
        assert len(below) == 2
    runner.launcher.close()
    assert not [process for process in below if process.is_running()]
    assert os.listdir("/proc/self/fd") == before
    assert not folder.exists()


DRIVER = """
import sys
from test_launcher import Runner, write_model
from pathlib import Path
folder = Path(sys.argv[1])
preload, extra, act = sys.argv[2:5]
runner = Runner(write_model(folder, extra), folder, preload.split())
runner.launcher.load()
print("loaded", flush=True)
runner.launcher.settle()
runner.run(act)
"""


@pytest.mark.parametrize("moment", ["import", "build", "probe"])
def test_a_killed_driver_leaves_no_process(acts, tmp_path, monkeypatch, moment):
    monkeypatch.syspath_prepend(tmp_path)
    touch = f"open({str(tmp_path / 'reached')!r}, 'w').close()"
    sleep = f"{touch}; import time; time.sleep(600)"
    (tmp_path / "slow.py").write_text(sleep)
    build = f"def build_model(): {sleep}"
    preload, extra, act = {
        "import": ("slow", "", "report"),
        "build": ("acts", build, "report"),
        "probe": ("acts", "", "hang"),
    }[moment]
    reached = tmp_path / ("probe-0/phase" if moment == "probe" else "reached")
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), preload, extra, act],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "MARK": mark},
        stdout=subprocess.DEVNULL,
    )
    try:
        assert eventually(reached.exists)
        marked = with_mark(mark)
        assert len(marked) >= 2
    finally:
        driver.kill()
        driver.wait()
    assert eventually(lambda: not [one for one in marked if alive(one.pid)], within_s=4.0)
    assert with_mark(mark) == []


def with_mark(mark):
    """The processes that this test has started, directly or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_ends_are_told_in_words():
    assert forkserver.how_it_ended(-9) == "died by SIGKILL (9)"
    assert forkserver.how_it_ended(3) == "exited with code 3"
