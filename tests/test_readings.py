"""What is made of a GPU's samples: cut to the window, interpolated, judged."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import measurement

from autotune import readings
from autotune.metrics import METRICS, rate
from autotune.readings import (
    DEVICE_LABELS,
    LEAST_ENERGY_S,
    Sample,
    device_labels,
    increase,
    mean,
    mean_at_first,
    mean_later,
    mean_over_time,
    with_energy,
)
from autotune.types import SCHEMA, DeviceReading, Label, Measurement, decode, encode

S = 10**9
QUIET = DeviceReading(index=0, event_reasons=0x4, others=0, others_bytes=0, others_util_pct=0.0)


def points(values, every_s=0.2, start_s=0.0):
    """Samples of moments, evenly spaced."""
    return [
        Sample(at, at, value)
        for turn, value in enumerate(values)
        if (at := int((start_s + turn * every_s) * S)) is not None
    ]


# --- counters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start_s", [1.0, 1.037, 1.15, 1.199])
@pytest.mark.parametrize("every_s", [0.1, 0.2, 0.23])
def test_a_counter_that_ticks_every_100_ms_gives_the_energy_of_ten_seconds(start_s, every_s):
    watts = 350.0
    counter = [watts * 0.1 * math.floor(turn * every_s / 0.1 + 1e-9) for turn in range(100)]
    joules = increase(
        points(counter, every_s), int(start_s * S), int((start_s + LEAST_ENERGY_S) * S)
    )
    assert joules is None or joules == pytest.approx(watts * LEAST_ENERGY_S, rel=0.02)
    assert (joules is None) == (99 * every_s < start_s + LEAST_ENERGY_S)


@given(
    steps=st.lists(st.floats(0.1, 100.0), min_size=4, max_size=30),
    cuts=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3, unique=True),
)
def test_what_a_counter_grew_by_adds_up(steps, cuts):
    total = [sum(steps[:turn]) for turn in range(len(steps) + 1)]
    series = points(total, every_s=1.0)
    first, middle, last = (int(share * len(steps) * S) for share in sorted(cuts))
    whole = increase(series, first, last)
    parts = [increase(series, *edges) for edges in ((first, middle), (middle, last))]
    if None in (whole, *parts):
        return  # a part so short that nothing was counted
    assert sum(parts) == pytest.approx(whole, rel=1e-6, abs=1e-6)
    assert 0 < whole <= total[-1] + 1e-6


@pytest.mark.parametrize(
    ("counter", "window"),
    [
        ([0, 10, 20, 30], (-0.1, 0.5)),  # not read before it began
        ([0, 10, 20, 30], (0.1, 0.7)),  # nor after it ended
        ([5, 5, 5, 5], (0.1, 0.5)),  # stands still: it counts nothing
        ([30, 20, 10, 0], (0.1, 0.5)),  # runs backwards
        ([10, 20, 0, 10], (0.1, 0.5)),  # began anew
        ([], (0.1, 0.5)),
    ],
)
def test_a_counter_that_cannot_be_trusted_is_not_read(counter, window):
    assert increase(points(counter), *(int(edge * S) for edge in window)) is None


def test_energy_and_power_agree_in_long_windows_only():
    read = replace(QUIET, energy_j=3000.0, power_w=250.0)
    assert with_energy(read, 10.0).power_w == 300.0
    assert not with_energy(read, 10.0).estimated
    short = with_energy(read, 9.0)
    assert (short.energy_j, short.power_w) == (None, 250.0)


def test_without_a_counter_energy_is_estimated_from_power():
    estimated = with_energy(replace(QUIET, power_w=250.0), 12.0)
    assert (estimated.energy_j, estimated.estimated) == (3000.0, True)
    neither = with_energy(QUIET, 12.0)
    assert (neither.energy_j, neither.power_w, neither.estimated) == (None, None, False)


# --- means --------------------------------------------------------------------------------------


def test_samples_that_tell_of_another_time_are_left_out():
    series = [
        Sample(0, 1 * S, 0.0),  # before
        Sample(int(0.5 * S), int(1.5 * S), 0.0),  # half before
        *(Sample(int(at * S), int((at + 0.5) * S), 90.0) for at in (1.0, 1.5, 2.0, 2.5)),
        Sample(int(2.8 * S), int(3.2 * S), 0.0),  # half after
    ]
    assert mean(series, S, 3 * S) == 90.0


def test_a_window_with_few_samples_is_too_short_to_tell():
    series = points([50.0] * 10)
    assert mean(series, 0, 2 * S) == 50.0
    assert mean(series, 0, int(0.3 * S)) is None
    assert mean_over_time(series, 0, int(0.3 * S)) is None


def test_a_mean_weighs_intervals_and_moments_by_time():
    long_and_short = [
        Sample(0, 3 * S, 10.0),
        Sample(3 * S, 4 * S, 50.0),
        Sample(4 * S, 5 * S, 20.0),
    ]
    assert mean(long_and_short, 0, 5 * S) == pytest.approx(20.0)
    dense_then_sparse = [*points([100.0] * 6), Sample(5 * S, 5 * S, 0.0)]  # 1 s, then a gap of 4
    assert mean_over_time(dense_then_sparse, 0, 5 * S) == pytest.approx((100 + 4 * 50) / 5)


def test_clocks_are_told_by_thirds_of_the_window():
    series = points([1900.0] * 10 + [1500.0] * 10 + [1800.0] * 10, every_s=0.1)
    assert mean_at_first(series, 0, 3 * S - 1) == 1900.0
    assert mean_later(series, 0, 3 * S - 1) == pytest.approx(1500.0, rel=0.01)


# --- what it says about a row ---------------------------------------------------------------------

LABELLED = {
    Label.CONTENDED: [{"others": 1}, {"others_bytes": 2**30}, {"others_util_pct": 20.0}],
    Label.THROTTLED: [
        *({"event_reasons": reason | 0x4} for reason in (0x8, 0x20, 0x40, 0x80)),
        {"sm_clock_first_mhz": 1900.0, "sm_clock_later_mhz": 1600.0},
    ],
    Label.ESTIMATED: [{"estimated": True}],
}


@pytest.mark.parametrize("label", DEVICE_LABELS)
def test_each_label_has_its_reasons_and_no_other(label):
    for changes in LABELLED[label]:
        told = measurement(devices=(QUIET, replace(QUIET, index=1, **changes)))
        assert device_labels(told) == (label,), changes
        assert rate(told).labels == (label,)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"event_reasons": None},
        {"event_reasons": 0x4},  # the power cap: normal at full load
        {"event_reasons": 0x1 | 0x2},
        {"sm_clock_first_mhz": 1900.0, "sm_clock_later_mhz": 1750.0},
        {"sm_clock_first_mhz": 1900.0, "sm_clock_later_mhz": 900.0, "event_reasons": 0x1},
        {"others": None, "others_bytes": None, "others_util_pct": None},
        {"others_util_pct": 2.0},
    ],
)
def test_what_is_normal_is_no_label(changes):
    assert device_labels(measurement(devices=(replace(QUIET, **changes),))) == ()


def test_a_labelled_row_keeps_its_number_and_widens_its_interval():
    speeds = [100.0] * 12 + [99.6] * 6 + [100.4] * 6
    calm = measurement(1.0, blocks=len(speeds))
    blocks = tuple(
        replace(block, seconds=1000 / speed)
        for block, speed in zip(calm.blocks, speeds, strict=True)
    )
    calm = replace(calm, blocks=blocks, devices=(QUIET,))
    hot = replace(calm, devices=(replace(QUIET, event_reasons=0x40),))
    assert Label.THROTTLED in rate(hot).labels
    assert rate(hot).estimate.value == rate(calm).estimate.value
    assert rate(hot).estimate.low <= 99.6 < rate(calm).estimate.low


# --- metrics ------------------------------------------------------------------------------------


def value(name, *devices):
    return METRICS[name].compute(measurement(samples=1000, blocks=12, devices=devices))


@pytest.mark.parametrize("name", ["gpu_util_pct", "sm_active_pct"])
def test_utilisation_is_a_mean_over_ranks(name):
    one, two = (replace(QUIET, **{name: percent}) for percent in (40.0, 80.0))
    assert value(name, one, two) == 60.0
    assert value(name, one, QUIET) == 40.0
    assert value(name, QUIET) is None
    assert value(name) is None


def test_power_and_energy_are_sums_over_ranks():
    one, two = (replace(QUIET, power_w=w, energy_j=12 * w) for w in (300.0, 500.0))
    assert value("power_w", one, two) == 800.0
    assert value("joules_per_sample", one, two) == pytest.approx(12 * 800.0 / 12_000)
    for name in ("power_w", "joules_per_sample"):
        assert value(name, one, QUIET) is None  # a sum of which a part is missing is wrong
        assert value(name) is None


def test_a_reading_survives_being_stored():
    known = measurement(devices=(replace(QUIET, uuid="GPU-1", estimated=True, used_bytes=5),))
    assert decode(Measurement, encode(known)) == known
    as_a_child_writes_it = json.dumps({"schema": SCHEMA, **asdict(measurement())})
    assert decode(Measurement, as_a_child_writes_it).devices == ()


def test_every_fold_of_nothing_is_nothing():
    folds = [mean, mean_over_time, increase, mean_at_first, mean_later]
    folds += [readings.mean_of_any, readings.peak, readings.count, readings.size, readings.bits]
    assert [fold([], 0, S) for fold in folds] == [None] * len(folds)
