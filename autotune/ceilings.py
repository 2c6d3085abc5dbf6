"""The two halves by themselves: what the loader alone and the device alone can do.

Each is an upper bound of every end-to-end config that shares it, so the halves are searched one
after the other instead of multiplied (METHODS 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune import laws
from autotune.device_ladder import DeviceLadder
from autotune.halves import SLACK, WORTH, Halves
from autotune.knobs import KNOBS, Family
from autotune.loader_ladder import LoaderLadder
from autotune.metrics import restart_s_per_sample
from autotune.scene import Plan, Scene
from autotune.space import PERSISTENT, PREFETCH, THREADS, WORKERS
from autotune.types import Config, Estimate, Value, whole

ABOUT = 0.95
"""How near a prediction must come to the best one to count as tied: the queue's law is rough."""
RESTART_MATTERS = 0.005
"""Share of an epoch's time above which workers are kept from epoch to epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A loader setting and a device setting: what they should make, and cannot exceed."""

    config: Config
    workers: int
    predicted: float
    """With batches that vary as much as the queue's law assumes."""
    at_best: float
    """With batches that do not vary at all."""
    bound: float


class Ceilings:
    """Ladders over both halves, and the pairs that come of them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.halves = Halves(scene=scene, start=scene.space.start, base=scene.space.start)
        self.loader = LoaderLadder(self.halves)
        self.device = DeviceLadder(self.halves)
        self.bounds_hold = True
        """Until a config exceeds its own: then these ceilings bound nothing."""

    def first_look(self) -> Plan:
        """Both halves as they are: which one holds the other back."""
        yield from self.loader.own()
        yield from self.device.own()

    # --- both halves together ---

    def candidates(self) -> list[Candidate]:
        """Pairs of a loader and a device setting, the best prediction first.

        For each worker count only the device setting that is predicted best: what the other
        ones are good for shows when its changes are taken back one by one.
        """
        pairs = [
            self._candidate(device, workers)
            for device in self._device_options()
            for workers in self._loader_options(self.halves.device[device])
        ]
        if not pairs:
            return [self._unmeasured()]
        predicted = max(pair.predicted for pair in pairs)
        at_best = max(pair.at_best for pair in pairs)

        def in_order(pair: Candidate) -> tuple[float, int, int, int]:
            # What should be as fast as the best is a tie: the simplest goes first.
            tied = pair.at_best * WORTH >= at_best and pair.predicted >= ABOUT * predicted
            changes = len(pair.config.changed_from(self.halves.start))
            size = self.scene.space.micro_batch(pair.config)
            return (-predicted if tied else -pair.predicted, changes, pair.workers, size)

        pairs.sort(key=in_order)
        best: dict[int, Candidate] = {}
        for pair in pairs:
            best.setdefault(pair.workers, pair)
        return list(best.values())

    def _unmeasured(self) -> Candidate:
        """Where no ceiling could be measured: the start, without workers if those hang."""
        workers = self.halves.own_workers if self.loader.may_run(self.halves.own_workers) else 0
        config = self.with_workers(self.halves.start, workers)
        return Candidate(config=config, workers=workers, predicted=0.0, at_best=0.0, bound=math.inf)

    def _device_options(self) -> list[Config]:
        fit = [config for config in self.halves.device if self.scene.space.admits(config)]
        if not fit:
            return []
        fit.sort(key=lambda config: -self.halves.device[config].value)
        least = 0.85 * self.halves.device[fit[0]].value
        near = [config for config in fit if self.halves.device[config].value > least][:3]
        wanted = dict.fromkeys((self.halves.base, *near, self.halves.start))
        return [config for config in wanted if config in fit]

    def _loader_options(self, device: Estimate) -> list[int]:
        """The fewest workers that feed the device, or are as fast as any; and the user's own."""
        counts = sorted(self.halves.loader)
        if not counts:
            return [self.halves.own_workers]
        fed = [w for w in counts if w and self.halves.rate(w).value >= self.loader.enough(device)][
            :1
        ]
        others = [w for w in (self.halves.own_workers, 0) if w in self.halves.loader]
        return list(dict.fromkeys([*fed, *others]))

    def _candidate(self, device: Config, workers: int) -> Candidate:
        compute = self.halves.device[device]
        config = self.with_workers(device, workers)
        predicted = at_best = compute.value
        if workers in self.halves.loader:
            predicted, at_best = self._expected(device, config)
        return Candidate(
            config=config,
            workers=workers,
            predicted=predicted,
            at_best=at_best,
            bound=self.bound(config),
        )

    def cannot_beat(self, config: Config, incumbent: float | None) -> bool:
        """Whether even its bound lies clearly below what the incumbent makes."""
        if incumbent is None or not self.bounds_hold:
            return False
        return self.bound(config) * (1 + SLACK) < WORTH * incumbent

    def bound(self, config: Config) -> float:
        """What a config cannot exceed, samples/s; infinite where no half of it is known."""
        device, workers = self.scene.space.step_alone(config), whole(config.get(WORKERS))
        bounds = [math.inf, math.inf]
        if device in self.halves.device:
            bounds[0] = self.halves.device_bound(device)
        if self._knows_loader(config):
            bounds[1] = self.halves.loader_bound(workers)
        if workers:
            return min(bounds)
        turns = sum(1 / high for high in bounds)
        return 1 / turns if turns else math.inf

    def expected(self, config: Config) -> tuple[float, float] | None:
        """What a config should make by its halves, at least and at best; None where one is unknown.

        Samples/s.
        """
        device = self.scene.space.step_alone(config)
        known = device in self.halves.device and self._knows_loader(config)
        return self._expected(device, config) if known else None

    def _knows_loader(self, config: Config) -> bool:
        """Whether the loader was measured alone with these settings, its start apart."""
        measured = self.halves.loader.get(whole(config.get(WORKERS)))
        if measured is None:
            return False
        return all(
            KNOBS[name].family is not Family.LOADER or name == PERSISTENT
            for name in config.changed_from(measured.config)
        )

    def _expected(self, device: Config, config: Config) -> tuple[float, float]:
        workers = whole(config.get(WORKERS))
        compute = self.halves.device[device].value
        loader = self.halves.rate(workers).value
        queued = workers * (whole(config.get(PREFETCH)) or 2)
        predicted = laws.together(loader, compute, queued)
        if not workers:
            return predicted, predicted
        cores = self._cores_allow(device, workers)
        return min(predicted, cores), min(compute, loader, cores)

    def _cores_allow(self, device: Config, workers: int) -> float:
        """On a CPU loader and step share the cores: samples/s that their CPU time leaves."""
        loader = self.halves.loader[workers].measurement
        if not self.scene.space.machine.on_cpu or loader is None or loader.cpu_s is None:
            return math.inf
        loaded = sum(block.consumed for block in loader.blocks)
        threads = whole(device.get(THREADS)) or 1
        step_s = threads / self.halves.device[device].value
        return self.scene.space.machine.cpus / (loader.cpu_s / max(loaded, 1) + step_s)

    def with_workers(self, config: Config, workers: int) -> Config:
        """The config with so many workers, kept from epoch to epoch where that pays."""
        changes: dict[str, Value] = {WORKERS: workers}
        values = self.scene.space.values.get(PERSISTENT, ())
        if workers and len(values) > 1 and self._restart_matters(workers):
            changes[PERSISTENT] = True
        return self.scene.space.config(changes, config)

    def _restart_matters(self, workers: int) -> bool:
        measured = (
            self.halves.loader[workers].measurement if workers in self.halves.loader else None
        )
        if measured is None:
            return False
        return restart_s_per_sample(measured) * self.halves.rate(workers).value > RESTART_MATTERS
