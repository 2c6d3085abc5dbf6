"""Every metric's unit, direction and formula."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import measurement

from autotune.errors import OptionError
from autotune.metrics import (
    BETWEEN_PROCESSES,
    METRICS,
    SPEED,
    Limit,
    mean_of,
    rate,
    read_limit,
    read_objectives,
    restart_s_per_sample,
    throughput,
)
from autotune.types import Block, Measurement

EMPTY = Measurement(blocks=(), stopped="limit")
FULL = measurement(
    200.0,
    memory_bytes=3 * 1024**3,
    host_memory_bytes=1024**3,
    cpu_s=6.0,
    cpus=4,
    start_ns=0,
    end_ns=2_000_000_000,
)

metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


@metric
def test_what_was_not_read_is_none_and_never_zero(metric):
    assert metric.compute(EMPTY) is None


@metric
def test_the_name_says_the_unit(metric):
    endings = {"samples/s": "_per_s", "s": "_s", "%": "_pct", "GiB": "_gb", "W": "_w"}
    others = {"joules_per_sample", "device_s_per_sample"}
    assert metric.name in others or metric.name.endswith(endings[metric.unit])


@metric
def test_values_are_finite_numbers(metric):
    value = metric.compute(FULL)
    assert value is None or math.isfinite(value)


@metric
@given(better=st.floats(1.0, 1e6), share=st.floats(0.01, 0.99))
def test_cost_gain_and_limit_agree_on_which_way_is_better(metric, better, share):
    good, bad = better, better * share
    if metric.better == "lower":
        good, bad = bad, good
    assert metric.cost(good) < metric.cost(bad)
    assert metric.gain(good, bad) > 1 > metric.gain(bad, good)
    assert metric.gain(good, bad) * metric.gain(bad, good) == pytest.approx(1)
    assert Limit(metric=metric, bound=bad).holds(good)
    assert Limit(metric=metric, bound=good).holds(good)
    assert not Limit(metric=metric, bound=good).holds(bad)
    assert Limit(metric=metric, bound=good).holds(None)


@metric
def test_a_limit_reads_what_it_shows(metric):
    limit = Limit(metric=metric, bound=40.0)
    assert read_limit(str(limit)) == limit
    assert read_limit(f" {metric.name} = 4e1 ") == limit


@metric
def test_a_limit_against_the_direction_is_refused(metric):
    wrong = {"higher": "<=", "lower": ">="}[metric.better]
    with pytest.raises(OptionError, match=f"better {metric.better}"):
        read_limit(f"{metric.name}{wrong}40")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("memory_gb", "write it like"),
        ("memory_gb<40", "write it like"),
        ("memry_gb<=40", "Did you mean memory_gb"),
        ("memory_gb<=4e", "is not a number"),
        ("memory_gb<=", "write it like"),
    ],
)
def test_a_limit_that_cannot_be_read_says_what_is_allowed(text, told):
    with pytest.raises(OptionError, match=told):
        read_limit(text)


@metric
def test_objectives_are_what_makes_a_config_good(metric):
    if metric.objective:
        assert read_objectives(metric.name) == (metric,)
    else:
        with pytest.raises(OptionError, match="how busy the machine is"):
            read_objectives(metric.name)


def test_objectives_come_in_the_order_given_and_once():
    assert [m.name for m in read_objectives("memory_gb, samples_per_s")] == [
        "memory_gb",
        "samples_per_s",
    ]
    with pytest.raises(OptionError, match="twice"):
        read_objectives("memory_gb,memory_gb")
    with pytest.raises(OptionError, match="unknown metric"):
        read_objectives("")


def test_the_formulas():
    assert SPEED.compute(FULL) == pytest.approx(200)
    assert METRICS["step_s"].compute(FULL) == pytest.approx(100 / 200)  # 100 samples a step
    assert METRICS["memory_gb"].compute(FULL) == 3
    assert METRICS["host_memory_gb"].compute(FULL) == 1
    assert METRICS["cpu_util_pct"].compute(FULL) == pytest.approx(75)
    assert METRICS["data_wait_pct"].compute(FULL) == 0
    assert METRICS["device_s_per_sample"].compute(FULL) == pytest.approx(1 / 200)


def test_waiting_counts_the_restarts_too():
    waiting = tuple(replace(block, wait_s=block.seconds / 4) for block in FULL.blocks)
    assert METRICS["data_wait_pct"].compute(replace(FULL, blocks=waiting)) == pytest.approx(25)
    # 12 000 samples in 60 s: two epochs, each with a border of 10 s
    restarting = replace(FULL, restarts_s=(8.0, 12.0), epoch_samples=6000.0)
    assert METRICS["data_wait_pct"].compute(restarting) == pytest.approx(25)


def test_waiting_never_exceeds_all_of_the_time():
    waiting = tuple(replace(block, wait_s=2 * block.seconds) for block in FULL.blocks)
    assert METRICS["data_wait_pct"].compute(replace(FULL, blocks=waiting)) == 100


# --- samples/s over whole epochs ----------------------------------------------------------------


@given(
    speed=st.floats(1.0, 1e6),
    restart_s=st.floats(0.0, 100.0),
    epoch=st.floats(1.0, 1e9),
    noise=st.floats(0.0, 0.2),
)
def test_an_epoch_takes_its_samples_and_its_border(speed, restart_s, epoch, noise):
    measured = measurement(speed, noise=noise, restarts_s=(restart_s,), epoch_samples=epoch)
    between = rate(measured).estimate
    over_all = throughput(measured)
    assert over_all.low <= over_all.value <= over_all.high
    assert epoch / over_all.value == pytest.approx(epoch / between.value + restart_s)
    assert over_all.value <= between.value * (1 + 1e-9)
    # What fresh processes differ by is in no window: it comes on top.
    scatter = BETWEEN_PROCESSES * over_all.value
    assert over_all.high <= (between.high + scatter) * (1 + 1e-9)
    assert over_all.high >= (over_all.value + scatter) * (1 - 1e-9)
    assert over_all.low <= (over_all.value - scatter) * (1 + 1e-9)


@pytest.mark.parametrize("changes", [{}, {"restarts_s": (1.0,)}, {"epoch_samples": 10.0}])
def test_without_a_known_epoch_no_border_is_charged(changes):
    assert restart_s_per_sample(replace(EMPTY, **changes)) == 0
    assert throughput(replace(FULL, **changes)).value == pytest.approx(200)


def test_workers_in_step_blur_the_count_of_what_was_made():
    def made(workers, produced):
        blocks = tuple(
            Block(seconds=1.0, consumed=100, produced=produced, wait_s=0.0, steps=10)
            for _ in range(12)
        )
        return replace(FULL, blocks=blocks, workers=workers)

    # 60 batches of 10 samples count; 24 are missing: more than a round of 8 workers
    assert rate(made(8, 60)).estimate.value == pytest.approx(60)
    assert rate(made(8, 90)).estimate.value == pytest.approx(100)  # 6 batches: less than a round
    assert rate(made(2, 90)).estimate.value == pytest.approx(90)
    assert rate(made(0, 100)).estimate.value == pytest.approx(100)


def test_the_mean_leaves_out_what_was_not_read():
    assert mean_of([None, 1.0, 3.0]) == 2.0
    assert mean_of([None]) is None
    assert mean_of([]) is None
