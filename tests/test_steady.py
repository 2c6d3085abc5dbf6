"""The statistics of short windows, against theory, SciPy and a simulated loader."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from autotune.metrics import rate
from autotune.steady import (
    LEAST_COUNTED,
    TOLERANCE,
    flow_ratio,
    rate_of,
    spread,
    surely_below,
    t_quantile,
)
from autotune.types import Block, Label, Measurement

PER_BLOCK = 5


def block(seconds, consumed=100, produced=None, wait_s=0.0, steps=1):
    return Block(
        seconds=seconds,
        consumed=consumed,
        produced=consumed if produced is None else produced,
        wait_s=wait_s,
        steps=steps,
    )


blocks_of_any_kind = st.lists(
    st.builds(
        block,
        seconds=st.floats(1e-3, 1e3),
        consumed=st.integers(1, 10_000),
        produced=st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=40,
)


# --- the t quantile -----------------------------------------------------------------------------


@given(st.floats(0.5001, 0.99999), st.integers(1, 500))
def test_the_quantile_is_scipys(probability, freedom):
    expected = stats.t.ppf(probability, freedom)
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=2e-5, abs=1e-9)


@pytest.mark.parametrize(("probability", "freedom"), [(0.5, 3), (0.3, 3), (1.0, 3), (0.9, 0)])
def test_no_quantile_where_there_is_none(probability, freedom):
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, freedom)


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=50))
def test_the_spread_is_the_t_interval_of_the_mean(values):
    assume(len(set(values)) > 1)
    low, _ = stats.t.interval(0.95, len(values) - 1, stats.tmean(values), stats.sem(values))
    assert spread(values) == pytest.approx(stats.tmean(values) - low, rel=1e-4)


def test_one_value_tells_nothing_of_the_spread():
    assert spread([1.0]) == math.inf
    assert spread([]) == math.inf


# --- the rate -----------------------------------------------------------------------------------


@given(blocks_of_any_kind)
def test_the_interval_holds_the_value_and_nothing_is_negative(blocks):
    known = rate_of(blocks)
    assert known is not None
    assert 0 < known.estimate.low <= known.estimate.value <= known.estimate.high < math.inf
    assert known.half_width >= 0


@given(blocks_of_any_kind, st.floats(0, 5000))
def test_the_rate_exceeds_neither_what_was_consumed_nor_what_was_made(blocks, slack):
    known = rate_of(blocks, slack)
    counted = counted_of(blocks)
    seconds = sum(b.seconds for b in counted)
    produced = sum(b.produced for b in counted)
    assert known.estimate.value <= sum(b.consumed for b in counted) / seconds * (1 + 1e-9)
    if produced > 0:
        assert known.estimate.value <= (produced + slack) / seconds * (1 + 1e-9)


@given(blocks_of_any_kind, st.floats(1e-2, 1e2))
def test_a_clock_in_other_units_gives_the_same_rate_in_other_units(blocks, factor):
    slower = [block(b.seconds * factor, b.consumed, b.produced, b.wait_s, b.steps) for b in blocks]
    one, other = rate_of(blocks), rate_of(slower)
    assert other.estimate.value * factor == pytest.approx(one.estimate.value)
    assert other.estimate.low * factor == pytest.approx(one.estimate.low)
    assert set(one.labels) == set(other.labels)


def counted_of(blocks):
    return blocks[len(blocks) // 2 :] if len(blocks) >= 2 * LEAST_COUNTED else blocks


@pytest.mark.parametrize("blocks", [[], [block(1.0, consumed=0)], [block(1.0, 0, 50)] * 20])
def test_no_rate_where_nothing_was_consumed(blocks):
    assert rate_of(blocks) is None


def test_warm_up_does_not_count():
    steady = rate_of([block(1.0)] * 12)
    assert rate_of([*[block(9.0)] * 6, *[block(1.0)] * 6]).estimate.value == steady.estimate.value


def test_a_short_window_says_that_it_knows_little():
    known = rate_of([block(1.0)] * (LEAST_COUNTED - 1))
    assert known.half_width >= 0.2
    assert rate_of([block(1.0)] * LEAST_COUNTED).half_width < 0.2


def test_a_lucky_calm_end_does_not_make_the_interval_narrow():
    wild = [block(1.0 + 0.2 * (turn % 2)) for turn in range(6)]
    calm = [block(1.1)] * 6
    assert rate_of([*wild, *calm]).half_width > 0.03
    assert rate_of([block(2.0), *calm, *calm]).half_width < 0.01  # that was warm-up


# --- what qualifies it --------------------------------------------------------------------------


def test_halves_that_differ_are_not_steady_and_both_lie_in_the_interval():
    known = rate_of([*[block(1.0)] * 10, *[block(1.0)] * 5, *[block(1.0 + 3 * TOLERANCE)] * 5])
    assert Label.NOT_STEADY in known.labels
    assert not known.steady
    assert known.estimate.low <= 100 / (1.0 + 3 * TOLERANCE)
    assert known.estimate.high >= 100


def test_halves_that_differ_by_less_than_the_tolerance_are_steady():
    known = rate_of([*[block(1.0)] * 15, *[block(1.0 + TOLERANCE / 2)] * 5])
    assert known.steady


def test_noise_alone_is_no_drift():
    numbers = random.Random(1)
    seen = [rate_of([block(numbers.gauss(1.0, 0.05)) for _ in range(24)]) for _ in range(200)]
    assert sum(not known.steady for known in seen) < 20


def test_a_drift_beyond_the_noise_is_found():
    numbers = random.Random(2)
    drifting = [
        rate_of([block(numbers.gauss(1 + 0.01 * turn, 0.005)) for turn in range(24)])
        for _ in range(50)
    ]
    assert sum(not known.steady for known in drifting) > 45


def test_noise_and_rare_slow_blocks_are_named():
    noisy = [block(1.0 + 0.4 * (turn % 2)) for turn in range(12)]
    assert Label.NOISY in rate_of(noisy).labels
    rare = [block(3.0 if turn == 20 else 1.0) for turn in range(24)]
    assert Label.HEAVY_TAIL in rate_of(rare).labels
    assert rate_of([block(1.0)] * 24).labels == ()


# --- what was made against what was taken -------------------------------------------------------


def test_a_queue_that_empties_flatters_nobody():
    draining = [block(1.0, consumed=100, produced=60)] * 12
    known = rate_of(draining)
    assert known.estimate.value == pytest.approx(60)
    assert flow_ratio(draining) == pytest.approx(0.6)


def test_a_queue_that_fills_flatters_nobody():
    assert rate_of([block(1.0, consumed=60, produced=100)] * 12).estimate.value == pytest.approx(60)


def test_near_balance_is_named():
    known = rate_of([block(1.0, consumed=100, produced=95)] * 12)
    assert Label.BALANCED in known.labels
    assert Label.BALANCED not in rate_of([block(1.0, 100, 95)] * 12, slack=100).labels


def test_where_nothing_is_counted_consumption_is_all_there_is():
    assert flow_ratio([block(1.0, 100, 0)]) == 1.0


# --- coverage, by simulation --------------------------------------------------------------------


def series(numbers, count, spread, memory):
    """Blocks of steps that remember the one before: an AR(1) process, as step times are."""
    state = numbers.gauss(0, 1)
    blocks = []
    for _ in range(count):
        seconds = 0.0
        for _ in range(PER_BLOCK):
            state = memory * state + math.sqrt(1 - memory**2) * numbers.gauss(0, 1)
            seconds += 0.05 * (1 + spread * state)
        blocks.append(block(seconds, 32 * PER_BLOCK))
    return blocks


def stopped_early(blocks, least, want):
    """The rate at which a probe would have stopped, looking after every block."""
    for count in range(least, len(blocks) + 1):
        known = rate_of(blocks[:count])
        if known.steady and known.half_width <= want:
            return known
    return rate_of(blocks)


@pytest.mark.parametrize(
    ("spread", "memory", "least", "most", "want"),
    [
        (0.01, 0.3, 12, 40, 0.01),
        (0.03, 0.0, 12, 40, 0.01),
        (0.03, 0.5, 6, 20, 0.02),
        (0.03, 0.5, 12, 40, 0.01),
        (0.08, 0.5, 8, 30, 0.015),
    ],
)
def test_the_interval_covers_the_truth_although_the_probe_stops_when_it_is_narrow(
    spread, memory, least, most, want
):
    numbers = random.Random(3)
    known = [stopped_early(series(numbers, most, spread, memory), least, want) for _ in range(300)]
    truth = 32 / 0.05
    covered = sum(k.estimate.low <= truth <= k.estimate.high for k in known)
    assert covered / len(known) > 0.87
    assert sum(k.half_width for k in known) / len(known) < 0.06


class Pipeline:
    """A loader with workers and an in-order queue, and a device, in simulated time."""

    def __init__(self, workers, prefetch, batch_s, step_s, numbers):
        self.workers, self.batch_s, self.step_s, self.numbers = workers, batch_s, step_s, numbers
        self.now_s = self.waited_s = 0.0
        self.taken = 0
        self.made_at = []
        self.free_at = [0.0] * workers
        for _ in range(workers * prefetch):
            self.begin()

    def begin(self):
        worker = len(self.made_at) % self.workers
        started = max(self.now_s, self.free_at[worker])
        self.free_at[worker] = started + self.batch_s * self.numbers.gauss(1, 0.05)
        self.made_at.append(self.free_at[worker])

    def take(self):
        self.waited_s += max(0.0, self.made_at[self.taken] - self.now_s)
        self.now_s = max(self.now_s, self.made_at[self.taken])
        self.taken += 1
        self.begin()

    def step(self):
        self.take()
        self.now_s += self.step_s * self.numbers.gauss(1, 0.05)

    def made(self):
        return self.taken + sum(at <= self.now_s for at in self.made_at[self.taken :])

    def drain(self):
        """What the probe does before its window (LoaderSource.drain)."""
        for _ in range(len(self.made_at)):
            if self.made() <= self.taken:
                return
            self.take()

    def measured(self, window_s, steps):
        """What a probe's window of blocks with so many steps would tell."""
        blocks = []
        until = self.now_s + window_s
        while self.now_s < until:
            start, taken, made, waited = self.now_s, self.taken, self.made(), self.waited_s
            for _ in range(steps):
                self.step()
            blocks.append(
                block(
                    self.now_s - start,
                    32 * (self.taken - taken),
                    32 * (self.made() - made),
                    self.waited_s - waited,
                    steps,
                )
            )
        count = steps * len(blocks)
        return Measurement(
            blocks=tuple(blocks),
            stopped="limit",
            batches=count,
            steps=count,
            workers=self.workers,
        )


def shortly(workers, prefetch, balance, step_s, seed):
    """What a short probe says of a loader `balance` times as fast as the device."""
    batch_s = workers * step_s / balance
    pipeline = Pipeline(workers, prefetch, batch_s, step_s, random.Random(seed))
    pipeline.now_s = 1.0  # the first steps run while the queue fills
    for _ in range(max(2, workers)):
        pipeline.step()
    pipeline.drain()
    pipeline.step()
    return rate(pipeline.measured(window_s=50 * step_s, steps=workers))


def in_the_long_run(workers, prefetch, balance, step_s):
    batch_s = workers * step_s / balance
    pipeline = Pipeline(workers, prefetch, batch_s, step_s, random.Random(99))
    for _ in range(500):
        pipeline.step()
    start, taken = pipeline.now_s, pipeline.taken
    for _ in range(1500):
        pipeline.step()
    return 32 * (pipeline.taken - taken) / (pipeline.now_s - start)


@pytest.mark.parametrize("balance", [0.6, 0.8, 0.9, 0.95, 1.0, 1.1, 1.5])
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (2, 2), (4, 2), (8, 2), (8, 8)])
def test_a_full_queue_at_the_start_misleads_no_short_probe(workers, prefetch, balance):
    truth = in_the_long_run(workers, prefetch, balance, 0.08)
    known = [shortly(workers, prefetch, balance, 0.08, seed) for seed in range(8)]
    middle = sum(k.estimate.value for k in known) / len(known)
    assert middle < 1.02 * truth  # never flattered
    assert middle > 0.93 * truth
    assert sum(k.estimate.low <= truth <= k.estimate.high for k in known) >= 5


# --- stopping early: cannot win -----------------------------------------------------------------


def looks_until_dropped(rng, rate, noise, looks, beat=100.0):
    """After how many blocks a probe at this rate is dropped, looking after each; 0 for never."""
    blocks = []
    for number in range(1, looks + 1):
        speed = rate * math.exp(rng.gauss(0, noise))
        blocks.append(block(1.0, round(1000 * speed)))
        if surely_below(blocks, 1000 * beat, looks):
            return number
    return 0


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_an_equal_is_dropped_at_most_once_in_twenty(noise):
    rng = random.Random(7)
    dropped = sum(looks_until_dropped(rng, 100, noise, looks=30) > 0 for _ in range(400))
    assert dropped <= 0.05 * 400 * 1.5, "looked too often without a correction"


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_what_is_much_slower_is_dropped_soon(noise):
    rng = random.Random(7)
    looks = [looks_until_dropped(rng, 70, noise, looks=30) for _ in range(50)]
    assert all(looks)
    assert sum(looks) / len(looks) < 10


@given(st.floats(0.0, 1e6), st.integers(1, 1000), st.integers(1, 1000))
def test_more_looks_make_nobody_bolder(beat, few, more):
    rng = random.Random(3)
    blocks = [block(1.0, round(1000 * rng.uniform(80, 120))) for _ in range(8)]
    few, more = sorted((few, more))
    assert not (surely_below(blocks, beat, more) and not surely_below(blocks, beat, few))
