"""One probe, start to end, of real model files; most of them run in this process."""

import importlib
import os
import pickle
import random
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from autotune.errors import ModelFileError
from autotune.metrics import METRICS, rate, throughput
from autotune.probe import run
from autotune.probe.batches import leading, mapped, size_bytes, tensors_of
from autotune.probe.inspecting import STOCK_FILE
from autotune.probe.run import run_probe
from autotune.probe.setup import setup_of
from autotune.probe.sources import SOURCES, CachedSource, Counted, LoaderSource
from autotune.probe.workload import load
from autotune.types import (
    Failure,
    Label,
    Measurement,
    ModelRef,
    ProbeSpec,
    Sink,
    Source,
    Stage,
    Status,
    WorkloadFacts,
    decode,
    encode,
)

JOB = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

STEPS = []  # when the optimizer really stepped, in ns

class Logged(torch.optim.SGD):
    def step(self, closure=None):
        STEPS.append(time.time_ns())
        return super().step(closure)

def build_optimizer(model):
    return Logged(model.parameters(), lr=1e-3)

def build_model():
    return nn.Linear(6, 3)

def build_dataset():
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(256, 6, generator=numbers), torch.randint(0, 3, (256,), generator=numbers)
    )
"""

NAMES = (f"job_{os.getpid()}_{number}" for number in count())


@pytest.fixture(autouse=True)
def as_before():
    """Put back what a probe sets for its whole process."""
    path, modules, threads = list(sys.path), set(sys.modules), torch.get_num_threads()
    environment = dict(os.environ)
    precision, switch = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    sys.path[:] = path
    for name in set(os.environ) - set(environment):
        del os.environ[name]  # PyTorch's compiler and Lightning leave some when first used
    for name in set(sys.modules) - modules:
        if name.startswith("job_"):
            del sys.modules[name]
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = switch


class Bench:
    """Runs probes of one model file."""

    def __init__(self, folder, text, base=JOB):
        self.name = next(NAMES)
        self.folder = folder
        self.ref = ModelRef(path=str(folder / f"{self.name}.py"))
        Path(self.ref.path).write_text(base + textwrap.dedent(text))
        self.numbers = count()
        self.stock = None

    def spec(self, config, **changes):
        folder = self.folder / f"{self.name}-{next(self.numbers)}"
        folder.mkdir()
        config = {"loader.num_workers": 0, "train.batch_size": 8, **config}
        fields = {
            "model": self.ref,
            "config": config,
            "stage": Stage.SEARCH,
            "source": Source.LOADER,
            "sink": Sink.TRAIN,
            "folder": str(folder),
            "device": "cpu",
            "seed": 1,
            "global_batch": config["train.batch_size"] or 8,
            "stock": self.stock,
            "max_window_s": 0.15,
            "min_blocks": 6,
            "block_s": 0.01,
            "requested_s": time.monotonic(),
            "default_threads": 1,
        }
        return ProbeSpec(**{**fields, **changes})

    def run(self, config=None, *, spawned=False, **changes):
        """What a probe of the config measures, or why it fails."""
        spec = self.spec(config or {}, **changes)
        path = Path(spec.folder, "spec.json")
        path.write_text(encode(spec))
        if spawned:
            command = [sys.executable, "-m", "autotune.probe", str(path)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        else:
            run_probe(path, None)
        raw = decode(dict, path.with_name("result.json").read_text())
        return raw.get("measurement") or raw["failure"]

    def measure(self, config=None, **changes):
        measured = self.run(config, **changes)
        assert isinstance(measured, Measurement), measured
        return measured

    def fail(self, config=None, **changes):
        failed = self.run(config, **changes)
        assert isinstance(failed, Failure), failed
        return failed

    def inspect(self, config=None, **changes):
        """The inspecting probe's facts; later probes get its stock."""
        measured = self.measure(config, stage=Stage.INSPECT, **changes)
        stock = self.folder / f"{self.name}-{next(self.numbers) - 1}" / STOCK_FILE
        self.stock = str(stock) if stock.exists() else None
        return WorkloadFacts(**measured.facts)

    @property
    def module(self):
        return sys.modules[self.name]

    def workload(self, seed=1):
        workload = load(self.ref)
        workload.complete(seed, torch.device("cpu"))
        return workload


@pytest.fixture
def bench(tmp_path):
    def made(text="", base=JOB):
        return Bench(tmp_path, text, base)

    return made


# --- every source into every sink ---------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sink", Sink)
@pytest.mark.parametrize("source", [Source(name) for name in SOURCES])
def test_what_is_counted_is_what_happened(bench, source, sink, workers):
    job = bench()
    job.inspect()
    measured = job.measure(
        {"loader.num_workers": workers, "train.accumulation_steps": 2}, source=source, sink=sink
    )
    steps = [at for at in job.module.STEPS if measured.start_ns <= at <= measured.end_ns]
    assert measured.optimizer_steps == len(steps)
    assert measured.steps == sum(block.steps for block in measured.blocks)
    if sink is Sink.TRAIN:
        assert measured.steps == len(steps)
        assert measured.batches == 2 * measured.steps
        assert measured.parity_loss is not None
        assert measured.first_step_s > 0
    else:
        assert measured.batches == measured.steps
        assert measured.parity_loss is None
        assert measured.first_step_s is None
    assert sum(block.consumed for block in measured.blocks) == 8 * measured.batches
    assert measured.workers == (workers if source is Source.LOADER else 0)
    # what goes into a block lies within it
    assert sum(b.seconds for b in measured.blocks) <= (measured.end_ns - measured.start_ns) / 1e9
    assert all(block.wait_s <= block.seconds * 1.01 for block in measured.blocks)


def test_a_window_ends_when_it_cannot_win(bench):
    measured = bench().measure(beat=1e12, max_window_s=5.0)
    assert measured.stopped == "dominated"
    assert (measured.end_ns - measured.start_ns) / 1e9 < 2


def test_a_window_in_which_memory_still_grows_is_not_steady(bench, monkeypatch):
    grown = count()
    monkeypatch.setattr(run, "counters_for", lambda device: lambda: {"device memory": next(grown)})
    measured = bench().measure(max_window_s=0.3)
    assert (measured.stopped, measured.unsettled) == ("limit", ("device memory",))
    assert Label.NOT_STEADY in rate(measured).labels
    grown = iter([1, 2, 3, *[4] * 10_000])  # of the warm-up nothing is held against it
    settled = bench().measure(max_window_s=0.3)
    assert settled.unsettled == ()


def test_a_speed_that_changes_within_the_window_is_told(bench):
    slowing = """
    CALLS = []

    def compute_loss(model, batch):
        CALLS.append(batch)
        time.sleep(min(0.002 * 1.03 ** len(CALLS), 0.1))
        return model(batch[0]).sum()
    """
    measured = bench(slowing).measure(max_window_s=0.6, block_s=0.02)
    assert Label.NOT_STEADY in rate(measured).labels
    assert "% slower towards the end" in measured.notes[0]


def test_a_window_lasts_as_long_as_is_asked_at_least(bench):
    measured = bench().measure(want=10.0, max_window_s=5.0, min_window_s=0.6)
    assert (measured.end_ns - measured.start_ns) / 1e9 >= 0.6
    lost = bench().measure(beat=1e12, max_window_s=5.0, min_window_s=4.0)
    assert lost.stopped == "dominated"  # what cannot win need not tell more


def test_a_step_longer_than_the_window_is_measured_all_the_same(bench):
    slow = """
    def compute_loss(model, batch):
        time.sleep(0.15)
        return model(batch[0]).sum()
    """
    measured = bench(slow).measure(max_window_s=0.1)
    assert measured.stopped == "limit"
    assert measured.steps >= 1
    assert 0.5 * 8 / 0.15 < throughput(measured).value < 8 / 0.15


def test_no_batch_is_an_invalid_row_that_says_why(bench):
    failed = bench().fail({"train.batch_size": 512})
    assert failed.status is Status.INVALID
    assert "0 batches: a dataset of 256 samples at batch size 512" in failed.message


def test_a_count_of_nothing_is_invalid(bench):
    failed = bench("def count_samples(batch):\n    return 0\n").fail()
    assert failed.status is Status.INVALID


def test_a_non_finite_loss_is_invalid(bench):
    failed = bench("def compute_loss(m, b):\n    return m(b[0]).sum() * float('nan')\n").fail()
    assert (failed.status, failed.message) == (Status.INVALID, "non-finite loss")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def compute_loss(m, b):\n    return 1.0\n", "the loss must be a tensor, it is float"),
        ("def compute_loss(m, b):\n    raise KeyError('labels')\n", "KeyError: 'labels' (job_"),
        ("def build_optimizer(m):\n    return None\n", "not an Optimizer"),
        ("def build_loader(d, **k):\n    return [1]\n", "build_loader returned list"),
        ("def compute_loss(m, b):\n    raise SystemExit(3)\n", "SystemExit: 3"),
        (
            "def build_dataset():\n    return [(torch.zeros(n), 0) for n in range(1, 65)]\n",
            "define a padding collate",
        ),
    ],
)
def test_what_the_users_code_raises_is_an_error_row(bench, text, told):
    failed = bench(text).fail()
    assert failed.status is Status.ERROR
    assert told in failed.message


# --- the step -----------------------------------------------------------------------------------

CLIPPED = """
NORMS = []

def before_step(model, optimizer):
    NORMS.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
"""


@pytest.mark.parametrize("precision", ["default", "fp32", "bf16", "fp16"])
def test_accumulation_clipping_and_every_precision_go_together(bench, precision):
    job = bench(CLIPPED)
    job.inspect()
    measured = job.measure({"train.accumulation_steps": 4, "train.precision": precision})
    assert measured.optimizer_steps == measured.steps > 0
    assert measured.skipped_steps == 0
    # the user's clipping sees the true gradients, not those multiplied by the loss scale
    assert all(0 < norm < 100 for norm in job.module.NORMS[-10:])


HOPELESS = """
class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")

def compute_loss(model, batch):
    return Overflow.apply(model(batch[0])).float().mean()

def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), fused={fused})
"""


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_are_all_skipped_are_no_steps(bench, fused):
    failed = bench(HOPELESS.format(fused=fused)).fail({"train.precision": "fp16"})
    assert failed.status is Status.INVALID
    assert "all fp16 steps skipped" in failed.message


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_starts_counting_when_its_scale_fits(bench, fused):
    large = """
    def compute_loss(model, batch):
        return model(batch[0]).float().mean() * 100.0

    def build_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=%s)
    """
    measured = bench(large % fused).measure({"train.precision": "fp16"})
    assert measured.skipped_steps <= 1
    assert measured.optimizer_steps > 0


def test_a_skipped_step_is_counted_as_one(bench):
    seldom = """
    CALLS = [0]

    class Sometimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            CALLS[0] += 1
            return grad * (float("inf") if CALLS[0] % 40 == 0 else 1.0)

    def compute_loss(model, batch):
        return Sometimes.apply(model(batch[0])).float().mean()
    """
    job = bench(seldom)
    measured = job.measure({"train.precision": "fp16"})
    steps = [at for at in job.module.STEPS if measured.start_ns <= at <= measured.end_ns]
    assert measured.optimizer_steps == len(steps)
    assert measured.skipped_steps == measured.steps - len(steps)
    assert measured.skipped_steps == pytest.approx(measured.steps / 40, abs=2)


@pytest.mark.parametrize(("precision", "switch"), [("fp32", "highest"), ("default", "high")])
def test_only_a_named_precision_touches_the_switches(bench, precision, switch):
    job = bench("torch.set_float32_matmul_precision('high')\n")
    job.measure({"train.precision": precision})
    assert torch.get_float32_matmul_precision() == switch


# --- parity: the training problem is the same ---------------------------------------------------


def test_the_parity_loss_does_not_depend_on_how_a_global_batch_is_cut(bench):
    job = bench()
    job.inspect(global_batch=32)
    losses = {
        (batch, steps, source, workers): job.measure(
            {
                "train.batch_size": batch,
                "train.accumulation_steps": steps,
                "loader.num_workers": workers,
            },
            source=source,
            global_batch=32,
            max_window_s=0.05,
        ).parity_loss
        for batch, steps in ((32, 1), (16, 2), (8, 4), (1, 32))
        for source, workers in ((Source.LOADER, 0), (Source.CACHED, 0))
    }
    first = next(iter(losses.values()))
    assert first > 0
    assert all(loss == pytest.approx(first, rel=1e-5) for loss in losses.values())
    other = job.measure({"train.batch_size": 64}, max_window_s=0.05).parity_loss
    assert other != pytest.approx(first, rel=1e-5)


def test_the_parity_loss_tells_another_precision_and_another_seed(bench):
    job = bench()
    job.inspect()
    one = job.measure(max_window_s=0.05).parity_loss
    assert job.measure(max_window_s=0.05).parity_loss == one
    bf16 = job.measure({"train.precision": "bf16"}, max_window_s=0.05).parity_loss
    assert bf16 != one
    assert bf16 == pytest.approx(one, rel=0.05)
    assert job.measure(seed=2, max_window_s=0.05).parity_loss != one


def test_every_probe_sees_the_same_weights_data_and_random_numbers(bench):
    seen = """
    import random
    import numpy as np

    SEEN = []

    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return batch

    def compute_loss(model, batch):
        SEEN.append((float(model.weight.sum()), float(batch[0].sum()), random.random(),
                     float(np.random.rand()), float(torch.rand(()))))
        return model(batch[0]).sum()
    """
    job = bench(seen)
    job.inspect()
    sys.modules.pop(job.name)
    runs = []
    for workers in (0, 0, 2):
        job.measure({"loader.num_workers": workers}, max_window_s=0.1)
        runs.append(job.module.SEEN[:])
        sys.modules.pop(job.name)
    assert runs[0][:10] == runs[1][:10]
    # with workers the batches are the same; only what the main process draws may differ
    assert [row[1] for row in runs[0][:5]] == [row[1] for row in runs[2][:5]]


# --- batches of any shape -----------------------------------------------------------------------

SHAPES = {
    "list": "[x, y]",
    "tuple": "(x, y)",
    "dict": "{'x': x, 'y': y}",
    "nested": "{'x': [x], 'y': ((y,), 'a word', None, 3)}",
    "named tuple": "Pair(x, y)",
    "list subclass": "Own([x, y])",
    "list subclass with another constructor": "Wrapped(x, y)",
    "dict subclass": "Words(x=x, y=y)",
    "user dict": "UserDict({'x': x, 'y': y})",
    "data class": "Fields(x, y)",
}
SHAPED = """
from collections import UserDict, namedtuple
from dataclasses import dataclass

Pair = namedtuple("Pair", "x y")

class Own(list):
    pass

class Wrapped(list):
    def __init__(self, x, y):
        super().__init__([x, y])

class Words(dict):
    pass

@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor

KINDS = set()

def collate(samples):
    x, y = torch.utils.data.default_collate(samples)
    return SHAPE

def flat(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, (dict, UserDict)):
        batch = list(batch.values())
    if isinstance(batch, Fields):
        batch = [batch.x, batch.y]
    if isinstance(batch, (list, tuple)):
        return [tensor for entry in batch for tensor in flat(entry)]
    return []

def compute_loss(model, batch):
    KINDS.add(type(batch).__name__)
    x, y = flat(batch)
    return nn.functional.cross_entropy(model(x), y)
"""


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_may_have_any_shape(bench, shape, source):
    job = bench(SHAPED.replace("SHAPE", SHAPES[shape]))
    facts = job.inspect()
    assert facts.delivered_batch == 8
    assert facts.sample_bytes == pytest.approx(6 * 4 + 8)
    measured = job.measure(source=source)
    assert sum(block.consumed for block in measured.blocks) == 8 * measured.batches
    if shape != "list subclass with another constructor":  # that one stays a plain list
        assert len(job.module.KINDS) == 1


@pytest.mark.parametrize(
    "loss",
    [
        "y = batch.pop('y'); return nn.functional.cross_entropy(model(batch.pop('x')), y)",
        "del batch['y']; return model(batch['x']).sum()",
        "batch['x'].mul_(2.0).clamp_(-1e6, 1e6); HIGHEST.append(float(batch['x'].abs().max())); "
        "return model(batch['x']).mean()",
    ],
)
@pytest.mark.parametrize("kind", ["dict", "Words"])
def test_a_loss_may_take_its_batch_apart(bench, loss, kind):
    job = bench(
        f"""
        class Words(dict):
            pass

        HIGHEST = []

        def collate(samples):
            x, y = torch.utils.data.default_collate(samples)
            return {kind}(x=x, y=y)

        def compute_loss(model, batch):
            {loss}
        """
    )
    job.inspect()
    measured = job.measure(source=Source.CACHED)
    assert measured.batches > 2 * 8  # several times round the ring
    highest = job.module.HIGHEST[-8:]
    assert all(value < 4 * 6 for value in highest)  # the data does not drift from lap to lap


def test_a_loss_may_take_an_object_of_the_users_apart(bench):
    job = bench(
        """
        class Batch:
            def __init__(self, x, y):
                self.x, self.y = x, y

        def collate(samples):
            return Batch(*torch.utils.data.default_collate(samples))

        def compute_loss(model, batch):
            x, batch.x = batch.x, None
            return model(x).sum()
        """
    )
    job.inspect()
    assert job.measure(source=Source.CACHED).batches > 16


def test_batches_are_mapped_leaf_by_leaf():
    batch = {"a": [torch.ones(2), (torch.ones(3), "word")], "b": 7}
    doubled = mapped(batch, lambda leaf: leaf * 2)
    assert doubled["a"][0].tolist() == [2, 2]
    assert doubled["a"][1][1] == "wordword"
    assert doubled["b"] == 14
    assert type(doubled["a"][1]) is tuple
    assert batch["b"] == 7
    assert size_bytes(batch) == 5 * 4
    assert [len(tensor) for tensor in tensors_of(batch)] == [2, 3]
    assert leading(batch) == 2
    assert leading([torch.tensor(1.0), torch.ones(4, 2)]) == 4
    assert leading("nothing") == 1


# --- tokens -------------------------------------------------------------------------------------

TOKENS = """
UNIT = "tokens"

def build_dataset():
    return [torch.arange(1 + n % 5, dtype=torch.float32) for n in range(256)]

def collate(samples):
    return torch.cat(samples)

def count_samples(batch):
    return len(batch)

def compute_loss(model, batch):
    return model(batch[:, None].expand(-1, 6)).mean()
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", Source)
def test_tokens_are_counted_as_the_user_counts_them(bench, source, workers):
    job = bench(TOKENS)
    facts = job.inspect()
    assert facts.delivered_batch == 8  # samples of a batch, not tokens
    assert facts.not_applicable == {}
    measured = job.measure({"loader.num_workers": workers}, source=source)
    consumed = sum(block.consumed for block in measured.blocks)
    assert consumed == pytest.approx(measured.batches * 8 * 3, rel=0.1)
    if source is Source.LOADER:
        assert measured.epoch_samples == pytest.approx(256 * 3, rel=0.1)


def test_tokens_of_a_loader_with_its_own_batches(bench):
    job = bench(
        TOKENS
        + """
def build_loader(dataset, num_workers):
    return DataLoader(dataset, batch_size=16, num_workers=num_workers, collate_fn=collate)
"""
    )
    facts = job.inspect()
    assert facts.delivered_batch == 16
    assert "16 samples whatever" in facts.not_applicable["train.batch_size"]


# --- loaders of the user's own ------------------------------------------------------------------

ALL = {"batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers"}
LOADERS = {
    "all by name": (
        "def build_loader(dataset, **kwargs):\n    return DataLoader(dataset, **kwargs)\n",
        ALL,
    ),
    "two that are required": (
        "def build_loader(dataset, batch_size, num_workers):\n"
        "    return DataLoader(dataset, batch_size, num_workers=num_workers, shuffle=True)\n",
        {"batch_size", "num_workers"},
    ),
    "keywords only": (
        "def build_loader(dataset, *, batch_size, shuffle, drop_last, pin_memory, num_workers=0):\n"
        "    return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last,\n"
        "                      num_workers=num_workers)\n",
        {"batch_size", "num_workers", "pin_memory"},
    ),
    "a batch sampler": (
        "from torch.utils.data import BatchSampler, RandomSampler\n"
        "def build_loader(dataset, batch_size, num_workers=0):\n"
        "    batches = BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)\n"
        "    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers)\n",
        {"batch_size", "num_workers"},
    ),
    "nothing": (
        "def build_loader(dataset):\n    return DataLoader(dataset, batch_size=20)\n",
        set(),
    ),
    "all, ignoring the batch size": (
        "def build_loader(dataset, **kwargs):\n"
        "    return DataLoader(dataset, **{**kwargs, 'batch_size': 20})\n",
        ALL - {"batch_size"},
    ),
    "all, ignoring it though it is the user's own": (
        "def build_loader(dataset, **kwargs):\n"
        "    return DataLoader(dataset, **{**kwargs, 'batch_size': 8})\n",
        ALL - {"batch_size"},
    ),
    "ignoring the workers": (
        "def build_loader(dataset, batch_size, num_workers):\n"
        "    return DataLoader(dataset, batch_size, num_workers=0)\n",
        {"batch_size"},
    ),
    "whole batches from the dataset": (
        "def build_dataset():\n"
        "    return [(torch.randn(12, 6), torch.zeros(12, dtype=torch.long)) for _ in range(40)]\n"
        "def build_loader(dataset, num_workers):\n"
        "    return DataLoader(dataset, batch_size=None, num_workers=num_workers)\n",
        {"num_workers"},
    ),
    "the whole dataset at once": (
        "def build_dataset():\n    return [(torch.randn(6), 0) for _ in range(5)]\n"
        "def build_loader(dataset, batch_size):\n    return DataLoader(dataset, batch_size)\n",
        {"batch_size"},
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gets_what_it_takes_and_the_rest_is_refused(bench, name):
    text, applies = LOADERS[name]
    job = bench(text)
    facts = job.inspect()
    known = {f"loader.{knob}" for knob in ALL - {"batch_size"}} | {"train.batch_size"}
    refused = {knob for knob in facts.not_applicable if ">" not in knob}
    assert {knob.partition(".")[2] for knob in known - refused} == applies
    assert all(facts.not_applicable.values())
    config = {"loader.num_workers": 1, "loader.prefetch_factor": 2, "train.batch_size": 4}
    left = {knob: value for knob, value in config.items() if knob not in refused}
    delivered = int(facts.delivered_batch)
    spec_config = {"loader.num_workers": 0, "train.batch_size": 8, **left}
    for knob in refused & set(spec_config):
        del spec_config[knob]
    spec = replace(job.spec({}), config=spec_config, delivered_batch=delivered)
    path = Path(spec.folder, "spec.json")
    path.write_text(encode(spec))
    run_probe(path, None)
    measured = decode(dict, path.with_name("result.json").read_text())["measurement"]
    size = delivered if "train.batch_size" in refused else 4
    consumed = sum(block.consumed for block in measured.blocks)
    assert consumed == pytest.approx(size * measured.batches, rel=0.5)
    assert measured.workers == (1 if "num_workers" in applies else 0)


@pytest.mark.parametrize(
    "text",
    [
        "def build_loader():\n    pass\n",
        "def build_loader(dataset, factor):\n    pass\n",
        "build_loader = 3\n",
        "async def build_loader(dataset):\n    pass\n",
    ],
)
def test_a_loader_that_cannot_be_called_is_refused_at_once(bench, text):
    with pytest.raises(ModelFileError, match="build_loader"):
        load(bench(text).ref)


def test_counting_can_be_pickled_for_workers_that_are_spawned(bench):
    job = bench("def count_samples(batch):\n    return 3\n")
    workload = job.workload()
    counted = Counted(torch.utils.data.default_collate, workload, batched=True, workers=7)
    again = pickle.loads(pickle.dumps(replace_shared(counted)))
    assert again([torch.ones(1)])[0] == 3


def replace_shared(counted):
    """Shared memory goes between processes by torch's own pickler only."""
    counted.made = torch.zeros(8, dtype=torch.int64)
    return counted


# --- iterable datasets --------------------------------------------------------------------------

ITERABLES = {
    "every worker repeats it": "yield from self.samples",
    "shards": (
        "me = get_worker_info()\n"
        "        yield from (self.samples[me.id :: me.num_workers] if me else self.samples)"
    ),
    "fails with workers": (
        "if get_worker_info():\n            raise ValueError('one process only')\n"
        "        yield from self.samples"
    ),
}


def iterable(body):
    return f"""
class Stream(IterableDataset):
    def __init__(self):
        self.samples = [(torch.full((6,), float(n)), n % 3) for n in range(64)]

    def __iter__(self):
        {body}

def build_dataset():
    return Stream()
"""


def test_an_iterable_that_every_worker_repeats_gets_one_worker_at_most(bench):
    facts = bench(iterable(ITERABLES["every worker repeats it"])).inspect()
    assert "every worker repeats it" in facts.not_applicable["loader.num_workers>1"]
    assert facts.dataset_len is None
    assert facts.stock == 64


def test_an_iterable_that_shards_gets_as_many_as_it_likes(bench):
    job = bench(iterable(ITERABLES["shards"]))
    assert job.inspect().not_applicable == {}
    measured = job.measure({"loader.num_workers": 2})
    assert measured.epoch_samples == 64


def test_an_iterable_that_two_workers_cannot_read_gets_one_at_most(bench):
    facts = bench(iterable(ITERABLES["fails with workers"])).inspect(spawned=True)
    assert "two workers cannot read" in facts.not_applicable["loader.num_workers>1"]


def test_an_iterable_with_batches_of_its_own(bench):
    own = iterable("yield from self.samples") + (
        "\ndef build_loader(dataset, batch_size, num_workers):\n"
        "    return DataLoader(dataset, batch_size=16, num_workers=num_workers)\n"
    )
    facts = bench(own).inspect()
    assert "16 samples whatever the batch size" in facts.not_applicable["train.batch_size"]


# --- Lightning ----------------------------------------------------------------------------------

LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch{index}):
        x, y = batch
        return {result}

    def configure_optimizers(self):
        optimizer = Logged(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {optimizer}

    {more}

def build_model():
    return Module()
"""
LOSS = "nn.functional.cross_entropy(self.layer(x), y)"


def lightning_job(index=", batch_idx", result=LOSS, optimizer="optimizer", more="pass"):
    text = LIGHTNING.format(index=index, result=result, optimizer=optimizer, more=more)
    return text.replace("    pass\n", "")


def without_own_optimizer():
    start = JOB.index("def build_optimizer")
    return JOB[:start] + JOB[JOB.index("def build_model") :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index": ""},
        {"result": "{'loss': " + LOSS + ", 'other': 1}"},
        {"optimizer": "[optimizer]"},
        {"optimizer": "([optimizer], [scheduler])"},
        {"optimizer": "{'optimizer': optimizer, 'lr_scheduler': scheduler}"},
        {"optimizer": "[{'optimizer': optimizer}]"},
        {"optimizer": "(optimizer,)"},
    ],
    ids=str,
)
def test_a_lightning_module_trains_as_it_is(bench, changes):
    job = bench(lightning_job(**changes), base=without_own_optimizer())
    measured = job.measure()
    steps = [at for at in job.module.STEPS if measured.start_ns <= at <= measured.end_ns]
    assert measured.optimizer_steps == len(steps) > 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": "[optimizer, optimizer]"}, "needs a Trainer: configure_optimizers"),
        ({"optimizer": "None"}, "configure_optimizers returned NoneType"),
        (
            {"more": "@property\n    def automatic_optimization(self):\n        return False"},
            "needs a Trainer: the module optimises manually",
        ),
        ({"result": "self.trainer.max_epochs"}, "RuntimeError"),
    ],
    ids=str,
)
def test_what_needs_a_trainer_is_an_error_row(bench, changes, told):
    failed = bench(lightning_job(**changes), base=without_own_optimizer()).fail()
    assert failed.status is Status.ERROR
    assert told in failed.message


# --- building -----------------------------------------------------------------------------------


def test_builders_may_ask_for_the_device(bench):
    job = bench(
        """
        DEVICES = []

        def build_model(device):
            DEVICES.append(device)
            return nn.Linear(6, 3, device=device)

        def build_dataset(device=None):
            DEVICES.append(device)
            return TensorDataset(torch.randn(64, 6), torch.zeros(64, dtype=torch.long))
        """
    )
    workload = load(job.ref)
    workload.build(1)  # ahead, where no device may be touched
    assert workload.model is None
    assert workload.dataset is None
    measured = job.measure()
    assert measured.build_s > 0
    assert {str(device) for device in job.module.DEVICES} == {"cpu"}


def test_the_phases_are_told_apart(bench):
    job = bench(
        """
        FIRST = [True]

        def build_model():
            time.sleep(0.4)
            return nn.Linear(6, 3)

        def collate(samples):
            time.sleep(0.05)
            return torch.utils.data.default_collate(samples)

        def compute_loss(model, batch):
            if FIRST[0]:
                FIRST[0] = False
                time.sleep(0.3)
            return model(batch[0]).sum()
        """
    )
    measured = job.measure()
    assert 0.4 <= measured.build_s < 0.6
    assert 0.05 <= measured.startup_s < 0.35  # the first batch; building and stepping come apart
    assert 0.3 <= measured.first_step_s < 0.6
    assert max(block.seconds / block.steps for block in measured.blocks) < 0.2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def build_model():\n    return 3\n", "build_model returned int"),
        ("def build_dataset():\n    pass\n", "build_dataset returned None"),
        ("def build_model():\n    raise OSError('no weights')\n", "OSError: no weights"),
    ],
)
def test_a_builder_that_fails_says_which(bench, text, told):
    assert told in bench(text).fail().message


# --- what is stored of the dataset --------------------------------------------------------------


def test_the_stock_holds_samples_and_not_what_they_are_a_view_of(bench):
    job = bench(
        """
        def build_dataset():
            return TensorDataset(torch.randn(20_000, 6), torch.zeros(20_000, dtype=torch.long))
        """
    )
    assert job.inspect().stock == 512
    assert Path(job.stock).stat().st_size < 1e6


def test_samples_that_cannot_be_stored_are_no_hindrance(bench):
    job = bench(
        """
        class Stubborn:
            def __init__(self, x):
                self.x = x

            def __reduce__(self):
                raise TypeError("stays here")

        def build_dataset():
            return [Stubborn(torch.randn(6)) for _ in range(64)]

        def collate(samples):
            return torch.stack([sample.x for sample in samples])

        def compute_loss(model, batch):
            return model(batch).sum()
        """
    )
    assert job.inspect().stock == 0
    for source in Source:
        measured = job.measure(source=source)
        assert measured.parity_loss is None
        assert measured.first_step_s > 0


@pytest.mark.parametrize(
    ("text", "exact", "norm"),
    [
        ("", True, False),
        (
            "def compute_loss(m, b):\n    z = m(b[0])\n    return (z @ z.T).logsumexp(0).mean()\n",
            False,
            False,
        ),
        (
            "def build_model():\n"
            "    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))\n",
            True,
            True,
        ),
    ],
)
def test_what_a_smaller_micro_batch_changes_is_found(bench, text, exact, norm):
    facts = bench(text).inspect()
    assert (facts.exact_split, facts.batch_norm) == (exact, norm)


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", "built in bf16"), ("float32", None)])
def test_a_model_built_in_half_precision_has_no_precision_knob(bench, dtype, told):
    job = bench(
        f"""
        def build_model():
            return nn.Linear(6, 3).to(torch.{dtype})

        def compute_loss(model, batch):
            return model(batch[0].to(model.weight.dtype)).float().mean()
        """
    )
    assert job.inspect().not_applicable.get("train.precision") == told


# --- epochs, queues and workers -----------------------------------------------------------------

SLOW = """
class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(6), 0

def build_dataset():
    return Slow()
"""


def plainly(dataset, epochs=4, **arguments):
    """Samples/s of a plain loop over epochs, which shares no code with a probe."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True, **arguments)
    seen, ends = 0, []
    for _ in range(1 + epochs):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(y)
        ends.append(time.perf_counter())
    return seen / (1 + epochs) / ((ends[-1] - ends[0]) / epochs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=str,
)
def test_short_epochs_are_charged_for_their_borders(bench, arguments):
    job = bench(SLOW)
    config = {f"loader.{name}": value for name, value in arguments.items()}
    ratios = []
    for _ in range(3):
        truth = plainly(job.workload().dataset, **arguments)
        measured = job.measure(config, max_window_s=0.6, want=0.001, block_s=0.05)
        assert measured.epoch_samples == 64
        assert measured.restarts_s
        ratios.append(throughput(measured).value / truth)
    assert 0.8 < median(ratios) < 1.25


def test_a_border_that_was_not_reached_is_charged_as_the_start_was(bench):
    job = bench(SLOW.replace("return 64", "return 100_000"))
    # Kept workers, too, have nothing in stock at a border; what is known of it is the start.
    kept = job.measure({"loader.num_workers": 1, "loader.persistent_workers": True})
    anew = job.measure({"loader.num_workers": 1})
    assert len(kept.restarts_s) == len(anew.restarts_s) == 1
    assert anew.epoch_samples == pytest.approx(100_000)
    assert throughput(anew).value < METRICS["samples_per_s"].compute(replace(anew, restarts_s=()))


def test_a_full_queue_is_taken_before_anything_is_timed(bench):
    job = bench()
    setup = setup_of(
        {"loader.num_workers": 2, "loader.prefetch_factor": 4, "train.batch_size": 8}, 8
    )
    source = LoaderSource(job.workload(), setup, job.spec({}))
    source.start()
    wait_until(lambda: source.produced >= 8 * 8)
    source.drain()
    assert source.consumed >= 8 * 8
    CachedSource(job.workload(), setup, job.spec({})).drain()


def test_a_queue_that_was_full_flatters_nobody(bench):
    job = bench(
        """
        CALLS = [0]

        def build_dataset():
            return TensorDataset(torch.randn(20_000, 6), torch.zeros(20_000, dtype=torch.long))

        def collate(samples):
            if get_worker_info():
                time.sleep(0.03)  # two workers: a batch every 15 ms
            return torch.utils.data.default_collate(samples)

        def compute_loss(model, batch):
            CALLS[0] += 1
            time.sleep(0.3 if CALLS[0] == 1 else 0.008)  # the queue is full before the second step
            return model(batch[0]).sum()
        """
    )
    config = {"loader.num_workers": 2, "loader.prefetch_factor": 8}
    measured = job.measure(config, max_window_s=0.5, want=0.001)
    made = throughput(replace(measured, restarts_s=())).value
    assert 0.6 * 8 / 0.015 < made < 1.1 * 8 / 0.015  # not the step's 8 / 0.008


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waiting_for_the_loader_is_told_from_computing(bench):
    job = bench(SLOW)
    waiting = METRICS["data_wait_pct"].compute(job.measure())
    assert waiting > 80
    busy = "\ndef compute_loss(m, b):\n    time.sleep(0.02)\n    return m(b[0]).sum()\n"
    fed = bench(SLOW.replace("0.002", "0").replace("64", "10_000") + busy)
    fed = fed.measure({"loader.num_workers": 2})
    assert METRICS["data_wait_pct"].compute(fed) < 20


def test_workers_cpu_time_counts_after_they_have_ended(bench):
    burning = """
    class Burns(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            until = time.process_time() + 0.005
            while time.process_time() < until:
                pass
            return torch.ones(6), 0

    def build_dataset():
        return Burns()
    """
    measured = bench(burning).measure({"loader.num_workers": 1}, max_window_s=0.6)
    assert measured.restarts_s
    loaded = sum(block.consumed for block in measured.blocks)
    assert measured.worker_cpu_s > 0.6 * loaded * 0.005
    assert measured.cpu_s >= measured.worker_cpu_s


def test_memory_grows_with_the_batch(bench):
    wide = "def build_model():\n    return nn.Sequential(nn.Linear(6, 4000), nn.Linear(4000, 3))\n"
    wide += "def build_dataset():\n"
    wide += "    return TensorDataset(torch.randn(8192, 6), torch.zeros(8192, dtype=torch.long))\n"
    job = bench(wide)
    used = [job.measure({"train.batch_size": batch}).memory_bytes for batch in (8, 4096)]
    assert used[1] - used[0] > 4096 * 4000 * 4 / 2
    assert METRICS["memory_gb"].compute(job.measure()) >= 0
    measured = job.measure()
    assert measured.resident_bytes == sum(
        parameter.numel() * 4 for parameter in job.workload().model.parameters()
    )
    assert measured.host_memory_bytes > 0


# --- the probe as a process's only work ---------------------------------------------------------


def test_the_phase_is_on_disk_for_whoever_has_to_end_the_probe(bench):
    job = bench()
    job.measure()
    assert (job.folder / f"{job.name}-0" / "phase").read_text() == "result"
    failed = bench("def compute_loss(m, b):\n    raise ValueError\n").fail()
    assert failed.phase == "first step"


def test_threads_are_those_of_the_config_or_the_usual_ones(bench):
    assert bench().measure(default_threads=2).threads == 2
    assert bench().measure({"host.threads": 1}, default_threads=2).threads == 1


def test_the_random_state_is_seeded_for_libraries_too(bench):
    job = bench()
    seen = []
    for _ in range(2):
        random.seed()
        np.random.seed()
        job.measure(max_window_s=0.02)
        seen.append((random.random(), float(np.random.rand())))
    assert seen[0] == seen[1]


def test_a_name_that_a_library_has_taken_is_no_hindrance(tmp_path):
    path = tmp_path / "json.py"
    path.write_text(JOB)
    importlib.import_module("json")
    assert load(ModelRef(path=str(path))).holder.build_model


# --- memory: its parts, its walls, and the longest samples ------------------------------------


def test_one_huge_allocation_fails_as_an_error_that_names_the_host(bench):
    """Faster than anybody could look; spawned, as the limit stays with its process."""
    job = bench(
        """
        def compute_loss(model, batch):
            x, y = batch
            torch.empty(2 * 1024**3, dtype=torch.uint8)
            return nn.functional.cross_entropy(model(x), y)
        """
    )
    failure = job.run({}, spawned=True, host_limit_bytes=256 * 1024**2)
    assert isinstance(failure, Failure)
    assert failure.status is Status.OUT_OF_MEMORY
    assert failure.message.startswith("host: ")
    assert "can't allocate memory" in failure.message


def test_within_its_walls_a_probe_runs(bench):
    measured = bench("").run({}, spawned=True, host_limit_bytes=2 * 1024**3)
    assert isinstance(measured, Measurement)


RAGGED = """
def build_dataset():
    return [torch.randn(4000 if index == 77 else 10 + index % 7) for index in range(96)]

def collate(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)

def build_model():
    return nn.Linear(1, 2048)

def compute_loss(model, batch):
    return model(batch[:, :, None]).square().mean()
"""


def test_samples_that_vary_are_told(bench):
    facts = bench(RAGGED).inspect()
    assert facts.varies
    assert facts.longest_ratio > 10
    plain = bench("").inspect()
    assert not plain.varies
    assert plain.longest_ratio == pytest.approx(1.0, abs=0.05)


def test_memory_covers_a_step_on_the_longest_samples(bench):
    job = bench(RAGGED)
    job.inspect()
    short = {"source": Source.CACHED, "min_blocks": 2, "max_window_s": 0.05}
    typical = job.measure({"train.batch_size": 4}, **short)
    longest = job.measure({"train.batch_size": 4}, longest=True, **short)
    assert (typical.longest_of, longest.longest_of) == (0, 96)
    batch_bytes = 4 * 4000 * 2048 * 4
    assert longest.memory_bytes > typical.memory_bytes + batch_bytes
    # What every config is compared by is taken before.
    assert longest.parity_loss == typical.parity_loss
