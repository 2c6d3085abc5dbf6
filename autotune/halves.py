"""What is known of the two halves by themselves: the loader's rates and the device's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autotune.labels import UNSURE
from autotune.metrics import rate
from autotune.scene import Scene
from autotune.space import WORKERS
from autotune.types import Config, Estimate, Trial, whole

SLACK = 0.03
"""What a bound is widened by before anything is dropped because of it."""
WORTH = 1.02
"""A step of a ladder that gains less ends it; a neighbour that does is tied, and no move."""


@dataclass
class Halves:
    """The ceilings measured so far, and where the search stands."""

    scene: Scene
    start: Config
    base: Config
    """The device setting that the search goes on with."""
    loader: dict[int, Trial] = field(default_factory=dict)
    device: dict[Config, Estimate] = field(default_factory=dict)
    unsure: set[Config] = field(default_factory=set)
    """Device settings whose ceiling bounds nothing: in another state they may do better."""

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

    def loader_bound(self, workers: int) -> float:
        """What no pair with so many workers can exceed; no bound where it was disturbed."""
        disturbed = UNSURE & set(self.loader[workers].labels)
        return math.inf if disturbed else self.rate(workers).high

    def device_bound(self, config: Config) -> float:
        """What no pair with this device setting can exceed; no bound where it was disturbed."""
        return math.inf if config in self.unsure else self.device[config].high
