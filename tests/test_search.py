"""The searchers against made-up jobs whose best config is known by construction."""

from dataclasses import replace

import pytest
from made_up import CPU, EVERYTHING, FACTS, GIB, HOPPER, asking, trial
from oracle import CLOSING, KEPT_BACK, Job, Law, fits_into

from autotune import guard
from autotune.fitting import why_refused, why_unfit
from autotune.metrics import read_limit
from autotune.scene import MOST_END_TO_END, TOO_LARGE
from autotune.search import SAMPLERS, path_configs
from autotune.space import ACCUMULATION, BATCH, PINNING, WORKERS, Goal
from autotune.types import DEVICE_MEMORY, Failure, Sink, Source, Stage, Status, Suspect

YOURS = {WORKERS: 0, BATCH: 32}

LAWS = {
    "nothing matters": Law(load_s=1e-9, launch_s=0.0, sample_s=1e-3),
    "launches cost most": Law(load_s=1e-7, launch_s=5e-3, sample_s=1e-6),
    "a loader that waits": Law(load_s=1e-2, launch_s=1e-3, sample_s=1e-4),
    "a loader that waits long": Law(load_s=5e-2, launch_s=1e-3, sample_s=1e-5),
    "a loader that computes": Law(load_s=1e-3, computing=1.0, launch_s=1e-3, sample_s=1e-5),
    "storage gives no more": Law(load_s=1e-3, most_loaded=3500.0, launch_s=1e-3, sample_s=1e-5),
    "the device is the limit": Law(load_s=1e-6, launch_s=1e-4, sample_s=1e-3),
    "both halves alike": Law(load_s=2e-3, launch_s=1e-2, sample_s=2e-4),
    "a costly epoch border": Law(load_s=2e-3, launch_s=1e-3, sample_s=1e-4, restart_s=30.0),
    "a costly optimizer": Law(load_s=1e-7, launch_s=1e-4, sample_s=1e-5, optimizer_s=2e-2),
}
MACHINES = {
    "cpu": (CPU, {}),
    "gpu": (HOPPER, {("train.precision", "bf16"): 2.0, ("train.precision", "tf32"): 1.5}),
}


def job(law, **changes):
    return Job(law=law, **{"current": YOURS, **changes})


@pytest.fixture(params=MACHINES.values(), ids=MACHINES)
def on_machine(request):
    """A job on that machine, with what its precisions gain there."""
    machine, speedups = request.param

    def made(law, **changes):
        known = Law(**{**vars(law), "speedups": speedups})
        return job(known, machine=machine, **changes)

    return made


def planned(known):
    """End-to-end probes, local search apart: where the halves do not add up, it goes on."""
    return sum(ask.stage is not Stage.LOCAL for ask in known.end_to_end())


# --- the default searcher -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LAWS)
def test_staged_comes_within_two_percent_of_the_best_in_few_probes(on_machine, name):
    known = on_machine(LAWS[name], goal=Goal(size=256)).run()
    # Where a doubling of the micro-batch gains less than 2 %, the ladder ends.
    assert known.found() > (0.96 if name == "a costly optimizer" else 0.98)
    assert planned(known) <= MOST_END_TO_END
    assert len(known.asks) <= 40
    assert known.answer.verified


@pytest.mark.parametrize("name", LAWS)
def test_with_a_free_batch_staged_takes_the_smallest_that_is_about_as_fast(on_machine, name):
    known = on_machine(LAWS[name]).run()
    assert known.found() > 0.95
    assert planned(known) <= MOST_END_TO_END
    assert len(known.asks) <= 45


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["a loader that waits", "launches cost most", "both halves alike"])
def test_staged_finds_it_through_the_noise_too(name, seed):
    known = job(LAWS[name], noise=0.02, seed=seed).run()
    assert known.found() > 0.9
    if not known.answer.keep:
        assert known.truth(known.answer.config) > known.truth(known.space.baseline)


@pytest.mark.parametrize("seed", range(5))
def test_where_nothing_matters_everything_stays(seed):
    known = job(LAWS["nothing matters"], noise=0.01, seed=seed).run()
    assert known.answer.keep


def test_the_users_good_config_stays():
    best = job(LAWS["a loader that waits"]).run().answer.config
    again = job(LAWS["a loader that waits"], current=dict(best)).run()
    assert again.found() > 0.98
    assert again.truth(again.answer.config) < 1.03 * again.truth(best)


@pytest.mark.parametrize("above", [20, 33, 100, 1000])
def test_a_size_that_fails_is_learnt_from(on_machine, above):
    law = Law(**{**vars(LAWS["launches cost most"]), "fails_above": above})
    known = on_machine(law).run()
    failed = [t for t in known.trials if t.status is Status.OUT_OF_MEMORY]
    assert known.found() > 0.98
    assert len(failed) <= 8
    assert known.answer.config.get(BATCH) <= above
    assert fits_into(known) > 0.85 * above - 8  # the edge is looked for between powers of two


def test_a_baseline_that_fails_is_no_end():
    law = Law(**{**vars(LAWS["launches cost most"]), "fails_above": 10})
    known = job(law).run()
    assert not known.answer.keep
    assert known.answer.speedup is None
    assert known.answer.config[BATCH] in (8, 10)
    assert known.found() > 0.98


@pytest.mark.parametrize("own", [0, 2])
def test_workers_that_hang_are_left_alone(own):
    law = Law(
        **{**vars(LAWS["launches cost most"]), "hangs_with": lambda config: config.get(WORKERS)}
    )
    known = job(law, current={WORKERS: own, BATCH: 32}).run()
    hung = [t for t in known.trials if t.status is Status.TIMEOUT]
    assert known.answer.config[WORKERS] == 0
    assert known.found() > 0.98
    assert len(hung) <= 3


def test_a_held_global_batch_is_held():
    known = job(
        LAWS["launches cost most"], goal=Goal(size=64), current={BATCH: 16, ACCUMULATION: 4}
    )
    known.run()
    sizes = {known.space.global_batch(t.config) for t in known.trials if t.end_to_end}
    assert sizes == {64}
    assert known.answer.config[BATCH] == 64


def test_the_price_of_a_held_global_batch_is_told():
    known = job(LAWS["launches cost most"], goal=Goal(size=64)).run()
    assert any("a global batch of 128 would allow" in told for told in known.scene.not_explored)
    free = job(LAWS["launches cost most"]).run()
    assert not any("a global batch" in told for told in free.scene.not_explored)


def test_a_free_batch_grows_no_further_than_it_pays():
    law = Law(load_s=1e-7, launch_s=1e-3, sample_s=1e-4)  # 1 + 0.1 b milliseconds
    known = job(law).run()
    batch = known.answer.config[BATCH]
    assert known.found() > 0.97
    assert batch <= 1024
    smaller = known.answer.config.but({BATCH: batch // 4})
    assert known.truth(smaller) < 0.98 * known.best()


def test_pins_are_kept():
    request = asking(
        loader__num_workers=(2,), train__batch_size=None, train__precision=("default", "bf16")
    )
    known = job(LAWS["a loader that waits"], request=request).run()
    assert known.answer.config[WORKERS] == 2
    assert known.found() > 0.98
    assert all(t.config[WORKERS] == 2 for t in known.trials if t.stage is Stage.VERIFY)


def test_limits_are_kept():
    limit = read_limit("memory_gb<=1.1")  # a micro-batch of 102 at most
    known = job(LAWS["launches cost most"], limits=(limit,)).run()
    assert known.answer.config[BATCH] <= 102
    assert known.answer.config[BATCH] >= 64


def test_a_space_with_one_config_asks_for_nothing_but_finals():
    known = job(LAWS["launches cost most"], request=asking(loader__num_workers=(0,))).run()
    assert known.answer.keep
    assert len(known.asks) <= 4


def test_what_is_left_out_is_told():
    fast_loader = job(LAWS["the device is the limit"]).run()
    assert any("loader settings can gain at most" in t for t in fast_loader.scene.not_explored)
    short = job(LAWS["a loader that waits"], most=14).run()
    assert short.scene.not_explored


# --- memory ---------------------------------------------------------------------------------------

MIB = 1024**2
GROWS = Law(
    load_s=1e-7,
    launch_s=5e-3,
    sample_s=1e-6,
    # the optimizer's step holds most, until activations do
    memory=lambda batch: max(3 * GIB, 1.5 * GIB + 10 * MIB * batch),
    resident_bytes=int(1.5 * GIB),
)
SMALL_GPU = replace(HOPPER, device_memory_bytes=16 * GIB)


def growing(**changes):
    return replace(GROWS, **changes)


def device_sizes(known):
    """The micro-batches that device probes tried, in order."""
    return [a.config[BATCH] for a in known.asked(Stage.DEVICE)]


def test_the_ladder_climbs_to_the_limit_and_never_past_it():
    law = growing(physical_bytes=0.92 * 16 * GIB)
    known = job(law, machine=SMALL_GPU).run()
    largest = (0.92 * 16 * GIB - 1.5 * GIB) / (10 * MIB)
    assert not [t for t in known.trials if t.failure]
    assert 0.9 * largest < known.answer.config[BATCH] <= largest
    assert len(device_sizes(known)) < 16


def test_a_size_that_cannot_fit_is_left_out_and_told():
    known = job(GROWS, machine=SMALL_GPU).run()
    assert max(device_sizes(known)) * 10 * MIB + 1.5 * GIB <= 0.92 * 16 * GIB
    told = [text for text in known.scene.not_explored if text.startswith("micro-batch")]
    assert len(told) == 1
    assert told[0].startswith("micro-batch 2048 and more: needs at least")
    assert told[0].endswith("of 14.7 GiB")


@pytest.mark.parametrize("name", ["memory_gb<=8", "host_memory_gb<=8"])
def test_the_users_limit_is_climbed_to_on_the_cpu(name):
    limit = read_limit(name)
    known = job(GROWS, limits=(limit,))
    window = known.window
    known.window = lambda *args: replace(
        window(*args), host_memory_bytes=window(*args).memory_bytes
    )
    known.run()
    largest = (8 * GIB - 1.5 * GIB) / (10 * MIB)
    above = [size for size in device_sizes(known) if size > largest]
    assert len(above) <= 1  # one that may fit is tried, where failing does no harm
    assert 0.85 * largest < known.answer.config[BATCH] <= largest


def test_a_held_global_batch_is_tried_where_it_may_fit():
    law = growing(physical_bytes=0.92 * 16 * GIB)
    known = job(law, machine=SMALL_GPU, goal=Goal(size=4096)).run()
    assert set(device_sizes(known)) <= {2**n for n in range(13)}
    assert known.answer.config[BATCH] == 1024


SIZES = asking(
    loader__num_workers=(0, 2), train__batch_size=tuple(32 << n for n in range(9)),
    train__precision=("default", "bf16"),
)  # fmt: skip


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_sampler_asks_for_what_the_guard_has_refused(sampler):
    law = growing(physical_bytes=0.92 * 16 * GIB)
    known = job(law, machine=SMALL_GPU, request=SIZES, most=200).run(sampler)
    largest = (0.92 * 16 * GIB - 1.5 * GIB) / (10 * MIB)
    seen = []
    for row in known.trials:
        if row.sink is Sink.TRAIN and row.stage is not Stage.BASELINE:
            assert why_refused(row.config, seen, known.space, ()) == "", row.config
        seen.append(row)
    # Random order may try one that is too large before anything is known of such sizes.
    failed = [t for t in known.trials if t.status is Status.OUT_OF_MEMORY]
    assert len(failed) <= (0 if sampler == "staged" else 4)
    assert known.answer.config[BATCH] <= largest
    if sampler != "staged":
        assert any(text.startswith(TOO_LARGE) for text in known.scene.not_explored)


def test_a_size_that_ran_out_rules_out_larger_ones_alone():
    known = job(GROWS, machine=HOPPER)
    failure = Failure(status=Status.OUT_OF_MEMORY, message="device: no room")
    base = known.space.config({BATCH: 256})
    row = trial(base, failure=failure)

    def refused(changes, *rows):
        config = known.space.config(changes, base)
        return why_refused(config, rows or (row,), known.space, ())

    assert refused({}) == refused({BATCH: 512}) == "micro-batch 256 ran out of memory"
    assert refused({BATCH: 512, WORKERS: 4}) == "micro-batch 256 ran out of memory"
    assert refused({BATCH: 128}) == ""
    assert refused({"train.precision": "bf16"}) == ""  # another precision takes another amount
    ran = trial(known.space.config({WORKERS: 4}, base))
    assert refused({BATCH: 512, WORKERS: 8}, row, ran) == ""  # it was the loader's memory
    assert refused({BATCH: 512}, row, ran) == "micro-batch 256 ran out of memory"
    pinning = trial(base, failure=replace(failure, suspect=Suspect.PINNING))
    assert refused({BATCH: 512}, pinning) == ""
    assert refused({BATCH: 512}, trial(base, failure=replace(failure, status=Status.ERROR))) == ""


def test_memory_that_bends_costs_one_failure_at_most():
    law = growing(
        memory=lambda batch: 1.5 * GIB + 4 * MIB * batch + 20_000 * batch**2,
        physical_bytes=0.92 * 16 * GIB,
    )
    known = job(law, machine=SMALL_GPU).run()
    failed = [t for t in known.trials if t.status is Status.OUT_OF_MEMORY]
    assert len(failed) <= 2
    assert law.memory(known.answer.config[BATCH]) > 0.8 * 0.92 * 16 * GIB


def test_retries_of_the_allocator_are_no_fit():
    known = job(growing(retries_above=256), machine=SMALL_GPU).run()
    assert known.answer.config[BATCH] <= 256
    assert not [t for t in known.trials if t.stage is Stage.FINAL and t.config[BATCH] > 256]


def test_a_suspected_spill_is_told_and_no_candidate():
    known = job(growing(memory=lambda _: GIB, collapses_above=100)).run()
    told = [text for text in known.scene.not_explored if "suspected spill" in text]
    assert told
    assert known.answer.config[BATCH] <= 100
    assert not [a for a in known.end_to_end() if a.config[BATCH] > 100]


def test_memory_that_still_grows_keeps_a_margin():
    known = job(GROWS, machine=SMALL_GPU)
    near = trial(
        known.space.config({BATCH: 1300}), memory_bytes=int(14.5 * GIB), resident_bytes=GIB
    )
    grew = replace(near, measurement=replace(near.measurement, unsettled=(DEVICE_MEMORY,)))
    assert why_unfit(near, known.space, ()) == ""
    assert why_unfit(grew, known.space, ()) == "holds 14.5 of 13.2 GiB"


@pytest.mark.parametrize("suspect", [Suspect.PINNING, None])
def test_pinning_that_fails_is_tried_off_before_anything_else(suspect):
    """Case 13: page-locked memory is short while the device's own is free."""
    law = growing(memory=lambda _: GIB, load_s=1e-4)
    known = job(law, machine=HOPPER, current={**YOURS, PINNING: True})
    outcome = known.outcome

    def without_pinned_memory(ask):
        if ask.source is Source.LOADER and ask.config.get(PINNING):
            message = "device: AcceleratorError: CUDA error: out of memory"
            return Failure(status=Status.OUT_OF_MEMORY, message=message, suspect=suspect)
        return outcome(ask)

    known.outcome = without_pinned_memory
    known.run()
    verified = [a.config for a in known.asked(Stage.VERIFY)]
    if suspect:
        assert verified[1] == verified[0].but({PINNING: False})
        assert known.answer.config[PINNING] is False
    else:
        assert all(config[PINNING] for config in verified)


def test_where_lengths_vary_a_margin_is_kept():
    facts = replace(FACTS, varies=True)
    known = job(GROWS, machine=SMALL_GPU, facts=facts).run()
    assert GROWS.memory(known.answer.config[BATCH]) <= guard.LONGER_TO_COME * 0.92 * 16 * GIB
    assert known.answer.config[BATCH] > 1000


def test_without_a_limit_on_the_cpu_memory_does_not_matter():
    free, bound = job(growing(resident_bytes=None)).run(), job(GROWS).run()
    assert [a.config for a in free.asks] == [a.config for a in bound.asks]


# --- every searcher -----------------------------------------------------------------------------

FEW = asking(
    loader__num_workers=(0, 2, 8), train__batch_size=(32, 128), train__precision=("default", "bf16")
)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", LAWS)
def test_a_small_space_is_searched_to_the_end(sampler, name):
    known = job(LAWS[name], request=FEW).run(sampler)
    assert known.found() > 0.98


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("request_of", [EVERYTHING, FEW], ids=["all", "few"])
def test_nothing_is_asked_for_twice_but_finals(sampler, request_of):
    known = job(LAWS["a loader that waits"], request=request_of).run(sampler)
    once = [(a.config, a.source, a.sink) for a in known.asks if a.stage not in CLOSING]
    assert len(set(once)) == len(once)
    finals = [(a.config, a.round) for a in known.asked(Stage.FINAL)]
    assert len(set(finals)) == len(finals)
    measured = {(a.config, a.source, a.sink) for a in known.asks if a.stage is not Stage.PATH}
    assert not [a for a in known.asked(Stage.PATH) if (a.config, a.source, a.sink) in measured]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("most", [1, 2, 5, 8, 12, 20])
def test_no_more_is_asked_for_than_is_paid_for(sampler, most):
    known = job(LAWS["a loader that waits"], most=most).run(sampler)
    assert len(known.asks) <= max(most, 1)
    kept_back = [a for a in known.asks if a.stage not in CLOSING]
    assert len(kept_back) <= max(most - KEPT_BACK, 1)
    if sampler == "staged" and most >= 20:
        assert known.answer.verified
    if known.answer is not None and not known.answer.keep:
        assert known.answer.verified


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_what_may_be_tried_is_asked_for_end_to_end(sampler):
    known = job(LAWS["both halves alike"], facts=FACTS).run(sampler)
    others = [a for a in known.end_to_end() if a.stage not in (Stage.BASELINE, *CLOSING)]
    assert all(known.space.admits(ask.config) for ask in others)
    assert all(ask.why for ask in known.asks)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_asks_the_same(sampler):
    one, two = (job(LAWS["both halves alike"], request=FEW).run(sampler) for _ in range(2))
    assert one.asks == two.asks


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_everything_may_fail(sampler):
    law = Law(**{**vars(LAWS["launches cost most"]), "fails_above": 0})
    known = job(law, request=FEW).run(sampler)
    assert known.answer is None
    assert not known.asked(Stage.FINAL)


# --- finals and path ----------------------------------------------------------------------------


def test_finals_are_interleaved_and_turned_round_each_time():
    known = job(LAWS["a loader that waits"]).run()
    finals = known.asked(Stage.FINAL)
    rounds = {a.round for a in finals}
    assert len(rounds) >= 3
    orders = [[a.config for a in finals if a.round == turn] for turn in sorted(rounds)]
    assert all(known.space.baseline in order for order in orders)
    assert orders[0] == orders[1][::-1] == orders[2]
    assert sum(a.fresh for a in finals) == 1


def test_an_ambiguous_answer_gets_more_rounds():
    known = job(LAWS["a loader that waits"])
    known.course.is_ambiguous = lambda: True
    assert len({a.round for a in known.run().asked(Stage.FINAL)}) == 6


def test_the_path_leads_from_the_baseline_to_the_answer_one_family_at_a_time():
    law = Law(
        load_s=1e-2, launch_s=2e-3, sample_s=1e-4, speedups={("train.precision", "bf16"): 2.0}
    )
    known = job(law, machine=HOPPER).run()
    steps = path_configs(known.space, known.space.baseline, known.answer.config)
    assert steps[0] == known.space.baseline
    assert steps[-1] == known.answer.config
    assert len(set(steps)) == len(steps) <= 5
    measured = {t.config for t in known.trials if t.end_to_end and t.ok}
    assert set(steps) <= measured
    assert len(known.asked(Stage.PATH)) <= 4


def test_a_step_of_the_path_that_does_not_fit_is_left_out():
    """A larger batch that only fits with the precision that comes after it."""

    class Halved(Law):
        def fits(self, config, batch):
            return batch <= (64 if config.get("train.precision") == "bf16" else 32)

    speedups = {("train.precision", "bf16"): 1.5}
    law = Halved(load_s=1e-3, launch_s=2e-2, sample_s=1e-5, speedups=speedups)
    request = asking(
        loader__num_workers=(0, 4, 8), train__batch_size=(16, 32, 64),
        train__precision=("default", "bf16"),
    )  # fmt: skip
    known = job(law, request=request)
    outcome = known.outcome

    def fitting_or_not(ask):
        if ask.sink is Sink.TRAIN and not law.fits(ask.config, ask.config[BATCH]):
            return Failure(status=Status.OUT_OF_MEMORY, message="device: no room")
        return outcome(ask)

    known.outcome = fitting_or_not
    known.run()
    failed = [t.config for t in known.trials if t.status is Status.OUT_OF_MEMORY]
    assert known.answer.config[BATCH] == 64
    assert failed
    assert len(failed) == len(set(failed)) <= 2
    assert not [t for t in known.trials if t.stage in (Stage.PATH, Stage.CLIMB) and t.failure]


def test_ceilings_are_asked_of_each_half_alone():
    known = job(LAWS["both halves alike"]).run()
    for ask in known.asks:
        if ask.stage is Stage.DEVICE:
            assert ask.source is Source.CACHED
        if ask.source is Source.CACHED:
            assert ask.stage is Stage.DEVICE
