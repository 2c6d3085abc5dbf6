"""Statistics of one probe's timed blocks: is it steady, how fast, how sure.

Short windows mislead in known ways: step times are autocorrelated, so intervals come from block
means; warm-up is not a fixed count, so the second half counts and its halves must agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from autotune.types import Block, Estimate, Label

TOLERANCE = 0.01
"""How far the halves of the counted window may lie apart, relative."""
LEAST_COUNTED = 3
"""Fewer counted blocks than this carry no interval of their own."""
LEAST_BEATEN = 4
"""Blocks before a probe may be judged unable to win."""
UNKNOWN_SPREAD = 0.25
"""The half-width, relative, of a rate from too few blocks."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Samples per second while the loader does not restart, and what qualifies it."""

    estimate: Estimate
    labels: tuple[Label, ...]

    @property
    def half_width(self) -> float:
        """Relative."""
        return (self.estimate.high - self.estimate.low) / 2 / self.estimate.value

    @property
    def steady(self) -> bool:
        """Whether the halves of the window agree."""
        return Label.NOT_STEADY not in self.labels


def rate_of(
    blocks: Sequence[Block], slack: float = 0.0, outside: Sequence[Label] = ()
) -> Rate | None:
    """The sustained rate of the counted half; None when nothing was consumed.

    Sustained is the smaller of consumed and produced per second: a queue that was full at the
    start flatters the consumer, one that fills flatters the producer.

    Args:
        blocks: The timed blocks, in order.
        slack: Samples by which the two counts may differ without meaning anything: workers
            finish whole batches, several at a time.
        outside: Labels for what the blocks themselves do not show.
    """
    first = _first_counted(blocks)
    counted = blocks[first:]
    seconds = sum(block.seconds for block in counted)
    consumed = sum(block.consumed for block in counted)
    if seconds <= 0 or consumed <= 0:
        return None
    flow = flow_ratio(counted, slack)
    kept_up = min(flow, 1.0)
    speeds = [block.consumed / block.seconds * kept_up for block in blocks]
    labels = tuple(dict.fromkeys((*_labels(speeds[first:], flow), *outside)))
    estimate = _widened(consumed / seconds * kept_up, speeds, first, labels)
    return Rate(estimate=estimate, labels=labels)


def drift(blocks: Sequence[Block]) -> float:
    """How much faster the end of the counted half was than its beginning; 0 where it was steady."""
    rates = [block.consumed / block.seconds for block in blocks[_first_counted(blocks) :]]
    if not all(rates) or _halves_agree(rates):
        return 0.0
    early, late = _halves(rates)
    return fmean(late) / fmean(early) - 1


def flow_ratio(blocks: Sequence[Block], slack: float = 0.0) -> float:
    """Samples produced for each one consumed; 1 where they were not counted or agree."""
    produced = sum(block.produced for block in blocks)
    consumed = sum(block.consumed for block in blocks)
    if produced <= 0 or consumed <= 0 or abs(produced - consumed) <= slack:
        return 1.0
    return produced / consumed


def surely_below(blocks: Sequence[Block], rate: float, looks: int) -> bool:
    """Whether even the upper end of what was consumed a second lies below a rate.

    Args:
        blocks: The timed blocks so far.
        rate: Samples/s of the incumbent's lower end.
        looks: How often this is asked in one window: each look is another chance to be wrong
            (Bonferroni), and 5 % are for all of them together.
    """
    if len(blocks) < LEAST_BEATEN:
        return False
    counted = blocks[_first_counted(blocks) :]
    rates = [block.consumed / block.seconds for block in counted]
    return fmean(rates) + spread(rates, 1 - 0.05 / max(looks, 1)) < rate


def spread(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Half-width of the t-interval of the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return _quantile(len(values), confidence) * stdev(values) / math.sqrt(len(values))


def stdev(values: Sequence[float]) -> float:
    """Standard deviation of a sample of two or more; the standard library's is exact and slow."""
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _first_counted(blocks: Sequence[Block]) -> int:
    return len(blocks) // 2 if len(blocks) >= 2 * LEAST_COUNTED else 0


def _widened(
    value: float, speeds: Sequence[float], first: int, labels: Sequence[Label]
) -> Estimate:
    rates = speeds[first:]
    half = UNKNOWN_SPREAD * value
    if len(rates) >= LEAST_COUNTED:
        # A probe stops once this is narrow, so what is counted is too often a calm stretch by
        # luck: let the blocks before it speak too, those of the warm-up apart.
        calm, before = stdev(rates), stdev(speeds[first // 2 :])
        half = max(calm, before) * _quantile(len(rates)) / math.sqrt(len(rates))
    low, high = max(value - half, value * 1e-3), value + half
    if labels and len(rates) >= 2:
        early, late = _halves(rates)
        low = min(low, fmean(early), fmean(late))
        high = max(high, fmean(early), fmean(late))
    return Estimate(value=value, low=low, high=high)


def _labels(rates: Sequence[float], flow: float) -> tuple[Label, ...]:
    labels: list[Label] = []
    if not _halves_agree(rates):
        labels.append(Label.NOT_STEADY)
    if len(rates) >= 2 and spread(rates) / fmean(rates) > 0.05:
        labels.append(Label.NOISY)
    if 0.02 < abs(flow - 1) < 0.1:
        labels.append(Label.BALANCED)
    if len(rates) >= 8 and min(rates) < median(rates) / 1.5:
        labels.append(Label.HEAVY_TAIL)
    return tuple(labels)


def _halves_agree(rates: Sequence[float]) -> bool:
    if len(rates) < 2 * LEAST_COUNTED:
        return True
    early, late = _halves(rates)
    apart = abs(median(early) / median(late) - 1)
    # Noise alone moves the medians apart: only what it cannot explain counts as drift.
    error = math.hypot(
        *(stdev(half) / fmean(half) / math.sqrt(len(half)) for half in (early, late))
    )
    return apart <= max(TOLERANCE, 3 * error)


def _halves(rates: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    middle = len(rates) // 2
    return rates[:middle], rates[middle:]


def _quantile(count: int, confidence: float = CONFIDENCE) -> float:
    return t_quantile(0.5 + confidence / 2, count - 1)


def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t for a probability above one half (Hill, CACM algorithm 396)."""
    tail = 2 * (1 - probability)
    if freedom < 1 or not 0 < tail < 1:
        raise ValueError(f"no quantile for p={probability}, {freedom} degrees of freedom")
    if freedom == 1:
        return 1 / math.tan(tail * math.pi / 2)
    if freedom == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (freedom - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * tail) ** (2 / freedom)
    if y > 0.05 + a:
        return _t_from_normal(tail, freedom, a, b, c)
    y = ((1 / (((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3)
          + 0.5 / (freedom + 4)) * y - 1) * (freedom + 1) / (freedom + 2) + 1 / y  # fmt: skip
    return math.sqrt(freedom * y)


def _t_from_normal(tail: float, freedom: float, a: float, b: float, c: float) -> float:
    x = NormalDist().inv_cdf(tail / 2)
    y = x * x
    if freedom < 5:
        c += 0.3 * (freedom - 4.5) * (x + 0.6)
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    y = math.expm1(a * y * y)
    return math.sqrt(freedom * y)
