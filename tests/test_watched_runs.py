"""Runs whose telemetry is made up: a GPU that is lost, one that others use, energy in finals."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import MODEL, write
from made_up import HOPPER, Listener, measurement

from autotune import driver, measuring
from autotune.budget import Budget
from autotune.errors import NothingRanError
from autotune.launcher import Outcome
from autotune.measuring import ENERGY_WINDOW_S, Prober
from autotune.options import Options
from autotune.readings import LEAST_ENERGY_S
from autotune.runfolder import new_run, resumed_run
from autotune.stop import Stop
from autotune.store import read_trials
from autotune.telemetry import Telemetry
from autotune.types import Config, DeviceReading, Label, Sink, Source, Stage, Status

GONE = "GPU 0 (Made Up): GPU is lost"
SLOW = MODEL + "\ndef before_step(model, optimizer):\n    import time\n    time.sleep(0.01)\n"


class MadeUpWatch:
    """Tells what it is given."""

    def __init__(self, told=(), *, lost=False):
        self.told = told
        self.lost = GONE if lost else ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def readings(self, start_ns, end_ns):
        return self.told


class MadeUpTelemetry(Telemetry):
    """Loses the GPU during the n-th probe."""

    def __init__(self, lost_in=None, *, told=(), fields=("energy_j",)):
        super().__init__()
        self.lost_in = lost_in
        self.told = told
        self.fields = fields
        self.watched = []
        self.closed = False
        self.notes = ["not read from this GPU: energy"]

    def reads(self, index, *names):
        return bool(set(self.fields) & set(names))

    def watch(self, indices):
        self.watched.append(list(indices))
        return MadeUpWatch(self.told, lost=len(self.watched) == self.lost_in)

    def await_release(self, watch, should_stop):
        return True

    def close(self):
        self.closed = True


def tune(monkeypatch, order, telemetry):
    """A run with that telemetry, and what it told."""
    monkeypatch.setattr(driver.Telemetry, "open", lambda facts: telemetry)
    listener = Listener()
    return driver.tune(order, listener), listener


@pytest.fixture
def order(tmp_path):
    path = write(tmp_path / "job.py", SLOW)
    output = str(tmp_path / "run")
    return new_run(Options(model=str(path), budget="60s", output=output))


def content_of(order):
    return json.loads((order.folder / "run.json").read_text())


# --- a GPU that is lost ---------------------------------------------------------------------------


def test_a_lost_gpu_ends_the_run_at_once_with_all_rows_kept(monkeypatch, order):
    telemetry = MadeUpTelemetry(lost_in=3)
    state, listener = tune(monkeypatch, order, telemetry)
    assert len(telemetry.watched) == 3  # nothing was launched after it
    assert telemetry.closed
    rows = read_trials(order.folder)
    assert [trial.status for trial in rows if trial.status is not Status.NOT_APPLICABLE] == [
        Status.OK,
        Status.OK,
        Status.DEVICE_LOST,
    ]
    lost = rows[-1]
    assert lost.reason == GONE
    assert state.stopped_because == f"the device was lost ({GONE})"
    assert (state.answer.keep, state.answer.verified) == (True, False)
    assert "device was lost" in state.answer.reason
    assert "device was lost" in (order.folder / "summary.md").read_text()
    assert "device_lost" in (order.folder / "failed.csv").read_text()
    assert [text for text in listener.notes if "not read" in text] == telemetry.notes
    assert state.notes.count(telemetry.notes[0]) == 1
    assert content_of(order)["status"] == "interrupted"

    # Once the device is back, the run goes on where it was.
    again = MadeUpTelemetry(lost_in=2)
    state, _ = tune(monkeypatch, resumed_run(order.folder, force=False), again)
    assert len(again.watched) == 2
    assert [trial.status for trial in state.trials].count(Status.DEVICE_LOST) == 2
    assert [trial.stage for trial in state.trials].count(Stage.BASELINE) == 1


@pytest.mark.parametrize("lost_in", [1, 2])
def test_a_gpu_that_is_lost_before_anything_was_measured_is_no_answer(monkeypatch, order, lost_in):
    telemetry = MadeUpTelemetry(lost_in=lost_in)
    with pytest.raises(NothingRanError, match="device_lost: GPU 0"):
        tune(monkeypatch, order, telemetry)
    assert len(telemetry.watched) == lost_in
    assert telemetry.closed
    assert not (order.folder / "overrides.txt").exists()


# --- one probe ------------------------------------------------------------------------------------


class Launcher:
    """Gives the same outcome to every probe, and remembers what it was told."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.specs = []
        self.looks = 0

    def run(self, spec, environment, should_stop):
        self.specs.append(spec)
        for _ in range(10):
            self.looks += 1
            should_stop()
        return self.outcome


MEASURED = Outcome(measurement=measurement(start_ns=1, end_ns=2), probe_s=1.0)


@pytest.fixture
def prober(tmp_path):
    """A prober on a made-up machine: `prober(telemetry)`."""

    def made(telemetry, *, machine=HOPPER, outcome=MEASURED, budget_s=600.0):
        options = SimpleNamespace(seed=0)
        checked = SimpleNamespace(model=None, options=options)
        state = SimpleNamespace(
            folder=tmp_path, trials=[], machine=machine, checked=checked, space=None
        )
        budget = Budget(budget_s, None, [], time.monotonic())
        made = Prober(state, Launcher(outcome), budget, Stop())
        made.read_with(telemetry)
        return made

    return made


def ask(stage=Stage.VERIFY, **changes):
    wanted = {"config": Config({}), "stage": stage, "why": "", **changes}
    return measuring.Ask(**wanted)


def test_readings_and_what_they_say_go_into_the_row(prober):
    read = DeviceReading(index=1, event_reasons=0x40, others=2, energy_j=5.0, estimated=True)
    telemetry = MadeUpTelemetry(told=(read,))
    machine = replace(HOPPER, device="cuda:1")
    trial = prober(telemetry, machine=machine).probe(ask(), 1)
    assert telemetry.watched == [[1]]
    assert trial.measurement.devices == (read,)
    assert trial.labels == (Label.CONTENDED, Label.THROTTLED, Label.ESTIMATED)
    assert trial.status is Status.OK


def test_only_devices_that_are_trained_on_are_watched(prober):
    telemetry = MadeUpTelemetry()
    made = prober(telemetry)
    made.probe(ask(Stage.LOADER, sink=Sink.DISCARD), 1)
    made.probe(ask(Stage.DEVICE, source=Source.CACHED), 2)
    assert telemetry.watched == [[], [0]]
    on_cpu = prober(telemetry, machine=replace(HOPPER, device="cpu"))
    on_cpu.probe(ask(), 3)
    assert telemetry.watched[-1] == []


def test_a_probe_on_a_lost_gpu_is_not_waited_for(prober):
    made = prober(MadeUpTelemetry(lost_in=2))
    assert made.probe(ask(), 1).ok
    assert made.launcher.looks == 10
    trial = made.probe(ask(), 2)
    assert made.launcher.looks == 11  # it would have hung
    assert (trial.status, trial.reason) == (Status.DEVICE_LOST, GONE)


def test_a_probe_that_ends_on_a_lost_gpu_before_that_is_noticed_is_lost_all_the_same(prober):
    made = prober(MadeUpTelemetry(lost_in=1))
    made.launcher.run = lambda spec, environment, should_stop: MEASURED
    trial = made.probe(ask(), 1)
    assert (trial.status, trial.reason) == (Status.DEVICE_LOST, GONE)
    assert trial.measurement is None


@pytest.mark.parametrize(
    ("stage", "budget_s", "fields", "longer"),
    [
        (Stage.FINAL, 600.0, ("energy_j",), True),
        (Stage.FINAL, 600.0, ("power_w",), True),
        (Stage.FINAL, 600.0, (), False),
        (Stage.FINAL, 120.0, ("energy_j",), False),  # a window of 10 s would eat the budget
        (Stage.VERIFY, 600.0, ("energy_j",), False),
    ],
)
def test_finals_are_long_enough_for_energy_where_it_can_be_read(
    prober, stage, budget_s, fields, longer
):
    made = prober(MadeUpTelemetry(fields=fields), budget_s=budget_s)
    made.probe(ask(stage), 1)
    (spec,) = made.launcher.specs
    assert spec.min_window_s == (ENERGY_WINDOW_S if longer else 0.0)
    assert spec.max_window_s >= spec.min_window_s
    assert (made.budget.least_final_s > LEAST_ENERGY_S) == (longer or stage is Stage.VERIFY)
