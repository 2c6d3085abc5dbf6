"""The command line from outside: what is printed where, what a run leaves, how it ends."""

import ast
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import optuna
import pandas as pd
import pytest
import yaml
from conftest import MODEL, CommandLine, write
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

import autotune
from autotune.errors import NothingRanError
from autotune.exporters import EXPORTERS
from autotune.knobs import KNOBS
from autotune.metrics import METRICS
from autotune.store import COLUMNS
from autotune.types import FAILED, Stage, Status

TALKATIVE = """
import atexit, ctypes, logging, os, subprocess, sys, warnings
import torch
from torch import nn
from torch.utils.data import Dataset

def talk(where):
    print(f"print {where}")
    print(f"print to stderr {where}", file=sys.stderr)
    ctypes.CDLL(None).puts(f"puts {where}".encode())
    os.write(1, f"write {where}\\n".encode())
    logging.warning("log %s", where)
    warnings.warn(f"warning {where}")

talk("at import")
subprocess.run(["echo", "echo at import"])
atexit.register(talk, "at exit")

CURRENT = {"loader.num_workers": 1, "train.batch_size": 32, "host.threads": 1}

class Numbers(Dataset):
    def __init__(self):
        talk("in build_dataset")
        numbers = torch.Generator().manual_seed(0)
        self.samples = torch.randn(512, 16, generator=numbers)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index % 64 == 0:
            talk("in a worker")
        return self.samples[index], index % 4

def build_model():
    talk("in build_model")
    return nn.Linear(16, 4)

def build_dataset():
    return Numbers()

def before_step(model, optimizer):
    talk("in the step")
"""

PLACES = ("at import", "in build_dataset", "in build_model", "in a worker", "in the step")
FILES = {
    *("run.json", "study.db", "probes", "trials.csv", "trials.parquet", "pareto.csv"),
    *("failed.csv", "best.yaml", "overrides.txt", "command.txt", "summary.md", "diagnosis.json"),
}


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A run of a job that prints wherever it can, and the folder that it was started in."""
    folder = tmp_path_factory.mktemp("talkative")
    write(folder / "job.py", TALKATIVE)
    cli = CommandLine(folder)
    # fp64 is no value and tf32 none for CPUs: one refused row, which is in the table all the same.
    words = ("loader.num_workers=0,1", "train.precision=default,tf32", "~host.omp_wait_policy")
    ran = cli("--model", "job.py", "--budget", "14s", "-v", *words)
    cli.close()
    assert ran.code == 0, ran.err
    return ran, folder


@pytest.fixture(scope="module")
def run(talkative):
    """The folder of that run."""
    return (talkative[1] / "results" / "latest").resolve()


def settings(line):
    """The keys and values of an answer's line, as Hydra reads them; checks every word."""
    words = line.split(" ")
    parser = OverridesParser.create()
    for word in words:
        assert re.fullmatch(r"[\w.]+=[\w.+-]+", word), word
    read = [parser.parse_override(word) for word in words]
    assert not any(override.is_sweep_override() for override in read)
    return {override.get_key_element(): override.value() for override in read}


def in_table_order(keys):
    return [name for name in KNOBS if name in keys]


# --- what is printed where ------------------------------------------------------------------------


def test_stdout_is_one_line_of_overrides(talkative):
    ran, _ = talkative
    assert ran.out == f"{ran.line}\n"
    values = settings(ran.line)
    assert list(values) == in_table_order(values)
    assert not [name for name in values if name.startswith("host.")]
    assert {"train.batch_size", "loader.num_workers", "train.precision"} <= set(values)
    assert ("loader.prefetch_factor" in values) == bool(values["loader.num_workers"])


def test_what_the_job_prints_is_in_the_logs_only(talkative, run):
    ran, _ = talkative
    logs = "".join(path.read_text() for path in run.glob("probes/*/log.txt"))
    for way in ("print", "puts", "write"):
        assert f"{way} in the step" in logs
    for place in PLACES:
        assert place not in ran.out + ran.err, place
    assert "at exit" not in ran.out + ran.err


def test_stderr_tells_progress_rows_and_verdict(talkative):
    err = talkative[0].err
    assert "inspect: ok" in err
    assert "baseline: " in err
    assert "Apply:" in err
    assert "OMP_NUM_THREADS=1 python train.py" in err
    assert "not_applicable" in err
    verdict = err[err.index("\n\n") :].partition("   trial ")[0]
    assert max(len(line) for line in verdict.splitlines()) <= 80


def test_quiet_leaves_one_line_and_keeps_yours(cli, tmp_path):
    """With own keys, the values are the user's own, and what has no key is named."""
    keys = {
        "train.batch_size": "data.batch_size",
        "train.precision": {"key": "+trainer.precision", "values": {"default": "32-true"}},
    }
    write(tmp_path / "job.py", MODEL + f"\nKEYS = {keys!r}\n")
    ran = cli("--model", "job.py", "--quiet", "--budget", "8s", "--max-probes", "1")
    assert ran.code == 0, ran.err
    assert ran.line == "data.batch_size=32 +trainer.precision=32-true"
    (told,) = ran.err.splitlines()
    assert told.startswith("keep yours: ")
    assert "not in KEYS, set by hand: loader.num_workers, train.accumulation_steps" in told
    folder = tmp_path / "results" / "latest"
    content = json.loads((folder / "run.json").read_text())
    assert content["answer"]["keep"] is True
    assert content["answer"]["overrides"] == ran.line
    assert (folder / "overrides.txt").read_text() == ran.out
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert best == {"data": {"batch_size": 32}, "trainer": {"precision": "32-true"}}


def test_help_is_on_stdout(cli):
    ran = cli("--help")
    assert (ran.code, ran.err) == (0, "")
    for option in ("--space", "--budget", "--global-batch", "--resume", "--limit"):
        assert option in ran.out


# --- what a run leaves ----------------------------------------------------------------------------


def test_the_run_folder_holds_what_is_promised(talkative, run):
    ran, folder = talkative
    assert {path.name for path in run.iterdir()} == FILES
    assert re.fullmatch(r"job-\d{8}-\d{6}", run.name)
    assert (folder / "results" / "latest").readlink() == Path(run.name)
    assert {path.name for path in folder.iterdir()} <= {"job.py", "results", "__pycache__"}
    assert (run / "overrides.txt").read_text() == ran.out
    assert (run / "command.txt").read_text() == f"OMP_NUM_THREADS=1 python train.py {ran.out}"
    assert ran.err.count("Apply:") == 1
    assert "Apply:" in (run / "summary.md").read_text()


def test_each_probe_has_a_folder_with_its_spec_result_and_log(run):
    table = pd.read_parquet(run / "trials.parquet")
    launched = table[table["status"] != "not_applicable"]
    names = {f"{row.trial:04d}-{row.key}" for row in launched.itertuples()}
    assert {path.name for path in (run / "probes").iterdir()} == names
    for path in (run / "probes").iterdir():
        assert {"spec.json", "result.json", "log.txt"} <= {file.name for file in path.iterdir()}
        assert not [file.name for file in path.iterdir() if file.name.endswith(".part")]


def test_run_json_says_what_was_asked_and_answered(talkative, run):
    ran, folder = talkative
    content = json.loads((run / "run.json").read_text())
    assert content["status"] == "finished"
    assert content["model"]["path"] == str(folder / "job.py")
    assert re.fullmatch(r"[0-9a-f]{64}", content["model"]["sha256"])
    assert content["command"][1:3] == ["--model", "job.py"]
    assert {"cpus", "devices", "driver_major", "torch"} <= set(content["machine"])
    assert {"python", "torch", "optuna"} <= set(content["versions"])
    assert content["space"]["overrides"][0] == "loader.num_workers=0,1"
    answer = content["answer"]
    assert {
        *("keep", "overrides", "speedup", "baseline_key", "best_key", "stopped_because"),
        *("not_explored", "global_batch_changed", "numerics_changed", "tuning_s"),
    } <= set(answer)
    assert set(answer["speedup"]) == {"value", "low", "high"}
    assert answer["overrides"] == ran.line
    assert answer["keep"] == (answer["baseline_key"] == answer["best_key"])
    assert 0 < answer["tuning_s"] < 60


def test_the_tables_have_the_promised_columns(run):
    table = pd.read_csv(run / "trials.csv")
    assert tuple(table.columns) == COLUMNS
    parquet = pd.read_parquet(run / "trials.parquet")
    assert tuple(parquet.columns) == COLUMNS
    assert len(parquet) == len(table)
    assert list(table["trial"]) == sorted(set(table["trial"]))
    assert table["key"].str.fullmatch("[0-9a-f]{8}").all()
    assert set(table["stage"]) <= set(Stage)
    assert set(table["status"]) <= set(Status)
    assert {"inspect", "baseline"} <= set(table["stage"])
    assert len(pd.read_csv(run / "failed.csv")) == table["status"].isin(FAILED).sum()
    measured = table[(table["status"] == "ok") & (table["stage"] != "inspect")]
    assert (measured["samples_per_s_low"] <= measured["samples_per_s"]).all()
    assert (measured["samples_per_s"] <= measured["samples_per_s_high"]).all()
    # What this machine has not got is empty, never 0.
    assert (
        table[["gpu_util_pct", "sm_active_pct", "power_w", "joules_per_sample"]]
        .isna()
        .to_numpy()
        .all()
    )
    refused = table[table["status"] == "not_applicable"]
    assert any("train.precision=tf32" in reason for reason in refused["reason"])
    pareto = pd.read_csv(run / "pareto.csv")
    assert len(pareto) >= 1
    assert {"key", "samples_per_s", "memory_gb", *KNOBS, *METRICS} <= set(pareto.columns)


def test_the_study_is_optunas_and_the_record(run):
    url = f"sqlite:///{run / 'study.db'}"
    assert optuna.get_all_study_names(url) == [run.name]
    study = optuna.load_study(study_name=run.name, storage=url)
    table = pd.read_parquet(run / "trials.parquet")
    trials = study.get_trials()
    assert len(trials) == len(table)
    together = (table["source"] == "loader") & (table["sink"] == "train")
    for row, end_to_end, trial in zip(table.to_dict("records"), together, trials, strict=True):
        assert trial.state.name == optuna_state(row, end_to_end)
        for name in ("trial", "key", "stage", "status", "reason"):
            assert trial.user_attrs[name] == row[name]
        values = {name: row[name] for name in KNOBS if not pd.isna(row[name])}
        assert trial.params == values
        if trial.state.name == "COMPLETE":
            assert trial.values == [row["samples_per_s"], row["memory_gb"]]
            assert trial.user_attrs["samples_per_s"] == row["samples_per_s"]
    directions = [direction.name for direction in study.directions]
    assert directions == ["MAXIMIZE", "MINIMIZE"]
    close(study)


def optuna_state(row, end_to_end):
    if row["status"] == "ok":
        measured = end_to_end and row["stage"] != "inspect"
        return "COMPLETE" if measured else "PRUNED"
    return "FAIL" if row["status"] in FAILED else "PRUNED"


def close(study):
    study._storage.remove_session()
    study._storage._backend.engine.dispose()


def test_the_best_config_composes_in_the_users_app(run, tmp_path):
    text = (run / "best.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    write(tmp_path / "conf" / "config.yaml", "loader: {num_workers: 0}\ntrain: {batch_size: 1}\n")
    write(tmp_path / "conf" / "autotune" / "best.yaml", text)
    with initialize_config_dir(str(tmp_path / "conf"), version_base=None):
        composed = compose("config", overrides=["+autotune=best"])
    answer = settings((run / "overrides.txt").read_text().strip())
    for name, value in answer.items():
        group, leaf = name.split(".")
        assert composed[group][leaf] == value


# --- reading a run again --------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_answer_can_be_exported(talkative, run, tmp_path, name):
    cli = CommandLine(talkative[1])
    ran = cli("export", "results/latest", "--format", name)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.strip()
    target = tmp_path / "not yet there" / "answer.txt"
    ran_to = cli("export", run, "--format", name, "--to", target)
    assert (ran_to.code, ran_to.out) == (0, "")
    assert str(target) in ran_to.err
    assert target.read_text() == ran.out
    if name == "hydra":
        assert ran.out == talkative[0].out
    if name == "torch":
        ast.parse(ran.out)


def test_a_report_is_the_verdict_again(talkative):
    ran = CommandLine(talkative[1])("report", "results/latest")
    assert (ran.code, ran.err) == (0, "")
    shown = talkative[0].err.partition("\n\n")[2]
    assert shown[: len(ran.out)] == ran.out


def test_python_reads_the_run(talkative, run):
    loaded = autotune.load_run(run)
    content = json.loads((run / "run.json").read_text())
    assert tuple(loaded.trials.columns) == COLUMNS
    assert len(loaded.trials) == len(pd.read_csv(run / "trials.csv"))
    assert loaded.keep == content["answer"]["keep"]
    assert loaded.speedup.value == content["answer"]["speedup"]["value"]
    assert loaded.overrides("hydra") == talkative[0].line
    assert loaded.best["samples_per_s"] > 0
    assert loaded.baseline["samples_per_s"] > 0
    assert len(loaded.pareto) == len(pd.read_csv(run / "pareto.csv"))
    assert list(loaded.path.columns) == ["step", "device_busy_pct", "samples_per_s"]
    assert str(run) in repr(loaded)
    assert "Apply:" in loaded.verdict


def test_a_run_is_read_without_being_written(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    autotune.load_run(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with sqlite3.connect(f"file:{run / 'study.db'}?mode=ro", uri=True) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


# --- the forms that a model file can have ---------------------------------------------------------

LAYERS = """
from torch import nn

def Net():
    return nn.Linear(16, 4)
"""

PACKAGED = """
from ..layers import Net
from . import data

class Job:
    CURRENT = {"loader.num_workers": 1, "train.batch_size": 16}

    def build_model(self):
        return Net()

    def build_dataset(self):
        return data.samples()
"""

DATA = """
import torch
from torch.utils.data import TensorDataset

def samples():
    return TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
"""

LIGHTNING = """
import lightning
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layer(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

def build_model():
    return Module()

def build_dataset():
    return TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
"""

ONE_PROBE = ("--budget", "30s", "--max-probes", "1")


def test_a_factory_in_a_package_with_relative_imports(cli, tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "layers.py", LAYERS)
    write(tmp_path / "pkg" / "jobs" / "__init__.py", "")
    write(tmp_path / "pkg" / "jobs" / "data.py", DATA)
    write(tmp_path / "pkg" / "jobs" / "small.py", PACKAGED)
    write(tmp_path / "own.yaml", "train.batch_size: data.size\n")
    words = ("--model", "pkg/jobs/small.py:Job", "--output", "out", "--keys", "own.yaml")
    ran = cli(*words, *ONE_PROBE)
    assert ran.code == 0, ran.err
    assert ran.line == "data.size=16"
    assert "Not in KEYS, set by hand: loader.num_workers," in " ".join(ran.err.split())
    assert {path.name for path in tmp_path.iterdir()} == {"pkg", "own.yaml", "out"}


def test_a_lightning_module_without_current(cli, tmp_path):
    write(tmp_path / "module.py", LIGHTNING)
    ran = cli("--model", "module.py", *ONE_PROBE)
    assert ran.code == 0, ran.err
    assert settings(ran.line)["train.batch_size"] == 32
    assert "keep PyTorch's defaults" in ran.err
    assert 'add to module.py: CURRENT = {"loader.num_workers"' in " ".join(ran.err.split())
    assert not re.search(r"\byours?\b", ran.err)


def test_python_tunes_as_the_command_line_does(job, tmp_path, capfd):
    tuned = autotune.tune(
        job,
        "loader.num_workers=0",
        budget="30s",
        max_probes=1,
        output=tmp_path / "out",
        global_batch=32,
        min_gain=0.05,
        objectives=["samples_per_s"],
        limits="memory_gb<=4",
    )
    assert capfd.readouterr() == ("", "")
    assert tuned.folder == tmp_path / "out"
    assert tuned.keep
    assert settings(tuned.overrides())["train.batch_size"] == 32
    assert set(tuned.trials["stage"]) == {"inspect", "baseline"}
    assert autotune.load_run(tuned.folder).overrides() == tuned.overrides()


# --- when nothing runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["command line", "Python"])
def test_nothing_ran(cli, tmp_path, way):
    broken = MODEL + "\n\ndef compute_loss(model, batch):\n    return model(batch[0])[:, 9].sum()\n"
    job = write(tmp_path / "job.py", broken)
    if way == "Python":
        with pytest.raises(NothingRanError, match="no config ran"):
            autotune.tune(job, budget="10s", output=str(tmp_path / "out"))
    else:
        ran = cli("--model", "job.py", "--budget", "10s", "--output", "out", "--quiet")
        assert (ran.code, ran.out) == (1, ""), ran
        assert "no config ran" in ran.err
        assert "IndexError" in ran.err
        assert "Traceback" not in ran.err
    table = pd.read_csv(tmp_path / "out" / "trials.csv")
    assert len(table) >= 1
    assert set(table["status"]) <= {"error", "not_applicable"}
    assert table["reason"].str.contains("IndexError").any()
    assert not (tmp_path / "out" / "overrides.txt").exists()
    assert not (tmp_path / "out" / "best.yaml").exists()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["answer"] is None
    again = cli("--resume", "out")
    assert (again.code, again.out) == (1, "")
    assert "IndexError" in again.err
    told = cli("report", "out")
    assert (told.code, told.out) == (2, "")
    assert "no answer" in told.err


# --- odd places -----------------------------------------------------------------------------------


def test_any_name_may_be_a_folders(cli, job):
    name = "50% of #1? [a=b] größe"
    ran = cli("--model", job, "--output", name, *ONE_PROBE)
    assert ran.code == 0, ran.err
    assert {path.name for path in (cli.folder / name).iterdir()} == FILES
    assert {path.name for path in cli.folder.iterdir()} <= {name, "job.py", "__pycache__"}
    told = cli("report", name)
    assert (told.code, told.err) == (0, "")


LOAD = """
import sys
from autotune.probe.workload import load
from autotune.types import ModelRef
for path in sys.argv[1:]:
    assert load(ModelRef(path=path)).facts().current["train.batch_size"] == 32, path
"""


def test_any_name_may_be_a_model_files(tmp_path):
    names = ("model-v2", "my model", "2layer", "types", "random", "model.v2", "torch", "größe")
    paths = [write(tmp_path / str(n) / f"{name}.py", MODEL) for n, name in enumerate(names)]
    done = subprocess.run([sys.executable, "-c", LOAD, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_of_two_runs_at_once_only_one_gets_the_folder(cli, job):
    words = ("--model", job, "--output", "out", "--quiet", *ONE_PROBE)
    runs = [cli.start(*words), cli.start(*words)]
    told = [process.communicate(timeout=120) for process in runs]
    assert sorted(process.returncode for process in runs) == [0, 2]
    refused = "".join(err for _, err in told if err.startswith("autotune: "))
    assert "not an empty folder" in refused or "another run is at work" in refused


def test_an_answer_that_keeps_no_limit_is_none(cli, job):
    words = ("--output", "out", "--limit", "memory_gb<=0.00001", "--quiet")
    ran = cli("--model", job, *words, *ONE_PROBE)
    assert (ran.code, ran.out) == (1, "")
    assert "of 1 measured, none keeps the values asked for and memory_gb<=1e-05" in ran.err
    assert not (cli.folder / "out" / "overrides.txt").exists()


# --- borders --------------------------------------------------------------------------------------

PACKAGE = Path(autotune.__file__).parent
TELEMETRY = ("fields", "meter", "nvml", "surveys", "tenants", "watch")
LAYERS_DOWN = (
    {"__main__"},
    {"cli", "api"},
    {"driver"},
    {"measuring", "course"},
    {"report.progress", "report.verdict"},
    {"report.words", "reuse"},
    {"state", "search"},
    {
        "staged",
        "local",
        "ceilings",
        "device_ladder",
        "loader_ladder",
        "halves",
        "scene",
        "store",
        "runfolder",
        "budget",
        "causes",
        "evidence",
    },
    {"options", "diagnosis", "pareto", "exporters", "fitting", "space", "request", "doctor"},
    {"checkup"},
    {"launcher", "home", "hostwatch", "forkserver"},
    {"telemetry", *(f"telemetry.{name}" for name in TELEMETRY)},
    {"knobs", "metrics", "labels", "readings", "steady", "ending", "machine"},
    {"source", "channel", "stop", "guard", "laws"},
    {"types", "errors", "parallel", "precision", "shm"},
)
"""From the top down: a file imports from below itself, or beside itself without a circle."""

HEAVY = {"torch", "pandas", "optuna", "hydra", "numpy", "pyarrow", "rich", "psutil"}
ONLY_IN = {
    "torch": lambda name: name.startswith("probe."),
    "optuna": lambda name: name in ("search", "store"),
    "hydra": lambda name: name == "request",
    "pynvml": lambda name: name == "telemetry.nvml",
    "pandas": lambda name: name in ("store", "api"),
    "rich": lambda name: name in ("cli", "report.progress"),
}
FOR_PROBES = {
    *("types", "errors", "knobs", "precision", "parallel", "steady", "ending", "channel"),
    *("source", "shm"),
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__").removesuffix("__init__"), ast.parse(path.read_text())


def imported(tree, *, top_only=False):
    """What a file imports, what only type checkers see left out."""
    for node in tree.body if top_only else walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else node.module for name in names)


def walk(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from walk(child)


def is_module(name):
    relative = name.removeprefix("autotune.").replace(".", "/")
    return name.startswith("autotune.") and (
        (PACKAGE / f"{relative}.py").exists() or (PACKAGE / relative).is_dir()
    )


def ours(names):
    found = {name.removeprefix("autotune.") for name in names if name.startswith("autotune.")}
    return found - {"report", "probe"}


def test_imports_go_downward_only():
    rank = {name: number for number, names in enumerate(LAYERS_DOWN) for name in names}
    graph = {name: ours(imported(tree)) for name, tree in modules()}
    parents = {name for name in graph if name not in ("", "report") and "probe" not in name}
    assert parents == set(rank), "name the new file in LAYERS_DOWN"
    upward = [
        (name, below)
        for name in parents
        for below in graph[name]
        if rank.get(below, -1) < rank[name]
    ]
    assert upward == []
    assert circles({name: graph[name] for name in parents}) == []
    for name, below in graph.items():
        if name.startswith("probe"):
            assert {b for b in below if not b.startswith("probe")} <= FOR_PROBES, name


def circles(graph):
    """What is left when all that imports nothing of the rest is taken away again and again."""
    left = dict(graph)
    while free := [name for name, below in left.items() if not below & left.keys() - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


def test_one_outside_library_one_file():
    for name, tree in modules():
        for library in {found.partition(".")[0] for found in imported(tree)}:
            allowed = ONLY_IN.get(library)
            assert allowed is None or allowed(name), f"{name} imports {library}"


@pytest.mark.parametrize("module", ["autotune", "autotune.__main__", "autotune.cli"])
def test_the_command_line_starts_light(module):
    code = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY & set(done.stdout.split()) == set()


def test_the_driver_never_imports_torch():
    code = "import autotune.api, autotune.driver, autotune.cli, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "torch" not in loaded
    assert not [name for name in loaded if f"{name}.".startswith("autotune.probe.")]
