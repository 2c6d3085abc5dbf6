"""Which configs may be tried: pins, lists, limits of the machine, and a held global batch."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import CPU, EVERYTHING, FACTS, HOPPER, VOLTA, asking, space

from autotune.errors import OptionError
from autotune.knobs import KNOBS
from autotune.request import Choice, Request
from autotune.space import (
    ACCUMULATION,
    BATCH,
    PERSISTENT,
    PREFETCH,
    THREADS,
    WORKERS,
    Goal,
    check_goal,
    first_baseline,
    goal_of,
    resolve,
)
from autotune.types import Config

SMALL = asking(
    loader__num_workers=(0, 1, 2),
    loader__prefetch_factor=(2, 4),
    train__batch_size=(16, 32, 64),
    host__threads=(1, 8),
)
DUPLICATES = replace(FACTS, not_applicable={"loader.num_workers>1": "every worker repeats it"})


# --- the baseline and what is pinned ------------------------------------------------------------


def test_without_current_the_baseline_is_pytorchs_defaults():
    baseline = space().baseline
    assert baseline[WORKERS] == 0
    assert baseline[BATCH] == 32
    assert baseline["train.precision"] == "default"
    assert baseline[THREADS] == FACTS.default_threads
    assert list(baseline) == [name for name in KNOBS if name in baseline]


def test_the_users_values_are_the_baseline_and_pins_fill_the_rest():
    known = space(
        asking(loader__num_workers=(4,), train__batch_size=(128,)), {BATCH: 64, ACCUMULATION: 2}
    )
    assert (known.baseline[BATCH], known.baseline[WORKERS]) == (64, 4)
    assert not known.admits(known.baseline)  # the user's batch breaks the pin
    assert known.start[BATCH] == 128
    assert known.admits(known.start)


def test_what_is_not_asked_stays_at_the_baseline():
    known = space(asking(loader__num_workers=None), {BATCH: 48})
    assert known.searched() == (WORKERS,)
    assert {config[BATCH] for config in known.grid()} == {48}
    assert known.start == known.baseline


def test_a_list_need_not_hold_the_users_own_value():
    known = space(asking(train__batch_size=(16, 64)), {BATCH: 32}, Goal(size=None))
    assert known.values[BATCH] == (16, 64)
    assert known.admits(known.start)


def test_auto_holds_the_users_own_value_in_its_place():
    known = space(EVERYTHING, {WORKERS: 6, BATCH: 48, PREFETCH: 3, "train.precision": "fp32"})
    assert known.values[WORKERS] == (0, 1, 2, 4, 6, 8, 16, 32, 64)
    assert known.values[PREFETCH] == (2, 3, 4, 8)
    assert "fp32" in known.values["train.precision"]
    assert {12, 24, 48, 96, 64} <= set(known.values[BATCH])
    assert known.admits(known.baseline)


def test_a_pin_of_a_knob_that_the_baseline_has_no_use_for_holds_as_soon_as_it_has():
    known = space(asking(loader__num_workers=(0, 2), loader__prefetch_factor=(4,)), {WORKERS: 0})
    assert PREFETCH not in known.baseline
    with_workers = known.config({WORKERS: 2})
    assert with_workers[PREFETCH] == 4
    assert known.admits(with_workers)


def test_a_change_goes_back_to_what_the_user_had():
    known = space(EVERYTHING, {WORKERS: 2, PREFETCH: 4})
    alone = known.config({WORKERS: 0})
    assert PREFETCH not in alone
    assert known.config({WORKERS: 2}, alone) == known.baseline


# --- knobs that mean nothing --------------------------------------------------------------------


def test_without_workers_their_knobs_are_gone():
    known = space()
    config = known.config({WORKERS: 0, PREFETCH: 8, PERSISTENT: True})
    assert PREFETCH not in config
    assert PERSISTENT not in config
    assert known.config({WORKERS: 2, PREFETCH: 8}).get(PREFETCH) == 8


@pytest.mark.parametrize(("machine", "absent"), [(CPU, "loader.pin_memory"), (HOPPER, THREADS)])
def test_knobs_of_another_kind_of_machine_are_gone(machine, absent):
    known = space(machine=machine)
    assert absent not in known.values
    assert absent not in known.baseline
    assert not any(absent in config for config in itertools.islice(known.grid(), 500))


def test_precisions_follow_the_machine():
    assert space(machine=CPU).values["train.precision"] == ("default", "bf16")
    assert space(machine=HOPPER).values["train.precision"] == ("default", "tf32", "bf16", "fp16")
    assert space(machine=VOLTA).values["train.precision"] == ("default", "fp16")


def test_what_is_asked_and_impossible_is_refused_with_its_reason():
    asked = asking(
        train__precision=("default", "tf32"), loader__pin_memory=(True,), loader__num_workers=None
    )
    known = space(asked)
    told = {refusal.knob: refusal.reason for refusal in known.refusals}
    assert told["train.precision"] == "needs a CUDA device of capability 8.0 or newer"
    assert "pinned memory" in told["loader.pin_memory"]
    assert known.values["train.precision"] == ("default",)
    assert next(r for r in known.refusals if r.knob == "loader.pin_memory").whole


def test_what_the_model_cannot_have_is_refused_as_a_whole():
    facts = replace(FACTS, not_applicable={"train.precision": "built in bf16"})
    known = space(facts=facts)
    assert "train.precision" not in known.values
    assert "train.precision" not in known.baseline
    assert [(r.knob, r.reason, r.whole) for r in known.refusals] == [
        ("train.precision", "built in bf16", True)
    ]


def test_a_dataset_that_every_worker_repeats_gets_one_worker():
    known = space(facts=DUPLICATES)
    assert known.values[WORKERS] == (0, 1)
    assert {r.value for r in known.refusals} == {2, 4, 8, 16, 32, 64}
    assert all("repeats" in r.reason for r in known.refusals)
    broken = space(current={WORKERS: 4}, facts=DUPLICATES)
    assert not broken.admits(broken.baseline)
    assert broken.start[WORKERS] in (0, 1)


def test_no_batch_is_larger_than_the_dataset():
    facts = replace(FACTS, dataset_len=100)
    known = space(facts=facts)
    assert max(known.values[BATCH]) <= 100
    listed = space(asking(train__batch_size=(64, 128)), facts=facts)
    assert listed.values[BATCH] == (64,)
    assert [(r.value, r.reason) for r in listed.refusals] == [
        (128, "more than the dataset's 100 samples")
    ]


def test_a_loader_that_ignores_the_batch_size_has_what_it_delivers():
    facts = replace(FACTS, not_applicable={BATCH: "delivers 20"}, delivered_batch=20.0)
    known = space(current={BATCH: 32}, facts=facts)
    assert BATCH not in known.baseline
    assert known.micro_batch(known.baseline) == 20
    assert known.global_batch(known.baseline) == 20
    assert known.admits(known.baseline)


# --- the global batch ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "current", "size"),
    [
        ("", None, None),
        ("", {WORKERS: 2}, None),
        ("", {BATCH: 64}, 64),
        ("", {BATCH: 64, ACCUMULATION: 4}, 256),
        ("free", {BATCH: 64}, None),
        ("keep", {WORKERS: 2}, 32),
        ("keep", None, 32),
        ("96", {BATCH: 64}, 96),
    ],
)
def test_what_the_global_batch_is_to_be(option, current, size):
    assert goal_of(option, current).size == size


@pytest.mark.parametrize("option", ["0", "-1", "1.5", "kep", "1e3"])
def test_a_global_batch_that_cannot_be_read_is_refused(option):
    with pytest.raises(OptionError, match="keep, free or a positive number"):
        goal_of(option, None)


@given(
    st.integers(1, 512),
    st.integers(1, 16),
    st.sampled_from(["", "keep", "free", "96", "97", "256"]),
    st.booleans(),
)
def test_a_held_global_batch_is_held_by_every_pair(batch, steps, option, with_current):
    current = {BATCH: batch, ACCUMULATION: steps} if with_current else None
    goal = goal_of(option, current)
    known = space(EVERYTHING, current, goal)
    pairs = known.pairs()
    assert pairs
    assert len(set(pairs)) == len(pairs)
    assert pairs == sorted(pairs)
    if goal.size is not None:
        assert {size * count for size, count in pairs} == {goal.size}
        assert known.global_batch(known.baseline) == goal.size
    assert known.admits(known.start)


def test_keep_changes_the_accumulation_with_the_micro_batch():
    known = space(
        EVERYTHING, {BATCH: 64, ACCUMULATION: 2}, goal_of("", {BATCH: 64, ACCUMULATION: 2})
    )
    assert known.pairs() == [
        (1, 128),
        (2, 64),
        (4, 32),
        (8, 16),
        (16, 8),
        (32, 4),
        (64, 2),
        (128, 1),
    ]
    assert known.admits(known.config({BATCH: 32, ACCUMULATION: 4}))
    assert not known.admits(known.config({BATCH: 32}))
    assert not known.admits(known.config({BATCH: 48, ACCUMULATION: 2}))


def test_a_named_global_batch_changes_the_baseline():
    goal = goal_of("256", {BATCH: 48})
    assert space(EVERYTHING, {BATCH: 48}, goal).baseline[BATCH] == 32  # divides, below the user's
    assert space(EVERYTHING, {BATCH: 48}, goal).baseline[ACCUMULATION] == 8
    small = goal_of("8", {BATCH: 48})
    assert space(EVERYTHING, {BATCH: 48}, small).baseline[BATCH] == 8


def test_listed_accumulation_steps_are_kept_to():
    asked = asking(train__batch_size=None, train__accumulation_steps=(1, 2))
    assert space(asked, {BATCH: 64}, Goal(size=64)).pairs() == [(32, 2), (64, 1)]
    free = space(asking(train__batch_size=(8, 16), train__accumulation_steps=(1, 2)))
    assert free.pairs() == [(8, 1), (8, 2), (16, 1), (16, 2)]


def test_a_global_batch_that_nothing_divides_is_refused():
    check_goal(Goal(size=96), asking(train__batch_size=(64, 32)))
    check_goal(Goal(size=None), asking(train__batch_size=(64,)))
    check_goal(Goal(size=96), EVERYTHING)
    with pytest.raises(OptionError, match="none of the micro-batches 64, 128 divides it"):
        check_goal(Goal(size=96), asking(train__batch_size=(64, 128)))
    with pytest.raises(OptionError, match="32 with accumulation steps 1, 2 divides it"):
        check_goal(Goal(size=96), asking(train__batch_size=(32,), train__accumulation_steps=(1, 2)))


def test_sizes_between_the_listed_ones_may_be_tried_where_nothing_is_held():
    free = space()
    assert free.admits(free.config({BATCH: 40}))
    assert not free.admits(free.config({BATCH: 36}))
    assert not free.admits(free.config({BATCH: 1 << 20}))
    held = space(EVERYTHING, {BATCH: 64}, Goal(size=64))
    assert not held.admits(held.config({BATCH: 40}))
    listed = space(asking(train__batch_size=(32, 64)))
    assert not listed.admits(listed.config({BATCH: 40}))
    untouched = space(asking(loader__num_workers=None))
    assert not untouched.admits(untouched.config({BATCH: 40}))


# --- the grid -----------------------------------------------------------------------------------

currents = st.fixed_dictionaries(
    {},
    optional={
        WORKERS: st.integers(0, 3),
        BATCH: st.sampled_from([8, 32, 48, 64]),
        ACCUMULATION: st.sampled_from([1, 2]),
        PREFETCH: st.sampled_from([2, 3]),
        THREADS: st.sampled_from([1, 4]),
        "train.precision": st.sampled_from(["default", "bf16"]),
    },
)
lists = st.fixed_dictionaries(
    {},
    optional={
        WORKERS: st.sampled_from([(0,), (2,), (0, 1, 2)]),
        BATCH: st.sampled_from([(16,), (16, 32), (32, 64)]),
        PREFETCH: st.sampled_from([(4,), (2, 8)]),
        PERSISTENT: st.sampled_from([(True,), (False, True)]),
        "train.precision": st.sampled_from([("bf16",), ("default", "bf16")]),
        "loader.pin_memory": st.sampled_from([(True,), (True, False)]),
    },
)


@given(currents, lists, st.sampled_from(["", "free", "64"]), st.sampled_from([CPU, HOPPER]))
def test_the_grid_holds_every_config_once_and_only_what_may_be_tried(
    current, listed, option, machine
):
    request = Request({name: Choice(listed[name]) for name in KNOBS if name in listed})
    goal = goal_of(option, current)
    known = space(request, current, goal, machine)
    configs = list(known.grid())
    assert len(set(configs)) == len(configs)
    assert len({config.key for config in configs}) == len(configs)
    assert all(known.admits(config) for config in configs)
    assert all(known.normal(config) == config for config in configs)
    assert all(tuple(config) == tuple(n for n in KNOBS if n in config) for config in configs)
    if known.pairs():
        assert known.start in configs
        assert known.admits(known.baseline) == (known.baseline in configs)


def test_the_grid_is_as_large_as_its_lists():
    known = space(SMALL)
    # without workers there is one prefetch factor (none), with 1 or 2 there are two
    assert len(list(known.grid())) == (1 + 2 * 2) * 3 * 2


def test_the_first_baseline_is_the_later_one_where_nothing_is_found_out():
    for machine in (CPU, HOPPER):
        request = asking(train__precision=("bf16",))
        goal = goal_of("64", {BATCH: 48})
        first = first_baseline(request, {BATCH: 48}, goal, machine)
        later = resolve(request, {BATCH: 48}, goal, machine, FACTS).baseline
        assert {**first, **later} == dict(later)
        assert set(later) - set(first) <= {THREADS}


def test_a_config_is_named_by_its_values():
    one = Config({BATCH: 32, WORKERS: 0})
    assert one.key == Config({WORKERS: 0, BATCH: 32}).key
    assert one.key != one.but({BATCH: 64}).key
    assert len(one.key) == 8
    assert one.changed_from(one.but({BATCH: 64, PREFETCH: 2})) == (BATCH, PREFETCH)
