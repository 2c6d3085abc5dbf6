"""The device by itself: the micro-batch that costs least a sample, then precision and the like."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable

from autotune import guard
from autotune.fitting import Fitting, why_unfit
from autotune.guard import CLOSE_ENOUGH, Judgement
from autotune.halves import SLACK, WORTH, Halves
from autotune.knobs import KNOBS, Family
from autotune.labels import UNSURE
from autotune.scene import Ask, Plan, device_ask, speed_of
from autotune.space import ACCUMULATION, BATCH, FINENESS, WAIT_POLICY
from autotune.types import Config, Estimate, Stage, Trial, Value, whole

IDLE_DEVICE = 1.5
"""A device this much faster than the loader gains nothing by being faster still."""
IDLE_CPU = 4.0
"""The same on a CPU, where a cheaper step leaves its cores to the loader."""
IDLE_IN_TURNS = 50.0
"""The same without workers: loading and stepping take turns, and every faster step is a gain."""
CLOSE = 0.9
"""What loses less than this by itself may gain beside another change."""
DOWNWARD = 3
"""Micro-batches below the user's own that are tried when larger ones do not pay."""


class DeviceLadder:
    """Micro-batches, each compute knob by itself, micro-batches again; what gains is kept."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.scene = halves.scene
        self._fittings: dict[Config, Fitting] = {}
        """What is known of micro-batches, for each setting of everything else."""
        self._matters = False

    def own(self) -> Plan:
        """The device as it is."""
        if self.scene.may_probe(Stage.DEVICE):
            yield from self._probe(self.halves.start, "as now")

    def climb(self) -> Plan:
        """Micro-batches, each compute knob by itself, micro-batches again; what gains is kept."""
        self._matters = not self._cannot_pay()
        if not self._matters:
            return
        yield from self._batches()
        before = self.halves.base = self._smallest_near_best()
        yield from self._screen()
        if self.halves.base != before:
            yield from self._batches_around(self.halves.base)
            self.halves.base = self._smallest_near_best()

    def _cannot_pay(self) -> bool:
        """Skip the family, and say so, when the loader is the limit by far."""
        device = self.halves.device.get(self.halves.start)
        if device is None or not self.halves.loader:
            return False
        if math.isinf(max(map(self.halves.loader_bound, self.halves.loader))):
            return False
        fastest = max(self.halves.rate(workers).value for workers in self.halves.loader)
        if device.value < self._idle() * fastest:
            return False
        self.scene.leave_out(
            f"batch and precision: the device alone is {device.value / fastest:.1f}x as fast as "
            "the loader can be"
        )
        return True

    def _idle(self) -> float:
        """How much faster than the loader the device must be for its speed not to matter."""
        if not any(self.halves.loader):
            return IDLE_IN_TURNS
        return IDLE_CPU if self.scene.space.machine.on_cpu else IDLE_DEVICE

    def _batches(self) -> Plan:
        """Upward from the user's own, downward when that does not pay or their own does not run."""
        start = self.halves.start
        if start in self.halves.device:
            yield from self._batches_around(start)
            return
        own = self.scene.space.micro_batch(start)
        fails = min(own, 2 * (self.scene.space.facts.step_batch or own))
        smaller = [pair for pair in reversed(self._pairs()) if pair[0] < fails]
        yield from self._descend(smaller, fails)

    def _batches_around(self, base: Config) -> Plan:
        """Sizes above that of a setting which runs; below it when those do not pay."""
        own, pairs = self.scene.space.micro_batch(base), self._pairs()
        yield from self._climb_batches([pair for pair in pairs if pair[0] > own], base)
        if self._best_device() == base:
            below = [pair for pair in reversed(pairs) if pair[0] < own]
            yield from self._climb_batches(below[:DOWNWARD], base)

    def _pairs(self) -> list[tuple[int, int]]:
        """One accumulation for each micro-batch: what keeps the user's global batch, or little."""
        batches = dict.fromkeys(batch for batch, _ in self.scene.space.pairs())
        return [(batch, self._accumulation(batch)) for batch in batches]

    def _accumulation(self, batch: int) -> int:
        space = self.scene.space
        wanted = max(1, space.global_batch(self.halves.start) // batch)
        allowed = {steps for size, steps in space.pairs() if space.goal.free or size == batch}
        return min(sorted(allowed), key=lambda steps: abs(steps - wanted))

    def _climb_batches(self, pairs: Iterable[tuple[int, int]], base: Config) -> Plan:
        """Size after size while that gains; none that is known not to fit."""
        best, reached_size = self.halves.device.get(base), 0
        left = [pair for pair in pairs if self._sized(base, *pair) not in self.halves.device]
        fitting = self._fitting(base)
        while left and self.scene.may_probe(Stage.DEVICE):
            batch, steps = self._proven_before(left[0], fitting)
            if batch == left[0][0]:
                left.pop(0)
            config = self._sized(base, batch, steps)
            if fitting.judge(batch, steps) is Judgement.REFUSED:
                self._leave_out(fitting, batch, steps)
                return
            yield from self._probe(config, f"micro-batch {batch}")
            reached = self.halves.device.get(config)
            if reached is None:
                yield from self._bisect(batch, base)
                return
            if best is not None and reached.value < _worth(batch, reached_size) * best.value:
                return
            best, reached_size = reached, batch

    def _proven_before(self, pair: tuple[int, int], fitting: Fitting) -> tuple[int, int]:
        """Rather than a size that may not fit one below it that must, if that is a step at all."""
        if fitting.judge(*pair) is Judgement.SAFE or not self.scene.space.may_bisect:
            return pair
        size = fitting.largest_safe // FINENESS * FINENESS
        largest = max(self._sizes(), default=0)
        if not max(CLOSE_ENOUGH * largest, largest + 1) <= size < pair[0]:
            return pair
        return size, self._accumulation(size)

    def _leave_out(self, fitting: Fitting, batch: int, steps: int) -> None:
        reason = fitting.why_refused(batch, steps)
        self.scene.leave_out(f"micro-batch {batch} and more: {reason}")

    def _sizes(self) -> list[int]:
        """The micro-batches that are known to run."""
        return [self.scene.space.micro_batch(config) for config in self.halves.device]

    def _descend(self, pairs: Iterable[tuple[int, int]], failing: int) -> Plan:
        """From a size that fails down to one that runs, then back up between the two."""
        for batch, steps in pairs:
            if not self.scene.may_probe(Stage.DEVICE):
                return
            config = self._sized(self.halves.start, batch, steps)
            yield from self._probe(config, f"micro-batch {batch}")
            if config in self.halves.device:
                yield from self._bisect(failing, self.halves.start)
                return
            failing = batch

    def _bisect(self, failing: int, base: Config) -> Plan:
        """The largest multiple of eight that runs, below a size that does not."""
        if not self.scene.space.goal.free or BATCH in self.scene.space.asked:
            return
        low = max((size for size in self._sizes() if size < failing), default=0)
        while low and failing - low > 8 and self.scene.may_probe(Stage.DEVICE):
            middle = (low + failing) // 16 * 8
            if middle <= low:
                return
            steps = self._accumulation(middle)
            config = self._sized(base, middle, steps)
            if self._fitting(base).judge(middle, steps) is not Judgement.REFUSED:
                yield from self._probe(config, f"micro-batch {middle}")
            if config in self.halves.device:
                low = middle
            else:
                failing = middle

    def price_of_the_global_batch(self) -> Plan:
        """What a larger batch would allow, where the global batch forbids it."""
        goal, facts = self.scene.space.goal, self.scene.space.facts
        matters = self._matters and self.halves.device
        if goal.size is None or not matters or BATCH in self.scene.space.asked:
            return
        largest = max(self.scene.space.micro_batch(config) for config in self.halves.device)
        beyond = 2 * goal.size
        if largest < goal.size or (facts.dataset_len and beyond > facts.dataset_len):
            return
        if not self.scene.may_probe(Stage.DEVICE):
            return
        start = self.halves.start
        if self._fitting(start).judge(beyond, 1) is Judgement.REFUSED:
            return
        trial = yield device_ask(
            self._sized(start, beyond, 1), f"device alone, micro-batch {beyond} (only its price)"
        )
        reached, best = speed_of(trial), self.halves.device[self._best_device()]
        if reached is not None and reached.low > best.high * (1 + SLACK):
            self.scene.leave_out(
                f"a global batch of {beyond} would allow up to "
                f"{reached.value / best.value:.1f}x on the device; not verified end to end"
            )

    def _screen(self) -> Plan:
        """Each compute knob by itself at the best micro-batch; what gains is kept.

        What lost little before another knob was turned is tried once more after it: the two may
        only pay together.
        """
        close: list[tuple[str, Value, Config]] = []
        for name in self.scene.space.searched():
            # How threads wait shows only beside loader workers: climbing tries it.
            if KNOBS[name].family is not Family.COMPUTE or name == WAIT_POLICY:
                continue
            for value in self.scene.space.values[name]:
                base = self.halves.base
                if value == base.get(name) or not self.scene.may_probe(Stage.DEVICE):
                    continue
                changed = yield from self._turn(name, value)
                if self.halves.base == base and self._lost_little(changed, base):
                    close.append((name, value, base))
        for name, value, base in close:
            turned_since = set(self.halves.base.changed_from(base)) - {name}
            if turned_since and self.scene.may_probe(Stage.DEVICE):
                yield from self._turn(name, value)

    def _turn(self, name: str, value: Value) -> Generator[Ask, Trial, Config]:
        """The base with one knob turned; it becomes the base if it gains."""
        base = self.halves.base
        changed = self.scene.space.config({name: value}, base)
        if changed not in self.halves.device:
            yield from self._probe(changed, f"{name}={value}")
        before, reached = self.halves.device.get(base), self.halves.device.get(changed)
        if before is not None and reached is not None and reached.value > WORTH * before.value:
            self.halves.base = changed
        return changed

    def _lost_little(self, changed: Config, base: Config) -> bool:
        reached, before = self.halves.device.get(changed), self.halves.device.get(base)
        return reached is not None and before is not None and reached.value > CLOSE * before.value

    def _probe(self, config: Config, why: str) -> Plan:
        trial = yield device_ask(config, f"device alone, {why}")
        batch, steps = self.scene.space.micro_batch(config), whole(config.get(ACCUMULATION, 1))
        self._fitting(config).learn(trial, batch, steps)
        known = speed_of(trial)
        if known is not None and self._fits(trial) and not self._spilled(trial, known):
            self.halves.device[config] = known
            if UNSURE & set(trial.labels):
                self.halves.unsure.add(config)

    def _fits(self, trial: Trial) -> bool:
        """What needs more memory than allowed is no better than what runs out of it."""
        return self.scene.keeps(trial, *self._on_device) and not why_unfit(
            trial, self.scene.space, self.scene.limits
        )

    @property
    def _on_device(self) -> tuple[str, ...]:
        """The limits that the training process alone can break already."""
        on_cpu = self.scene.space.machine.on_cpu
        return ("memory_gb", "host_memory_gb") if on_cpu else ("memory_gb",)

    def _spilled(self, trial: Trial, reached: Estimate) -> bool:
        """Whether it runs, but so slowly that its memory seems to lie on the host."""
        batch = self.scene.space.micro_batch(trial.config)
        smaller = {
            self.scene.space.micro_batch(config): known.value
            for config, known in self.halves.device.items()
            if self.scene.space.micro_batch(config) < batch
        }
        assert trial.measurement is not None
        best = max(smaller, key=lambda size: smaller[size], default=0)
        used = self._fitting(trial.config).used(trial.measurement)
        if not smaller or not guard.has_spilled(reached.value, smaller[best], used):
            return False
        self.scene.leave_out(
            f"micro-batch {batch}: suspected spill to host memory, a sample takes "
            f"{smaller[best] / reached.value:.1f}x as long as at {best}"
        )
        return True

    def _sized(self, base: Config, batch: int, steps: int) -> Config:
        return self.scene.space.config({BATCH: batch, ACCUMULATION: steps}, base)

    def _fitting(self, config: Config) -> Fitting:
        """What is known of other micro-batches with everything else as in the config."""
        key = config.but({BATCH: None, ACCUMULATION: None})
        if key not in self._fittings:
            self._fittings[key] = Fitting(self.scene.space, self.scene.limits)
        return self._fittings[key]

    def _best_device(self) -> Config:
        return max(
            self.halves.device, key=lambda c: self.halves.device[c].value, default=self.halves.start
        )

    def _smallest_near_best(self) -> Config:
        """With a free batch the smallest within 2 % of the fastest; else the fastest."""
        best = self._best_device()
        if not self.scene.space.goal.free or best not in self.halves.device:
            return best
        near = [
            c
            for c in self.halves.device
            if WORTH * self.halves.device[c].value >= self.halves.device[best].value
        ]
        return min(
            near, key=lambda c: (self.scene.space.global_batch(c), -self.halves.device[c].value)
        )


def _worth(batch: int, before: int) -> float:
    """What a step must gain: a doubling all of it, a smaller one its part."""
    if not before or batch <= before:
        return WORTH
    return math.pow(WORTH, min(1.0, math.log2(batch / before)))
