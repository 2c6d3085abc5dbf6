"""The scripts for a machine with a GPU, as far as a CPU can prove them."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import wait_for

from autotune.types import Block, Estimate, Measurement
from scripts import gpu_checking, gpu_lab, gpu_recording, recording
from scripts.gpu_checking import Bench, CheckError, Row
from scripts.gpu_lab import Clock, OutOfTimeError, Reading, SkipError

ROOT = Path(__file__).resolve().parent.parent


def run_script(name, folder, *words, within_s=120.0):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / name, "--device", "cpu", *words],
        env={**os.environ, "OUT": str(folder)},
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    files = sorted(folder.glob("*.json"))
    return done, json.loads(files[-1].read_text()) if files else None


# --- gpu_check ------------------------------------------------------------------------------------


def test_the_checks_fit_into_six_minutes_and_each_has_a_share():
    assert gpu_checking.SECONDS <= 350
    assert len({row.name for row in gpu_checking.ROWS}) == len(gpu_checking.ROWS)
    assert all(gpu_checking.LEAST_S < row.share_s <= 110 for row in gpu_checking.ROWS)


def raising(error):
    def run(bench, figures):
        figures["before"] = 1
        raise error

    return run


def waiting(bench, figures):
    figures["before"] = 1
    while True:
        bench.clock.check()


ENDS = {
    "passes": (lambda bench, figures: figures.update(in_short="fine"), "passed", ""),
    "is wrong": (raising(CheckError("2 overshoots")), "failed", "2 overshoots"),
    "breaks": (raising(KeyError("memory")), "failed", "KeyError: 'memory'"),
    "cannot": (raising(SkipError("no NVML: not found")), "skipped", "no NVML: not found"),
    "waits": (waiting, "failed", "not done within its time"),
}


@pytest.mark.parametrize("name", ENDS)
def test_whatever_a_check_does_is_a_result(name, tmp_path):
    run, status, reason = ENDS[name]
    bench = Bench("cpu", "", gpu_lab.Labs("cpu", tmp_path), tmp_path, Clock(0))
    share_s = 0.05 if run is waiting else 60
    result = gpu_checking.attempt(Row(name=name, share_s=share_s, run=run), bench, Clock(60))
    assert (result.status, result.reason) == (status, reason)
    assert result.figures
    assert ("traceback" in result.figures) == (name == "breaks")
    told = gpu_checking.table([result])
    assert f"1 {status}" in told
    assert reason in told


def test_what_only_a_gpu_can_tell_is_skipped_and_so_is_what_has_no_time(tmp_path):
    bench = Bench("cpu", "", gpu_lab.Labs("cpu", tmp_path), tmp_path, Clock(0))
    row = Row(name="r", share_s=9, run=raising(CheckError("ran")), gpu_only=True)
    assert gpu_checking.attempt(row, bench, Clock(60)).reason == "no GPU"
    late = Row(name="r", share_s=9, run=raising(CheckError("ran")))
    assert gpu_checking.attempt(late, bench, Clock(1)).reason == "no time left"


def step(real, predicted, status="ok"):
    return {"batch": 8, "memory_bytes": real, "predicted_bytes": predicted, "status": status}


def judged(climbs, *, strict=True):
    figures = {}
    gpu_checking.judge_climbs(climbs, figures)
    gpu_checking.judge_guard(figures, strict=strict)
    return figures


def test_overshoots_are_counted_and_fail_on_a_gpu():
    good = {"mlp default": [step(5, None), step(8, 10), step(9, 10)]}
    figures = judged(good)
    assert (figures["predictions"], figures["overshoots"]) == (2, 0)
    assert "real is 0.80 to 0.90 of predicted" in figures["in_short"]
    over = {"mlp default": [step(5, None), step(11, 10)]}
    with pytest.raises(CheckError, match="bound was passed"):
        judged(over)
    assert judged(over, strict=False)["overshoots"] == 1
    full = {"mlp default": [step(5, None), step(8, 10), step(None, 12, "out_of_memory")]}
    with pytest.raises(CheckError, match="bound was passed"):
        judged(full)
    with pytest.raises(CheckError, match="no prediction could be compared: cnn bf16"):
        judged({**good, "cnn bf16": [step(5, None)]})


def test_the_ratio_carries_the_uncertainty_of_both():
    long = Estimate(value=100.0, low=99.0, high=101.0)
    found = gpu_checking.ratio_of([100.0, 102.0, 98.0, 100.0], long)
    assert found.low < 1 < found.high
    exact = gpu_checking.ratio_of([100.0] * 4, long)
    assert exact.high - exact.low == pytest.approx(0.02)
    with pytest.raises(CheckError, match="something else"):
        gpu_checking.judge_ratio(gpu_checking.ratio_of([80.0] * 4, long))
    with pytest.raises(CheckError, match="too noisy"):
        gpu_checking.judge_ratio(gpu_checking.ratio_of([50.0, 150.0, 100.0, 100.0], long))


def reading(second, **values):
    unread = dict.fromkeys(("busy_pct", "used_bytes", "energy_j", "power_w", "clock_mhz"))
    return Reading(at_ns=int(second * 1e9), **{**unread, **values})


def test_nvml_is_held_against_the_probes_own_counters():
    gib = gpu_checking.GIB
    block = Block(seconds=10.0, consumed=100, produced=100, wait_s=0.5, steps=10)
    measured = Measurement(blocks=(block,), stopped="limit", steps=10, memory_bytes=3 * gib)
    before = reading(0, used_bytes=gib)
    inside = [
        reading(n, busy_pct=94.0, used_bytes=4.5 * gib, energy_j=300.0 * n, power_w=310.0)
        for n in range(1, 11)
    ]
    figures = {}
    gpu_checking.compare(measured, inside, before, figures)
    assert figures["busy_pct"] == {"nvml": 94.0, "events": 95.0}
    assert figures["power_w"] == {"sensor": 310.0, "energy": pytest.approx(300.0)}
    assert figures["context_bytes"] == 0.5 * gib
    with pytest.raises(CheckError, match="memory"):
        gpu_checking.compare(measured, inside, reading(0, used_bytes=3 * gib), {})
    with pytest.raises(CheckError, match="no reading"):
        gpu_checking.compare(measured, [], before, {})
    unread = {}
    gpu_checking.compare(measured, [reading(1), reading(2)], before, unread)
    assert unread["power_w"] == {"sensor": None, "energy": None}
    assert unread["context_bytes"] is None


PYTEST = {
    "3 passed, 1 skipped in 9.1s": (0, ""),
    "15 skipped in 1.01s": (0, "none of them ran"),
    "1 failed, 14 passed in 60.2s": (1, "pytest ended with 1"),
}


@pytest.mark.parametrize("last", PYTEST)
def test_gpu_tests_that_did_not_run_have_not_passed(last, monkeypatch, tmp_path):
    code, reason = PYTEST[last]
    asked = []

    def command(words, clock):
        asked.append(words)
        return gpu_lab.Ran(code=code, out=f"FAILED tests/test_gpu.py::test_a\n{last}\n", err="")

    monkeypatch.setattr(gpu_checking, "command", command)
    bench = Bench("cuda:0", "", gpu_lab.Labs("cuda:0", tmp_path), tmp_path, Clock(0))
    (row,) = gpu_checking.chosen("gpu_tests")
    result = gpu_checking.attempt(row, bench, Clock(60))
    assert (result.status, result.reason) == ("failed" if reason else "passed", reason)
    assert result.figures["failures"] == ["FAILED tests/test_gpu.py::test_a"]
    files = {Path(word).name for word in asked[0] if word.endswith(".py")}
    assert files == {"test_gpu.py", "test_telemetry.py"}, "the files with tests marked gpu"


def test_a_run_is_told_as_far_as_it_came(tmp_path):
    assert gpu_checking.told_by_run(tmp_path) == {"statuses": {}}
    (tmp_path / "run.json").write_text('{"answer": null}')
    rows = (
        "trial,stage,status,reason,samples_per_s\n0,baseline,ok,,412\n1,loader,crash,SIGKILL (9),\n"
    )
    (tmp_path / "trials.csv").write_text(rows)
    told = gpu_checking.told_by_run(tmp_path)
    assert (told["answer"], told["statuses"]) == (None, {"ok": 1, "crash": 1})
    assert told["reasons"] == ["SIGKILL (9)"]
    assert [row["samples_per_s"] for row in told["rows"]] == ["412", ""]


class MadeUpNvml(ModuleType):
    """Enough of pynvml for a watcher: energy ticks, power is not supported."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1

    def __init__(self, known):
        super().__init__("pynvml")
        self.known, self.opened, self.joules = known, 0, 0

    def nvmlInit(self):  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self):  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        if name != self.known:
            raise self.NVMLError("Not Found")
        return name

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=2**30)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        self.joules += 70
        return 1000 * self.joules

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetClockInfo(self, handle, which):  # noqa: N802
        return 1980


def test_a_watcher_reads_what_can_be_read(monkeypatch):
    nvml = MadeUpNvml("GPU-1234")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_lab, "READ_EVERY_S", 0.01)
    start_ns = time.time_ns()
    with gpu_lab.Watcher("1234") as watcher:
        assert wait_for(lambda: len(watcher.readings) >= 3)
    inside = watcher.within(start_ns, time.time_ns())
    assert inside == watcher.readings
    assert watcher.within(0, start_ns) == []
    assert {reading.busy_pct for reading in inside} == {97}
    assert {reading.power_w for reading in inside} == {None}
    assert [reading.energy_j for reading in inside[:2]] == [140, 210]
    assert gpu_checking.power_from_energy(inside) > 0
    with pytest.raises(SkipError, match="Not Found"), gpu_lab.Watcher("99"):
        pass
    assert nvml.opened == 0


def test_a_command_that_takes_too_long_is_ended_with_what_it_started():
    with pytest.raises(OutOfTimeError):
        gpu_lab.command(["http.server", "0", "--bind", "127.0.0.1"], Clock(1.0))


def test_gpu_check_on_the_cpu(tmp_path):
    done, found = run_script("gpu_check", tmp_path, "--only", "doctor,launching,gpu_tests,nvml")
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert list(statuses.values()) == ["passed", "passed", "skipped", "skipped"]
    assert [check["reason"] for check in found["checks"][2:]] == ["no GPU"] * 2
    assert "2 passed, 0 failed, 2 skipped" in done.stdout
    assert found["machine"]["torch"]["device"]["type"] == "cpu"
    launching = found["checks"][1]["figures"]
    assert [probe["status"] for probe in launching["probes"]] == ["ok"] * 3
    assert launching["fallback"] == ""


def test_gpu_check_knows_its_checks():
    with pytest.raises(SystemExit, match="no check fly; known: doctor"):
        gpu_checking.chosen("doctor,fly")
    assert gpu_checking.chosen("nvml,doctor")[0].name == "doctor"


# --- gpu_record -----------------------------------------------------------------------------------

SMALL = {"workers": "0", "batches": "16,32", "precisions": "default", "pins": None}


def values(**given):
    return gpu_recording.values_of({**SMALL, **given}, gpu_recording.CPU_GRID)


def test_the_default_grid_fits():
    none = dict.fromkeys(gpu_recording.KNOBS)
    known = gpu_recording.values_of(none, gpu_recording.GRID)
    assert 24 <= math.prod(map(len, known.values())) <= gpu_recording.MOST_CONFIGS
    assert {type(value) for one in known.values() for value in one} == {int, str, bool}
    with pytest.raises(SystemExit, match="at most 96"):
        values(workers=",".join(map(str, range(60))))


def test_gpu_record_on_the_cpu(tmp_path):
    words = ("--model", "mlp", "--workers", "0", "--batches", "16,32", "--passes", "1")
    done, _ = run_script("gpu_record", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.parquet")
    record = recording.Record.read(file)
    assert {probe["kind"] for probe in record.probes} == {"both", "device", "loader"}
    assert {probe["status"] for probe in record.probes} == {"ok"}
    assert len({probe["start_ns"] for probe in record.probes}) == len(record.probes)
    assert set(record.rates()) == {config.key for config in record.space.grid()}
    assert all(rate > 0 for rate in record.rates().values())
