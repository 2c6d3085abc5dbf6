"""The device by itself: the micro-batch that costs least a sample, then precision and the like."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune import guard
from autotune.fitting import Fitting, why_unfit
from autotune.guard import CLOSE_ENOUGH, Judgement
from autotune.halves import SLACK, WORTH, Halves
from autotune.knobs import KNOBS, Family
from autotune.labels import UNSURE
from autotune.scene import Plan, device_ask, speed_of
from autotune.space import ACCUMULATION, BATCH, FINENESS, WAIT_POLICY
from autotune.types import Config, Estimate, Stage, Trial, whole

IDLE_DEVICE = 1.5
"""A device this much faster than the loader gains nothing by being faster still."""
IDLE_CPU = 4.0
"""The same on a CPU, where a cheaper step leaves its cores to the loader."""
IDLE_IN_TURNS = 50.0
"""The same without workers: loading and stepping take turns, and every faster step is a gain."""
DOWNWARD = 3
"""Micro-batches below the user's own that are tried when larger ones do not pay."""


class DeviceLadder:
    """Micro-batches, then each compute knob by itself; what gains is kept."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.scene = halves.scene
        self.fitting = Fitting(self.scene.space, self.scene.limits)
        self._matters = False

    def own(self) -> Plan:
        """The device as it is."""
        if self.scene.may_probe(Stage.DEVICE):
            yield from self._probe(self.halves.start, "as now")

    def climb(self) -> Plan:
        """Micro-batches, then each compute knob by itself; what gains is kept."""
        self._matters = not self._cannot_pay()
        if not self._matters:
            return
        yield from self._batches()
        self.halves.base = self._smallest_near_best()
        yield from self._screen()

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
        """Upward from the user's own, downward when that does not pay."""
        own = self.scene.space.micro_batch(self.halves.start)
        pairs = self._pairs()
        down = [pair for pair in reversed(pairs) if pair[0] < own]
        if self.halves.start in self.halves.device:
            yield from self._climb_batches([pair for pair in pairs if pair[0] > own])
        else:
            runs = self.scene.space.facts.step_batch or own
            fails = min(own, 2 * runs)
            yield from self._descend([pair for pair in down if pair[0] < fails], fails)
        if self._best_device() == self.halves.start:
            yield from self._climb_batches(down[:DOWNWARD])

    def _pairs(self) -> list[tuple[int, int]]:
        """One accumulation for each micro-batch: what keeps the user's global batch, or little."""
        batches = dict.fromkeys(batch for batch, _ in self.scene.space.pairs())
        return [(batch, self._accumulation(batch)) for batch in batches]

    def _accumulation(self, batch: int) -> int:
        space = self.scene.space
        wanted = max(1, space.global_batch(self.halves.start) // batch)
        allowed = {steps for size, steps in space.pairs() if space.goal.free or size == batch}
        return min(sorted(allowed), key=lambda steps: abs(steps - wanted))

    def _climb_batches(self, pairs: Iterable[tuple[int, int]]) -> Plan:
        """Size after size while that gains; none that is known not to fit."""
        best, reached_size = self.halves.device.get(self.halves.start), 0
        left = [pair for pair in pairs if self._with_batch(*pair) not in self.halves.device]
        while left and self.scene.may_probe(Stage.DEVICE):
            batch, steps = self._proven_before(left[0])
            if batch == left[0][0]:
                left.pop(0)
            if self.fitting.judge(batch, steps) is Judgement.REFUSED:
                self._leave_out(batch, steps)
                return
            config = self._with_batch(batch, steps)
            yield from self._probe(config, f"micro-batch {batch}")
            reached = self.halves.device.get(config)
            if reached is None:
                yield from self._bisect(batch)
                return
            if best is not None and reached.value < _worth(batch, reached_size) * best.value:
                return
            best, reached_size = reached, batch

    def _proven_before(self, pair: tuple[int, int]) -> tuple[int, int]:
        """Rather than a size that may not fit one below it that must, if that is a step at all."""
        if self.fitting.judge(*pair) is Judgement.SAFE or not self.scene.space.may_bisect:
            return pair
        size = self.fitting.largest_safe // FINENESS * FINENESS
        largest = max(self._sizes(), default=0)
        if not max(CLOSE_ENOUGH * largest, largest + 1) <= size < pair[0]:
            return pair
        return size, self._accumulation(size)

    def _leave_out(self, batch: int, steps: int) -> None:
        reason = self.fitting.why_refused(batch, steps)
        self.scene.leave_out(f"micro-batch {batch} and more: {reason}")

    def _sizes(self) -> list[int]:
        """The micro-batches that are known to run."""
        return [self.scene.space.micro_batch(config) for config in self.halves.device]

    def _descend(self, pairs: Iterable[tuple[int, int]], failing: int) -> Plan:
        """From a size that fails down to one that runs, then back up between the two."""
        for batch, steps in pairs:
            if not self.scene.may_probe(Stage.DEVICE):
                return
            config = self._with_batch(batch, steps)
            yield from self._probe(config, f"micro-batch {batch}")
            if config in self.halves.device:
                yield from self._bisect(failing)
                return
            failing = batch

    def _bisect(self, failing: int) -> Plan:
        """The largest multiple of eight that runs, below a size that does not."""
        if not self.scene.space.goal.free or BATCH in self.scene.space.asked:
            return
        low = max((size for size in self._sizes() if size < failing), default=0)
        while low and failing - low > 8 and self.scene.may_probe(Stage.DEVICE):
            middle = (low + failing) // 16 * 8
            if middle <= low:
                return
            steps = self._accumulation(middle)
            config = self._with_batch(middle, steps)
            if self.fitting.judge(middle, steps) is not Judgement.REFUSED:
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
        if self.fitting.judge(beyond, 1) is Judgement.REFUSED:
            return
        trial = yield device_ask(
            self._with_batch(beyond, 1), f"device alone, micro-batch {beyond} (only its price)"
        )
        reached, best = speed_of(trial), self.halves.device[self._best_device()]
        if reached is not None and reached.low > best.high * (1 + SLACK):
            self.scene.leave_out(
                f"a global batch of {beyond} would allow up to "
                f"{reached.value / best.value:.1f}x on the device; not verified end to end"
            )

    def _screen(self) -> Plan:
        """Each compute knob by itself at the best micro-batch; what gains is kept."""
        for name in self.scene.space.searched():
            # How threads wait shows only beside loader workers: climbing tries it.
            if KNOBS[name].family is not Family.COMPUTE or name == WAIT_POLICY:
                continue
            before = self.halves.device.get(self.halves.base)
            for value in self.scene.space.values[name]:
                if value == self.halves.base.get(name) or not self.scene.may_probe(Stage.DEVICE):
                    continue
                changed = self.scene.space.config({name: value}, self.halves.base)
                yield from self._probe(changed, f"{name}={value}")
            best = self._best_device()
            if before is not None and self.halves.device[best].value > WORTH * before.value:
                self.halves.base = best

    def _probe(self, config: Config, why: str) -> Plan:
        trial = yield device_ask(config, f"device alone, {why}")
        batch, steps = self.scene.space.micro_batch(config), whole(config.get(ACCUMULATION, 1))
        if config == self._with_batch(batch, steps):
            self.fitting.learn(trial, batch, steps)
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
        used = self.fitting.used(trial.measurement)
        if not smaller or not guard.has_spilled(reached.value, smaller[best], used):
            return False
        self.scene.leave_out(
            f"micro-batch {batch}: suspected spill to host memory, a sample takes "
            f"{smaller[best] / reached.value:.1f}x as long as at {best}"
        )
        return True

    def _with_batch(self, batch: int, steps: int) -> Config:
        return self.scene.space.config({BATCH: batch, ACCUMULATION: steps}, self.halves.start)

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
