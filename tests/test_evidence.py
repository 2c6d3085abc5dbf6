"""What a failure comes from is decided by other rows, and what fails alike is told once."""

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pandas as pd
import pytest
from made_up import EVERYTHING, FACTS, HOPPER, space, trial

from autotune import store
from autotune.budget import Budget
from autotune.causes import cause_of, grouped, last_frame, plain
from autotune.course import Aim, Course
from autotune.driver import _smaller
from autotune.evidence import RULES, Rows, judged
from autotune.metrics import SPEED, read_objectives
from autotune.report import verdict
from autotune.space import ACCUMULATION, BATCH, PINNING, WORKERS
from autotune.types import (
    Config,
    Failure,
    Sink,
    Stage,
    Status,
    Suspect,
    Trial,
    decode,
    encode,
)

CUDNN = "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"
BASE = {WORKERS: 2, PINNING: False, BATCH: 32, ACCUMULATION: 1}


def config(**changes):
    names = {"workers": WORKERS, "pin": PINNING, "batch": BATCH, "steps": ACCUMULATION}
    return Config({**BASE, **{names[name]: value for name, value in changes.items()}})


def ran(**changes):
    return trial(config(**changes))


def failed(message=CUDNN, status=Status.ERROR, suspect=Suspect.DEVICE_MEMORY, **changes):
    failure = Failure(status=status, message=message, suspect=suspect)
    return trial(config(**changes), failure=failure)


def numbered(*trials):
    return [replace(one, number=number) for number, one in enumerate(trials)]


def of(trials, **changes):
    """The one judged row of a config."""
    (row,) = [row for row in judged(numbered(*trials)) if row.config == config(**changes)]
    return row


# --- one rule after the other ---


def test_what_runs_with_a_smaller_micro_batch_ran_out_of_memory():
    row = of([ran(batch=16), ran(batch=8), failed(batch=64)], batch=64)
    assert row.status is Status.OUT_OF_MEMORY
    assert row.reason.startswith("device: suspected, as micro-batch 16 runs in a fresh process")
    assert row.reason.endswith(CUDNN)


def test_accumulation_may_make_up_for_a_smaller_micro_batch():
    row = of([ran(batch=16, steps=4), failed(batch=64)], batch=64)
    assert row.status is Status.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "other",
    [
        ran(batch=16, workers=0),
        ran(batch=64, workers=0),
        ran(batch=128),
        replace(ran(batch=16), sink=Sink.DISCARD),
        failed(batch=16),
        replace(
            ran(batch=16), measurement=None, failure=Failure(status=Status.TIMEOUT, message="")
        ),
    ],
    ids=["other workers", "same batch", "larger", "no step", "failed", "late"],
)
def test_nothing_else_is_evidence(other):
    assert of([other, failed(batch=64)], batch=64).status is Status.ERROR


def test_what_fails_at_every_size_is_an_error_and_says_so():
    text = "ValueError: label 7 is out of memory range 4"
    rows = judged(numbered(*(failed(text, batch=size) for size in (64, 8, 1))))
    assert {row.status for row in rows} == {Status.ERROR}
    assert {row.reason for row in rows} == {f"the same from micro-batch 1 to 64: {text}"}


def test_a_size_that_is_not_supported_is_no_want_of_memory():
    text = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."
    rows = [ran(batch=1024), failed(text, suspect=Suspect.SIZE, batch=1025)]
    row = of(rows, batch=1025)
    assert row.status is Status.ERROR
    assert row.reason == f"does not run at this size, micro-batch 1024 does: {text}"
    assert "memory" not in row.reason


def test_a_worker_that_dies_is_told_with_the_workers_that_do_not():
    text = "a loader worker died"
    rows = [ran(workers=0), ran(batch=8), failed(text, suspect=Suspect.HOST_MEMORY)]
    row = judged(numbered(*rows))[2]
    assert (row.status, row.reason) == (Status.ERROR, f"with 0 loader workers it runs: {text}")


def test_a_probe_that_is_killed_lacked_memory_if_a_smaller_one_is_not():
    killed = failed("died by SIGKILL (9)", Status.CRASH, Suspect.HOST_MEMORY)
    row = judged(numbered(killed, ran(batch=16)))[0]
    assert row.status is Status.OUT_OF_MEMORY
    assert row.reason.startswith("host: suspected, as micro-batch 16 runs")
    assert judged(numbered(killed, ran(batch=64)))[0].status is Status.CRASH


@pytest.mark.parametrize("suspect", [None, Suspect.PINNING])
def test_memory_that_lasts_without_pinning_was_the_pages(suspect):
    text = "device: RuntimeError: CUDA error: out of memory"
    pinned = failed(text, Status.OUT_OF_MEMORY, suspect, pin=True)
    row = of([pinned, ran(pin=False)], pin=True)
    assert row.status is Status.OUT_OF_MEMORY
    assert "loader.pin_memory=false: RuntimeError: CUDA error" in row.reason
    assert of([pinned, ran(pin=False, batch=16)], pin=True) == pinned


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.suspect}, {rule.less}")
def test_every_rule_needs_less_of_its_knob_and_keeps_the_text(rule):
    name, less, most = {
        WORKERS: ("workers", 1, 2),
        BATCH: ("batch", 16, 32),
        PINNING: ("pin", False, True),
    }[rule.less]
    bad = failed("the original", suspect=rule.suspect, **{name: most})
    row = of([ran(**{name: less}), bad], **{name: most})
    assert row.status is (rule.status or Status.ERROR)
    assert row.reason.endswith(": the original")
    alone = judged([bad, replace(ran(**{name: most}), stage=Stage.FINAL)])[0]
    assert alone == bad


def test_the_order_of_rows_changes_nothing_and_neither_does_a_second_look():
    rows = numbered(ran(batch=8), ran(batch=16), failed(batch=64), failed(batch=128))
    expected = {row.number: row for row in judged(rows)}
    for order in permutations(rows):
        assert {row.number: row for row in judged(order)} == expected
    assert rows[2].status is Status.ERROR  # what was measured stays as it is


def test_a_suspicion_survives_its_text():
    row = failed()
    assert decode(Trial, encode(row)) == row
    assert decode(Trial, encode(row)).failure.suspect is Suspect.DEVICE_MEMORY


def test_the_study_keeps_what_was_measured(tmp_path):
    rows = numbered(trial(config(batch=16), memory_bytes=1), failed(batch=64))
    kept = store.Store(tmp_path, read_objectives("samples_per_s,memory_gb"))
    for row in rows:
        kept.add(row)
    assert store.read_trials(tmp_path) == rows
    states = [one.state.name for one in kept._study.get_trials()]
    kept.close()
    assert states == ["COMPLETE", "FAIL"]


# --- one cause, told once ---


def test_numbers_addresses_and_pids_do_not_tell_causes_apart():
    texts = (
        "DataLoader worker (pid 4711) is killed, at 0x7f00aa, 1.25 GiB (job.py:7, in f)",
        "DataLoader worker (pid 12) is  killed, at 0xdead, 300 GiB (job.py:7, in f)",
    )
    assert plain(texts[0]) == plain(texts[1])
    assert plain(texts[0]) != plain(texts[0].replace("job.py:7", "job.py:8"))
    assert plain(texts[0]) != plain(texts[0].replace("killed", "ended"))


def test_failed_rows_are_grouped_the_most_frequent_first():
    other = Failure(status=Status.CRASH, message="died by SIGSEGV (11)")
    rows = numbered(
        ran(batch=1),
        trial(config(batch=2), failure=other),
        failed("lost 3 of 8", suspect=None, batch=8),
        failed("lost 5 of 16", suspect=None, batch=16),
    )
    first, second = grouped(rows)
    assert str(first) == "2 x error: lost 3 of 8"
    assert [row.number for row in first.trials] == [2, 3]
    assert first.log.parts[:1] == ("probes",)
    assert first.log.parts[1].startswith("0002-")
    assert str(second) == "1 x crash: died by SIGSEGV (11)"


def test_the_table_of_failures_names_cause_count_and_log():
    rows = numbered(ran(), failed("lost 3", suspect=None), failed("lost 5", suspect=None))
    frame = store.failed_table(rows)
    assert list(frame["trial"]) == [1, 2]
    assert set(frame["cause"]) == {"error: lost #"}
    assert list(frame["count"]) == [2, 2]
    assert list(frame["log"])[0] == f"probes/0001-{rows[1].config.key}/log.txt"
    assert list(store.failed_table([]).columns) == list(frame.columns)
    assert isinstance(frame, pd.DataFrame)


def test_the_users_own_frame_is_shown():
    log = (
        "Traceback (most recent call last):\n"
        '  File "/x/loop.py", line 3, in step\n    loss = f()\n'
        '  File "/x/job.py", line 9, in compute_loss\n    return batch["labels"]\n'
        "KeyError: 'labels'"
    )
    row = trial(config(), failure=Failure(status=Status.ERROR, message="x", log_tail=log))
    shown = last_frame(row, "/x/job.py")
    assert shown.splitlines()[0].strip() == 'File "/x/job.py", line 9, in compute_loss'
    assert shown.splitlines()[1].strip() == 'return batch["labels"]'
    assert last_frame(row, "/y/job.py") == ""


# --- a fault that hits every config ends the run early ---

SPACE = space(EVERYTHING, {WORKERS: 2, BATCH: 32}, machine=HOPPER)


def is_hopeless(*trials):
    rows = Rows()
    for row in numbered(*trials):
        last = rows.take(row)
    known = Course(space=SPACE, aim=Aim(objective=SPEED), purse=Budget(60, None, [], 0), rows=rows)
    return known.ends_with(last)


def dead(number, **changes):
    return failed(f"RuntimeError: record {number} is broken", suspect=None, **changes)


def test_one_cause_three_times_is_hopeless_whatever_the_numbers():
    assert is_hopeless(dead(7), dead(8, workers=0), dead(9, batch=8))
    assert not is_hopeless(dead(7), dead(8))
    assert not is_hopeless(dead(7), dead(8), ran(batch=4), dead(9))
    assert not is_hopeless(dead(7), dead(8), failed("RuntimeError: another", suspect=None))


def test_a_job_that_looks_too_large_is_given_up_at_the_smallest_size_only():
    for status, suspect in ((Status.OUT_OF_MEMORY, None), (Status.ERROR, Suspect.DEVICE_MEMORY)):
        rows = [failed(CUDNN, status, suspect, batch=size) for size in (64, 32, 16)]
        assert not is_hopeless(*rows)
        assert is_hopeless(*rows, failed(CUDNN, status, suspect, batch=1))


def test_a_job_that_may_be_too_large_is_looked_at_with_a_smaller_micro_batch():
    sizes, size = [], 100
    while size:
        look = replace(failed(batch=size), stage=Stage.INSPECT)
        smaller = _smaller(look)
        size = 0 if smaller is None else smaller[BATCH]
        sizes.append(size)
    assert sizes == [12, 1, 0]
    assert _smaller(dead(1)) is None
    assert _smaller(ran()) is None


# --- what is said of the answer ---


def test_a_last_batch_of_one_is_told_where_batch_norm_cannot_train_on_it():
    facts = replace(FACTS, batch_norm=True, dataset_len=33)
    known = space(EVERYTHING, {BATCH: 32}, facts=facts)
    assert known.leaves_one(known.baseline)
    assert not known.leaves_one(known.config({BATCH: 1}))
    assert not known.leaves_one(known.config({BATCH: 16}).but({BATCH: 5}))
    without = space(EVERYTHING, {BATCH: 32}, facts=replace(facts, batch_norm=False))
    assert not without.leaves_one(without.baseline)
    state = SimpleNamespace(
        answer=SimpleNamespace(config=known.baseline), space=known, baseline=known.baseline
    )
    assert "drop_last=True" in " ".join(verdict._problem(state))


def test_failures_are_told_with_their_log():
    rows = numbered(*(failed("lost 3", suspect=None, batch=size) for size in (4, 8)))
    told = list(verdict._failures(SimpleNamespace(trials=rows)))
    assert "2 x error: lost 3" in told[1]
    assert told[2].strip() == f"log: probes/0000-{rows[0].config.key}/log.txt"
    assert cause_of(rows[0]) == "error: lost #"
