"""What the two halves should make together, and more workers by themselves: the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The Universal Scalability Law (Gunther): w workers make w / (a + b (w - 1) + c w (w - 1)).

    `a` is the time that one worker takes for a sample, `b` what they wait for each other, `c` what
    keeping out of each other's way costs every pair of them; all in seconds, none below zero.
    """

    a: float
    b: float = 0.0
    c: float = 0.0

    def rate(self, workers: int) -> float:
        """Samples/s of so many workers."""
        more = workers - 1
        return workers / (self.a + self.b * more + self.c * workers * more)


def fitted(rates: Mapping[int, float]) -> Scaling:
    """The law nearest to measured rates, by relative error.

    Args:
        rates: Samples/s by number of workers, one of them at least. One rate tells the first term
            only, two the second as well.

    Raises:
        ValueError: If there is no rate to fit.
    """
    if not rates:
        raise ValueError("a law needs one measured rate at least")
    workers = np.array(sorted(rates), dtype=float)
    seconds = np.array([count / rates[int(count)] for count in workers])
    terms = np.stack([np.ones_like(workers), workers - 1, workers * (workers - 1)], axis=1)
    known = min(len(rates), 3)
    best, least = Scaling(a=float(seconds.mean())), math.inf
    for chosen in _subsets(known):
        columns = terms[:, chosen] / seconds[:, None]
        values, *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
        error = float(np.sum((columns @ values - 1) ** 2))
        if (values >= 0).all() and values[0] > 0 and error < least - 1e-12:
            named = dict(zip(chosen, values.tolist(), strict=True))
            best = Scaling(a=named[0], b=named.get(1, 0.0), c=named.get(2, 0.0))
            least = error
    return best


def _subsets(known: int) -> list[list[int]]:
    """Which terms may differ from zero, fewest first: the first one always does."""
    others = range(1, known)
    return [[0, *some] for size in range(known) for some in combinations(others, size)]


def together(loader: float, device: float, queued: int) -> float:
    """Samples/s of a loader that fills a queue and a device that empties it (tf.data's formula).

    The device waits for as long as the loader takes to make a batch, as often as the queue is
    empty. Real batches vary less than the formula assumes: near a ratio of one it loses too much.

    Args:
        loader: Samples/s of the loader alone.
        device: Samples/s of the device alone.
        queued: Batches that may lie ready; 0 where loading and stepping take turns.
    """
    if queued < 1:
        return 1 / (1 / loader + 1 / device)
    return 1 / (1 / device + _empty(loader / device, queued) / loader)


def _empty(ratio: float, queued: int) -> float:
    """How often a queue is empty, by how many times faster it is filled than emptied."""
    if abs(ratio - 1) < 1e-6:
        return 1 / (queued + 1)
    if (queued + 1) * math.log(ratio) > 700:
        return 0.0
    return (1 - ratio) / (1 - math.pow(ratio, queued + 1))
