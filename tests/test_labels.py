"""What qualifies a row besides its own blocks, and what the operating system tells about it."""

import math
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up import finals, measurement, trial

from autotune import diagnosis
from autotune.halves import Halves
from autotune.labels import LABELS, UNSURE, outside_labels
from autotune.metrics import SPEED, rate, throughput
from autotune.pareto import pool, ratio
from autotune.probe import host
from autotune.probe.clocks import counters_for
from autotune.staged import again_if_cold
from autotune.types import Config, Label, Stage

MIB = 2**20
OWN = Config({"loader.num_workers": 0})
FED = Config({"loader.num_workers": 2})

EXAMPLES = {
    Label.BALANCED: ({"workers": 2, "starved": 0.3}, {"workers": 2, "starved": 0.97}),
    Label.NOT_STEADY: ({"unsettled": ("device memory",)}, {"unsettled": ()}),
    Label.CONTENDED: (
        {"cpu_s": 4.0, "others_cpu_s": 6.0, "idle_cpu_s": 0.1},
        {"cpu_s": 4.0, "others_cpu_s": 6.0, "idle_cpu_s": 90.0},
    ),
    Label.COLD: (
        {"storage_bytes": 100 * MIB, "asked_bytes": 100 * MIB},
        {"storage_bytes": 2 * MIB, "asked_bytes": 100 * MIB},
    ),
}
"""For each label: facts for which it holds, and facts for which it just does not."""


def made(rate=100.0, *, starved=0.0, **changes):
    """A measurement in which nothing lay ready for a share of the batches."""
    known = measurement(rate, **changes)
    each = round(starved * 1000)
    blocks = tuple(replace(block, starved=each) for block in known.blocks)
    return replace(known, blocks=blocks, batches=1000 * len(blocks))


@pytest.mark.parametrize("label", LABELS)
def test_every_label_holds_where_it_should_and_only_there(label):
    holds, not_quite = EXAMPLES[label]
    assert outside_labels(made(**holds)) == (label,)
    assert outside_labels(made(**not_quite)) == ()
    assert outside_labels(measurement()) == (), "what was not read says nothing"


@pytest.mark.parametrize("label", LABELS)
def test_a_labelled_row_keeps_its_number_and_covers_both_halves(label):
    holds, _ = EXAMPLES[label]
    drifting = [made(100 + 0.2 * n, starved=holds.get("starved", 0.0)).blocks[0] for n in range(12)]
    calm = rate(replace(made(), blocks=tuple(drifting)))
    marked = rate(replace(made(**holds), blocks=tuple(drifting)))
    assert marked.estimate.value == calm.estimate.value
    assert label in marked.labels
    speeds = [block.consumed / block.seconds for block in drifting[6:]]
    assert marked.estimate.low <= sum(speeds[:3]) / 3
    assert marked.estimate.high >= sum(speeds[3:]) / 3


# --- cold and warm --------------------------------------------------------------------------------


def cold(rows):
    return [replace(row, labels=(Label.COLD,)) for row in rows]


def test_a_cold_row_is_never_compared_with_a_warm_one():
    mixed = [*cold(finals(OWN, [50.0])), *finals(OWN, [50.0, 100.0, 101.0])[1:]]
    faster = finals(FED, [110.0, 110.0, 111.0])
    # Round 0 found the cache cold for one of them only: 110/50 must not count.
    both = ratio([*mixed, *faster], FED, OWN, SPEED)
    assert both.value == pytest.approx((110 * 111 / (100 * 101)) ** 0.5, rel=1e-6)
    assert ratio([*cold(finals(OWN, [50.0])), *faster], FED, OWN, SPEED) is None


def test_what_is_always_cold_is_compared():
    rows = [*cold(finals(OWN, [50, 51, 50])), *cold(finals(FED, [75, 76, 75]))]
    assert ratio(rows, FED, OWN, SPEED).value == pytest.approx(1.5, rel=0.02)


def test_the_pooled_speed_is_that_of_one_state():
    rows = [*cold(finals(OWN, [50.0])), *finals(OWN, [1.0, 100.0, 102.0])[1:]]
    assert pool(rows)[OWN].speed.value == pytest.approx(101.0)
    assert pool(cold(finals(OWN, [50.0, 52.0])))[OWN].speed.value == pytest.approx(51.0)


def test_a_ceiling_that_was_disturbed_bounds_nothing():
    halves = Halves(scene=None, start=OWN, base=OWN)
    calm = trial(OWN, 100.0, stage=Stage.LOADER)
    for label in UNSURE:
        halves.loader = {0: calm, 2: replace(calm, labels=(label,))}
        assert 100 <= halves.loader_bound(0) < 120
        assert halves.loader_bound(2) == math.inf
    halves.device = {OWN: throughput(calm.measurement), FED: throughput(calm.measurement)}
    halves.unsure = {FED}
    assert 100 <= halves.device_bound(OWN) < 120
    assert halves.device_bound(FED) == math.inf


@pytest.mark.parametrize(("labels", "asked"), [((Label.COLD,), 1), ((Label.NOISY,), 0), ((), 0)])
def test_a_cold_baseline_is_measured_again_and_no_other(labels, asked):
    row = replace(trial(OWN, stage=Stage.BASELINE), labels=labels)
    scene = SimpleNamespace(
        space=SimpleNamespace(baseline=OWN), row_of=lambda config: row, may_probe=lambda stage: True
    )
    asks = list(again_if_cold(scene))
    assert [(ask.config, ask.stage) for ask in asks] == [(OWN, Stage.BASELINE)] * asked


def test_an_allocator_that_tells_nothing_is_no_growth():
    read = counters_for(torch.device("meta"))  # a device that counts nothing
    assert list(read()) == ["compiled graphs"]


# --- the diagnosis prefers what was measured undisturbed ------------------------------------------


def test_a_disturbed_row_speaks_only_where_there_is_no_other():
    starved = trial(OWN, stage=Stage.BASELINE)
    block = replace(starved.measurement.blocks[0], wait_s=5.0)
    starved = replace(
        starved,
        measurement=replace(starved.measurement, blocks=(block,) * 12),
        labels=(Label.CONTENDED,),
    )
    (alone,) = diagnosis.diagnose([starved], OWN)
    assert alone.bottleneck == "data-starved"
    assert "other processes were using the machine" in alone.evidence
    (found,) = diagnosis.diagnose([trial(OWN, stage=Stage.BASELINE), starved], OWN)
    assert found.bottleneck == "device-bound", "the undisturbed row counts, although it is older"


# --- the operating system's figures ---------------------------------------------------------------


def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_own_work_is_told_from_that_of_others():
    before = host.usage()
    burn(0.3)
    spent = host.spent(before, host.usage())
    assert spent["cpu_s"] == pytest.approx(0.3, abs=0.1)
    assert spent["worker_cpu_s"] < 0.1
    assert spent["idle_cpu_s"] >= 0


def test_what_is_no_descendant_counts_as_another(monkeypatch):
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", code])
    monkeypatch.setattr(host, "_descendants", lambda: iter(()))  # as if somebody else's
    before = host.usage()
    while neighbour.poll() is None:
        time.sleep(0.05)
        now = host.usage()
        if host.spent(before, now)["others_cpu_s"] > 0.2:
            break
    neighbour.communicate()
    spent = host.spent(before, now)
    assert spent["others_cpu_s"] > 0.2
    assert spent["cpu_s"] < 0.2


def test_each_worker_is_told_apart():
    code = "import sys, time\nprint(flush=True)\nend = time.process_time() + {}\n"
    code += "while time.process_time() < end: pass\nprint(flush=True)\nsys.stdin.read()"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seconds in (0.4, 0.0)
    ]
    try:
        for worker in workers:
            worker.stdout.readline()
        before = host.usage()
        for worker in workers:
            worker.stdout.readline()
        spent = host.spent(before, host.usage())
    finally:
        for worker in workers:
            worker.communicate()
    busy, idle = spent["each_worker_cpu_s"]
    assert busy > 0.2 > idle
    assert spent["worker_cpu_s"] == pytest.approx(busy + idle, abs=0.02)


def test_bytes_asked_of_the_file_system_are_counted(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(3 * MIB))
    before = host.usage()
    path.read_bytes()
    spent = host.spent(before, host.usage())
    if spent["asked_bytes"] is None:
        pytest.skip("no /proc/self/io here")
    assert spent["asked_bytes"] >= 3 * MIB
    assert spent["storage_bytes"] < MIB, "it lies in the page cache"


def test_what_cannot_be_read_is_none_and_the_rest_is_there(monkeypatch):
    monkeypatch.setattr(host, "_io_bytes", lambda pid, field: None)
    monkeypatch.setattr(host, "_machine_s", lambda: (None, None))
    before = host.usage()
    burn(0.05)
    spent = host.spent(before, host.usage())
    unread = ("storage_bytes", "asked_bytes", "others_cpu_s", "idle_cpu_s")
    assert [spent[name] for name in unread] == [None] * 4
    assert spent["cpu_s"] > 0


@given(
    st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.integers(0, 2**40), st.integers(0)
)
def test_a_label_never_empties_a_result(cpu_s, others_s, idle_s, stored, asked):
    disturbed = measurement(
        cpu_s=cpu_s, others_cpu_s=others_s, idle_cpu_s=idle_s, storage_bytes=stored,
        asked_bytes=asked, unsettled=("device memory",),
    )  # fmt: skip
    speed = throughput(disturbed)
    assert speed is not None
    assert speed.value == pytest.approx(throughput(measurement()).value)
