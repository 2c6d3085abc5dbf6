"""When a probe has measured enough: one rule for the probe's own loop and for replayed windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.steady import LEAST_COUNTED, rate_of, surely_below
from autotune.types import Block

LONGEST = 4
"""Times its planned length that a window may last for the sake of steps slower than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """How long a window may be, and what ends it sooner."""

    max_window_s: float
    min_window_s: float = 0.0
    min_blocks: int = 12
    block_s: float = 0.25
    want: float = 0.01
    """Relative half-width that is narrow enough."""
    beat: float | None = None
    """Samples/s of the incumbent's lower end."""

    def reached(self, blocks: Sequence[Block], elapsed_s: float, *, settled: bool) -> str:
        """Why the window ends here: limit, dominated, narrow or noise; "" while it goes on.

        Args:
            blocks: The timed blocks so far.
            elapsed_s: Since the window began.
            settled: Whether nothing grew that must stand still.
        """
        least = LEAST_COUNTED if elapsed_s < LONGEST * self.max_window_s else 1
        if elapsed_s >= self.max_window_s and len(blocks) >= least:
            return "limit"
        if self._cannot_win(blocks):
            return "dominated"
        if len(blocks) < self.min_blocks or elapsed_s < self.min_window_s:
            return ""
        rate = rate_of(blocks)
        if rate is None or not rate.steady or not settled:
            return ""
        if rate.half_width <= self.want:
            return "narrow"
        return "noise" if _noise_has_converged(blocks) else ""

    def _cannot_win(self, blocks: Sequence[Block]) -> bool:
        if self.beat is None:
            return False
        looks = math.ceil(self.max_window_s / self.block_s)
        return surely_below(blocks, self.beat, looks)


def _noise_has_converged(blocks: Sequence[Block]) -> bool:
    """More blocks would tell the same spread again: the machine is noisy."""
    if len(blocks) < 8 * LEAST_COUNTED:
        return False
    now, before = rate_of(blocks), rate_of(blocks[: -2 * LEAST_COUNTED])
    if now is None or before is None:
        return False
    return abs(now.half_width / before.half_width - 1) < 0.05
