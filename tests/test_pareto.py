"""What nothing clearly beats, and the answer: which, how sure, and when to keep what there is."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import GIB, finals, trial

from autotune.metrics import METRICS, SPEED, read_limit, read_objectives
from autotune.pareto import CLEAR, TIED, Pooled, decide, front, pool, ratio
from autotune.types import Config, Estimate, Failure, Stage, Status

OBJECTIVES = read_objectives("samples_per_s,memory_gb")
THREE = read_objectives("samples_per_s,memory_gb,host_memory_gb")

OWN = Config({"loader.num_workers": 0, "train.batch_size": 32})
WIDER = OWN.but({"train.batch_size": 64})
FED = OWN.but({"loader.num_workers": 2})
BOTH = WIDER.but({"loader.num_workers": 4})

DIED = Failure(status=Status.CRASH, message="died by SIGKILL (9)")


def decided(trials, *, baseline=OWN, forbidden=(), limits=(), min_gain=0.02):
    allowed = {t.config: t.config not in forbidden for t in trials}
    return decide(
        trials,
        baseline,
        allowed,
        objective=SPEED,
        limits=[read_limit(limit) for limit in limits],
        min_gain=min_gain,
    )


# --- the front ----------------------------------------------------------------------------------


def point(number, speed, memory_gb, host_gb=1.0):
    def in_bytes(gigabytes):
        return None if gigabytes is None else int(gigabytes * GIB)

    row = trial(
        {"train.batch_size": number},
        speed,
        memory_bytes=in_bytes(memory_gb),
        host_memory_bytes=in_bytes(host_gb),
    )
    return pool([row])[row.config]


def clearly_better(a, b, metric):
    x, y = metric.cost(a.value(metric)), metric.cost(b.value(metric))
    return x < y - CLEAR * abs(y)


numbers = st.floats(1.0, 1.1) | st.floats(1.0, 100.0)
points = st.lists(st.tuples(numbers, numbers, numbers), max_size=12).map(
    lambda all_values: [point(n + 1, *values) for n, values in enumerate(all_values)]
)


def clearly_beats(a, b, objectives):
    better = any(clearly_better(a, b, metric) for metric in objectives)
    return better and not any(clearly_better(b, a, metric) for metric in objectives)


@given(points)
def test_nothing_on_the_front_is_clearly_beaten(known):
    kept = front(known, OBJECTIVES)
    assert not any(clearly_beats(b, a, OBJECTIVES) for a in kept for b in known)


@given(points)
def test_what_is_not_on_the_front_is_clearly_beaten(known):
    left_out = [one for one in known if one not in front(known, OBJECTIVES)]
    assert all(any(clearly_beats(b, a, OBJECTIVES) for b in known) for a in left_out)


@given(points)
def test_something_is_always_on_the_front_best_first(known):
    kept = front(known, OBJECTIVES)
    assert bool(kept) == bool(known)
    speeds = [one.speed.value for one in kept]
    assert speeds == sorted(speeds, reverse=True)


@given(points)
def test_the_front_of_the_front_is_the_front(known):
    kept = front(known, OBJECTIVES)
    assert front(kept, OBJECTIVES) == kept


@given(points)
def test_with_three_objectives_a_circle_of_small_differences_leaves_something(known):
    assert bool(front(known, THREE)) == bool(known)


def test_a_circle_of_small_differences():
    circle = [(100.0, 1.0, 1.0), (98.2, 0.991, 0.991), (99.08, 1.0088, 0.982)]
    known = [point(n + 1, *values) for n, values in enumerate(circle)]
    beaten = zip(known, [*known[1:], known[0]], THREE, strict=True)
    assert all(clearly_better(one, other, metric) for one, other, metric in beaten)
    assert len(front(known, THREE)) == 3


def test_points_closer_than_the_margin_do_not_beat_each_other():
    near = [point(1, 100.0, 1.0), point(2, 100.5, 1.005)]
    assert len(front(near, OBJECTIVES)) == 2
    assert [p.speed.value for p in front([point(1, 100, 1.0), point(2, 102, 1.0)], OBJECTIVES)] == [
        pytest.approx(102)
    ]


@given(points)
def test_a_point_that_was_not_read_is_left_out(known):
    unread = point(99, 1000.0, None)
    endless = Pooled(
        config=Config({"train.batch_size": 98}),
        trials=unread.trials,
        speed=Estimate(value=math.inf, low=1.0, high=math.inf),
    )
    assert front([*known, unread, endless], OBJECTIVES) == front(known, OBJECTIVES)


# --- pooling ------------------------------------------------------------------------------------


def test_finals_alone_count_where_there_are_any():
    rows = [trial(OWN, 500.0), *finals(OWN, [100.0, 101.0, 102.0]), trial(FED, 90.0)]
    pooled = pool(rows)
    assert pooled[OWN].speed.value == pytest.approx(101)
    assert pooled[OWN].final
    assert not pooled[FED].final
    assert list(pooled) == [OWN, FED]


def test_what_failed_or_measured_a_half_is_not_pooled():
    rows = [
        trial(OWN, failure=DIED),
        trial(OWN, stage=Stage.INSPECT),
        trial(FED, stopped="dominated"),
    ]
    assert pool(rows) == {}


@given(st.lists(st.floats(50.0, 150.0), min_size=1, max_size=6))
def test_the_pooled_interval_covers_what_lies_between_processes(rates):
    pooled = pool(finals(OWN, rates))[OWN].speed
    assert pooled.low <= pooled.value <= pooled.high
    assert pooled.value == pytest.approx(sum(rates) / len(rates))
    if len(rates) == 2:
        assert pooled.high - pooled.value >= abs(rates[0] - rates[1]) * (1 - 1e-9)


# --- ratios -------------------------------------------------------------------------------------


def test_a_round_that_was_slow_for_all_cancels():
    slow_round = [100.0, 50.0, 100.0]
    rows = finals(OWN, slow_round) + finals(FED, [1.5 * rate for rate in slow_round])
    gain = ratio(rows, FED, OWN, SPEED)
    assert gain.value == pytest.approx(1.5)
    assert gain.high - gain.low < 1e-6


def test_one_shared_round_says_little_and_none_says_nothing():
    rows = [*finals(OWN, [100.0]), *finals(FED, [150.0])]
    gain = ratio(rows, FED, OWN, SPEED)
    assert gain.low < 1.2 < 1.8 < gain.high
    assert ratio(rows[:1], FED, OWN, SPEED) is None
    failed = trial(FED, stage=Stage.FINAL, failure=DIED)
    assert ratio([*rows[:1], failed], FED, OWN, SPEED) is None


def test_a_metric_that_is_better_lower_is_turned():
    rows = finals(OWN, [100.0] * 3, memory_bytes=2 * GIB)
    rows += finals(FED, [100.0] * 3, memory_bytes=GIB)
    assert ratio(rows, FED, OWN, METRICS["memory_gb"]).value == pytest.approx(2)


@pytest.mark.parametrize("gains", [(1.1,), (1.1, 1.1), (1.1, 0.9)])
@pytest.mark.parametrize("rounds", [3, 6])
@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_the_interval_of_a_ratio_covers_the_truth(gains, rounds, drift):
    numbers = random.Random(4)
    configs = [OWN, FED, WIDER][: 1 + len(gains)]
    covered = 0
    for _ in range(300):
        slowness = [numbers.gauss(0, drift) for _ in range(rounds)]
        rows = []
        for config, gain in zip(configs, (1.0, *gains), strict=True):
            rates = [100 * gain * math.exp(s + numbers.gauss(0, 0.02)) for s in slowness]
            rows += finals(config, rates)
        known = ratio(rows, FED, OWN, SPEED)
        covered += known.low <= gains[0] <= known.high
    assert 0.91 < covered / 300 < 0.985


# --- the answer ---------------------------------------------------------------------------------


def test_a_clear_gain_is_recommended_with_its_interval():
    answer = decided(finals(OWN, [100, 101, 99]) + finals(FED, [150, 151, 149]))
    assert not answer.keep
    assert answer.config == FED
    assert answer.verified
    assert answer.speedup.low > 1.02
    assert answer.speedup.value == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("min_gain", [0.0, 0.02, 0.5])
def test_a_gain_below_the_least_one_worth_a_change_is_none(min_gain):
    steady = finals(OWN, [100] * 3)
    below = decided(steady + finals(FED, [100 * (1 + min_gain) * 1.001] * 3), min_gain=min_gain)
    assert below.keep == (min_gain == 0.0)  # its interval has no width: just above is above
    above = decided(steady + finals(FED, [100 * (1 + min_gain) * 1.05] * 3), min_gain=min_gain)
    assert not above.keep


def test_a_gain_that_is_not_sure_is_none():
    answer = decided(finals(OWN, [100, 130, 80]) + finals(FED, [150, 100, 140]))
    assert answer.keep
    assert answer.config == OWN
    assert answer.speedup == Estimate(value=1.0, low=1.0, high=1.0)


def test_nothing_is_recommended_that_is_slower():
    assert decided(finals(OWN, [100] * 3) + finals(FED, [60] * 3)).keep


def tied(*others):
    """A baseline half as fast as the others, which differ by less than a tie."""
    rows = finals(OWN, [50.0, 50.2, 49.8])
    for turn, (config, memory_gb) in enumerate(others):
        rate = 100 * (1 + 0.004 * turn)
        rows += finals(config, [rate, rate, rate], memory_bytes=int(memory_gb * GIB))
    return rows


def test_among_ties_the_users_own_wins():
    assert decided(finals(OWN, [99.5] * 3) + finals(BOTH, [100.5] * 3)).keep


@pytest.mark.parametrize("order", [1, -1])
def test_among_ties_the_fewest_changes_win_then_workers_then_memory(order):
    two_workers = OWN.but({"loader.num_workers": 2})
    four_workers = OWN.but({"loader.num_workers": 4})
    fp32 = OWN.but({"train.precision": "fp32"})
    bf16 = OWN.but({"train.precision": "bf16"})
    assert decided(tied(*[(BOTH, 1), (FED, 9)][::order])).config == FED
    assert decided(tied(*[(four_workers, 1), (two_workers, 9)][::order])).config == two_workers
    assert decided(tied(*[(fp32, 2), (bf16, 1)][::order])).config == bf16


def test_a_simple_tie_that_gains_too_little_does_not_cost_the_answer():
    # FED is tied with BOTH and simpler, but is not clearly faster than what there is.
    rows = finals(OWN, [100, 101, 99, 100])
    rows += finals(FED, [100, 109, 101, 108])
    rows += finals(BOTH, [110, 109, 111, 110])
    gains = {c: ratio(rows, c, OWN, SPEED) for c in (FED, BOTH)}
    assert ratio(rows, FED, BOTH, SPEED).high > TIED
    assert gains[FED].low <= 1.02 < gains[BOTH].low
    answer = decided(rows)
    assert answer.config == BOTH
    assert answer.speedup == gains[BOTH]


def test_a_baseline_that_breaks_a_pin_cannot_be_kept_but_is_compared_with():
    rows = finals(OWN, [100] * 3) + finals(FED, [60] * 3)
    answer = decided(rows, forbidden=(OWN,))
    assert not answer.keep
    assert answer.config == FED
    assert answer.speedup.value == pytest.approx(0.6)


def test_a_baseline_that_breaks_a_limit_cannot_be_kept():
    rows = finals(OWN, [100] * 3, memory_bytes=8 * GIB) + finals(FED, [60] * 3, memory_bytes=GIB)
    answer = decided(rows, limits=["memory_gb<=4"])
    assert (answer.keep, answer.config) == (False, FED)
    assert decided(rows, limits=["memory_gb<=0.5"]) is None


def test_an_answer_never_breaks_a_pin_or_a_limit():
    rows = finals(OWN, [100] * 3, memory_bytes=GIB)
    rows += finals(FED, [150] * 3, memory_bytes=2 * GIB)
    rows += finals(BOTH, [200] * 3, memory_bytes=8 * GIB)
    assert decided(rows).config == BOTH
    assert decided(rows, limits=["memory_gb=4"]).config == FED
    assert decided(rows, forbidden=(BOTH, FED)).keep
    assert decided(rows, limits=["samples_per_s>=180"]).config == BOTH
    assert decided(rows, limits=["memory_gb<=4"], forbidden=(FED,)).config == OWN


def test_a_baseline_that_failed_leaves_the_speedup_empty():
    rows = [trial(OWN, stage=Stage.BASELINE, failure=DIED), *finals(FED, [100] * 3)]
    answer = decided(rows)
    assert (answer.keep, answer.config, answer.speedup) == (False, FED, None)


def test_without_finals_nothing_is_claimed():
    measured = [trial(OWN, 100), trial(FED, 300)]
    answer = decided(measured)
    assert (answer.keep, answer.verified) == (True, False)
    broken = decided(measured, forbidden=(OWN,))
    assert (broken.config, broken.verified, broken.speedup) == (FED, False, None)
    assert decided(measured, forbidden=(OWN, FED)) is None
    assert decided([]) is None


def test_the_first_objective_decides():
    rows = finals(OWN, [100] * 3, memory_bytes=4 * GIB) + finals(FED, [50] * 3, memory_bytes=GIB)
    answer = decide(
        rows, OWN, {OWN: True, FED: True}, objective=METRICS["memory_gb"], limits=(), min_gain=0.02
    )
    assert answer.config == FED
    assert answer.speedup.value == pytest.approx(4)


@given(
    st.lists(
        st.tuples(st.sampled_from([OWN, FED, WIDER, BOTH]), st.floats(50, 150)),
        min_size=1,
        max_size=24,
    )
)
def test_whatever_was_measured_the_answer_was_measured_and_pays(rows):
    turns = dict.fromkeys([OWN, FED, WIDER, BOTH], 0)
    trials = []
    for config, rate in rows:
        trials.append(trial(config, rate, stage=Stage.FINAL, turn=turns[config]))
        turns[config] += 1
    answer = decided(trials)
    assert answer.config in {t.config for t in trials}
    if answer.keep:
        assert answer.config == OWN
    elif turns[OWN]:
        assert answer.speedup.low > 1.02
    else:
        assert answer.speedup is None


def test_a_window_without_a_rate_is_no_point():
    assert decided([trial(OWN, blocks=0)]) is None
