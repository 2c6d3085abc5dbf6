"""Where loader and step do not add up, the neighbours of the best config are searched."""

from dataclasses import dataclass

import pytest
from made_up import asking
from oracle import Job, Law

from autotune.ceilings import Ceilings
from autotune.local import HOLDS, structure_holds
from autotune.scene import speed_of
from autotune.space import BATCH, PREFETCH, WAIT_POLICY, WORKERS
from autotune.types import Stage

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
