"""What the search is compared with: how people and general tools go about it. A row each.

All of them probe end to end, with the same windows, costs and failures as the search, and report
the best row so far. A failure is told as one, never as a slow config.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from autotune.scene import Ask, Climb, Plan, Scene
from autotune.search import randomly, suggested
from autotune.space import ACCUMULATION, BATCH, WORKERS
from autotune.types import Config, Stage, Trial, Value, whole

MOST_ASKS = 10_000


def probe(config: Config) -> Ask:
    """An end-to-end probe without any knowledge of what it has to beat."""
    return Ask(config=config, stage=Stage.SEARCH, why="search")


def default(scene: Scene) -> Plan:
    """No search: what the user has."""
    yield probe(scene.space.baseline)


def coordinate(scene: Scene) -> Plan:
    """One pass over the knobs, as Lightning and DeepSpeed go about the batch.

    The batch is doubled until it fails or gains nothing, then the workers; every other knob's
    values are tried once.
    """
    best = yield probe(scene.space.baseline)
    for name in (BATCH, WORKERS):
        best = yield from _doubled(scene, name, best)
    for name in scene.space.searched():
        if name not in (BATCH, ACCUMULATION, WORKERS):
            best = yield from _tried(scene, name, best)


def _doubled(scene: Scene, name: str, best: Trial) -> Generator[Ask, Trial, Trial]:
    """Up while that gains."""
    own = whole(best.config.get(name))
    for value in sorted(scene.space.values.get(name, ()), key=whole):
        if whole(value) > own:
            row = yield probe(scene.space.config({name: value}, best.config))
            if not _beats(scene, row, best):
                break
            best = row
    return best


def _tried(scene: Scene, name: str, best: Trial) -> Generator[Ask, Trial, Trial]:
    """Every value once."""
    for value in scene.space.values[name]:
        config = scene.space.config({name: value}, best.config)
        if scene.row_of(config) is None:
            row = yield probe(config)
            best = row if _beats(scene, row, best) else best
    return best


def local(scene: Scene) -> Plan:
    """Iterated greedy search over one-knob neighbours: from the user's config, then from any."""
    dice = random.Random(scene.seed)
    configs = list(scene.space.grid())
    start: Config | None = scene.space.baseline
    while start is not None:
        best: Trial | None = scene.row_of(start) or (yield probe(start))
        while best is not None:
            best = yield from _better(scene, best, dice)
        unknown = [config for config in configs if scene.row_of(config) is None]
        start = dice.choice(unknown) if unknown else None


def _better(scene: Scene, best: Trial, dice: random.Random) -> Climb:
    """The first neighbour that beats it, in random order."""
    around = list(neighbours(scene, best.config))
    dice.shuffle(around)
    for config in around:
        row = scene.row_of(config) or (yield probe(config))
        if _beats(scene, row, best):
            return row
    return None


def neighbours(scene: Scene, config: Config) -> Iterator[Config]:
    """Every config that differs in one knob: by one notch if it is a number."""
    space = scene.space
    for name in space.searched():
        values = space.values[name]
        if name not in config:
            continue
        for value in _next_to(values, config[name]):
            other = space.config({name: value}, config)
            if other != config and space.admits(other):
                yield other


def _next_to(values: Sequence[Value], own: Value) -> list[Value]:
    if not isinstance(own, int) or isinstance(own, bool):
        return [value for value in values if value != own]
    ordered = sorted(values, key=whole)
    place = ordered.index(own) if own in ordered else 0
    return ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2]


def _beats(scene: Scene, row: Trial, best: Trial) -> bool:
    if not row.ok:
        return False
    return not best.ok or scene.score(row) > scene.score(best)


def with_optuna(make: Callable[[int], Any]) -> Callable[[Scene], Plan]:
    """A search by one of Optuna's samplers, all knobs as categories."""

    def search(scene: Scene) -> Plan:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(direction="maximize", sampler=make(scene.seed))
        for _ in range(MOST_ASKS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                asked = study.ask()
                config = suggested(asked, scene.space)
            row = scene.row_of(config) or (yield probe(config))
            if row.ok:
                study.tell(asked, scene.score(row))
            else:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)

    return search


def _tpe(seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed)


def _gp(seed: int) -> Any:
    import optuna

    return optuna.samplers.GPSampler(seed=seed, deterministic_objective=False)


def _nsga2(seed: int) -> Any:
    import optuna

    return optuna.samplers.NSGAIISampler(seed=seed, population_size=10)


COMPARATORS: Mapping[str, Callable[[Scene], Plan]] = {
    "default": default,
    "one-pass coordinate": coordinate,
    "random": randomly,
    "local": local,
    "TPE": with_optuna(_tpe),
    "NSGA-II": with_optuna(_nsga2),
    "GP": with_optuna(_gp),
}
"""The Gaussian process last: an ask of it takes a second."""


def expected_of_random(shares: Sequence[float], draws: int) -> float:
    """What the best of some draws without replacement is expected to make (METHODS (c)).

    Args:
        shares: Every config's rate as a share of the optimum's, 0 for what fails.
        draws: How many configs are drawn.
    """
    ordered = sorted(shares)
    total = len(ordered)
    draws = min(draws, total)
    place = round(draws * (total + 1) / (draws + 1))
    return ordered[min(max(place, 1), total) - 1]


def chance_of_random(shares: Sequence[float], draws: int, least: float) -> float:
    """How likely some draws without replacement hold a config of that share at least."""
    total, good = len(shares), sum(share >= least for share in shares)
    missed = 1.0
    for turn in range(min(draws, total)):
        missed *= max(0, total - good - turn) / (total - turn)
    return 1 - missed
