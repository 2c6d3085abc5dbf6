"""The device by itself: the micro-batch that costs least a sample, then precision and the like."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.halves import SLACK, WORTH, Halves
from autotune.knobs import KNOBS, Family
from autotune.scene import Plan, device_ask, speed_of
from autotune.space import ACCUMULATION, BATCH, WAIT_POLICY
from autotune.types import Config, Stage

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
        best = self.halves.device.get(self.halves.start)
        for batch, steps in pairs:
            if not self.scene.may_probe(Stage.DEVICE):
                return
            config = self._with_batch(batch, steps)
            if config in self.halves.device:
                continue
            yield from self._probe(config, f"micro-batch {batch}")
            reached = self.halves.device.get(config)
            if reached is None:
                yield from self._bisect(batch)
                return
            if best is not None and reached.value < WORTH * best.value:
                return
            best = reached

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
        sizes = [self.scene.space.micro_batch(config) for config in self.halves.device]
        low = max((size for size in sizes if size < failing), default=0)
        while low and failing - low > 8 and self.scene.may_probe(Stage.DEVICE):
            middle = (low + failing) // 16 * 8
            if middle <= low:
                return
            config = self._with_batch(middle, self._accumulation(middle))
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
        known = speed_of(trial)
        # What needs more memory than allowed is no better than what runs out of it.
        if known is not None and self.scene.keeps(trial, "memory_gb"):
            self.halves.device[config] = known

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
