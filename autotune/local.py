"""Search around the best config, for jobs whose two halves do not add up.

On a CPU, loader and step take each other's cores; knobs may help only together. Then what a config
makes is not what its halves promise, and the ladders may have missed it: from the best one on, one
knob after the other is turned, where no ceiling rules that out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, pstdev

from autotune.ceilings import Ceilings
from autotune.halves import WORTH
from autotune.scene import Ask, Climb, Plan, Scene, gain, speed_of
from autotune.space import ACCUMULATION, BATCH, PERSISTENT, WORKERS
from autotune.types import Config, Stage, Trial, Value, whole

HOLDS = 0.03
"""How far measured rates may scatter about predicted ones, and lie off them, relative."""
MOST_LOCAL = 30
"""Probes of this search: it ends by itself where no neighbour gains."""


def spend(scene: Scene, ceilings: Ceilings) -> Plan:
    """Neighbours of the best config, until none gains, while predictions miss."""
    best = scene.best()
    tried = 0
    while best is not None and not structure_holds(scene, ceilings):
        better = yield from _better(scene, ceilings, best, MOST_LOCAL - tried)
        tried = sum(trial.stage is Stage.LOCAL for trial in scene.end_to_end)
        if better is None:
            return
        best = better


def structure_holds(scene: Scene, ceilings: Ceilings) -> bool:
    """Whether what was measured together is what the halves by themselves promise."""
    misses = []
    for trial in scene.end_to_end:
        expected, reached = ceilings.expected(trial.config), speed_of(trial)
        if expected is not None and reached is not None:
            misses.append(_miss(reached.value, *expected))
    if not misses:
        return True
    return abs(fmean(misses)) <= HOLDS and pstdev(misses) <= HOLDS


def _miss(reached: float, low: float, high: float) -> float:
    """How far a rate lies outside what is expected, in log units."""
    return math.log(reached / min(max(reached, low), high))


def _better(scene: Scene, ceilings: Ceilings, best: Trial, left: int) -> Climb:
    for config, why in _neighbours(scene, ceilings, best.config):
        if left < 1 or not scene.may_search(Stage.LOCAL):
            scene.leave_out("more neighbours of the best config: no probes were left for them")
            return None
        left -= 1
        trial = yield Ask(config=config, stage=Stage.LOCAL, why=why, beat=scene.to_beat())
        if trial.ok and scene.fits(trial) and gain(scene, trial, best) > WORTH:
            return trial
    return None


def _neighbours(scene: Scene, ceilings: Ceilings, config: Config) -> Iterator[tuple[Config, str]]:
    """Configs that differ in one knob and are not ruled out, the most promising first."""
    found: dict[Config, str] = {}
    for name in scene.space.searched():
        # An epoch's border is seldom in a short window: its cost is measured by itself.
        if name in (BATCH, ACCUMULATION, PERSISTENT) or name not in config:
            continue
        for value in _other_values(scene, name, config[name]):
            found[_changed(scene, ceilings, config, name, value)] = f"{name}={value}"
    for batch, steps in _sizes_beside(scene, config):
        sized = scene.space.config({BATCH: batch, ACCUMULATION: steps}, config)
        found[sized] = f"micro-batch {batch}"
    unknown = [c for c in found if scene.row_of(c) is None and scene.space.admits(c)]
    unknown.sort(key=lambda other: -_promise(ceilings, other))
    return (
        (c, found[c])
        for c in unknown
        if not ceilings.cannot_beat(c, scene.to_beat()) and not scene.rules_out(c)
    )


def _changed(scene: Scene, ceilings: Ceilings, config: Config, name: str, value: Value) -> Config:
    if name == WORKERS:
        return ceilings.with_workers(config, whole(value))
    return scene.space.config({name: value}, config)


def _promise(ceilings: Ceilings, config: Config) -> float:
    """What a config should make at best; of what is unknown nothing is promised."""
    expected = ceilings.expected(config)
    return 0.0 if expected is None else expected[1]


def _other_values(scene: Scene, name: str, own: Value) -> list[Value]:
    """A number's neighbours, or every other word."""
    values = scene.space.values[name]
    if not isinstance(own, int) or isinstance(own, bool):
        return [value for value in values if value != own]
    return notches(values, own)


def _sizes_beside(scene: Scene, config: Config) -> list[tuple[int, int]]:
    """The next smaller and larger micro-batch, with about the same samples a step."""
    space, own = scene.space, scene.space.micro_batch(config)
    wanted = space.global_batch(config)
    sizes = sorted({batch for batch, _ in space.pairs()})
    below, above = [s for s in sizes if s < own], [s for s in sizes if s > own]
    found = []
    for size in (*below[-1:], *above[:1]):
        steps = [count for batch, count in space.pairs() if batch == size]
        found.append((size, min(steps, key=lambda count: abs(count * size - wanted))))
    return found


def notches(values: tuple[Value, ...], current: Value, *, up_first: bool = False) -> list[Value]:
    """The values next to the current one."""
    ordered = sorted(values, key=whole)
    below = [value for value in ordered if whole(value) < whole(current)][-1:]
    above = [value for value in ordered if whole(value) > whole(current)][:1]
    return [*above, *below] if up_first else [*below, *above]
