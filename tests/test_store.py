"""What a run folder keeps: rows through the study and back, and the tables made of them."""

import json
from dataclasses import replace

import numpy as np
import optuna
import pandas as pd
import pytest
from made_up import EVERYTHING, GIB, HOPPER, finals, measurement, space, trial

from autotune.knobs import KNOBS
from autotune.metrics import METRICS, read_objectives
from autotune.pareto import front, pool
from autotune.space import BATCH, WORKERS
from autotune.store import COLUMNS, Store, read_trials, row_of, table, write_tables
from autotune.types import (
    FAILED,
    REFUSED,
    SCHEMA,
    Config,
    Failure,
    Label,
    Sink,
    Source,
    Stage,
    Status,
    Trial,
    decode,
    encode,
    write_atomically,
)

OBJECTIVES = read_objectives("samples_per_s,memory_gb")

DOCUMENTED = """
trial, key, stage, source, sink, status, labels, reason,
loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers,
train.batch_size, train.accumulation_steps, train.precision, parallel.mode, host.threads,
host.omp_wait_policy,
samples_per_s, samples_per_s_low, samples_per_s_high, step_s, data_wait_pct, gpu_util_pct,
sm_active_pct, memory_gb, host_memory_gb, power_w, joules_per_sample, cpu_util_pct,
device_s_per_sample, parity_loss, build_s, startup_s, first_step_s, probe_s, optimizer_steps
"""
"""The columns that users rely on, in their order. Knobs may be added, among the knobs."""

SPACE = space(EVERYTHING, {WORKERS: 2, BATCH: 48}, machine=HOPPER)


def of_status(status):
    """A row that ended that way."""
    if status is Status.OK:
        return trial(SPACE.baseline, memory_bytes=GIB)
    if status is Status.DOMINATED:
        return trial(SPACE.baseline, stopped="dominated")
    failure = Failure(status=status, message=f"because of {status}", phase="window", log_tail="x")
    return trial(SPACE.baseline, failure=failure)


def rows():
    """One row of each kind, numbered."""
    device_alone = replace(trial(SPACE.baseline), source=Source.CACHED, stage=Stage.DEVICE)
    loader_alone = replace(trial(SPACE.baseline), sink=Sink.DISCARD, stage=Stage.LOADER)
    inspected = trial(SPACE.baseline, stage=Stage.INSPECT, blocks=0, facts={"parameters": 10})
    known = [
        inspected,
        device_alone,
        loader_alone,
        *(of_status(status) for status in Status),
        *finals(SPACE.config({WORKERS: 0}), [100.0, 110.0], memory_bytes=GIB),
        replace(trial(SPACE.baseline), labels=(Label.NOISY, Label.COLD), why="a reason"),
    ]
    return [replace(row, number=number) for number, row in enumerate(known)]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def stored(folder, trials):
    store = Store(folder, OBJECTIVES)
    for one in trials:
        store.add(one)
    return store


# --- the study ----------------------------------------------------------------------------------


def test_every_row_comes_back_as_it_was(folder):
    known = rows()
    store = stored(folder, known)
    assert store.trials() == known
    assert read_trials(folder) == known


def test_a_row_is_on_disk_as_soon_as_it_is_added(folder):
    store = Store(folder, OBJECTIVES)
    for count, one in enumerate(rows(), 1):
        store.add(one)
        assert len(read_trials(folder)) == count


def test_a_run_goes_on_in_the_same_study(folder):
    stored(folder, rows()[:3])
    assert stored(folder, rows()[3:]).trials() == rows()


def test_a_renamed_folder_keeps_its_rows(folder):
    stored(folder, rows())
    renamed = folder.rename(folder.with_name("kept"))
    assert read_trials(renamed) == rows()
    assert len(stored(renamed, [of_status(Status.OK)]).trials()) == len(rows()) + 1


def test_the_study_is_one_that_optuna_reads(folder):
    stored(folder, rows())
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'study.db'}")
    assert [str(d.name) for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    first = study.trials[3]
    assert first.params == dict(SPACE.baseline)
    assert first.user_attrs["status"] == "ok"
    assert first.values == [pytest.approx(100), 1.0]
    assert study.best_trials


@pytest.mark.parametrize("status", Status)
def test_each_status_has_a_state(folder, status):
    stored(folder, [of_status(status)])
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'study.db'}")
    expected = "FAIL" if status in FAILED else "COMPLETE" if status is Status.OK else "PRUNED"
    assert study.trials[0].state.name == expected
    assert (status in REFUSED) <= (expected == "PRUNED")


@pytest.mark.parametrize(
    "row",
    [
        replace(trial(SPACE.baseline), source=Source.CACHED),
        replace(trial(SPACE.baseline), sink=Sink.DISCARD),
        trial(SPACE.baseline, stage=Stage.INSPECT, blocks=0),
        trial(SPACE.baseline),  # its memory could not be read
        trial(SPACE.baseline, blocks=0, memory_bytes=GIB),
    ],
)
def test_half_a_measurement_is_no_complete_trial(folder, row):
    stored(folder, [row])
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'study.db'}")
    assert study.trials[0].state.name == "PRUNED"


def test_every_config_of_a_space_can_be_stored(folder):
    values = [
        trial(SPACE.config({name: value}))
        for name, values in SPACE.values.items()
        for value in values[:3]
    ]
    assert stored(folder, values).trials() == values


# --- the table ----------------------------------------------------------------------------------


def test_the_columns_are_the_documented_ones_in_their_order():
    documented = [name.strip() for name in DOCUMENTED.split(",")]
    assert [name for name in COLUMNS if name in documented] == documented
    assert set(COLUMNS) - set(documented) <= set(KNOBS)
    places = [COLUMNS.index(name) for name in KNOBS]
    assert places == list(range(places[0], places[0] + len(KNOBS)))  # together, in their order
    assert list(table(rows()).columns) == list(COLUMNS)


def test_one_row_a_trial_and_what_was_not_read_is_empty():
    frame = table(rows())
    assert list(frame["trial"]) == list(range(len(rows())))
    failed = frame[frame["status"] == "crash"].iloc[0]
    numbers = [*METRICS, "samples_per_s_low", "samples_per_s_high", "parity_loss", "build_s"]
    assert failed[numbers].isna().all()
    assert pd.isna(failed["optimizer_steps"])
    assert failed["reason"] == "because of crash"
    never_read = ["gpu_util_pct", "sm_active_pct", "power_w", "joules_per_sample"]
    assert frame[never_read].isna().all().all()


def test_a_knob_that_does_not_apply_is_empty():
    frame = table([trial(SPACE.config({WORKERS: 0}))])
    assert pd.isna(frame.loc[0, "loader.prefetch_factor"])
    assert frame.loc[0, "loader.num_workers"] == 0


@pytest.mark.parametrize("known", [rows(), rows()[:1], []], ids=["all", "one", "none"])
def test_the_types_do_not_depend_on_the_rows(known):
    frame = table(known)
    for name in METRICS:
        assert frame[name].dtype == np.float64
    assert frame["trial"].dtype == "Int64"
    assert frame["optimizer_steps"].dtype == "Int64"
    for name, knob in KNOBS.items():
        value = next(iter(knob.domain.words), 1)
        kinds = {bool: "boolean", int: "Int64", str: "string"}
        assert frame[name].dtype == kinds[type(value)]


def test_the_table_is_the_same_from_csv_and_parquet(folder):
    known = rows()
    write_tables(folder, known, front(list(pool(known).values()), OBJECTIVES))
    frame = table(known)
    parquet = pd.read_parquet(folder / "trials.parquet")
    pd.testing.assert_frame_equal(parquet, frame)
    csv = pd.read_csv(folder / "trials.csv", keep_default_na=False, na_values=[""])
    assert list(csv.columns) == list(COLUMNS)
    assert csv["samples_per_s"].tolist() == pytest.approx(
        frame["samples_per_s"].tolist(), nan_ok=True
    )
    assert set(pd.read_csv(folder / "failed.csv")["status"]) == {str(s) for s in FAILED}


def test_the_front_has_one_row_a_config(folder):
    known = [*finals(SPACE.baseline, [100, 110, 105], memory_bytes=GIB), *rows()]
    write_tables(folder, known, front(list(pool(known).values()), OBJECTIVES))
    pareto = pd.read_csv(folder / "pareto.csv")
    assert pareto["key"].is_unique
    assert pareto["repeats"].max() == 3
    assert (pareto["samples_per_s_low"] <= pareto["samples_per_s"]).all()


def test_empty_tables_can_be_written(folder):
    write_tables(folder, [], [])
    for name in ("trials.csv", "failed.csv", "pareto.csv"):
        assert len(pd.read_csv(folder / name)) == 0


def test_repeats_share_their_key_and_not_their_number():
    frame = table([replace(r, number=n) for n, r in enumerate(finals(SPACE.baseline, [1, 2]))])
    assert frame["key"].nunique() == 1
    assert frame["trial"].is_unique


def test_a_row_has_its_interval_around_its_value():
    row = row_of(trial(SPACE.baseline, 100.0, noise=0.1))
    assert row["samples_per_s_low"] < row["samples_per_s"] < row["samples_per_s_high"]


# --- files --------------------------------------------------------------------------------------


def test_no_file_is_left_half_written(folder):
    write_tables(folder, rows(), [])
    write_atomically(folder / "summary.md", "new")
    write_atomically(folder / "summary.md", "newer")
    assert (folder / "summary.md").read_text() == "newer"
    assert not [path.name for path in folder.iterdir() if "part" in path.name]


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    path = folder / "trials.csv"
    path.write_text("old")
    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def broken(*_):
    raise OSError("no space")


# --- facts as text ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.stage}-{row.status}")
def test_a_row_is_the_same_after_its_text(row):
    assert decode(Trial, encode(row)) == row
    assert json.loads(encode(row))["schema"] == SCHEMA


def test_text_of_another_version_is_refused():
    text = encode(measurement()).replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}')
    with pytest.raises(
        ValueError, match=f"format {SCHEMA + 1}, this version reads format {SCHEMA}"
    ):
        decode(Trial, text)


def test_a_config_keeps_its_values_kinds():
    config = Config({"loader.pin_memory": True, WORKERS: 1, "train.precision": "bf16"})
    kept = decode(Trial, encode(trial(config))).config
    assert [type(value) for value in kept.values()] == [bool, int, str]
