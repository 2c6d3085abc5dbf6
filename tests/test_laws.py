"""The formulas for more workers, and for a loader and a device with a queue between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.laws import Scaling, fitted, together

COUNTS = (1, 2, 4, 8, 16, 32)
rates = st.floats(min_value=1.0, max_value=1e5)


@pytest.mark.parametrize(
    "law",
    [
        Scaling(a=1e-3),
        Scaling(a=1e-3, b=2e-4),
        Scaling(a=1e-3, b=1e-4, c=3e-5),
        Scaling(a=5e-2, c=1e-3),
    ],
)
def test_a_law_is_found_again_from_three_counts(law):
    found = fitted({count: law.rate(count) for count in (1, 4, 16)})
    for count in COUNTS:
        assert found.rate(count) == pytest.approx(law.rate(count), rel=1e-6)


def test_few_counts_tell_few_terms():
    assert fitted({4: 400.0}) == Scaling(a=0.01)  # four workers, each as fast as one
    two = fitted({1: 100.0, 8: 200.0})
    assert two.c == 0
    assert two.rate(8) == pytest.approx(200.0)
    with pytest.raises(ValueError, match="one measured rate"):
        fitted({})


def test_storage_that_gives_no_more_is_seen_in_the_law():
    found = fitted({count: min(100.0 * count, 350.0) for count in (1, 8, 32)})
    assert found.rate(64) < 1.1 * 350


@given(st.dictionaries(st.sampled_from(COUNTS), rates, min_size=1))
def test_whatever_was_measured_gives_a_law_without_negative_costs(measured):
    found = fitted(measured)
    assert found.a > 0
    assert found.b >= 0
    assert found.c >= 0
    assert all(0 < found.rate(count) < math.inf for count in COUNTS)


@given(rates, rates, st.integers(min_value=0, max_value=512))
def test_together_never_exceeds_either_half_and_gains_by_a_longer_queue(loader, device, queued):
    made = together(loader, device, queued)
    assert 0 < made <= min(loader, device) * (1 + 1e-9)
    assert made <= together(loader, device, queued + 1) * (1 + 1e-9)
    serial = 1 / (1 / loader + 1 / device)
    assert made >= serial * (1 - 1e-9)


def test_the_queue_loses_most_where_the_halves_are_alike():
    """The figures of METHODS 2.1 for the same formula."""
    assert together(1000, 1000, 4) == pytest.approx(1000 / 1.2)
    assert together(1500, 1000, 4) == pytest.approx(952, rel=0.01)
    assert together(1000, 1000, 16) == pytest.approx(944, rel=0.01)
    assert together(2000, 1000, 16) == pytest.approx(1000, rel=1e-4)
