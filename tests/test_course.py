"""One search as it goes: what its rows add up to, and what is kept back for the finals."""

import pytest
from made_up import finals, measurement, space, trial

from autotune.budget import ONE_ROUND, Budget
from autotune.course import NOTHING_PAYS, Aim, Course
from autotune.evidence import Rows
from autotune.metrics import METRICS, SPEED
from autotune.pareto import ROUNDS
from autotune.search import MOST_ROUNDS
from autotune.space import BATCH, WORKERS
from autotune.types import Config, Failure, Sink, Source, Stage, Status, Trial

SPACE = space(current={WORKERS: 0, BATCH: 32})
OTHER = SPACE.config({WORKERS: 4})


class Clock:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def course(*rows, objective=SPEED, total_s=600.0):
    known, clock = Rows(), Clock()
    budget = Budget(total_s, None, known.judged, 0.0, now=clock)
    made = Course(space=SPACE, aim=Aim(objective=objective), purse=budget, rows=known)
    for row in rows:
        known.take(row)
    made.clock = clock
    return made


def rows(own, other, noise):
    return (
        trial(SPACE.baseline, own, stage=Stage.BASELINE, noise=noise),
        trial(OTHER, other, noise=noise),
    )


def test_quiet_rows_want_the_least_rounds_and_noisy_ones_more():
    assert course().rounds_wanted() == ROUNDS
    assert course(*rows(100, 180, noise=0.01)).rounds_wanted() == ROUNDS
    between = course(*rows(100, 170, noise=0.4)).rounds_wanted()
    assert ROUNDS < between < MOST_ROUNDS
    assert course(*rows(100, 110, noise=0.4)).rounds_wanted() == MOST_ROUNDS


def test_nothing_more_is_kept_back_for_what_cannot_pay():
    assert course(*rows(100, 100.5, noise=0.4)).rounds_wanted() == ROUNDS
    assert course(*rows(100, 80, noise=0.4)).rounds_wanted() == ROUNDS
    memory = METRICS["memory_gb"]
    assert course(*rows(100, 125, noise=0.4), objective=memory).rounds_wanted() == ROUNDS


def test_the_budget_keeps_back_as_many_finals_as_the_noise_asks_for():
    quiet, noisy = (course(*rows(100, 110, noise=noise)) for noise in (0.001, 0.4))
    kept_back = []
    for known in (quiet, noisy):
        assert known.purse.affords(Stage.CLIMB, 1)
        while known.purse.affords(Stage.CLIMB, 1):
            known.clock.s += 0.1
        kept_back.append(known.purse.left_s)
    assert kept_back[1] - kept_back[0] == pytest.approx(
        ONE_ROUND * (MOST_ROUNDS - ROUNDS) * 1.0, abs=0.2
    )


def test_a_course_ends_by_itself_and_says_why():
    known = course(trial(SPACE.baseline, 100.0, stage=Stage.BASELINE))

    def measure(ask):
        return known.rows.take(
            Trial(
                number=0, config=ask.config, stage=ask.stage, source=ask.source, sink=ask.sink,
                measurement=measurement(100.0), probe_s=1.0, round=ask.round,
            )
        )  # fmt: skip

    known.run("staged", measure)
    assert known.stopped_because == NOTHING_PAYS
    assert known.decide().keep


def test_the_answer_rests_on_finals_and_the_best_so_far_on_any_row():
    searched = course(*rows(100, 150, noise=0.01))
    assert searched.decide().keep
    assert not searched.decide().verified
    assert searched.best_so_far().config == OTHER
    repeated = course(
        *rows(100, 150, noise=0.01),
        *finals(SPACE.baseline, [100, 101, 99]),
        *finals(OTHER, [150, 151, 149]),
    )
    assert repeated.decide().config == OTHER
    assert repeated.decide().verified
    assert not repeated.is_ambiguous()


def test_a_small_gain_through_noise_is_ambiguous():
    known = course(*finals(SPACE.baseline, [100, 103, 97]), *finals(OTHER, [103, 101, 104]))
    assert known.is_ambiguous()


def test_a_device_that_is_lost_ends_it():
    lost = Trial(
        number=0, config=Config({WORKERS: 0}), stage=Stage.LOADER, source=Source.LOADER,
        sink=Sink.DISCARD, failure=Failure(status=Status.DEVICE_LOST, message="gone"),
    )  # fmt: skip
    known = course()
    assert known.ends_with(lost)
    assert known.lost
    assert "gone" in known.stopped_because
    assert known.not_explored
