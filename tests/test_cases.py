"""tests/CASES.md names what handles each public report; here are the cases with no other home."""

import os
import re
from pathlib import Path

import pytest
import torch
from test_probe import as_before, bench  # noqa: F401 - fixtures

from autotune.errors import ModelFileError
from autotune.probe.batches import moved
from autotune.probe.workload import load
from autotune.types import Source, Status

TESTS = Path(__file__).parent
CASES = TESTS / "CASES.md"
GROUPS = {
    "a": (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14),
    "b": (15, 17, 18, 19, 20, 21, 22, 23, 25, 26, 28, 30, 31, 32, 33, 34, 35),
    "c": (36, 38, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49),
    "e": (62, 63, 64, 66, 67, 68, 70, 71),
    "h": (93, 94, 95, 97, 98, 99),
    "j": (108, 111, 112, 113, 114, 115),
}
"""The reports that are answered one by one."""


def table():
    """Each case's group, and the cell that names its tests."""
    rows = re.findall(r"^\| (\d+) \| (\w) \|.*\| ([^|]+) \|$", CASES.read_text(), re.MULTILINE)
    return {int(number): (group, cell) for number, group, cell in rows}


def test_every_case_has_a_row():
    expected = {number: group for group, numbers in GROUPS.items() for number in numbers}
    assert {number: group for number, (group, _) in table().items()} == expected


def test_every_test_that_is_named_exists():
    sources = {path.name: path.read_text() for path in TESTS.glob("test_*.py")}
    for number, (_, cell) in table().items():
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
        for file, test in named:
            assert re.search(rf"^ *def {test}\(", sources[file], re.MULTILINE), (number, test)
        said = ("GPU only", "not handled: ")
        assert named or any(word in cell for word in said), f"case {number} names no test"


# --- (b) what loaders are made of -----------------------------------------------------------------

NORMED = """
def build_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

def build_dataset():
    return TensorDataset(torch.randn(33, 6), torch.zeros(33, dtype=torch.long))
"""


def test_batch_norm_needs_two_samples(bench):  # noqa: F811
    job = bench(NORMED)
    assert job.inspect({"train.batch_size": 32}).batch_norm
    assert "two or more a micro-batch" in job.fail({"train.batch_size": 1}).message
    assert job.measure({"train.batch_size": 2}).steps > 0


class WithTo:
    """A batch that only its author knows, with a way to move it."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return WithTo(self.x.to(device))


def test_a_batch_of_an_own_class_moves_itself_or_is_told():
    away = torch.device("meta")
    assert moved([WithTo(torch.ones(2))], away, non_blocking=False)[0].x.device == away
    with pytest.raises(TypeError, match="cannot move a batch of type object to meta"):
        moved({"x": object()}, away, non_blocking=False)


SUBCLASS = """
class Own(DataLoader):
    def __init__(self, dataset, tokenizer, *, workers):
        super().__init__(dataset, batch_size=16, num_workers=workers, drop_last=True)
        self.tokenizer = tokenizer

def build_loader(dataset, num_workers):
    return Own(dataset, "words", workers=num_workers)
"""


def test_a_loader_class_of_the_users_is_made_by_the_user(bench):  # noqa: F811
    job = bench(SUBCLASS)
    facts = job.inspect()
    assert facts.delivered_batch == 16
    assert "take batch_size in build_loader" in facts.not_applicable["train.batch_size"]
    assert "loader.num_workers" not in facts.not_applicable
    assert job.measure({"loader.num_workers": 1}).workers == 1


ONLY_THE_FIRST = """
class Shards(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for _ in range(4000 if worker is None or worker.id == 0 else 0):
            yield torch.randn(6), torch.tensor(0)

def build_dataset():
    return Shards()
"""


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_that_deliver_nothing_are_counted(bench):  # noqa: F811
    job = bench(ONLY_THE_FIRST)
    alone = job.measure({"loader.num_workers": 1})
    several = job.measure({"loader.num_workers": 3})
    assert not any("delivered" in note for note in alone.notes)
    assert "2 of 3 workers delivered nothing" in several.notes


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="one CPU cannot be narrowed",
)
@pytest.mark.parametrize("narrows", [True, False])
def test_an_import_that_narrows_the_affinity_is_noticed(bench, narrows):  # noqa: F811
    before = os.sched_getaffinity(0)
    pinned = f"import os\nos.sched_setaffinity(0, {{{min(before)}}})\n"
    try:
        facts = load(bench(pinned if narrows else "").ref).facts()
    finally:
        os.sched_setaffinity(0, before)
    assert facts.affinity_narrowed == narrows


STARTED = """
def build_loader(dataset, **arguments):
    way = "spawn" if arguments["num_workers"] else None
    return DataLoader(dataset, multiprocessing_context=way, **arguments)
"""
OPEN = """
class Open(torch.utils.data.Dataset):
    def __init__(self):
        self.file = open(__file__)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(6), 0

def build_dataset():
    return Open()
"""


def test_an_open_file_is_told_where_workers_are_not_forked(bench):  # noqa: F811
    failed = bench(OPEN + STARTED).run({"loader.num_workers": 1}, spawned=True)
    assert failed.status is Status.ERROR
    assert "open files at the first sample" in failed.message
    assert "cannot pickle '_io.TextIOWrapper'" in failed.message


def test_a_worker_that_is_spawned_finds_the_model_file(bench):  # noqa: F811
    own = OPEN.replace("self.file = open(__file__)", "self.known = 1")
    measured = bench(own + STARTED).run({"loader.num_workers": 1}, spawned=True, timeout_s=60.0)
    assert measured.workers == 1


HOARDS = """
import resource
HELD = []

def compute_loss(model, batch):
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    while True:
        HELD.append(open("/dev/null"))
"""


def test_a_process_that_can_open_nothing_more_still_tells_it(bench):  # noqa: F811
    # A cached source: the counters of a loader would give a file back when they go.
    failed = bench(HOARDS).run(source=Source.CACHED, spawned=True)
    assert failed.message.startswith("too many open files (ulimit -n is 32)")


# --- (e) precision --------------------------------------------------------------------------------

REFUSES = """
def compute_loss(model, batch):
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("binary_cross_entropy and BCELoss are unsafe to autocast.")
    return model(batch[0]).square().mean()
"""


def test_a_loss_that_autocast_refuses_costs_that_precision_only(bench):  # noqa: F811
    job = bench(REFUSES)
    job.inspect()
    assert "with_logits" in job.fail({"train.precision": "bf16"}).message
    assert job.measure({"train.precision": "fp32"}).steps > 0


TRANSFORMED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(torch.fft.rfft(x.to(self.layer.weight.dtype)).real.repeat(1, 2)[:, :6])

def build_model():
    return Net().to(torch.bfloat16)
"""


def test_an_operation_without_bf16_is_named(bench):  # noqa: F811
    failed = bench(TRANSFORMED).fail()
    assert failed.status is Status.ERROR
    assert "Unsupported dtype BFloat16" in failed.message
    assert ", in forward)" in failed.message


NEW_SWITCH = "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"


def test_a_model_file_may_use_the_new_switches(bench):  # noqa: F811
    ran = bench(NEW_SWITCH).run({"train.precision": "fp32"}, spawned=True)
    assert getattr(ran, "steps", 0) > 0, ran


# --- (j) model files ------------------------------------------------------------------------------

SCRIPTS = {
    "a relative import": ("from .layers import Net\n", "an __init__.py makes it one"),
    "a configurator": ("exec(open('configurator.py').read())\n", "/configurator.py"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_told_what_it_lacks(bench, name):  # noqa: F811
    text, told = SCRIPTS[name]
    with pytest.raises(ModelFileError, match="cannot be imported") as caught:
        load(bench(text).ref)
    assert told in str(caught.value)


def test_a_cuda_model_on_another_machine_is_told(bench):  # noqa: F811
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    hard_coded = "def compute_loss(m, b):\n    return m(b[0].cuda()).mean()\n"
    failed = bench(hard_coded).fail()
    assert failed.message.startswith("the model file asks for CUDA, which this machine has not")
    assert ", in compute_loss)" in failed.message
