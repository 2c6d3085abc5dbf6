"""What is known of the two halves by themselves: the loader's rates and the device's."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.metrics import rate
from autotune.scene import Scene
from autotune.space import WORKERS
from autotune.types import Config, Estimate, Trial, whole

SLACK = 0.03
"""What a bound is widened by before anything is dropped because of it."""
WORTH = 1.02
"""A step of a ladder that gains less ends the ladder."""


@dataclass
class Halves:
    """The ceilings measured so far, and where the search stands."""

    scene: Scene
    start: Config
    base: Config
    """The device setting that the search goes on with."""
    loader: dict[int, Trial] = field(default_factory=dict)
    device: dict[Config, Estimate] = field(default_factory=dict)

    @property
    def own_workers(self) -> int:
        """The worker count that the search sets out from."""
        return whole(self.start.get(WORKERS))

    def rate(self, workers: int) -> Estimate:
        """The loader's ceiling with so many workers, samples/s."""
        measured = self.loader[workers].measurement
        assert measured is not None
        known = rate(measured)
        assert known is not None
        return known.estimate
