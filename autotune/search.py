"""The searchers, and what each of them ends with. Only this file and `store.py` know Optuna."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.knobs import KNOBS, Family
from autotune.scene import ROUNDS, Ask, Plan, Scene, gain
from autotune.space import ACCUMULATION, BATCH, PERSISTENT, PREFETCH, Space
from autotune.staged import staged
from autotune.types import Config, Stage, Trial, Value

if TYPE_CHECKING:
    import optuna

MOST_FINALISTS = 3
"""The baseline among them."""
NEAR = 1.04
"""Rows of one probe each that differ less than this could be tied."""
MOST_ROUNDS = 6
MOST_PATH = 4


def plan(sampler: str, scene: Scene) -> Plan:
    """The whole run after inspection and baseline: search, finals, path."""
    yield from SAMPLERS[sampler](scene)
    yield from finals(scene)
    yield from path(scene)


# --- what every searcher ends with ------------------------------------------------------------


def finals(scene: Scene) -> Plan:
    """Fresh processes of the finalists and the baseline, interleaved, order reversed each round."""
    finalists = _finalists(scene)
    baseline = scene.space.baseline
    if not finalists or finalists == [baseline]:
        return
    order = [baseline, *(config for config in finalists if config != baseline)]
    for turn in range(MOST_ROUNDS):
        if not scene.affords(Stage.FINAL, len(order)):
            return
        if turn >= ROUNDS and not scene.ambiguous():
            return
        for config in order if turn % 2 == 0 else order[::-1]:
            last = turn == ROUNDS - 1 and config == finalists[0]
            yield Ask(
                config=config, stage=Stage.FINAL, why=f"final {turn + 1}", fresh=last, round=turn
            )


def _finalists(scene: Scene) -> list[Config]:
    """The best config, and of those that could be tied with it the simplest ones."""
    best = scene.best()
    if best is None:
        return []
    rows = {t.config: t for t in scene.end_to_end if t.ok and scene.fits(t)}
    ranked = sorted(rows.values(), key=scene.score, reverse=True)
    baseline = scene.space.baseline
    near = [t.config for t in ranked if gain(scene, best, t) < NEAR and t.config != baseline]
    most = MOST_FINALISTS if scene.affords(Stage.FINAL, ROUNDS * MOST_FINALISTS) else 1
    others = near[:1] + sorted(near[1:], key=lambda config: len(config.changed_from(baseline)))
    return others[: max(1, most - 1)] if others else [best.config]


def path(scene: Scene) -> Plan:
    """The measured steps from the baseline to the answer, one family of knobs at a time."""
    answer, baseline = scene.answer(), scene.space.baseline
    measured = 0
    for config in path_configs(scene.space, baseline, answer)[1:-1]:
        row = scene.row_of(config)
        if measured >= MOST_PATH or (row is not None and row.ok):
            continue
        if not scene.affords(Stage.PATH, 1):
            return
        measured += 1
        yield Ask(config=config, stage=Stage.PATH, why="a step of the path")


def path_configs(space: Space, baseline: Config, answer: Config) -> list[Config]:
    """Cumulative configs from the baseline to the answer; each differs from the one before."""
    steps = [baseline]
    for family in Family:
        names = [n for n in answer if KNOBS[n].family is family]
        if family is Family.LOADER:
            names += [n for n in (PREFETCH, PERSISTENT) if n in answer]
        config = space.config({name: answer[name] for name in names}, steps[-1])
        if config != steps[-1]:
            steps.append(config)
    return steps


# --- the general searchers ----------------------------------------------------------------------


def grid(scene: Scene) -> Plan:
    """Every config, in order."""
    yield from _measure_all(scene, scene.space.grid())


def randomly(scene: Scene) -> Plan:
    """Every config, shuffled."""
    configs = list(scene.space.grid())
    random.Random(scene.seed).shuffle(configs)
    yield from _measure_all(scene, configs)


def tpe(scene: Scene) -> Plan:
    """Optuna's TPE; a failure is told as one, never as a slow config."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=scene.seed)
    )
    total = sum(1 for _ in scene.space.grid())
    seen: set[Config] = set()
    for _ in range(10 * total):
        if len(seen) >= total or not scene.affords(Stage.SEARCH, 1):
            return
        asked = study.ask()
        config = _suggested(asked, scene.space)
        row = scene.row_of(config)
        if row is None:
            row = yield Ask(config=config, stage=Stage.SEARCH, why="TPE")
        seen.add(config)
        _tell(study, asked, scene, row)


def _tell(study: optuna.Study, asked: Any, scene: Scene, row: Trial) -> None:
    import optuna

    if row.ok and scene.fits(row):
        study.tell(asked, scene.score(row))
    else:
        study.tell(asked, state=optuna.trial.TrialState.FAIL)


def _suggested(asked: Any, space: Space) -> Config:
    pairs = {f"{batch}x{steps}": (batch, steps) for batch, steps in space.pairs()}
    batch, steps = pairs[asked.suggest_categorical("batch x accumulation", list(pairs))]
    changes: dict[str, Value] = {BATCH: batch, ACCUMULATION: steps}
    for name in space.searched():
        if name not in (BATCH, ACCUMULATION):
            changes[name] = asked.suggest_categorical(name, list(space.values[name]))
    return space.config(changes)


def _measure_all(scene: Scene, configs: Iterable[Config]) -> Plan:
    for config in configs:
        if scene.row_of(config) is not None:
            continue
        if not scene.affords(Stage.SEARCH, 1):
            scene.leave_out("the rest of the space: the budget ended")
            return
        yield Ask(config=config, stage=Stage.SEARCH, why="search", beat=None)


SAMPLERS: Mapping[str, Callable[[Scene], Plan]] = {
    "staged": staged,
    "random": randomly,
    "tpe": tpe,
    "grid": grid,
}
