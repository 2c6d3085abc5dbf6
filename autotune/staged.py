"""The default searcher: ceilings, composition, verification, climbing, simplification."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from autotune.ceilings import Ceilings
from autotune.halves import SLACK, WORTH
from autotune.local import notches, spend
from autotune.scene import Ask, Climb, Plan, Scene, data_wait, first_guesses, gain, speed_of
from autotune.space import (
    ACCUMULATION,
    BATCH,
    PERSISTENT,
    PINNING,
    PREFETCH,
    THREADS,
    WAIT_POLICY,
    WORKERS,
)
from autotune.types import Config, Label, Stage, Status, Suspect, Trial, whole

MOST_VERIFIED = 6
MISSED = 0.8
"""Share of its prediction below which loader and step are taken to be in each other's way."""
WAITS = 0.02
"""Share of waiting for data below which loader settings are left alone."""
WORTH_A_GLANCE = 1.2
"""A loader that should gain this much is run with the user's own step before that is searched."""
HOPELESS = 0.9
"""A prediction this far below the best measured rate is not worth a probe."""


def staged(scene: Scene) -> Plan:
    """Ceilings of each half, composed, verified in the order of their bounds, then climbed."""
    ceilings = Ceilings(scene)
    yield from ceilings.first_look()
    yield from again_if_cold(scene)
    if ceilings.halves.start in ceilings.halves.device:
        yield from ceilings.loader.climb()
        yield from glance(scene, ceilings)
    yield from ceilings.device.climb()
    yield from ceilings.loader.climb()
    yield from verify(scene, ceilings)
    yield from climb(scene, ceilings)
    yield from spend(scene, ceilings)
    yield from simplify(scene, ceilings)
    yield from ceilings.device.price_of_the_global_batch()


def again_if_cold(scene: Scene) -> Plan:
    """The baseline once more where it read from storage: the rows after it will not."""
    baseline = scene.space.baseline
    row = scene.row_of(baseline)
    if row is None or Label.COLD not in row.labels or not scene.may_probe(Stage.BASELINE):
        return
    yield Ask(config=baseline, stage=Stage.BASELINE, why="again, from the page cache")


def glance(scene: Scene, ceilings: Ceilings) -> Plan:
    """The loader that was found, end to end at once where it should pay: a first thing to beat."""
    own, best = scene.row_of(ceilings.halves.start), next(iter(ceilings.candidates()), None)
    known = None if own is None else speed_of(own)
    if best is None or known is None or best.predicted < WORTH_A_GLANCE * known.value:
        return
    if scene.row_of(best.config) is None and scene.may_measure(Stage.VERIFY):
        trial = yield from _together(scene, best.config, scene.to_beat())
        if best.workers and _misses(trial, best.predicted):
            yield from share_cores(scene, best.config)


def verify(scene: Scene, ceilings: Ceilings) -> Plan:
    """End to end, in descending order; stops when no remaining bound beats the incumbent."""
    yield from first_guesses(scene, Stage.VERIFY)
    verified = 0
    for candidate in ceilings.candidates():
        incumbent = scene.to_beat()
        if ceilings.cannot_beat(candidate.config, incumbent):
            scene.leave_out("other pairs of loader and device: their bounds are no higher")
            continue
        if incumbent and candidate.at_best < HOPELESS * incumbent:
            scene.leave_out("other pairs of loader and device: predicted to be slower")
            return
        if scene.row_of(candidate.config) is not None or scene.rules_out(candidate.config):
            continue
        if verified >= MOST_VERIFIED or not scene.may_measure(Stage.VERIFY):
            scene.leave_out("some pairs of loader and device: no probes were left for them")
            return
        verified += 1
        trial = yield from _together(scene, candidate.config, incumbent)
        reached = speed_of(trial)
        if reached is not None and reached.low > candidate.bound * (1 + SLACK):
            ceilings.bounds_hold = False
        if candidate.workers and _misses(trial, candidate.predicted):
            yield from share_cores(scene, candidate.config)


def _together(scene: Scene, config: Config, beat: float | None) -> Generator[Ask, Trial, Trial]:
    """A pair as it is; where page-locked memory runs out, the same batch without it."""
    trial = yield Ask(config=config, stage=Stage.VERIFY, why="together", beat=beat)
    unpinned = scene.space.config({PINNING: False}, config)
    known = scene.row_of(unpinned) is not None or not scene.space.admits(unpinned)
    if known or not pinning_failed(trial) or not scene.may_measure(Stage.VERIFY):
        return trial
    return (yield Ask(config=unpinned, stage=Stage.VERIFY, why="together, not pinned", beat=beat))


def pinning_failed(trial: Trial) -> bool:
    """Whether it was pinned host memory that there was too little of, not the device's."""
    suspect = None if trial.failure is None else trial.failure.suspect
    return suspect is Suspect.PINNING and bool(trial.config.get(PINNING))


def _misses(trial: Trial, predicted: float) -> bool:
    """Whether loader and step, which ran together, are far slower than each half allows."""
    reached = speed_of(trial)
    if reached is None:
        return trial.status is Status.DOMINATED
    return reached.value < MISSED * predicted


def share_cores(scene: Scene, config: Config) -> Plan:
    """Let the step leave its cores to the workers, whether or not the config is the best so far.

    OpenMP's threads spin while they wait for each other, and next to busy workers they wait long:
    that hides a loader setting which is the best one as soon as they do not.
    """
    for neighbour, why in _sharing_neighbours(scene, config):
        if scene.row_of(neighbour) is not None or not scene.space.admits(neighbour):
            continue
        if not scene.may_measure(Stage.CLIMB):
            return
        yield Ask(config=neighbour, stage=Stage.CLIMB, why=why, beat=scene.to_beat())


def climb(scene: Scene, ceilings: Ceilings) -> Plan:
    """One notch at a time on the knobs that the two halves share, while that gains."""
    best = scene.best()
    while best is not None:
        better = yield from _better_neighbour(scene, ceilings, best)
        if better is None:
            return
        best = better


def _better_neighbour(scene: Scene, ceilings: Ceilings, best: Trial) -> Climb:
    for config, why in _neighbours(scene, ceilings, best):
        known = scene.row_of(config) is not None or scene.rules_out(config)
        if known or not scene.space.admits(config):
            continue
        if ceilings.cannot_beat(config, scene.to_beat()):
            continue
        if not scene.may_measure(Stage.CLIMB):
            scene.leave_out("more neighbours of the best config: no probes were left for them")
            return None
        trial = yield Ask(config=config, stage=Stage.CLIMB, why=why, beat=scene.to_beat())
        if trial.ok and scene.fits(trial) and gain(scene, trial, best) > WORTH:
            return trial
    return None


def _neighbours(scene: Scene, ceilings: Ceilings, best: Trial) -> Iterator[tuple[Config, str]]:
    """Configs one notch away, the likeliest gain first."""
    if best.config.get(WORKERS):
        yield from _sharing_neighbours(scene, best.config)
    if data_wait(best) > WAITS:
        yield from _loader_neighbours(scene, ceilings, best.config)


def _sharing_neighbours(scene: Scene, config: Config) -> Iterator[tuple[Config, str]]:
    """How the step shares a CPU machine's cores with the loader's workers."""
    space = scene.space
    if WAIT_POLICY in space.searched():
        for value in space.values[WAIT_POLICY]:
            yield space.config({WAIT_POLICY: value}, config), f"OpenMP {value}"
    if THREADS in space.searched():
        for value in notches(space.values[THREADS], config.get(THREADS)):
            yield space.config({THREADS: value}, config), f"{value} threads beside the workers"


def _loader_neighbours(
    scene: Scene, ceilings: Ceilings, config: Config
) -> Iterator[tuple[Config, str]]:
    space, workers = scene.space, whole(config.get(WORKERS))
    if WORKERS in space.searched() and not ceilings.loader.feeds(workers):
        for value in notches(space.values[WORKERS], workers, up_first=True):
            if ceilings.loader.may_run(whole(value)):
                yield ceilings.with_workers(config, whole(value)), f"{value} workers"
    if workers and PREFETCH in space.searched():
        for value in notches(space.values[PREFETCH], config.get(PREFETCH), up_first=True):
            yield space.config({PREFETCH: value}, config), f"prefetch factor {value}"


def simplify(scene: Scene, ceilings: Ceilings) -> Plan:
    """Measure the best config without each of its changes: one that does not pay is taken back.

    A change whose ceiling shows that it pays need not be measured once more.
    """
    best = scene.best()
    if best is None:
        return
    base = scene.space.start
    for group in _changed_groups(best.config, base):
        best = scene.best() or best
        own = {name: base[name] for name in group if name in base}
        reverted = scene.space.config(own, best.config)
        if scene.row_of(reverted) is not None or not scene.space.admits(reverted):
            continue
        if ceilings.cannot_beat(reverted, scene.to_beat()) or scene.rules_out(reverted):
            continue
        if not scene.may_measure(Stage.CLIMB):
            return
        told = ", ".join(group)
        yield Ask(config=reverted, stage=Stage.CLIMB, why=f"without {told}", beat=scene.to_beat())


def _changed_groups(config: Config, base: Config) -> list[tuple[str, ...]]:
    """Changed knobs, those together that only make sense together, the last in the table first."""
    changed = config.changed_from(base)
    groups: list[tuple[str, ...]] = []
    for name in changed:
        depends_on_workers = name in (PREFETCH, PERSISTENT) and WORKERS in changed
        depends_on_batch = name == ACCUMULATION and BATCH in changed
        if not depends_on_workers and not depends_on_batch:
            groups.append((BATCH, ACCUMULATION) if name == BATCH else (name,))
    return groups[::-1]
