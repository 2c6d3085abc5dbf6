"""The two halves by themselves: what the loader alone and the device alone can do.

Each is an upper bound of every end-to-end config that shares it, so the halves are searched one
after the other instead of multiplied (METHODS 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.knobs import KNOBS, MOST_WORKERS, Family
from autotune.metrics import rate, restart_s_per_sample
from autotune.scene import Ask, Plan, Scene, device_ask, speed_of
from autotune.space import (
    ACCUMULATION,
    BATCH,
    PERSISTENT,
    PREFETCH,
    THREADS,
    WAIT_POLICY,
    WORKERS,
)
from autotune.types import Config, Estimate, Sink, Stage, Status, Trial, Value, whole

HEADROOM = 1.25
"""A loader this much faster than the device costs the device nothing (METHODS 2.1)."""
MOST_SHARED = 0.5
"""Share of the free shared memory that the batches of all workers may fill (METHODS, b)."""
LEAP = 8
"""How many times more workers are tried at once, where the rates so far ask for that many."""
SLACK = 0.03
"""What a bound is widened by before anything is dropped because of it."""
WORTH = 1.02
"""A step of a ladder that gains less ends the ladder."""
MORE_WORKERS_WORTH = 1.10
"""A doubling of the workers that gains less ends the ladder."""
RESTART_MATTERS = 0.005
"""Share of an epoch's time above which workers are kept from epoch to epoch."""
IDLE_DEVICE = 1.5
"""A device this much faster than the loader gains nothing by being faster still."""
IDLE_CPU = 4.0
"""The same on a CPU, where a cheaper step leaves its cores to the loader."""
IDLE_IN_TURNS = 50.0
"""The same without workers: loading and stepping take turns, and every faster step is a gain."""
DOWNWARD = 3
"""Micro-batches below the user's own that are tried when larger ones do not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A loader setting and a device setting: what they should make, and cannot exceed."""

    config: Config
    workers: int
    predicted: float
    bound: float


class Ceilings:
    """Ladders over both halves, and the pairs that come of them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.start = scene.space.start
        self.base = self.start
        """The device setting that the search goes on with."""
        self.loader: dict[int, Trial] = {}
        self.device: dict[Config, Estimate] = {}
        self._fails_from = MOST_WORKERS + 1
        """The fewest workers that are known to fail."""
        self._device_matters = False

    @property
    def own_workers(self) -> int:
        """The worker count that the search sets out from."""
        return whole(self.start.get(WORKERS))

    def first_look(self) -> Plan:
        """Both halves as they are: which one holds the other back."""
        if self._own_workers_hang():
            self._fails_from = 1
        elif self.scene.may_probe(Stage.LOADER):
            yield from self._loader_probe(self.own_workers)
        if self.scene.may_probe(Stage.DEVICE):
            yield from self._device_probe(self.start, "as now")

    def _own_workers_hang(self) -> bool:
        """Whether the baseline has shown it already: a second wait would tell nothing new."""
        row = self.scene.row_of(self.start)
        return bool(self.own_workers and row is not None and row.status is Status.TIMEOUT)

    # --- the loader: workers until the device is fed with something to spare ---

    def loader_ladder(self) -> Plan:
        """Worker counts until the device is fed, or more of them gain nothing."""
        if WORKERS not in self.scene.space.searched() or self._loader_cannot_pay():
            return
        if self.base not in self.device and self.scene.best() is None:
            return  # nothing is known to train: there is nothing to feed
        if 0 not in self.loader and 0 in self.scene.space.values[WORKERS]:
            if not self.scene.may_probe(Stage.LOADER):
                return
            yield from self._loader_probe(0)
        while (workers := self._next_workers()) is not None:
            if not self.scene.may_probe(Stage.LOADER):
                return
            yield from self._loader_probe(workers)
        most = self._most_in_flight()
        starved = not self.feeds(max(self.loader, default=0))
        if starved and most < max(whole(count) for count in self.scene.space.values[WORKERS]):
            self.scene.leave_out(f"more than {int(most)} workers: too little shared memory")

    def _next_workers(self) -> int | None:
        """As many as the rates so far say are needed, then the fewest that may be enough."""
        if not self.loader:
            return None
        counts = [whole(count) for count in self.scene.space.values[WORKERS] if count]
        counts = [count for count in counts if self.may_run(count)]
        most = max(self.loader)
        more = [count for count in counts if most < count <= self._most_sensible(most)]
        if more and not self.feeds(most) and self._still_grows():
            return next((count for count in more if count >= self._needed()), more[-1])
        least, known = self._fewest_enough(), self._smallest_known_enough()
        return next((c for c in counts if least <= c < known and c not in self.loader), None)

    def may_run(self, workers: int) -> bool:
        """Whether nothing is known against so many workers."""
        return workers < self._fails_from and workers <= self._most_in_flight()

    def _most_in_flight(self) -> float:
        """Workers whose batches ahead leave room in shared memory."""
        space = self.scene.space
        ahead = (whole(self.start.get(PREFETCH)) or 2) * space.micro_batch(self.start)
        bytes_each = ahead * space.facts.sample_bytes
        if not bytes_each or not space.machine.shm_bytes:
            return math.inf
        return MOST_SHARED * space.machine.shm_bytes / bytes_each

    def feeds(self, workers: int) -> bool:
        """Whether so many workers are known to keep the device busy, with something to spare."""
        device = self.device.get(self.base)
        if device is None or not workers or workers not in self.loader:
            return False
        return self.rate(workers).value >= HEADROOM * device.value

    def _still_grows(self) -> bool:
        """Whether each doubling of the last step to more workers gained something."""
        known = sorted(self.loader)
        if len(known) < 2 or known[-1] == 1:
            return True
        doublings = math.log2(known[-1] / max(known[-2], 1))
        grew = self.rate(known[-1]).value / self.rate(known[-2]).value
        return grew >= math.pow(MORE_WORKERS_WORTH, doublings)

    def _most_sensible(self, workers: int) -> float:
        """A leap at most; and of workers that compute no more than there are cores for."""
        cores = self.scene.space.machine.cpus / max(self._worker_share(workers), 0.01)
        return min(LEAP * max(workers, 1), max(round(cores), workers))

    def _worker_share(self, workers: int) -> float:
        """How much of a core each loading process uses: one that waits leaves it to others."""
        measured = self.loader[workers].measurement
        assert measured is not None
        seconds = (measured.end_ns - measured.start_ns) / 1e9
        used_s = measured.worker_cpu_s if workers else measured.cpu_s
        return (used_s or 0.0) / max(seconds, 1e-9) / max(workers, 1)

    def _needed(self) -> float:
        """Workers that would feed the device, did each add what those of the most known do."""
        device, most = self.device.get(self.base), max(self.loader)
        each = self.rate(most).value / max(most, 1)
        return math.inf if device is None else HEADROOM * device.value / each

    def _enough(self, device: Estimate | None) -> float:
        """Samples/s that feed the device, or as near to it as any number of workers surely came."""
        fastest = max(self.rate(workers).low for workers in self.loader) / WORTH
        return fastest if device is None else min(HEADROOM * device.value, fastest)

    def _fewest_enough(self) -> float:
        """Fewer workers than this cannot be enough: none makes more than the best one known."""
        each = max(self.rate(workers).value / max(workers, 1) for workers in self.loader)
        return self._enough(self.device.get(self.base)) / (each * (1 + SLACK))

    def _smallest_known_enough(self) -> int:
        enough = self._enough(self.device.get(self.base))
        known = (count for count in self.loader if count and self.rate(count).value >= enough)
        return min(known, default=0)

    def _loader_cannot_pay(self) -> bool:
        """Skip the family, and say so, when the device is the limit by far."""
        device = self.device.get(self.base)
        if device is None or self.own_workers not in self.loader:
            return False
        gain = max(0.0, device.high / self._made_with_own_loader(device) - 1)
        if gain >= WORTH - 1:
            return False
        self.scene.leave_out(f"loader settings can gain at most {100 * gain:.1f} %: not searched")
        return True

    def _made_with_own_loader(self, device: Estimate) -> float:
        """Samples/s with the loader as it is: measured, or what the two halves should make."""
        row = self.scene.row_of(self.base)
        measured = None if row is None else speed_of(row)
        if measured is not None:
            return measured.value
        loader = self.rate(self.own_workers)
        if self.own_workers:
            return loader.low
        # Without workers loading and training take turns: loading costs its share in full.
        return 1 / (1 / device.high + 1 / loader.low)

    def _loader_probe(self, workers: int) -> Plan:
        trial = yield Ask(
            config=self.scene.space.config({WORKERS: workers}, self.start),
            stage=Stage.LOADER,
            sink=Sink.DISCARD,
            why=f"loader alone, {workers} workers",
        )
        if trial.ok and trial.measurement is not None and rate(trial.measurement) is not None:
            self.loader[workers] = trial
        elif workers:
            # One that hangs will hang in any company; what dies may only lack memory.
            self._fails_from = 1 if trial.status is Status.TIMEOUT else workers

    def rate(self, workers: int) -> Estimate:
        """The loader's ceiling with so many workers, samples/s."""
        measured = self.loader[workers].measurement
        assert measured is not None
        known = rate(measured)
        assert known is not None
        return known.estimate

    # --- the device: the micro-batch that costs least a sample, then precision and the like ---

    def device_ladder(self) -> Plan:
        """Micro-batches, then each compute knob by itself; what gains is kept."""
        self._device_matters = not self._device_cannot_pay()
        if not self._device_matters:
            return
        yield from self._batches()
        self.base = self._smallest_near_best()
        yield from self._screen()

    def _device_cannot_pay(self) -> bool:
        """Skip the family, and say so, when the loader is the limit by far."""
        device = self.device.get(self.start)
        if device is None or not self.loader:
            return False
        fastest = max(self.rate(workers).value for workers in self.loader)
        if device.value < self._idle() * fastest:
            return False
        self.scene.leave_out(
            f"batch and precision: the device alone is {device.value / fastest:.1f}x as fast as "
            "the loader can be"
        )
        return True

    def _idle(self) -> float:
        """How much faster than the loader the device must be for its speed not to matter."""
        if not any(self.loader):
            return IDLE_IN_TURNS
        return IDLE_CPU if self.scene.space.machine.on_cpu else IDLE_DEVICE

    def _batches(self) -> Plan:
        """Upward from the user's own, downward when that does not pay."""
        own = self.scene.space.micro_batch(self.start)
        pairs = self._pairs()
        down = [pair for pair in reversed(pairs) if pair[0] < own]
        if self.start in self.device:
            yield from self._climb([pair for pair in pairs if pair[0] > own])
        else:
            runs = self.scene.space.facts.step_batch or own
            fails = min(own, 2 * runs)
            yield from self._descend([pair for pair in down if pair[0] < fails], fails)
        if self._best_device() == self.start:
            yield from self._climb(down[:DOWNWARD])

    def _pairs(self) -> list[tuple[int, int]]:
        """One accumulation for each micro-batch: what keeps the user's global batch, or little."""
        batches = dict.fromkeys(batch for batch, _ in self.scene.space.pairs())
        return [(batch, self._accumulation(batch)) for batch in batches]

    def _accumulation(self, batch: int) -> int:
        space = self.scene.space
        wanted = max(1, space.global_batch(self.start) // batch)
        allowed = {steps for size, steps in space.pairs() if space.goal.free or size == batch}
        return min(sorted(allowed), key=lambda steps: abs(steps - wanted))

    def _climb(self, pairs: Iterable[tuple[int, int]]) -> Plan:
        best = self.device.get(self.start)
        for batch, steps in pairs:
            if not self.scene.may_probe(Stage.DEVICE):
                return
            config = self._with_batch(batch, steps)
            if config in self.device:
                continue
            yield from self._device_probe(config, f"micro-batch {batch}")
            reached = self.device.get(config)
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
            yield from self._device_probe(config, f"micro-batch {batch}")
            if config in self.device:
                yield from self._bisect(failing)
                return
            failing = batch

    def _bisect(self, failing: int) -> Plan:
        """The largest multiple of eight that runs, below a size that does not."""
        if not self.scene.space.goal.free or BATCH in self.scene.space.asked:
            return
        sizes = [self.scene.space.micro_batch(config) for config in self.device]
        low = max((size for size in sizes if size < failing), default=0)
        while low and failing - low > 8 and self.scene.may_probe(Stage.DEVICE):
            middle = (low + failing) // 16 * 8
            if middle <= low:
                return
            config = self._with_batch(middle, self._accumulation(middle))
            yield from self._device_probe(config, f"micro-batch {middle}")
            if config in self.device:
                low = middle
            else:
                failing = middle

    def price_of_the_global_batch(self) -> Plan:
        """What a larger batch would allow, where the global batch forbids it."""
        goal, facts = self.scene.space.goal, self.scene.space.facts
        matters = self._device_matters and self.device
        if goal.size is None or not matters or BATCH in self.scene.space.asked:
            return
        largest = max(self.scene.space.micro_batch(config) for config in self.device)
        beyond = 2 * goal.size
        if largest < goal.size or (facts.dataset_len and beyond > facts.dataset_len):
            return
        if not self.scene.may_probe(Stage.DEVICE):
            return
        trial = yield device_ask(
            self._with_batch(beyond, 1), f"device alone, micro-batch {beyond} (only its price)"
        )
        reached, best = speed_of(trial), self.device[self._best_device()]
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
            before = self.device.get(self.base)
            for value in self.scene.space.values[name]:
                if value == self.base.get(name) or not self.scene.may_probe(Stage.DEVICE):
                    continue
                changed = self.scene.space.config({name: value}, self.base)
                yield from self._device_probe(changed, f"{name}={value}")
            best = self._best_device()
            if before is not None and self.device[best].value > WORTH * before.value:
                self.base = best

    def _device_probe(self, config: Config, why: str) -> Plan:
        trial = yield device_ask(config, f"device alone, {why}")
        known = speed_of(trial)
        # What needs more memory than allowed is no better than what runs out of it.
        if known is not None and self.scene.keeps(trial, "memory_gb"):
            self.device[config] = known

    def _with_batch(self, batch: int, steps: int) -> Config:
        return self.scene.space.config({BATCH: batch, ACCUMULATION: steps}, self.start)

    def _best_device(self) -> Config:
        return max(self.device, key=lambda c: self.device[c].value, default=self.start)

    def _smallest_near_best(self) -> Config:
        """With a free batch the smallest within 2 % of the fastest; else the fastest."""
        best = self._best_device()
        if not self.scene.space.goal.free or best not in self.device:
            return best
        near = [c for c in self.device if WORTH * self.device[c].value >= self.device[best].value]
        return min(near, key=lambda c: (self.scene.space.global_batch(c), -self.device[c].value))

    # --- both halves together ---

    def candidates(self) -> list[Candidate]:
        """Pairs of a loader and a device setting, the best prediction first.

        For each worker count only the device setting that is predicted best: what the other
        ones are good for shows when its changes are taken back one by one.
        """
        pairs = [
            self._candidate(device, workers)
            for device in self._device_options()
            for workers in self._loader_options(self.device[device])
        ]
        if not pairs:
            return [self._unmeasured()]
        most = max(pair.predicted for pair in pairs)

        def in_order(pair: Candidate) -> tuple[float, int, int]:
            # What is predicted to be as fast as the best is a tie: the simplest goes first.
            tied = pair.predicted * WORTH >= most
            changes = len(pair.config.changed_from(self.start))
            return (-most if tied else -pair.predicted, changes, pair.workers)

        pairs.sort(key=in_order)
        best: dict[int, Candidate] = {}
        for pair in pairs:
            best.setdefault(pair.workers, pair)
        return list(best.values())

    def _unmeasured(self) -> Candidate:
        """Where no ceiling could be measured: the start, without workers if those hang."""
        workers = self.own_workers if self.may_run(self.own_workers) else 0
        config = self.with_workers(self.start, workers)
        return Candidate(config=config, workers=workers, predicted=0.0, bound=math.inf)

    def _device_options(self) -> list[Config]:
        fit = [config for config in self.device if self.scene.space.admits(config)]
        if not fit:
            return []
        fit.sort(key=lambda config: -self.device[config].value)
        least = 0.85 * self.device[fit[0]].value
        near = [config for config in fit if self.device[config].value > least][:3]
        wanted = dict.fromkeys((self.base, *near, self.start))
        return [config for config in wanted if config in fit]

    def _loader_options(self, device: Estimate) -> list[int]:
        """The fewest workers that feed the device, or are as fast as any; and the user's own."""
        counts = sorted(self.loader)
        if not counts:
            return [self.own_workers]
        fed = [w for w in counts if w and self.rate(w).value >= self._enough(device)][:1]
        others = [w for w in (self.own_workers, 0) if w in self.loader]
        return list(dict.fromkeys([*fed, *others]))

    def _candidate(self, device: Config, workers: int) -> Candidate:
        compute = self.device[device]
        config = self.with_workers(device, workers)
        if workers not in self.loader:
            return Candidate(
                config=config, workers=workers, predicted=compute.value, bound=compute.high
            )
        loader = self.rate(workers)
        if workers == 0:
            predicted = 1 / (1 / compute.value + 1 / loader.value)
            bound = 1 / (1 / compute.high + 1 / loader.high)
        else:
            predicted = min(compute.value, loader.value, self._cores_allow(device, workers))
            bound = min(compute.high, loader.high)
        return Candidate(config=config, workers=workers, predicted=predicted, bound=bound)

    def _cores_allow(self, device: Config, workers: int) -> float:
        """On a CPU loader and step share the cores: samples/s that their CPU time leaves."""
        loader = self.loader[workers].measurement
        if not self.scene.space.machine.on_cpu or loader is None or loader.cpu_s is None:
            return math.inf
        loaded = sum(block.consumed for block in loader.blocks)
        threads = whole(device.get(THREADS)) or 1
        step_s = threads / self.device[device].value
        return self.scene.space.machine.cpus / (loader.cpu_s / max(loaded, 1) + step_s)

    def with_workers(self, config: Config, workers: int) -> Config:
        """The config with so many workers, kept from epoch to epoch where that pays."""
        changes: dict[str, Value] = {WORKERS: workers}
        values = self.scene.space.values.get(PERSISTENT, ())
        if workers and len(values) > 1 and self._restart_matters(workers):
            changes[PERSISTENT] = True
        return self.scene.space.config(changes, config)

    def _restart_matters(self, workers: int) -> bool:
        measured = self.loader[workers].measurement if workers in self.loader else None
        if measured is None:
            return False
        return restart_s_per_sample(measured) * self.rate(workers).value > RESTART_MATTERS
