"""A run that is stopped loses at most the probe in flight, leaves nothing running, and goes on."""

import json
import os
import re
import signal
import time
from pathlib import Path

import optuna
import pandas as pd
import psutil
import pytest
from conftest import MARK, MODEL, marked, wait_for, write

from autotune.store import read_trials
from autotune.types import encode

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
ORPHANS_END_S = 4.0
"""How long what a killed driver has started may live on."""

WITH_WORKERS = MODEL.replace('"loader.num_workers": 0', '"loader.num_workers": 1')


def start(cli, *words, budget="40s"):
    """A run that does not end by itself soon."""
    return cli.start("--model", "job.py", "--output", "run", "--budget", budget, *words)


def rows_in(run):
    """The rows on disk, as text."""
    try:
        return [encode(trial) for trial in read_trials(run)]
    except (KeyError, RuntimeError, optuna.exceptions.OptunaError):
        return []  # the study is only just being made


def wait_for_rows(run, count):
    """Wait until so many rows are on disk."""
    ready = lambda: (run / "run.json").exists() and len(rows_in(run)) >= count  # noqa: E731
    assert wait_for(ready), "no rows came"


def wait_for_probe(run, number):
    """Wait until a probe is busy."""
    assert wait_for(lambda: list(run.glob(f"probes/{number:04d}-*/phase"))), "no probe came"


def is_written(path):
    return path.exists() and path.stat().st_size > 0


def ended(process, within_s=30.0):
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out, err


@pytest.mark.parametrize("number", EXIT_CODES, ids=lambda number: signal.Signals(number).name)
def test_a_signal_ends_the_run_with_what_is_known(cli, tmp_path, number):
    write(tmp_path / "job.py", WITH_WORKERS)
    run = tmp_path / "run"
    process = start(cli)
    wait_for_rows(run, 3)
    process.send_signal(number)
    code, out, err = ended(process)
    assert (code, out) == (EXIT_CODES[number], ""), err
    assert "Traceback" not in err
    assert marked(os.environ[MARK]) == []
    content = json.loads((run / "run.json").read_text())
    assert content["status"] == "interrupted"
    assert content["answer"]["stopped_because"] == "interrupted"
    rows = read_trials(run)
    table = pd.read_csv(run / "trials.csv")
    assert list(table["trial"]) == [trial.number for trial in rows]
    assert len(rows) >= 3
    assert (run / "best.yaml").read_text().startswith("# @package _global_\n")
    assert (run / "summary.md").exists()
    assert not (run / "overrides.txt").exists()
    told = cli("report", "run")
    assert told.code == 0
    assert "not verified" in told.out


def test_a_second_signal_changes_nothing(cli, tmp_path):
    write(tmp_path / "job.py", MODEL)
    process = start(cli)
    wait_for_rows(tmp_path / "run", 2)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    code, out, err = ended(process)
    assert code in (130, 143)
    assert out == ""
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.7, 1.5, 2.2])
def test_a_signal_during_the_start_leaves_nothing(cli, tmp_path, after_s):
    """At whatever moment: during our imports, torch's, or the model file's."""
    write(tmp_path / "job.py", "import time\ntime.sleep(1)\n" + MODEL)
    process = start(cli)
    assert wait_for(lambda: catches(process.pid, signal.SIGTERM))
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, ""), err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def catches(pid, number):
    """Whether a process has a handler of its own for the signal: before, Python's own ends it."""
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(found[1], 16) >> (number - 1) & 1)


def kill(process):
    """Kill a driver, and wait until nothing of it is left."""
    process.kill()
    killed_s = time.monotonic()
    process.wait()
    assert wait_for(lambda: not marked(os.environ[MARK]), within_s=20.0)
    assert time.monotonic() - killed_s < ORPHANS_END_S


def test_a_killed_run_leaves_no_process_and_goes_on(cli, tmp_path):
    write(tmp_path / "job.py", WITH_WORKERS)
    run = tmp_path / "run"
    process = start(cli, "--sampler", "random", "--max-probes", "8", budget="60s")
    wait_for_rows(run, 2)
    too_early = cli("--resume", "run")
    assert (too_early.code, too_early.out) == (2, "")
    assert "another run is at work in it" in too_early.err
    wait_for_probe(run, len(rows_in(run)))
    assert len(marked(os.environ[MARK])) > 2
    kill(process)
    before = rows_in(run)
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    # Elsewhere, and by another name of the folder: model and space come from run.json.
    (tmp_path / "elsewhere").mkdir()
    cli.folder = tmp_path / "elsewhere"
    ran = cli("--resume", "../run")
    assert ran.code == 0, ran.err
    assert ran.line
    assert f"{len(before)} finished rows are kept" in ran.err
    after = rows_in(run)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    check_finished(run, ran.out)
    again = cli("--resume", "../run")
    assert (again.code, again.out) == (0, ran.out)
    assert rows_in(run) == after


def check_finished(run, out):
    """The run is whole, and nothing in it was measured twice because of the interruption."""
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert (run / "overrides.txt").read_text() == out
    table = pd.read_csv(run / "trials.csv")
    assert list(table["trial"]) == list(range(len(table)))
    assert len(table) == len(rows_in(run))
    once = table[table["stage"] != "final"]
    assert not once.duplicated(["key", "stage", "source", "sink", "status"]).any()


def test_an_interrupted_run_goes_on_too(cli, tmp_path):
    write(tmp_path / "job.py", MODEL)
    run = tmp_path / "run"
    process = start(cli, "loader.num_workers=0", "--max-probes", "5")
    wait_for_rows(run, 2)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    before = rows_in(run)
    ran = cli("--resume", "run", "--quiet")
    assert ran.code == 0, ran.err
    assert rows_in(run)[: len(before)] == before
    assert len(ran.err.splitlines()) == 1
    assert json.loads((run / "run.json").read_text())["options"]["max_probes"] == 5
    table = pd.read_csv(run / "trials.csv")
    assert (table["stage"] != "inspect").sum() <= 5


def test_a_run_that_was_killed_at_once_can_go_on(cli, tmp_path):
    """Before the first row there is nothing to keep; that is no reason to refuse."""
    write(tmp_path / "job.py", MODEL)
    run = tmp_path / "run"
    process = start(cli, "--max-probes", "1", budget="30s")
    assert wait_for(lambda: is_written(run / "run.json"))
    kill(process)
    ran = cli("--resume", "run")
    assert ran.code == 0, ran.err
    assert ran.line


def test_a_hanging_import_can_be_stopped(cli, tmp_path):
    write(tmp_path / "job.py", "import time\ntime.sleep(600)\n" + MODEL)
    process = start(cli)
    template = lambda: len(marked(os.environ[MARK])) >= 3  # noqa: E731
    assert wait_for(template)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (code, out) == (143, ""), err
    assert not psutil.pid_exists(process.pid)
