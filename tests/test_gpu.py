"""What only a CUDA device can prove. Where there is none, all of it is skipped.

This process never touches the device: a child says whether there is one, and every probe is forked
by the launcher, as in a run. One model file serves all tests; what its steps do is read from a file
beside it, by each probe for itself.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from conftest import CommandLine, write

from autotune.checkup import torch_facts
from autotune.home import Deadlines
from autotune.launcher import Launcher
from autotune.metrics import METRICS
from autotune.store import read_trials
from autotune.types import ModelRef, ProbeSpec, Sink, Source, Stage, Status

DEVICE = "cuda:0"
SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Without any of these files there is no CUDA device, and no child has to be asked."""


def cuda_here():
    return any(map(os.path.exists, SIGNS)) and torch_facts(90.0).kind == "cuda"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_here(), reason="no CUDA device here")]

JOB = '''
import json, os, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

HERE = Path(__file__).parent
CURRENT = {"loader.num_workers": 0, "train.batch_size": 32}
STATE = {}

def mode():
    """What this process's steps do."""
    if "mode" not in STATE:
        STATE["mode"] = json.loads((HERE / "mode.json").read_text())
    return STATE["mode"]

class Rows(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if sleep_s := mode().get("sleep_s"):
            time.sleep(sleep_s)
        return torch.zeros(mode().get("floats", 256)) + index % 7, index % 10

def build_model():
    return nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))

def build_dataset():
    return Rows()

def compute_loss(model, batch):
    x, y = batch
    if "begun" not in STATE:
        begin(x)
    loss = F.cross_entropy(model(x[:, :256]), y)
    burn(int(mode().get("work", 0) + mode().get("drift", 0) * (time.monotonic() - STATE["begun"])))
    return loss

def burn(products):
    """Matrix products that keep the device busy."""
    with torch.no_grad():
        for _ in range(products):
            torch.mm(STATE["square"], STATE["square"], out=STATE["out"])

def begin(x):
    """In the first step: tell how this process computes, and take what is asked for."""
    STATE["begun"] = time.monotonic()
    dice = torch.Generator().manual_seed(0)
    square = torch.randn(1024, 1024, generator=dice).to(x.device)
    exact = square.double() @ square.double()
    found = square @ square
    STATE["square"] = square.to(found.dtype)
    STATE["out"] = torch.empty_like(found)
    told = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "device": str(x.device),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cudnn.allow_tf32,
        "dtype": str(found.dtype),
        "error": float((found.double() - exact).abs().max() / exact.abs().max()),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if x.is_cuda:
        told["free"], told["total"] = torch.cuda.mem_get_info()
    (HERE / "told.json").write_text(json.dumps(told))
    spy(told)
    if share := mode().get("share"):
        STATE["held"] = torch.empty(int(share * told["total"]), dtype=torch.uint8, device=x.device)
        STATE["held"].fill_(1)

def spy(told):
    """Note from what memory, and how, batches are copied from now on."""
    plain, moves = torch.Tensor.to, set()

    def to(tensor, *args, **kwargs):
        if tensor.device.type == "cpu" and "non_blocking" in kwargs:
            move = (tensor.is_pinned(), kwargs["non_blocking"])
            if move not in moves:
                moves.add(move)
                (HERE / "told.json").write_text(json.dumps({**told, "moves": sorted(moves)}))
        return plain(tensor, *args, **kwargs)

    torch.Tensor.to = to
'''


class Bench:
    """Probes of the job, one after the other, forked from one template."""

    def __init__(self, folder, device=DEVICE):
        self.folder = folder
        self.device = device
        self.model = ModelRef(path=str(write(folder / "job.py", JOB)))
        self.set_mode()
        self.numbers = count()
        limits = dict.fromkeys(("start_s", "import_s", "build_s", "canary_s"), 90.0)
        self.launcher = Launcher(
            self.model, seed=0, preload=(), say=print, deadlines=Deadlines(**limits)
        )

    def set_mode(self, **mode):
        (self.folder / "mode.json").write_text(json.dumps(mode))

    @property
    def told(self):
        return json.loads((self.folder / "told.json").read_text())

    def run(self, config=None, *, mode=None, **changes):
        self.set_mode(**mode or {})
        known = {
            "model": self.model,
            "config": {"loader.num_workers": 0, "train.batch_size": 32, **(config or {})},
            "stage": Stage.SEARCH,
            "source": Source.LOADER,
            "sink": Sink.TRAIN,
            "folder": str(self.folder / str(next(self.numbers))),
            "device": self.device,
            "seed": 0,
            "global_batch": 32,
            "max_window_s": 0.6,
            "min_blocks": 4,
            "block_s": 0.1,
            "timeout_s": 90.0,
        }
        return self.launcher.run(ProbeSpec(**{**known, **changes}))

    def measure(self, config=None, **rest):
        outcome = self.run(config, **rest)
        assert outcome.failure is None, outcome.failure
        return outcome.measurement


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("gpu"))
    try:
        made.launcher.settle()  # what starts within a test is taken for something it has left
        yield made
    finally:
        made.launcher.close()


def wait_pct(measured):
    return METRICS["data_wait_pct"].compute(measured)


# --- launching ------------------------------------------------------------------------------------


def test_the_canary_computes_on_the_device_and_tells_of_it(bench):
    facts = bench.launcher.settle()
    assert facts["type"] == "cuda"
    assert len(facts["uuids"]) == len(facts["names"]) == facts["count"] >= 1
    assert all(facts["uuids"])
    assert all(total > 0 for total in facts["total_memory"])
    assert (bench.launcher.fallback, bench.launcher.skipped_preloads) == ("", ())


def contexts_opened(pid):
    """The files of CUDA contexts that a process holds open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("/dev/nvidia-uvm")}


def test_probes_reach_the_device_and_their_template_never_does(bench):
    told = []
    for _ in range(2):
        assert bench.measure().optimizer_steps > 0
        told.append(bench.told)
    assert [one["device"] for one in told] == [DEVICE] * 2
    assert told[0]["pid"] != told[1]["pid"]
    assert told[0]["parent"] == told[1]["parent"]
    assert contexts_opened(told[0]["parent"]) == set()


# --- time -----------------------------------------------------------------------------------------


def test_data_wait_is_the_devices_not_the_hosts(bench):
    """The host may wait in next() or not: what counts is whether the device had work."""
    busy = bench.measure({"loader.num_workers": 2, "loader.pin_memory": True}, mode={"work": 200})
    starved = bench.measure(mode={"sleep_s": 0.001})
    assert wait_pct(busy) < 5
    assert wait_pct(starved) > 60


def test_the_devices_clock_agrees_with_the_hosts(bench):
    measured = bench.measure(mode={"work": 50}, min_blocks=100)
    wall_s = (measured.end_ns - measured.start_ns) / 1e9
    assert 0.9 < sum(block.seconds for block in measured.blocks) / wall_s < 1.02


# --- copies and precision -------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_batches_are_copied_without_waiting(bench, pinned):
    bench.measure({"loader.num_workers": 1, "loader.pin_memory": pinned})
    assert bench.told["moves"] == [[pinned, pinned]]


def test_precisions_are_really_in_force(bench):
    told = {}
    for name in ("default", "fp32", "tf32", "bf16", "fp16"):
        bench.measure({"train.precision": name})
        told[name] = bench.told
    switches = {name: (one["matmul"], one["cudnn"]) for name, one in told.items()}
    assert switches["default"] == ("highest", True)  # PyTorch's own
    assert switches["fp32"] == ("highest", False)
    assert switches["tf32"] == ("high", True)
    types = {name: one["dtype"].removeprefix("torch.") for name, one in told.items()}
    assert types == {
        **dict.fromkeys(("default", "fp32", "tf32"), "float32"),
        "bf16": "bfloat16",
        "fp16": "float16",
    }
    error = {name: one["error"] for name, one in told.items()}
    assert error["default"] == pytest.approx(error["fp32"], rel=0.5)
    assert 10 * error["fp32"] < error["tf32"] < error["bf16"]


# --- memory ---------------------------------------------------------------------------------------


def test_out_of_memory_is_a_row_and_the_next_probe_finds_all_of_it_again(bench):
    bench.measure()
    before = bench.told["free"]
    failed = bench.run(mode={"share": 1.5}).failure
    assert failed.status is Status.OUT_OF_MEMORY
    assert failed.message.startswith("device: ")
    assert bench.measure().optimizer_steps > 0
    assert bench.told["free"] > 0.98 * before


def test_the_memory_that_is_held_is_told(bench):
    little, much = (bench.measure(mode={"share": share}) for share in (0.01, 0.05))
    grown = much.memory_bytes - little.memory_bytes
    assert grown == pytest.approx(0.04 * bench.told["total"], rel=0.05)


def test_a_ring_of_cached_batches_does_not_count_as_the_jobs_memory(bench):
    mode = {"floats": 250_000}  # 32 MB a batch, eight of them
    plain = bench.measure(mode=mode)
    cached = bench.measure(mode=mode, source=Source.CACHED)
    batch = 32 * 4 * mode["floats"]
    assert abs(cached.memory_bytes - plain.memory_bytes) < 3 * batch
    assert plain.memory_bytes > batch


def test_a_probe_takes_no_more_than_its_share_of_the_memory(bench):
    mode = {"share": 0.1}
    assert bench.run(mode=mode, memory_fraction=0.2).failure is None
    failed = bench.run(mode=mode, memory_fraction=0.05).failure
    assert failed.status is Status.OUT_OF_MEMORY


# --- NVML -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The rows of a run whose baseline gets slower and slower: its window lasts to the end."""
    folder = tmp_path_factory.mktemp("watched")
    write(folder / "job.py", JOB)
    (folder / "mode.json").write_text(json.dumps({"work": 20, "drift": 20}))
    cli = CommandLine(folder)
    try:
        words = ("--budget", "5m", "--max-probes", "1", "--output", "run", "--quiet")
        ran = cli("--model", "job.py", *words, within_s=90.0)
    finally:
        cli.close()
    assert ran.code == 0, ran.err
    return [trial for trial in read_trials(folder / "run") if trial.ok and trial.end_to_end]


def test_nvmls_readings_are_attached_to_the_window(watched):
    measured = [trial.measurement for trial in watched if trial.stage is Stage.BASELINE][0]
    found = {name: METRICS[name].compute(measured) for name in ("gpu_util_pct", "power_w")}
    assert found["gpu_util_pct"] is None or 50 < found["gpu_util_pct"] <= 100
    assert found["power_w"] is None or found["power_w"] > 10
    assert set(found.values()) != {None}


def test_energy_is_told_of_long_windows_only(watched):
    for measured in (trial.measurement for trial in watched if trial.stage is not Stage.INSPECT):
        long = (measured.end_ns - measured.start_ns) / 1e9 >= 10
        joules = METRICS["joules_per_sample"].compute(measured)
        assert joules is None or (long and joules > 0)


# --- which devices are seen -----------------------------------------------------------------------


def seen(tmp_path, values):
    """What torch sees under each value of CUDA_VISIBLE_DEVICES; all are asked at once."""
    asked = {}
    for number, value in enumerate(values):
        out = tmp_path / f"{number}.json"
        words = [sys.executable, "-m", "autotune.probe.checkup", str(out)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": value}
        asked[value] = out, subprocess.Popen(words, env=env)
    try:
        for _, process in asked.values():
            assert process.wait(timeout=90) == 0
    finally:
        for _, process in asked.values():
            process.kill()
            process.wait()
    return {value: json.loads(out.read_text())["device"] for value, (out, _) in asked.items()}


def test_every_form_of_visible_devices_is_taken_as_torch_takes_it(bench, tmp_path):
    uuid = f"GPU-{str(bench.launcher.settle()['uuids'][0]).removeprefix('GPU-')}"
    found = seen(tmp_path, ["0", uuid, "-1", ""])
    assert found["0"]["uuids"] == found[uuid]["uuids"]
    assert found["0"]["count"] == found[uuid]["count"] == 1
    assert found["-1"] == found[""] == {"type": "cpu"}


def test_where_the_devices_are_hidden_the_cpu_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    hidden = Bench(tmp_path, device="cpu")
    try:
        assert hidden.launcher.settle()["type"] == "cpu"
        assert hidden.measure().optimizer_steps > 0
        assert hidden.told["device"] == "cpu"
    finally:
        hidden.launcher.close()
