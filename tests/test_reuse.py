"""Earlier runs: the rows of the same job count after one verifying probe, others only guide."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
from conftest import MODEL, write
from made_up import CPU, FACTS, Listener
from oracle import Job, Law

from autotune import driver, measuring
from autotune.options import Options
from autotune.runfolder import new_run
from autotune.scene import Ask
from autotune.space import BATCH, WORKERS
from autotune.types import Failure, Measurement, ModelFacts, Stage, Status, Trial

YOURS = {WORKERS: 0, BATCH: 32}
LAW = Law(load_s=2e-3, launch_s=4e-3, sample_s=2e-4)


class MadeUpLauncher:
    """Starts nothing: the rows are made up."""

    fallback = ""

    def __init__(self, model, **_):
        self.model = model

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def load(self):
        return ModelFacts(
            current=YOURS, keys={}, unit="samples", cacheable=False, fresh=False,
            own_loader=False, loader_accepts=(),
        )  # fmt: skip

    def settle(self):
        return {"type": "cpu", "default_threads": 8}


class MadeUpRuns:
    """Whole runs of a job whose laws are known, in folders side by side."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.model = write(folder / "job.py", MODEL)
        self.law = LAW
        self.asked = []
        self.count = 0
        monkeypatch.setattr(driver, "Launcher", MadeUpLauncher)
        monkeypatch.setattr(driver, "machine_of", lambda facts, index: CPU)
        monkeypatch.setattr(measuring.Prober, "probe", lambda prober, *words: self.probe(*words))

    def __call__(self, **options):
        """A run; its state, what was told, and what was really asked for."""
        self.count += 1
        self.asked = []
        self.job = Job(law=self.law, current=YOURS, seed=self.count)
        listener = Listener()
        output = self.folder / f"run{self.count}"
        given = {"model": str(self.model), "output": str(output), "budget": "60s", **options}
        state = driver.tune(new_run(Options(**given)), listener)
        return state, " ".join(listener.notes), self.asked

    def probe(self, ask, number):
        if ask.stage is Stage.INSPECT:
            outcome = Measurement(blocks=(), stopped="limit", facts=asdict(FACTS))
        else:
            self.asked.append(ask)
            outcome = self.job.outcome(ask)
        failed = isinstance(outcome, Failure)
        return Trial(
            number=number,
            config=ask.config,
            stage=ask.stage,
            source=ask.source,
            sink=ask.sink,
            measurement=None if failed else outcome,
            failure=outcome if failed else None,
            probe_s=1.0,
            why=ask.why,
            round=ask.round,
        )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return MadeUpRuns(tmp_path, monkeypatch)


def stages(asked):
    return Counter(ask.stage for ask in asked)


def rewrite(folder, change):
    """Change what an earlier run says of itself."""
    content = json.loads((folder / "run.json").read_text())
    change(content)
    (folder / "run.json").write_text(json.dumps(content))


def test_the_same_job_again_takes_one_verifying_probe_and_the_finals(runs):
    first, told, before = runs()
    assert "count here too" not in told
    again, told, after = runs()
    assert "rows of run1 count here too" in told
    assert set(stages(after)) <= {Stage.BASELINE, Stage.FINAL, Stage.PATH}
    assert stages(after)[Stage.BASELINE] == 1
    assert len(after) < len(before)
    assert again.answer.config == first.answer.config
    assert again.answer.verified
    taken_over = [row for row in again.trials if row.reused]
    assert taken_over
    assert all(row.reason.endswith("reused from run1") for row in taken_over)
    assert all(row.probe_s == 0 for row in taken_over)
    assert not [row for row in taken_over if row.stage in (Stage.FINAL, Stage.BASELINE)]
    assert len({row.number for row in again.trials}) == len(again.trials)


def test_no_reuse_measures_everything(runs):
    _, _, before = runs()
    _, told, after = runs(no_reuse=True)
    assert "run1" not in told
    assert stages(after) == stages(before)


def test_a_baseline_that_makes_something_else_takes_nothing_over(runs):
    first, _, _ = runs()
    runs.law = replace(LAW, load_s=2 * LAW.load_s)
    state, told, asked = runs()
    assert "your config makes something else than then" in told
    assert not [row for row in state.trials if row.reused]
    guessed = [ask for ask in asked if ask.why == "best of an earlier run"]
    assert [ask.config for ask in guessed] == [first.answer.config]


CHANGES = {
    "another machine": lambda content: content["machine"].update(cpus=64),
    "another torch": lambda content: content["versions"].update(torch="1.0"),
    "another file": lambda content: content["model"].update(sha256="0" * 64),
    "another dataset": lambda content: content["workload"].update(dataset_len=7),
    "another seed": lambda content: content["options"].update(seed=9),
    "a shorter run": lambda content: content["options"].update(budget="59s"),
    "another limit": lambda content: content["options"].update(limits=["memory_gb<=9"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_since_only_orders_candidates(runs, name):
    runs()
    rewrite(runs.folder / "run1", CHANGES[name])
    state, told, asked = runs()
    assert "the answer of run1 is tried first; its rows do not count" in told
    assert not [row for row in state.trials if row.reused]
    assert stages(asked)[Stage.LOADER] > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(status="interrupted"),
        lambda content: content.update(answer=None),
        lambda content: content["model"].update(sha256="0" * 64, path="/elsewhere/job.py"),
        lambda content: content.update(schema=0),
    ],
)
def test_what_is_no_finished_run_of_this_job_is_left_alone(runs, change):
    runs()
    rewrite(runs.folder / "run1", change)
    _, told, asked = runs()
    assert "run1" not in told
    assert not [ask for ask in asked if ask.why == "best of an earlier run"]


def test_a_broken_run_beside_this_one_is_passed_over(runs):
    runs()
    (runs.folder / "run1" / "study.db").write_bytes(b"no database")
    state, told, _ = runs()
    assert "run1" not in told
    assert state.answer is not None


def test_the_newest_run_of_the_same_job_counts(runs):
    runs()
    runs(no_reuse=True)
    _, told, _ = runs()
    assert "rows of run2 count here too" in told


def test_a_row_that_a_day_may_change_is_not_taken_over(runs, monkeypatch):
    failing = replace(LAW, hangs_with=lambda config: config.get(WORKERS) == 8)
    runs.law = failing
    first, _, _ = runs()
    hung = [row for row in first.trials if row.status is Status.TIMEOUT]
    state, _, asked = runs()
    taken_over = {row.config for row in state.trials if row.reused and not row.ok}
    assert not taken_over & {row.config for row in hung}
    assert bool(hung) <= any(ask.config in {row.config for row in hung} for ask in asked)


def test_a_guess_outside_the_space_is_not_tried(runs):
    runs()
    rewrite(runs.folder / "run1", CHANGES["another machine"])
    _, _, asked = runs(overrides=("loader.num_workers=0",))
    assert not [ask for ask in asked if ask.why == "best of an earlier run"]
    assert {ask.config[WORKERS] for ask in asked} == {0}


def test_reusing_asks_for_what_the_row_is(runs):
    first, _, _ = runs()
    row = next(row for row in first.trials if row.stage is Stage.DEVICE and row.ok)
    earlier = driver.reuse.find(replace_folder(first, runs.folder / "new"))
    same = Ask(config=row.config, stage=row.stage, source=row.source, sink=row.sink, why="")
    assert earlier.row_for(same, 99).number == 99
    assert earlier.row_for(replace(same, stage=Stage.FINAL), 99) is None
    assert earlier.row_for(replace(same, config=row.config.but({BATCH: 7})), 99) is None


def replace_folder(state, folder):
    return replace(state, folder=folder)
