"""The searchers, and what each of them ends with. Only this file and `store.py` know Optuna."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.knobs import KNOBS, Family
from autotune.metrics import SPEED
from autotune.pareto import ROUNDS
from autotune.scene import Ask, Plan, Scene, first_guesses, gain, speed_of
from autotune.space import ACCUMULATION, BATCH, PERSISTENT, PREFETCH, WORKERS, Space
from autotune.staged import staged
from autotune.types import Config, Stage, Trial, Value, whole

if TYPE_CHECKING:
    import optuna

MOST_FINALISTS = 3
"""The baseline among them."""
NEAR = 1.04
"""Rows of one probe each that differ less than this could be tied."""
AS_GOOD = 1.02
"""Rows that differ less than this are told apart by how simple they are."""
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
    order = [config for config in finalists if config != baseline]
    row = scene.row_of(baseline)
    if row is not None and row.ok:  # what fails is no reference
        order.insert(0, baseline)
    for turn in range(MOST_ROUNDS):
        while len(order) > 2 and not _may_repeat(scene, order):
            order.pop()  # rather two configs for certain than three in doubt
        if not _may_repeat(scene, order):
            return
        if turn >= ROUNDS and not scene.ambiguous():
            return
        for config in order if turn % 2 == 0 else order[::-1]:
            last = turn == ROUNDS - 1 and config == finalists[0]
            yield Ask(
                config=config, stage=Stage.FINAL, why=f"final {turn + 1}", fresh=last, round=turn
            )


def _may_repeat(scene: Scene, order: list[Config]) -> bool:
    return scene.has_room(len(order)) and scene.affords(Stage.FINAL, len(order))


def _finalists(scene: Scene) -> list[Config]:
    """The simplest of those that are as good as the best, the best, and more that could be tied."""
    best = scene.best()
    if best is None:
        return []
    baseline = scene.space.baseline
    rows = {t.config: t for t in scene.end_to_end if t.ok and scene.fits(t)}
    near = [
        t
        for t in rows.values()
        if t.config != baseline and gain(scene, best, t) < NEAR and _could_pay(scene, t)
    ]

    def complexity(trial: Trial) -> tuple[bool, int, int]:
        config = trial.config
        worse = gain(scene, best, trial) > AS_GOOD
        return worse, len(config.changed_from(baseline)), whole(config.get(WORKERS))

    ordered = [trial.config for trial in sorted(near, key=complexity)]
    if not ordered:
        return [best.config]
    others = list(dict.fromkeys([ordered[0], best.config, *ordered]))
    counts = range(min(len(others) + 1, MOST_FINALISTS), 2, -1)
    most = next((n for n in counts if scene.affords(Stage.FINAL, ROUNDS * n)), 2)
    return others[: most - 1]


def _could_pay(scene: Scene, trial: Trial) -> bool:
    """Whether the row's interval leaves room for a gain over the baseline's."""
    row = scene.row_of(scene.space.baseline)
    own, other = speed_of(row) if row is not None else None, speed_of(trial)
    if scene.objective is not SPEED or own is None or other is None:
        return True
    return other.high > own.value


def path(scene: Scene) -> Plan:
    """The measured steps from the baseline to the answer, one family of knobs at a time."""
    answer, baseline = scene.answer(), scene.space.baseline
    measured = 0
    for config in path_configs(scene.space, baseline, answer)[1:-1]:
        # A step that failed by itself, or must, is a step that cannot be shown.
        if measured >= MOST_PATH or scene.row_of(config) is not None or scene.rules_out(config):
            continue
        if not scene.has_room(1) or not scene.affords(Stage.PATH, 1):
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
    yield from first_guesses(scene, Stage.SEARCH)
    yield from _measure_all(scene, scene.space.grid())


def randomly(scene: Scene) -> Plan:
    """Every config, shuffled."""
    yield from first_guesses(scene, Stage.SEARCH)
    configs = list(scene.space.grid())
    random.Random(scene.seed).shuffle(configs)
    yield from _measure_all(scene, configs)


def tpe(scene: Scene) -> Plan:
    """Optuna's TPE; a failure is told as one, never as a slow config."""
    import optuna

    yield from first_guesses(scene, Stage.SEARCH)

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
        config = suggested(asked, scene.space)
        row = scene.row_of(config)
        if row is None and not scene.rules_out(config):
            row = yield Ask(config=config, stage=Stage.SEARCH, why="TPE")
        seen.add(config)
        _tell(study, asked, scene, row)


def _tell(study: optuna.Study, asked: Any, scene: Scene, row: Trial | None) -> None:
    import optuna

    if row is not None and row.ok and scene.fits(row):
        study.tell(asked, scene.score(row))
    else:
        study.tell(asked, state=optuna.trial.TrialState.FAIL)


def suggested(asked: Any, space: Space) -> Config:
    """The config of one of Optuna's trials: knobs as categories, batch and accumulation as one."""
    pairs = {f"{batch}x{steps}": (batch, steps) for batch, steps in space.pairs()}
    batch, steps = pairs[asked.suggest_categorical("batch x accumulation", list(pairs))]
    changes: dict[str, Value] = {BATCH: batch, ACCUMULATION: steps}
    for name in space.searched():
        if name not in (BATCH, ACCUMULATION):
            changes[name] = asked.suggest_categorical(name, list(space.values[name]))
    return space.config(changes)


def _measure_all(scene: Scene, configs: Iterable[Config]) -> Plan:
    for config in configs:
        if scene.row_of(config) is not None or scene.rules_out(config):
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
