"""The guard's arithmetic against made-up memory laws, and what a probe must find free."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from made_up import FACTS, GIB, measurement

from autotune import guard
from autotune.guard import Guard, Judgement, Need, Point, Room, most_workers, shortage

MIB = 1024**2

resident = st.floats(1.0, 4000.0)
pieces = st.lists(
    st.tuples(st.floats(0.0, 3000.0), st.floats(0.0, 200.0)), min_size=1, max_size=5
).filter(lambda known: any(slope > 0.01 for _, slope in known))
"""What each piece holds beyond what is resident, and what it adds a sample."""
fragmentation = st.floats(1.0, 1.3)
room = st.floats(1.2, 50.0)
"""How many times what the smallest size needs the limit is."""


class Convex:
    """Peak memory as the largest of sums that are linear in the batch."""

    def __init__(self, base, parts, fragmented=1.0, other=0.0):
        self.base, self.parts = base, parts
        self.fragmented, self.other = fragmented, other

    def peak(self, batch):
        return max(self.base + held + slope * batch for held, slope in self.parts)

    def needs(self, batch):
        """With what the allocator's cache and the context take."""
        return self.peak(batch) * max(self.fragmented, guard.LEAST_FRAGMENTED) + self.other

    def point(self, batch):
        return Point(
            batch=batch,
            allocated_bytes=self.peak(batch),
            reserved_bytes=self.peak(batch) * self.fragmented,
            resident_bytes=self.base,
            other_bytes=self.other,
        )


class Quadratic(Convex):
    """A loss over all pairs of a batch."""

    def __init__(self, base, slope, bend):
        super().__init__(base, [(0.0, slope)])
        self.bend = bend

    def peak(self, batch):
        return super().peak(batch) + self.bend * batch**2


def climb(law, limit, first=1):
    """Every size that the proven bound leads to, from the first on."""
    sizes = [first]
    while True:
        safe = Guard.of(limit, [law.point(size) for size in sizes]).largest_safe
        if safe < guard.CLOSE_ENOUGH * sizes[-1] and safe <= sizes[-1] + 1:
            return sizes
        if law.needs(safe) > limit:
            return [*sizes, safe]
        if safe == sizes[-1] + 1 and safe < guard.CLOSE_ENOUGH * sizes[-1]:
            return [*sizes, safe]
        sizes.append(safe)


@given(resident, pieces, fragmentation, st.integers(1, 64), st.floats(1.0, 100.0))
def test_what_a_size_needs_at_most_is_never_less_than_it_needs(base, parts, share, batch, times):
    law = Convex(base, parts, share, other=300.0)
    larger = math.ceil(times * batch)
    most = Guard.of(1e9, [law.point(batch)]).most_bytes(larger)
    # Fragmentation is taken as measured.
    needs = law.peak(larger) * law.point(batch).fragmented + law.other
    assert most >= needs * (1 - 1e-9)


@given(resident, pieces, fragmentation, st.floats(0.0, 800.0), room, st.integers(1, 64))
def test_no_size_that_is_proven_to_fit_overshoots(base, parts, fragmented, other, times, first):
    law = Convex(base, parts, fragmented, other)
    limit = times * law.needs(first)
    sizes = climb(law, limit, first)
    assert all(law.needs(size) <= limit * (1 + 1e-9) for size in sizes)


@given(resident, pieces, fragmentation, st.floats(3.0, 50.0))
def test_a_few_steps_lead_close_to_the_limit(base, parts, fragmented, times):
    law = Convex(base, parts, fragmented)
    limit = times * law.needs(1)
    largest = next(b for b in (2**n for n in range(40)) if law.needs(b) > limit)
    assume(largest > 64)  # of few samples a next one may be a tenth of all
    sizes = climb(law, limit)
    assert law.needs(sizes[-1] + max(2, math.ceil(sizes[-1] / 20))) > 0.9 * limit
    assert len(sizes) <= 4 + 2.5 * math.log(largest, guard.LEAP)


@given(resident, pieces, st.lists(st.integers(1, 500), min_size=1, max_size=5, unique=True))
def test_the_lower_bound_never_exceeds_the_truth(base, parts, batches):
    law = Convex(base, parts, other=10.0)
    known = Guard.of(1.0, [law.point(batch) for batch in batches])
    for batch in range(1, 2000, 37):
        assert known.least_bytes(batch) <= (law.peak(batch) + 10.0) * (1 + 1e-9)


@given(
    resident,
    pieces,
    st.lists(st.tuples(st.integers(1, 500), st.floats(-5.0, 5.0)), min_size=2, max_size=5),
)
def test_readings_that_are_off_refuse_nothing_that_fits(base, parts, readings):
    law = Convex(base, parts)
    points = [
        replace(point, allocated_bytes=max(point.allocated_bytes + off, 0.0), unsure_bytes=5.0)
        for point, off in ((law.point(batch), off) for batch, off in readings)
    ]
    known = Guard.of(1.0, points)
    for batch in range(1, 2000, 37):
        assert known.least_bytes(batch) <= law.peak(batch) * (1 + 1e-9)


@given(resident, pieces, st.lists(st.integers(1, 500), min_size=2, max_size=4, unique=True), room)
def test_what_is_refused_would_not_fit_and_what_is_safe_does(base, parts, batches, times):
    law = Convex(base, parts)
    limit = times * law.needs(max(batches))
    known = Guard.of(limit, [law.point(batch) for batch in batches])
    for batch in (2**n for n in range(16)):
        judged = known.judge(batch)
        assert judged is not Judgement.REFUSED or law.needs(batch) > limit
        assert judged is not Judgement.SAFE or law.needs(batch) <= limit * (1 + 1e-9)


@given(resident, st.floats(0.1, 50.0), st.floats(0.001, 5.0), room)
def test_a_law_that_is_not_linear_overshoots_by_little(base, slope, bend, times):
    law = Quadratic(base, slope, bend)
    limit = times * law.needs(1)
    *fitting, last = climb(law, limit)
    assert all(law.needs(size) <= limit for size in fitting)
    # The one attempt that fails does so in its sandbox, and asks for no absurd size.
    assert law.needs(last) <= (1.6 if len(fitting) > 2 else guard.LEAP) * limit


def test_growth_is_capped_once_the_bend_shows():
    law = Quadratic(100.0, 1.0, 1.0)
    known = Guard.of(1e9, [law.point(batch) for batch in (4, 8, 16)])
    assert known.bends
    assert known.largest_safe == 24
    straight = Convex(100.0, [(0.0, 1.0)])
    known = Guard.of(1e9, [straight.point(batch) for batch in (4, 8, 16)])
    assert not known.bends
    assert known.largest_safe == 64


def test_a_flat_start_is_no_forecast():
    """Case 55: memory does not grow until 64, and then it does."""
    law = Convex(1000.0, [(500.0, 0.0), (0.0, 8.0)])
    known = Guard.of(4000.0, [law.point(batch) for batch in (8, 16, 32)])
    assert known.judge(4096) is Judgement.UNKNOWN
    assert law.needs(known.largest_safe) <= 4000.0


def test_nothing_is_known_of_other_sizes_without_a_point():
    assert Guard.of(100.0, []).judge(1) is Judgement.UNKNOWN
    assert Guard.of(100.0, []).largest_safe == 0


def test_a_refusal_says_what_is_needed_of_what():
    points = [
        Point(batch=batch, allocated_bytes=(1 + batch / 64) * GIB, resident_bytes=GIB)
        for batch in (128, 256)
    ]
    known = Guard.of(8 * GIB, points)
    assert known.judge(512) is Judgement.REFUSED
    assert known.why_refused(512) == "needs at least 9 of 8 GiB"


def test_points_without_accumulated_gradients_do_not_speak_for_those_with():
    points = [
        Point(batch=b, allocated_bytes=100.0 + b, resident_bytes=1.0, accumulates=True)
        for b in (1, 2)
    ]
    known = Guard.of(110.0, points)
    assert known.judge(64, accumulates=True) is Judgement.REFUSED
    assert known.judge(64, accumulates=False) is Judgement.UNKNOWN


def test_a_size_that_fits_without_its_margin_only_proves_nothing():
    point = Point(batch=8, allocated_bytes=95.0, reserved_bytes=130.0, resident_bytes=10.0)
    assert Guard.of(120.0, [point]).largest_safe == 0
    assert Guard.of(140.0, [point]).largest_safe == 8


# --- from measurements ----------------------------------------------------------------------------


def test_an_accelerators_point_keeps_its_parts_apart():
    measured = measurement(
        memory_bytes=13, resident_bytes=4, allocated_bytes=8, reserved_bytes=10, other_bytes=3
    )
    point = guard.step_point(measured, 32, 4)
    assert (point.allocated_bytes, point.reserved_bytes, point.other_bytes) == (8, 10, 3)
    assert point.accumulates
    on_cpu = guard.step_point(measurement(memory_bytes=13, resident_bytes=4), 32, 1)
    assert (on_cpu.allocated_bytes, on_cpu.reserved_bytes) == (13, None)


def test_what_could_not_be_read_is_no_point():
    assert guard.step_point(measurement(resident_bytes=4), 32, 1) is None
    assert guard.host_point(measurement(memory_bytes=4, resident_bytes=4), 32, 1) is None


def test_the_hosts_point_covers_the_steps_peak():
    measured = measurement(memory_bytes=9, host_memory_bytes=7, resident_bytes=1)
    assert guard.host_point(measured, 32, 1).allocated_bytes == 9


def test_retries_are_no_fit():
    assert guard.why_tight(measurement(alloc_retries=2)) == "the allocator had to retry 2 times"
    assert guard.why_tight(measurement(alloc_retries=0)) == ""
    assert guard.why_tight(measurement()) == ""


def test_the_allocators_share_leaves_the_context_out():
    assert guard.allocator_share(80 * GIB, 40 * GIB, GIB) == pytest.approx(39 / 80)
    assert guard.allocator_share(80 * GIB, 100 * GIB, None) == 1.0
    assert guard.plannable_bytes(100, 10) == pytest.approx(82)


@pytest.mark.parametrize(
    ("rate", "used", "spilled"),
    [(24.0, None, True), (40.0, None, False), (40.0, 0.97, True), (60.0, 0.97, False)],
)
def test_a_collapse_of_the_rate_is_a_suspected_spill(rate, used, spilled):
    assert guard.has_spilled(rate, 100.0, used) is spilled


def test_a_margin_is_kept_for_longer_samples_that_may_come():
    assert guard.margin(FACTS) == 1.0
    assert guard.margin(replace(FACTS, varies=True)) == guard.LONGER_TO_COME
    assert guard.margin(replace(FACTS, varies=True, stock=FACTS.dataset_len)) == 1.0


# --- the host -------------------------------------------------------------------------------------

MUCH = Room(free_bytes=64 * GIB, shm_bytes=64 * GIB)


def test_a_probe_that_finds_room_may_start():
    assert shortage(Need(workers=4, prefetch=2, batch_bytes=GIB), MUCH) == ""


def test_batches_ahead_must_fit_into_shared_memory():
    need = Need(workers=8, prefetch=4, batch_bytes=GIB)
    told = shortage(need, replace(MUCH, shm_bytes=16 * GIB))
    assert "/dev/shm" in told
    assert "8 workers x 4 batches of 1 GiB need 32 of 16 GiB" in told
    assert shortage(replace(need, workers=0), replace(MUCH, shm_bytes=16 * GIB)) == ""
    assert shortage(need, replace(MUCH, shm_bytes=0)) == ""  # not read


def test_parameters_and_batches_must_fit_into_memory():
    need = Need(workers=2, prefetch=2, batch_bytes=GIB, resident_bytes=4 * GIB)
    assert shortage(need, replace(MUCH, free_bytes=10 * GIB)) == ""
    told = shortage(need, replace(MUCH, free_bytes=8 * GIB))
    assert "host memory" in told
    assert "at least 9 of 8 GiB" in told
    assert shortage(replace(need, ranks=2), replace(MUCH, free_bytes=10 * GIB))


def test_workers_are_bounded_by_half_of_what_is_scarcest():
    assert most_workers(2, GIB, replace(MUCH, shm_bytes=16 * GIB)) == 4
    assert most_workers(2, GIB, replace(MUCH, free_bytes=8 * GIB)) == 2
    assert most_workers(2, GIB, Room(free_bytes=0, shm_bytes=0)) == math.inf
    assert most_workers(2, 0, MUCH) == math.inf
