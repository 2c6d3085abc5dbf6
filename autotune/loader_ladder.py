"""The loader by itself: workers until the device is fed with something to spare."""

from __future__ import annotations

import math

from autotune import guard, laws
from autotune.halves import SLACK, WORTH, Halves
from autotune.knobs import MOST_WORKERS
from autotune.metrics import BETWEEN_PROCESSES, rate
from autotune.scene import Ask, Plan, speed_of
from autotune.space import PREFETCH, WORKERS
from autotune.types import Estimate, Sink, Stage, Status, whole

HEADROOM = 1.25
"""A loader this much faster than the device costs the device nothing (METHODS 2.1)."""
LEAP = 8
"""How many times more workers are tried at once, where the rates so far ask for that many."""
MORE_WORKERS_WORTH = 1.10
"""A doubling of the workers that gains less ends the ladder."""


class LoaderLadder:
    """Worker counts, up from the user's own, by what the rates so far ask for."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.scene = halves.scene
        self._fails_alone = False
        """Whether loading fails in the main process, too."""
        self._fails_from = MOST_WORKERS + 1
        """The fewest workers that are known to fail."""

    def own(self) -> Plan:
        """The loader as it is."""
        if self._own_workers_hang():
            self._fails_from = 1
        elif self.scene.may_probe(Stage.LOADER):
            yield from self._probe(self.halves.own_workers)

    def _own_workers_hang(self) -> bool:
        """Whether the baseline has shown it already: a second wait would tell nothing new."""
        row = self.scene.row_of(self.halves.start)
        return bool(self.halves.own_workers and row is not None and row.status is Status.TIMEOUT)

    def climb(self) -> Plan:
        """Worker counts until the device is fed, or more of them gain nothing."""
        if WORKERS not in self.scene.space.searched() or self._loader_cannot_pay():
            return
        if self.halves.base not in self.halves.device and self.scene.best() is None:
            return  # nothing is known to train: there is nothing to feed
        alone = 0 in self.scene.space.values[WORKERS] and not self._fails_alone
        if alone and 0 not in self.halves.loader:
            if not self.scene.may_probe(Stage.LOADER):
                return
            yield from self._probe(0)
        while (workers := self._next_workers()) is not None:
            if not self.scene.may_probe(Stage.LOADER):
                return
            yield from self._probe(workers)
        most = self._most_in_flight()
        starved = not self.feeds(max(self.halves.loader, default=0))
        if starved and most < max(whole(count) for count in self.scene.space.values[WORKERS]):
            self.scene.leave_out(
                f"more than {int(most)} workers: too little memory for their batches"
            )

    def _next_workers(self) -> int | None:
        """As many as the rates so far say are needed, then the fewest that may be enough."""
        if not self.halves.loader:
            return None
        counts = [whole(count) for count in self.scene.space.values[WORKERS] if count]
        counts = [count for count in counts if self.may_run(count)]
        most = max(self.halves.loader)
        more = [count for count in counts if most < count <= self._most_sensible(most)]
        if more and not self.feeds(most) and (wanted := self._wanted(more, most)):
            return wanted
        known, enough = self._smallest_known_enough(), self._enough_for_base()
        fewer = (count for count in counts if count < known and count not in self.halves.loader)
        return next((w for w in fewer if self._scaling().rate(w) * (1 + SLACK) >= enough), None)

    def _wanted(self, more: list[int], most: int) -> int | None:
        """The fewest that should feed the device, or the best ones if they gain enough."""
        scaling, device = self._scaling(), self.halves.device.get(self.halves.base)
        if device is not None:
            feeding = (w for w in more if scaling.rate(w) >= HEADROOM * device.value)
            if (fewest := next(feeding, None)) is not None:
                return fewest
        best = max(more, key=scaling.rate)
        doublings = math.log2(best / max(most, 1)) if best > max(most, 1) else 1.0
        gain = scaling.rate(best) / self.halves.rate(most).value
        return best if gain >= math.pow(MORE_WORKERS_WORTH, doublings) else None

    def _scaling(self) -> laws.Scaling:
        """How the loader grows with its workers, by the counts that were measured.

        Without workers the main process loads, at about the rate of one of them.
        """
        measured = {w: self.halves.rate(w).value for w in self.halves.loader if w}
        return laws.fitted(measured or {1: self.halves.rate(0).value})

    def may_run(self, workers: int) -> bool:
        """Whether nothing is known against so many workers."""
        return workers < self._fails_from and workers <= self._most_in_flight()

    def _most_in_flight(self) -> float:
        """Workers whose batches ahead leave room in memory."""
        space, start = self.scene.space, self.halves.start
        room = guard.Room(free_bytes=space.machine.memory_bytes, shm_bytes=space.machine.shm_bytes)
        batch_bytes = space.micro_batch(start) * space.facts.sample_bytes
        return guard.most_workers(whole(start.get(PREFETCH)) or 2, batch_bytes, room)

    def feeds(self, workers: int) -> bool:
        """Whether so many workers are known to keep the device busy, with something to spare."""
        device = self.halves.device.get(self.halves.base)
        if device is None or not workers or workers not in self.halves.loader:
            return False
        return self.halves.rate(workers).value >= HEADROOM * device.value

    def _most_sensible(self, workers: int) -> float:
        """A leap at most; and of workers that compute no more than there are cores for."""
        cores = self.scene.space.machine.cpus / max(self._worker_share(workers), 0.01)
        return min(LEAP * max(workers, 1), max(round(cores), workers))

    def _worker_share(self, workers: int) -> float:
        """How much of a core each loading process uses: one that waits leaves it to others."""
        measured = self.halves.loader[workers].measurement
        assert measured is not None
        seconds = (measured.end_ns - measured.start_ns) / 1e9
        used_s = measured.worker_cpu_s if workers else measured.cpu_s
        return (used_s or 0.0) / max(seconds, 1e-9) / max(workers, 1)

    def enough(self, device: Estimate | None) -> float:
        """Samples/s that feed the device, or as near to it as any number of workers surely came."""
        fastest = max(self.halves.rate(workers).low for workers in self.halves.loader) / WORTH
        return fastest if device is None else min(HEADROOM * device.value, fastest)

    def _enough_for_base(self) -> float:
        return self.enough(self.halves.device.get(self.halves.base))

    def _smallest_known_enough(self) -> int:
        enough = self._enough_for_base()
        known = (
            count
            for count in self.halves.loader
            if count and self.halves.rate(count).value >= enough
        )
        return min(known, default=0)

    def _loader_cannot_pay(self) -> bool:
        """Skip the family, and say so, when the device is the limit by far."""
        device = self.halves.device.get(self.halves.base)
        if device is None or self.halves.own_workers not in self.halves.loader:
            return False
        bound = self.halves.device_bound(self.halves.base)
        gain = max(0.0, bound / self._made_with_own_loader(device) - 1)
        # Part of the bound is only what any two processes differ by.
        if gain >= WORTH - 1 + BETWEEN_PROCESSES:
            return False
        self.scene.leave_out(f"loader settings can gain at most {100 * gain:.1f} %: not searched")
        return True

    def _made_with_own_loader(self, device: Estimate) -> float:
        """Samples/s with the loader as it is: measured, or what the two halves should make."""
        row = self.scene.row_of(self.halves.base)
        measured = None if row is None else speed_of(row)
        if measured is not None:
            return measured.value
        loader = self.halves.rate(self.halves.own_workers)
        if self.halves.own_workers:
            return loader.low
        # Without workers loading and training take turns: loading costs its share in full.
        return 1 / (1 / device.high + 1 / loader.low)

    def _probe(self, workers: int) -> Plan:
        trial = yield Ask(
            config=self.scene.space.config({WORKERS: workers}, self.halves.start),
            stage=Stage.LOADER,
            sink=Sink.DISCARD,
            why=f"loader alone, {workers} workers",
        )
        if trial.ok and trial.measurement is not None and rate(trial.measurement) is not None:
            self.halves.loader[workers] = trial
        elif not workers:
            self._fails_alone = True
        else:
            # One that hangs will hang in any company; what dies may only lack memory.
            self._fails_from = 1 if trial.status is Status.TIMEOUT else workers
