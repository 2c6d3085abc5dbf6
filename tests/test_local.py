"""Where loader and step do not add up, the neighbours of the best config are searched."""

from dataclasses import dataclass

import pytest
from made_up import asking
from oracle import Job, Law

from autotune.ceilings import Ceilings
from autotune.local import HOLDS, structure_holds
from autotune.scene import speed_of
from autotune.space import BATCH, PREFETCH, THREADS, WAIT_POLICY, WORKERS
from autotune.types import Stage

PRECISION = "train.precision"
YOURS = {WORKERS: 0, BATCH: 32}
WORDS = {
    "loader__num_workers": (0, 1, 2, 4, 8),
    "loader__prefetch_factor": (2, 4, 8),
    "train__batch_size": (16, 32, 64),
    "host__omp_wait_policy": ("default", "passive"),
}


@dataclass(kw_only=True)
class Clashing(Law):
    """Workers get in the step's way, unless threads sleep and the queues are deep."""

    def together(self, config, batch, cpus):
        made = super().together(config, batch, cpus)
        if not config.get(WORKERS):
            return made
        calm = 0.7 if config.get(WAIT_POLICY) == "default" else 1.0
        return made * calm * {2: 0.8, 4: 0.9}.get(config.get(PREFETCH), 1.0)


def job(law, **changes):
    request = asking(**WORDS)
    return Job(law=law, request=request, **{"current": YOURS, **changes})


CLASHING = Clashing(load_s=2e-3, launch_s=4e-3, sample_s=2e-4)
ADDING = Law(load_s=2e-3, launch_s=4e-3, sample_s=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_what_only_pays_beside_workers_is_found(seed):
    known = job(CLASHING, seed=seed).run()
    assert known.asked(Stage.LOCAL)
    assert known.answer.config[WAIT_POLICY] == "passive"
    assert known.found() > 0.98


def test_where_the_halves_add_up_nothing_is_searched_around_the_best():
    known = job(ADDING).run()
    assert known.found() > 0.98
    assert not known.asked(Stage.LOCAL)


def test_local_search_ends_with_the_budget_and_says_so():
    known = job(CLASHING, most=16).run()
    assert len(known.asks) <= 16
    assert known.answer is not None


def test_whether_the_structure_holds_is_told_by_what_was_measured_together():
    adding, clashing = job(ADDING).run(), job(CLASHING).run()
    for known, holds in ((adding, True), (clashing, False)):
        ceilings = Ceilings(known.scene)
        for row in known.trials:  # what the ladders had learnt
            if row.stage is Stage.LOADER and row.ok:
                ceilings.halves.loader[row.config.get(WORKERS) or 0] = row
            if row.stage is Stage.DEVICE and row.ok:
                ceilings.halves.device[row.config] = speed_of(row)
        assert structure_holds(known.scene, ceilings) is holds
    assert 0 < HOLDS < 0.1


# --- screening: knobs that pay only beside each other ---------------------------------------------


@dataclass(kw_only=True)
class Paired(Law):
    """bf16 costs a little beside eight threads, and gains much beside four, which gain anyway."""

    def device(self, config, batch):
        few, half = config.get(THREADS) == 4, config.get(PRECISION) == "bf16"
        return super().device(config, batch) * {(1, 0): 1.1, (0, 1): 0.95, (1, 1): 1.6}.get(
            (few, half), 1.0
        )


def test_what_lost_little_is_tried_again_after_another_knob_was_turned():
    request = asking(train__precision=("default", "bf16"), host__threads=(4, 8))
    law = Paired(load_s=1e-7, launch_s=4e-3, sample_s=2e-4)
    known = Job(law=law, request=request, current={**YOURS, THREADS: 8}).run()
    assert known.answer.config[THREADS] == 4
    assert known.answer.config[PRECISION] == "bf16"
    tried = [a.config for a in known.asked(Stage.DEVICE) if a.config[PRECISION] == "bf16"]
    assert [config[THREADS] for config in tried] == [8, 4]


@dataclass(kw_only=True)
class Lighter(Law):
    """bf16 makes samples cheap, so that a step's launch is worth more of them."""

    def device(self, config, batch):
        each_s = self.sample_s / (20 if config.get(PRECISION) == "bf16" else 1)
        return batch / (self.launch_s + each_s * batch)


def test_micro_batches_are_climbed_again_after_the_precision():
    request = asking(
        train__batch_size=(32, 64, 128, 256, 512, 1024), train__precision=("default", "bf16")
    )
    law = Lighter(load_s=1e-8, launch_s=1e-3, sample_s=1e-3)
    known = Job(law=law, request=request, current=YOURS).run()
    assert known.answer.config[PRECISION] == "bf16"
    assert known.answer.config[BATCH] >= 512
    assert known.found() > 0.97
    own = [a.config[BATCH] for a in known.asked(Stage.DEVICE) if a.config[PRECISION] != "bf16"]
    assert max(own) < 512  # with the user's precision they do not pay
