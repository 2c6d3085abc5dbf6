"""Every knob of the table: what it may be, where it applies, what it does to a probe."""

import copy

import pytest
from made_up import CPU, FACTS, HOPPER, VOLTA

from autotune.errors import SpaceError
from autotune.knobs import (
    KNOBS,
    Exactness,
    Family,
    check_values,
    environment_of,
    in_order,
    knob_named,
)
from autotune.precision import PRECISIONS
from autotune.probe.setup import Setup, setup_of

MACHINES = {"cpu": CPU, "hopper": HOPPER, "volta": VOLTA}
WITH_WORKERS = {"loader.num_workers": 2}

knob = pytest.mark.parametrize("knob", KNOBS.values(), ids=KNOBS)
on_each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


def some_values(knob):
    least = knob.domain.least
    return knob.domain.words if least is None else (least, least + 1, 64)


@knob
def test_the_default_is_possible(knob):
    assert knob.default is None or knob.default in knob.domain


@knob
def test_the_domain_says_what_it_holds(knob):
    for value in some_values(knob):
        assert value in knob.domain
        assert knob.check(value, "here") == value
    assert str(knob.domain)


@knob
@pytest.mark.parametrize("value", [-1, 1.5, "", "nonsense", None, [], {}])
def test_what_lies_outside_is_refused_with_what_is_allowed(knob, value):
    if value in some_values(knob):
        return
    with pytest.raises(SpaceError) as refusal:
        knob.check(value, "here")
    assert "here" in str(refusal.value)
    assert knob.name in str(refusal.value)
    assert str(knob.domain) in str(refusal.value)


@knob
def test_truth_is_no_number_and_a_number_no_truth(knob):
    numbers = knob.domain.least is not None
    assert (True in knob.domain) == (True in knob.domain.words)
    assert (1 in knob.domain) == (numbers and knob.domain.least <= 1)


@knob
@on_each_machine
def test_what_is_tried_unasked_is_possible_and_in_no_pair(knob, machine):
    values = knob.candidates(machine, FACTS)
    assert len(set(values)) == len(values)
    for value in values:
        assert value in knob.domain
        assert not knob.forbids(value, machine)


@knob
@on_each_machine
def test_a_refusal_is_a_reason(knob, machine):
    for values in ({}, WITH_WORKERS):
        assert isinstance(knob.refuses(values, machine), str)


@knob
def test_it_acts_on_a_setup_and_on_nothing_twice(knob):
    plain = setup_of({}, 32)
    for value in some_values(knob):
        once, twice = copy.deepcopy(plain), copy.deepcopy(plain)
        knob.act(once, value)
        knob.act(twice, value)
        knob.act(twice, value)
        assert once == twice
    if not knob.load_time and knob.name != "parallel.mode":
        changed = [
            value for value in some_values(knob) if setup_of({knob.name: value}, 32) != plain
        ]
        assert changed  # it does something


@knob
def test_it_is_told_apart_from_the_others(knob):
    group, _, name = knob.name.partition(".")
    assert group in {"loader", "train", "parallel", "host"}
    assert name.isidentifier()
    assert knob.family in Family
    assert knob.exactness in Exactness
    assert knob_named(knob.name, "here") is knob


@knob
def test_only_what_a_variable_carries_is_in_the_environment(knob):
    for value in some_values(knob):
        carried = environment_of({knob.name: value}, load_time=False)
        at_load = environment_of({knob.name: value}, load_time=True)
        expected = {knob.environment: str(value)} if knob.environment else {}
        assert carried == ({} if value == knob.default else expected)
        assert at_load == (carried if knob.load_time else {})


def test_host_knobs_are_those_in_the_environment():
    assert all(bool(k.environment) == k.name.startswith("host.") for k in KNOBS.values())


def test_values_come_in_the_tables_order():
    values = {name: some_values(k)[0] for name, k in reversed(KNOBS.items())}
    assert list(in_order(values)) == list(KNOBS)
    assert check_values(values, "here") == values


def test_an_unknown_name_gets_the_nearest_and_all():
    with pytest.raises(SpaceError) as refusal:
        check_values({"train.batchsize": 1}, "CURRENT")
    assert "CURRENT: unknown knob train.batchsize (did you mean train.batch_size?)" in str(
        refusal.value
    )
    assert all(name in str(refusal.value) for name in KNOBS)


def test_a_loader_gets_its_arguments_whatever_the_config_leaves_out():
    plain = setup_of({}, 20)
    assert plain == Setup({"batch_size": 20, "num_workers": 0, "pin_memory": False})
    assert (plain.batch_size, plain.workers) == (20, 0)
    full = setup_of(
        {"loader.num_workers": 2, "loader.prefetch_factor": 4, "train.batch_size": 8}, 20
    )
    assert full.loader["prefetch_factor"] == 4
    assert (full.batch_size, full.workers) == (8, 2)


@pytest.mark.parametrize("name", PRECISIONS)
@on_each_machine
def test_a_precision_that_is_tried_unasked_can_run(name, machine):
    precision = PRECISIONS[name]
    tried = name in KNOBS["train.precision"].candidates(machine, FACTS)
    assert not (tried and precision.refuses(machine))
    assert precision.scaled <= (precision.autocast == "float16")
