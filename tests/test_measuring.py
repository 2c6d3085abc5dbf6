"""What a probe is told of memory, and whether it is started at all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_up import CPU, FACTS, GIB, HOPPER, measurement, space, trial

from autotune import measuring
from autotune.launcher import Outcome
from autotune.measuring import Prober
from autotune.metrics import read_limit
from autotune.scene import Ask
from autotune.space import BATCH, PREFETCH, WORKERS
from autotune.types import Failure, ModelRef, Sink, Source, Stage, Status

GPU = replace(HOPPER, device_memory_bytes=80 * GIB)
OWN = {WORKERS: 0, BATCH: 32}


class Launcher:
    """Keeps what it was told to launch."""

    def __init__(self, failures=()):
        self.specs = []
        self.failures = list(failures)

    def run(self, spec, environment, should_stop):
        self.specs.append(spec)
        if self.failures:
            failure = Failure(status=Status.ERROR, message=self.failures.pop(0))
            return Outcome(failure=failure, probe_s=2.0)
        return Outcome(measurement=measurement(), probe_s=1.0)


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Probe a config of a made-up job: the row, and what was launched."""
    monkeypatch.setattr(measuring, "memory_free", lambda: 16 * GIB)
    monkeypatch.setattr(measuring, "shm_free", lambda: 4 * GIB)

    def probed(changes, *, machine=CPU, facts=FACTS, limits=(), trials=(), failures=(), **asked):
        known = space(machine=machine, facts=facts, current=OWN)
        state = SimpleNamespace(
            space=known,
            machine=machine,
            trials=list(trials),
            folder=tmp_path,
            checked=SimpleNamespace(
                limits=tuple(map(read_limit, limits)),
                model=ModelRef(path="job.py"),
                options=SimpleNamespace(seed=0),
            ),
        )
        launcher = Launcher(failures)
        budget = SimpleNamespace(unit_s=1.0, timeout_s=lambda stage: 9.0)
        prober = Prober(state, launcher, budget, SimpleNamespace(check=lambda: None))
        asked = {"stage": Stage.SEARCH, "why": "a test", **asked}
        row = prober.probe(Ask(config=known.config(changes), **asked), 7)
        return row, launcher.specs

    return probed


LARGE = replace(FACTS, sample_bytes=32.0 * 1024**2)
"""A gibibyte for each batch of 32."""


def test_a_probe_whose_batches_ahead_find_no_room_is_not_started(probe):
    row, launched = probe({WORKERS: 4, PREFETCH: 2}, facts=LARGE)
    assert row.status is Status.SKIPPED
    assert "4 workers x 2 batches of 1 GiB need 8 of 4 GiB" in row.reason
    assert launched == []
    assert probe({WORKERS: 1, PREFETCH: 2}, facts=LARGE)[0].ok


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"


@pytest.mark.parametrize(
    ("failures", "launches", "status", "spent_s"),
    [
        ([BUSY], 2, Status.OK, 3.0),
        ([BUSY, BUSY], 2, Status.ERROR, 4.0),
        (["another error"], 1, Status.ERROR, 2.0),
    ],
)
def test_a_device_that_is_still_busy_gets_one_more_try(probe, failures, launches, status, spent_s):
    row, launched = probe({BATCH: 64}, failures=failures)
    assert len(launched) == launches
    assert (row.status, row.probe_s) == (status, spent_s)


def test_batches_on_the_device_need_no_workers(probe):
    asked = {"source": Source.CACHED, "stage": Stage.DEVICE}
    assert probe({WORKERS: 4, PREFETCH: 2}, facts=LARGE, **asked)[0].ok


def test_parameters_that_find_no_room_are_told(probe):
    heavy = replace(FACTS, parameter_bytes=20 * GIB)
    row, launched = probe({BATCH: 64}, facts=heavy)
    assert row.status is Status.SKIPPED
    assert "host memory" in row.reason
    assert launched == []
    assert probe({BATCH: 64}, facts=heavy, machine=GPU)[0].ok
    assert probe({BATCH: 64}, facts=heavy, sink=Sink.DISCARD)[0].ok


def test_limits_bind_the_search_and_not_the_users_own_config(probe):
    limits = ("memory_gb<=2", "host_memory_gb<=3")
    _, (spec,) = probe({BATCH: 64}, limits=limits)
    assert (spec.memory_limit_bytes, spec.host_limit_bytes) == (2 * GIB, 3 * GIB)
    assert spec.memory_fraction is None
    _, (own,) = probe({}, limits=limits)
    assert (own.memory_limit_bytes, own.host_limit_bytes) == (None, None)


def test_an_accelerators_allocator_gets_what_others_and_the_context_leave(probe):
    _, (spec,) = probe({BATCH: 64}, machine=GPU)
    assert spec.memory_fraction == pytest.approx(0.92)
    earlier = trial(OWN, other_bytes=2 * GIB, foreign_bytes=8 * GIB)
    _, (spec,) = probe({BATCH: 64}, machine=GPU, trials=[earlier])
    assert spec.memory_fraction == pytest.approx(0.92 - 10 / 80)
    _, (spec,) = probe({BATCH: 64}, machine=GPU, trials=[earlier], limits=("memory_gb<=40",))
    assert spec.memory_fraction == pytest.approx(38 / 80)
    assert spec.memory_limit_bytes is None  # no wall where an accelerator maps what it likes
    _, (own,) = probe({}, machine=GPU, trials=[earlier])
    assert own.memory_fraction is None
    _, (unread,) = probe({BATCH: 64}, machine=HOPPER)
    assert unread.memory_fraction is None


def test_the_longest_samples_are_tried_where_samples_vary(probe):
    assert not probe({BATCH: 64})[1][0].longest
    assert probe({BATCH: 64}, facts=replace(FACTS, varies=True))[1][0].longest
