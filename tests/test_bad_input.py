"""Bad input: exit code 2, one clear message on stderr, nothing on stdout, nothing created."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODEL, CommandLine, write

import autotune
from autotune.errors import InputError, OptionError, ResumeError
from autotune.exporters import EXPORTERS
from autotune.knobs import KNOBS
from autotune.metrics import METRICS
from autotune.options import SAMPLERS
from autotune.request import space_names

OURS = str(Path(autotune.__file__).parent)


def files_in(folder):
    """What is there, with what it holds; Python's own cache of compiled code included."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refusal(cli, *words, env=None):
    """The one message of a command that must be refused."""
    before = files_in(cli.folder)
    ran = cli(*words, env=env)
    assert (ran.code, ran.out) == (2, ""), ran
    assert ran.err.startswith("autotune: ")
    assert ran.err.count("autotune: ") == 1
    assert "Traceback" not in ran.err
    assert OURS not in ran.err
    assert files_in(cli.folder) == before
    return ran.err


def changed(**values):
    """The smallest job with other values of its names."""
    lines = "".join(f"\n{name} = {value}\n" for name, value in values.items())
    return MODEL.replace("\nCURRENT", f"{lines}\n_OLD" if "CURRENT" in values else "\nCURRENT") + (
        "" if "CURRENT" in values else lines
    )


# --- what shows without running the file ----------------------------------------------------------

FILES = {
    "job.py": MODEL,
    "text.txt": "no Python",
    "broken.py": "import torch\n\ndef build_model(:\n",
    "binary.py": b"\x00\x01\x02",
    "empty.py": "",
    "script.py": "import torch\nlayer = torch.nn.Linear(2, 2)\nlayer(torch.ones(2)).sum()\n",
    "no_model.py": "def build_dataset():\n    return [1]\n",
    "no_dataset.py": "def build_model():\n    return None\n",
    "knob.py": changed(CURRENT='{"train.batchsize": 64}'),
    "value.py": changed(CURRENT='{"train.batch_size": 0}'),
    "text_value.py": changed(CURRENT='{"train.batch_size": "64"}'),
    "word.py": changed(CURRENT='{"train.precision": "bf17"}'),
    "list.py": changed(CURRENT='["train.batch_size"]'),
    "keys.py": changed(KEYS='{"train.batchsize": "data.batch_size"}'),
    "keys_value.py": changed(KEYS='{"train.batch_size": 3}'),
    "space.yaml": "train:\n  batchsize: auto\n",
    "space_value.yaml": "train:\n  batch_size: [0, 8]\n",
    "space_list.yaml": "- train.batch_size\n",
    "mine.yaml": "train.batchsize: data.batch_size\n",
    "file": "not a folder",
    "full/of": "something else",
    "folder/run.json": "{}",
}

KNOB = "did you mean train.batch_size?", *KNOBS

EARLY = {
    "no model file": ("", ["--model is missing"]),
    "missing": ("--model nope.py", ["no model file", "nope.py"]),
    "a folder": ("--model full", ["full is not a Python file"]),
    "text": ("--model text.txt", ["text.txt is not a Python file"]),
    "broken": ("--model broken.py", ["broken.py", "line 3", "not valid Python"]),
    "binary": ("--model binary.py", ["binary.py", "not valid Python"]),
    "empty": ("--model empty.py", ["defines no build_model()"]),
    "script": ("--model script.py", ["defines no build_model()", "looks like a script"]),
    "no build_model": ("--model no_model.py", ["defines no build_model()", "-> nn.Module"]),
    "no build_dataset": ("--model no_dataset.py", ["defines no build_dataset()"]),
    "no factory": ("--model job.py:Job", ["job.py has no Job"]),
    "no identifier": ("--model job.py:a.b", ["FILE.py:FACTORY"]),
    "knob in CURRENT": ("--model knob.py", ["knob.py: CURRENT", *KNOB]),
    "value in CURRENT": ("--model value.py", ["CURRENT", "train.batch_size=0", "at least 1"]),
    "text in CURRENT": ("--model text_value.py", ["train.batch_size='64'", "a whole number"]),
    "word in CURRENT": ("--model word.py", ["'bf17'", "default, fp32, tf32, bf16, fp16"]),
    "CURRENT is a list": ("--model list.py", ["list.py: CURRENT", "dict"]),
    "knob in KEYS": ("--model keys.py", ["keys.py: KEYS", *KNOB]),
    "value in KEYS": ("--model keys_value.py", ["keys_value.py: KEYS", "your own key"]),
    "knob": ("--model job.py train.batchsize=8", ["train.batchsize=8", *KNOB]),
    "knob removed": ("--model job.py ~train.batchsize", ["~train.batchsize", *KNOB]),
    "value": ("--model job.py train.batch_size=8,0", ["train.batch_size=0", "at least 1"]),
    "word": ("--model job.py train.precision=bf17", ["'bf17'", "bf16"]),
    "no override": ("--model job.py lr", ["lr", "knob=value"]),
    "no grammar": ("--model job.py train.batch_size=[1", ["train.batch_size=[1", "knob=value"]),
    "a sweep": ("--model job.py train.batch_size=interval(1,8)", ["interval(...)"]),
    "space": ("--model job.py --space defualt", ["did you mean default?", *space_names()]),
    "space file": ("--model job.py --space no/such.yaml", ["no/such.yaml", "cannot be read"]),
    "space knob": ("--model job.py --space space.yaml", ["space.yaml", *KNOB]),
    "space value": ("--model job.py --space space_value.yaml", ["train.batch_size=0"]),
    "space list": ("--model job.py --space space_list.yaml", ["must be a mapping"]),
    "objective": (
        "--model job.py --objectives samples_per_s,memory",
        ["--objectives", "'memory'", "Did you mean memory_gb?", *METRICS],
    ),
    "objective twice": ("--model job.py --objectives memory_gb,memory_gb", ["twice"]),
    "no objective": ("--model job.py --objectives cpu_util_pct", ["cpu_util_pct", "memory_gb"]),
    "limit": ("--model job.py --limit memory<=4", ["--limit", "Did you mean memory_gb?", *METRICS]),
    "limit's text": ("--model job.py --limit memory_gb", ["--limit", "memory_gb<=40"]),
    "limit's sign": ("--model job.py --limit memory_gb>=4", ["better lower", "<="]),
    "limit's number": ("--model job.py --limit memory_gb<=1.2.3", ["'1.2.3' is not a number"]),
    "sampler": ("--model job.py --sampler anneal", ["'anneal'", *SAMPLERS]),
    "no device": ("--model job.py --devices 0", ["--devices", "at least 1"]),
    "devices": ("--model job.py --devices two", ["--devices", "two"]),
    "no probe": ("--model job.py --max-probes 0", ["--max-probes", "at least 1"]),
    "probes": ("--model job.py --max-probes many", ["--max-probes", "many"]),
    "seed": ("--model job.py --seed x", ["--seed", "x"]),
    "batch": ("--model job.py --global-batch big", ["'big'", "keep, free"]),
    "batch 0": ("--model job.py --global-batch 0", ["'0'", "keep, free"]),
    "nothing divides": (
        "--model job.py --global-batch 100 train.batch_size=32,64",
        ["global batch of 100", "32, 64", "divides"],
    ),
    "nothing divides what is kept": (
        "--model job.py train.batch_size=24,48",
        ["global batch of 32", "24, 48", "divides"],
    ),
    "no such accumulation": (
        "--model job.py --global-batch 64 train.accumulation_steps=3",
        ["global batch of 64", "accumulation", "3"],
    ),
    "no number": ("--model job.py --budget soon", ["--budget", "'soon'", "90s, 10m or 1h"]),
    "no unit": ("--model job.py --budget 10", ["--budget", "'10'", "90s, 10m or 1h"]),
    "negative": ("--model job.py --budget=-5m", ["--budget", "'-5m'", "90s, 10m or 1h"]),
    "no time": ("--model job.py --budget 0s", ["--budget", "'0s'", "at least"]),
    "gain": ("--model job.py --min-gain much", ["--min-gain", "'much'", "2%"]),
    "output is a file": ("--model job.py --output file", ["--output", "file"]),
    "output below a file": ("--model job.py --output file/run", ["--output", "not writable"]),
    "output is taken": ("--model job.py --output full", ["--output", "not an empty folder"]),
    "keys file": ("--model job.py --keys no.yaml", ["no.yaml", "cannot be read"]),
    "knob in keys file": ("--model job.py --keys mine.yaml", ["mine.yaml", *KNOB]),
    "no folder": ("--resume nowhere", ["nowhere", "holds no run"]),
    "no run": ("--resume full", ["full", "holds no run"]),
    "another version": ("--resume folder", ["folder", "another version"]),
    "option": ("--model job.py --bugdet 10m", ["--bugdet"]),
    "option without value": ("--model", ["--model", "expected one argument"]),
    "command beside a model": ("tnue --model job.py", ["tnue", "knob=value"]),
    "command": ("tnue", ["unknown command 'tnue'", "tune, report, export"]),
    "report of nothing": ("report full", ["full", "holds no run"]),
    "report without folder": ("report", ["DIR"]),
    "export of nothing": ("export nowhere --format hydra", ["nowhere", "holds no run"]),
    "format": ("export full --format yaml", ["--format", "'yaml'", *EXPORTERS]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with everything that the commands name."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        path = write(folder / name, "" if isinstance(content, bytes) else content)
        if isinstance(content, bytes):
            path.write_bytes(content)
    return folder


@pytest.mark.parametrize("case", EARLY)
def test_what_shows_without_running_the_file(folder, case):
    words, says = EARLY[case]
    message = refusal(CommandLine(folder), *words.split())
    assert [part for part in says if part not in message] == [], message


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
    ],
    ids=["torchrun", "srun"],
)
def test_several_tasks_are_told_to_be_one(folder, variables):
    message = refusal(CommandLine(folder), "--model", "job.py", env=variables)
    assert "start me once" in message


def test_python_is_told_the_same(folder):
    with pytest.raises(InputError, match="did you mean train.batch_size"):
        autotune.tune(folder / "job.py", "train.batchsize=8")
    with pytest.raises(OptionError, match="'soon'"):
        autotune.tune(folder / "job.py", budget="soon")
    with pytest.raises(OptionError, match="write it like 90s"):
        autotune.tune(folder / "job.py", budget=60)
    with pytest.raises(OptionError, match="max_probes='3': must be a whole number"):
        autotune.tune(folder / "job.py", max_probes="3")
    with pytest.raises(OptionError, match="unknown options .'bugdet'.; known: "):
        autotune.tune(folder / "job.py", bugdet="10m")
    with pytest.raises(ResumeError, match="holds no run"):
        autotune.load_run(folder)


# --- what shows when the file runs ----------------------------------------------------------------

HELPER = """
def fail():
    raise RuntimeError("no such corpus")
"""

RUNNING = {
    "raises": (
        {"job.py": "import helper\n\nhelper.fail()\n" + MODEL, "helper.py": HELPER},
        [
            "job.py cannot be imported",
            'job.py", line 3, in <module>',
            "helper.fail()",
            'helper.py", line 3, in fail',
            "RuntimeError: no such corpus",
        ],
    ),
    "imports what is not there": (
        {"job.py": "import torhc\n" + MODEL},
        ["job.py cannot be imported", "import torhc", "No module named 'torhc'"],
    ),
    "leaves": (
        {"job.py": "raise SystemExit('usage: train.py DATA')\n" + MODEL},
        ["job.py cannot be imported", "usage: train.py DATA", "if __name__ == '__main__'"],
    ),
    "opens what is not there": (
        {"job.py": "open('data/train.txt')\n" + MODEL},
        ["No such file or directory: 'data/train.txt'", "It looked for /", "/data/train.txt"],
    ),
    "dies": (
        {"job.py": "import os\nos.kill(os.getpid(), 11)\n" + MODEL},
        ["died by SIGSEGV (11)", 'job.py", line 2'],
    ),
    "ends the process": (
        {"job.py": "import os\nprint('no GPU', flush=True)\nos._exit(3)\n" + MODEL},
        ["exited with code 3", "no GPU"],
    ),
    "its star gives no build_model": (
        {"job.py": "from helper import *\n", "helper.py": HELPER},
        ["job.py defines no build_model()"],
    ),
    "computes an unknown knob": (
        {"job.py": changed(CURRENT='{"train." + "batchsize": 64}')},
        ["job.py: CURRENT", *KNOB],
    ),
    "computes an unknown key": (
        {"job.py": changed(KEYS='{"train." + "batchsize": "batch"}')},
        ["job.py: KEYS", *KNOB],
    ),
    "a builder raises": (
        {
            "job.py": MODEL.replace("return nn.Linear(16, 4)", "return helper.fail()"),
            "helper.py": HELPER,
        },
        ["build_model raised", 'job.py", line', "NameError"],
    ),
    "a builder returns the wrong thing": (
        {"job.py": MODEL.replace("return nn.Linear(16, 4)", "return [nn.Linear(16, 4)]")},
        ["build_model returned list", "torch.nn.Module"],
    ),
    "no dataset": (
        {"job.py": MODEL.replace("return TensorDataset(", "return iter([samples]) or (")},
        ["build_dataset returned list_iterator", "IterableDataset"],
    ),
}


@pytest.mark.parametrize("case", RUNNING)
def test_what_shows_when_the_file_runs(cli, tmp_path, case):
    files, says = RUNNING[case]
    for name, text in files.items():
        write(tmp_path / name, text)
    message = refusal(cli, "--model", "job.py", "--output", "run")
    assert [part for part in says if part not in message] == [], message
    assert "importlib" not in message
    assert "site-packages" not in message


def test_a_folder_that_cannot_be_made_is_told(cli, job):
    assert "--output /proc/run: cannot be made" in refusal(
        cli, "--model", job, "--output", "/proc/run"
    )


def test_a_failing_factory_is_told_with_its_own_frames(cli, tmp_path):
    write(
        tmp_path / "job.py", "class Job:\n    def __init__(self):\n        raise OSError('gone')\n"
    )
    message = refusal(cli, "--model", "job.py:Job")
    assert "Job raised" in message
    assert 'job.py", line 3, in __init__' in message
    assert "OSError: gone" in message


WRONG = {
    "build_model = 3": "build_model must be a function, build_model(); it is int",
    "def build_model(size): ...": "build_model(size) cannot be called as build_model()",
    "def build_model(*, size): ...": "cannot be called as build_model()",
    "async def build_model(): ...": "build_model must be a plain function",
    "def build_model():\n    yield": "build_model must be a plain function",
    "build_dataset = [1, 2]": "build_dataset must be a function",
    "def build_dataset(root): ...": "build_dataset(root) cannot be called as build_dataset()",
    "def compute_loss(model): ...": "cannot be called as compute_loss(model, batch)",
    "def compute_loss(model, x, y): ...": "cannot be called as compute_loss(model, batch)",
    "compute_loss = 'mse'": "compute_loss must be a function",
    "def build_optimizer(): ...": "cannot be called as build_optimizer(model)",
    "def collate(): ...": "cannot be called as collate(samples)",
    "def build_loader(): ...": "cannot be called as build_loader(dataset",
    "def before_step(model): ...": "cannot be called as before_step(model, optimizer)",
    "def count_samples(): ...": "cannot be called as count_samples(batch)",
    "def tensor_parallel_plan(): ...": "cannot be called as tensor_parallel_plan(model)",
    "CURRENT = 3": "CURRENT must be a dict",
    "CURRENT = {1: 2}": "CURRENT must be a dict with knob names as keys",
    "CURRENT = {'train.batch_size': torch.tensor(1)}": "is Tensor; plain values only",
    "KEYS = 'train'": "KEYS must be a dict",
    "build_dataset = None": "defines no build_dataset()",
}

LOAD = """
import json, sys
from autotune.errors import ModelFileError
from autotune.probe.workload import load
from autotune.types import ModelRef

told = {}
for name, path in json.load(sys.stdin).items():
    try:
        load(ModelRef(path=path)).facts()
        told[name] = "nothing"
    except ModelFileError as error:
        told[name] = str(error)
json.dump(told, sys.stdout)
"""


def test_functions_of_a_wrong_kind_or_signature(tmp_path):
    paths = {}
    for number, text in enumerate(WRONG):
        paths[text] = str(write(tmp_path / f"job{number}.py", f"{MODEL}\n{text}\n"))
    done = subprocess.run(
        [sys.executable, "-c", LOAD], input=json.dumps(paths), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {text: told[text] for text in WRONG if WRONG[text] not in told[text]} == {}


# --- going on with a run --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder in which a short run has been made, below `run`."""
    folder = tmp_path_factory.mktemp("resume")
    write(folder / "job.py", MODEL)
    ran = CommandLine(folder)(
        "--model", "job.py", "--output", "run", "--max-probes", "1", "--budget", "8s"
    )
    assert ran.code == 0, ran.err
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run beside a copy of its model file."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.copy(finished / "job.py", tmp_path)
    change(tmp_path / "run", lambda content: content["model"].update(path=f"{tmp_path}/job.py"))
    return tmp_path / "run"


def change(run, how):
    content = json.loads((run / "run.json").read_text())
    how(content)
    (run / "run.json").write_text(json.dumps(content))


def test_a_changed_model_file_needs_force(cli, run, tmp_path):
    with (tmp_path / "job.py").open("a") as file:
        file.write("\n# another day\n")
    message = refusal(cli, "--resume", "run")
    assert "job.py has changed" in message
    assert "--force" in message
    assert cli("--resume", "run", "--force").code == 0


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("cpus", 512, "cpus: 512 then, "),
        ("torch", "1.0", "torch: 1.0 then, "),
        ("devices", ["NVIDIA H100"], "devices: NVIDIA H100 then, "),
        ("driver_major", "535", "driver_major: 535 then, "),
    ],
)
def test_another_machine_needs_force(cli, run, name, value, told):
    change(run, lambda content: content["machine"].update({name: value}))
    message = refusal(cli, "--resume", "run")
    assert "the machine has changed" in message
    assert told in message
    assert "--force" in message
    if name == "cpus":
        assert cli("--resume", "run", "--force").code == 0


def test_a_run_whose_model_file_is_gone_cannot_go_on(cli, run, tmp_path):
    (tmp_path / "job.py").unlink()
    assert "no model file" in refusal(cli, "--resume", "run")


def test_a_new_run_does_not_overwrite_another(cli, run):
    message = refusal(cli, "--model", "job.py", "--output", "run")
    assert "--resume" in message


def test_a_message_says_no_more_than_it_must(folder):
    """A message is a few lines, however much there is to list."""
    for words, _ in list(EARLY.values())[:12]:
        message = refusal(CommandLine(folder), *words.split())
        assert len(message.splitlines()) <= 2
        assert not re.search(r"Error\b", message), message
