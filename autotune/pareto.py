"""What nothing clearly beats, and the answer.

Only finals carry a claim: several fresh processes of each finalist and of the baseline,
interleaved, so that a drift of the machine hits all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.metrics import METRICS, SPEED, Limit, Metric, mean_of, throughput
from autotune.space import BATCH, WORKERS
from autotune.steady import t_quantile
from autotune.types import Config, Estimate, Label, Stage, Trial

TIED = 0.98
"""A finalist whose ratio to the best reaches above this is tied with it."""
CLEAR = 0.01
"""Points of the front closer than this are one point."""
ROUNDS = 3
"""Interleaved rounds of finals at least."""
UNKNOWN = 0.25
"""Half-width, in log units, of a ratio that only one round stands behind."""

Block = tuple[int, bool]
"""What two rows must share to be compared: the round, and whether the page cache was cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """All end-to-end rows of one config together; finals alone where there are any."""

    config: Config
    trials: tuple[Trial, ...]
    speed: Estimate

    @property
    def final(self) -> bool:
        """Whether repeats in fresh processes stand behind it."""
        return any(trial.stage is Stage.FINAL for trial in self.trials)

    def value(self, metric: Metric) -> float | None:
        """The metric's mean over the rows in which it was read."""
        if metric is SPEED:
            return self.speed.value
        measured = [trial.measurement for trial in self.trials if trial.measurement]
        return mean_of([metric.compute(measurement) for measurement in measured])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to do, and how sure."""

    keep: bool
    config: Config
    speedup: Estimate | None
    verified: bool
    """Whether finals stand behind it."""
    reason: str


def pool(trials: Iterable[Trial]) -> dict[Config, Pooled]:
    """Every config that has an ok end-to-end row, in order of appearance."""
    rows: dict[Config, list[Trial]] = {}
    for trial in trials:
        if trial.ok and trial.end_to_end and trial.stage is not Stage.INSPECT:
            rows.setdefault(trial.config, []).append(trial)
    pooled = (_pooled(config, group) for config, group in rows.items())
    return {point.config: point for point in pooled if point is not None}


def front(points: Sequence[Pooled], objectives: Sequence[Metric]) -> list[Pooled]:
    """The configs that no other one clearly beats, best first in the leading objective.

    Points with an unread or infinite objective are left out.
    """
    known = [point for point in points if _is_known(point, objectives)]
    # With three objectives, differences about as large as the margin can form a circle.
    kept = _unbeaten(known, objectives, CLEAR) or _unbeaten(known, objectives, 0.0)
    leading = objectives[0]
    return sorted(kept, key=lambda point: leading.cost(point.value(leading) or 0.0))


def decide(
    trials: Sequence[Trial],
    baseline: Config,
    allowed: Mapping[Config, bool],
    *,
    objective: Metric,
    limits: Sequence[Limit],
    min_gain: float,
) -> Answer | None:
    """The answer from all rows; None when nothing can be recommended.

    Args:
        trials: Every row so far.
        baseline: The user's own config.
        allowed: Whether each config satisfies the pins.
        objective: What is maximised (or minimised).
        limits: Bounds that the answer keeps.
        min_gain: The least gain, as a share, that is worth a change.
    """
    pooled = pool(trials)
    fit = [
        point
        for point in pooled.values()
        if allowed.get(point.config, False)
        and all(limit.holds(point.value(limit.metric)) for limit in limits)
        and point.value(objective) is not None
    ]
    may_keep = any(point.config == baseline for point in fit)
    finalists = _repeated([point for point in fit if point.final])
    if not finalists:
        return _unverified(fit, baseline, objective, may_keep=may_keep)
    tied = _simplest_of_the_best(finalists, trials, baseline, objective)
    if tied[0].config == baseline:
        return _kept(baseline, "nothing measured is clearly faster")
    speedups = [ratio(trials, point.config, baseline, objective) for point in tied]
    for point, speedup in zip(tied, speedups, strict=True):
        if not may_keep or (speedup is not None and speedup.low > 1 + min_gain):
            return Answer(
                keep=False,
                config=point.config,
                speedup=speedup,
                verified=True,
                reason="measured best",
            )
    return _kept(baseline, _too_little(speedups, min_gain))


def _repeated(finalists: Sequence[Pooled]) -> list[Pooled]:
    """Those measured twice or more; one for which time was short is tied only for ignorance."""
    return [point for point in finalists if len(point.trials) > 1] or list(finalists)


def ratio(
    trials: Sequence[Trial], config: Config, over: Config, objective: Metric
) -> Estimate | None:
    """How many times better one config's finals are than another's, with a 95 % interval.

    A randomised block design: each round of finals is a block, so what slows a whole round down
    cancels; the scatter left over is pooled across all finalists.
    """
    rounds = _rounds(trials, objective)
    shared = sorted(set(rounds.get(config, {})) & set(rounds.get(over, {})))
    if not shared:
        return None
    difference = fmean(rounds[config][r] - rounds[over][r] for r in shared)
    half = _half_width(rounds, len(shared))
    return Estimate(
        value=math.exp(difference),
        low=math.exp(difference - half),
        high=math.exp(difference + half),
    )


def _rounds(trials: Sequence[Trial], objective: Metric) -> dict[Config, dict[Block, float]]:
    """Log of the objective, turned so that higher is better, by config and block.

    What was read from storage is never compared with what lay in the page cache already.
    """
    rounds: dict[Config, dict[Block, float]] = {}
    for trial in trials:
        if trial.stage is not Stage.FINAL:
            continue
        turn = rounds.setdefault(trial.config, {})
        block = (trial.round, Label.COLD in trial.labels)
        if trial.ok and trial.measurement is not None:
            value = objective.compute(trial.measurement)
            if value is not None and value > 0:
                turn[block] = math.log(objective.gain(value, 1.0))
    return rounds


def _half_width(rounds: Mapping[Config, Mapping[Block, float]], shared: int) -> float:
    if shared < 2:
        return UNKNOWN
    residuals, freedom = _residuals(rounds)
    if freedom < 1:
        return UNKNOWN
    variance = sum(residual * residual for residual in residuals) / freedom
    # Further rounds are run while the interval leaves the decision open: each of them is another
    # look, and without a correction (Bonferroni) looking often enough would find a gain.
    looks = max(1, shared - ROUNDS + 1)
    return t_quantile(1 - 0.025 / looks, freedom) * math.sqrt(2 * variance / shared)


def _residuals(rounds: Mapping[Config, Mapping[Block, float]]) -> tuple[list[float], int]:
    """What config and round do not explain, over the rounds that every finalist finished."""
    finished = [turn for turn in rounds.values() if len(turn) >= 2]
    numbers = set.intersection(*(set(turn) for turn in finished)) if finished else set()
    if len(numbers) < 2 or len(finished) < 2:
        return [], 0
    grand = fmean(turn[r] for turn in finished for r in numbers)
    by_round = {r: fmean(turn[r] for turn in finished) - grand for r in numbers}
    residuals = [
        turn[r] - fmean(turn[n] for n in numbers) - by_round[r]
        for turn in finished
        for r in numbers
    ]
    return residuals, (len(finished) - 1) * (len(numbers) - 1)


def _pooled(config: Config, group: Sequence[Trial]) -> Pooled | None:
    finals = tuple(trial for trial in group if trial.stage is Stage.FINAL)
    trials = _in_one_state(finals or tuple(group))
    speeds = [throughput(trial.measurement) for trial in trials if trial.measurement]
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    return Pooled(config=config, trials=trials, speed=_mean_estimate(known))


def _in_one_state(trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
    """The rows that found the page cache warm, unless all were cold."""
    return tuple(trial for trial in trials if Label.COLD not in trial.labels) or trials


def _mean_estimate(speeds: Sequence[Estimate]) -> Estimate:
    """Mean over processes; the interval covers what lies between and within them."""
    value = fmean(speed.value for speed in speeds)
    within = fmean((speed.high - speed.low) / 2 for speed in speeds) / math.sqrt(len(speeds))
    between = 0.0
    if len(speeds) >= 3:
        spread = math.sqrt(sum((speed.value - value) ** 2 for speed in speeds) / (len(speeds) - 1))
        between = t_quantile(0.975, len(speeds) - 1) * spread / math.sqrt(len(speeds))
    elif len(speeds) == 2:
        between = abs(speeds[0].value - speeds[1].value)
    half = max(within, between)
    return Estimate(value=value, low=max(value - half, 0.0), high=value + half)


def _simplest_of_the_best(
    finalists: Sequence[Pooled], trials: Sequence[Trial], baseline: Config, objective: Metric
) -> list[Pooled]:
    """Those tied with the best: the user's own first, then the smallest change."""
    best = min(finalists, key=lambda point: objective.cost(_final_mean(point, objective)))
    tied = [best] + [
        point
        for point in finalists
        if point is not best and _is_tied(point, best, trials, objective)
    ]
    return sorted(tied, key=lambda point: _complexity(point, baseline))


def _is_tied(point: Pooled, best: Pooled, trials: Sequence[Trial], objective: Metric) -> bool:
    to_best = ratio(trials, point.config, best.config, objective)
    return to_best is not None and to_best.high > TIED


def _complexity(point: Pooled, baseline: Config) -> tuple[bool, int, int, int, float]:
    config = point.config
    return (
        config != baseline,
        len(config.changed_from(baseline)),
        int(config.get(WORKERS) or 0),
        int(config.get(BATCH) or 0),
        point.value(METRICS["memory_gb"]) or 0.0,
    )


def _final_mean(point: Pooled, objective: Metric) -> float:
    value = point.value(objective)
    return math.inf if value is None else value


def _unverified(
    fit: Sequence[Pooled], baseline: Config, objective: Metric, *, may_keep: bool
) -> Answer | None:
    """Without finals nothing can be claimed to be faster."""
    if not fit:
        return None
    best = min(fit, key=lambda point: objective.cost(point.value(objective) or 0.0))
    if may_keep and best.config == baseline:
        return _kept(baseline, "nothing else that was measured is faster", verified=False)
    if may_keep:
        return _kept(baseline, "no time was left to verify anything else", verified=False)
    return Answer(
        keep=False,
        config=best.config,
        speedup=None,
        verified=False,
        reason="the best measured so far; no time was left to repeat it",
    )


def _kept(baseline: Config, reason: str, *, verified: bool = True) -> Answer:
    one = Estimate(value=1.0, low=1.0, high=1.0)
    return Answer(keep=True, config=baseline, speedup=one, verified=verified, reason=reason)


def _too_little(speedups: Sequence[Estimate | None], min_gain: float) -> str:
    known = [speedup for speedup in speedups if speedup is not None]
    if not known:
        return "the best other config could not be compared with the baseline"
    speedup = max(known, key=lambda estimate: estimate.value)
    return (
        f"the best other config makes {speedup.value:.2f}x "
        f"[{speedup.low:.2f}, {speedup.high:.2f}]: not clearly more than {1 + min_gain:.2f}x"
    )


def _is_known(point: Pooled, objectives: Sequence[Metric]) -> bool:
    values = [point.value(metric) for metric in objectives]
    return all(value is not None and math.isfinite(value) for value in values)


def _unbeaten(
    points: Sequence[Pooled], objectives: Sequence[Metric], margin: float
) -> list[Pooled]:
    return [
        point
        for point in points
        if not any(_beats(other, point, objectives, margin) for other in points)
    ]


def _beats(a: Pooled, b: Pooled, objectives: Sequence[Metric], margin: float) -> bool:
    """Better somewhere by more than the margin, worse nowhere by more than it."""
    better = any(_is_better(a, b, metric, margin) for metric in objectives)
    worse = any(_is_better(b, a, metric, margin) for metric in objectives)
    return better and not worse


def _is_better(a: Pooled, b: Pooled, metric: Metric, margin: float) -> bool:
    x, y = a.value(metric), b.value(metric)
    if x is None or y is None:
        return False
    return metric.cost(x) < metric.cost(y) - margin * abs(y)
