"""A made-up job with known laws: what each probe of it would measure, and what is really best."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from made_up import CPU, EVERYTHING, FACTS, GIB
from made_up import space as made_up_space

from autotune.course import Aim, Course
from autotune.evidence import Rows
from autotune.metrics import SPEED
from autotune.scene import Ask
from autotune.space import ACCUMULATION, BATCH, PREFETCH, WORKERS, Goal
from autotune.types import (
    Block,
    Config,
    Failure,
    Machine,
    Measurement,
    Sink,
    Source,
    Stage,
    Status,
    Trial,
    WorkloadFacts,
)

BLOCK_S = 0.25
CLOSING = (Stage.FINAL, Stage.PATH)
KEPT_BACK = 6


@dataclass(kw_only=True)
class Law:
    """How fast the two halves of a job are."""

    load_s: float = 1e-4
    """Seconds in which one worker makes one sample."""
    computing: float = 0.0
    """Share of that which computes; the rest waits, and leaves the core to others."""
    most_loaded: float = math.inf
    """Samples/s that the storage gives to all workers together."""
    launch_s: float = 1e-3
    """Seconds that a micro-batch costs however small it is."""
    sample_s: float = 1e-5
    """Seconds that each of its samples adds."""
    optimizer_s: float = 0.0
    fails_above: float = math.inf
    """The largest micro-batch that fits into memory."""
    speedups: dict = field(default_factory=dict)
    """How many times faster the step is with a knob's value, by (knob, value)."""
    restart_s: float = 0.0
    """What an epoch's border costs with workers that are not kept."""
    hangs_with: Callable[[Config], bool] = lambda config: False
    memory: Callable[[int], float] = lambda batch: GIB + 1024 * 1024 * batch
    """Peak bytes of the step by micro-batch."""
    resident_bytes: int | None = None
    """What of it is there all the time, if that is told."""
    physical_bytes: float = math.inf
    """Memory beyond which a probe fails."""
    retries_above: float = math.inf
    """The micro-batch above which the allocator must retry."""
    collapses_above: float = math.inf
    """The micro-batch above which memory spills and a sample takes ten times as long."""

    def loader(self, config: Config, cpus: int) -> float:
        """Samples/s of the loader alone."""
        workers = int(config.get(WORKERS) or 0)
        at_once = max(workers, 1)
        if self.computing:
            at_once = min(at_once, cpus / self.computing)
        return min(at_once / self.load_s, self.most_loaded)

    def device(self, config: Config, batch: int) -> float:
        """Samples/s of the device alone."""
        steps = int(config.get(ACCUMULATION) or 1)
        speedup = math.prod(
            times for (knob, value), times in self.speedups.items() if config.get(knob) == value
        )
        spilled = 10 if batch > self.collapses_above else 1
        step_s = (self.launch_s + self.sample_s * batch) * steps / speedup + self.optimizer_s
        step_s *= spilled
        return batch * steps / step_s

    def together(self, config: Config, batch: int, cpus: int) -> float:
        """Samples/s of both, between two borders of an epoch."""
        loader, device = self.loader(config, cpus), self.device(config, batch)
        workers = int(config.get(WORKERS) or 0)
        if not workers:
            return 1 / (1 / loader + 1 / device)
        # METHODS 2.1: what is lost where the two are alike, less with a deeper queue
        queued = workers * int(config.get(PREFETCH) or 2)
        ratio = min(loader, device) / max(loader, device)
        return min(loader, device) * (1 - 0.3 * ratio**4 / (queued + 1))


@dataclass
class Job:
    """A run of a searcher over a law."""

    law: Law
    machine: Machine = CPU
    facts: WorkloadFacts = FACTS
    request: object = EVERYTHING
    current: dict | None = None
    goal: Goal = field(default_factory=lambda: Goal(size=None))
    noise: float = 0.003
    seed: int = 0
    most: int = 60
    """Probes that are paid for."""
    limits: tuple = ()
    turned_down: str = ""
    asks: list = field(default_factory=list)

    def __post_init__(self):
        self.space = made_up_space(self.request, self.current, self.goal, self.machine, self.facts)
        self.numbers = random.Random(self.seed)
        self.answer = None
        self.rounds_wanted = None  # told by the course
        self.rows = Rows()
        self.course = Course(
            space=self.space,
            aim=Aim(objective=SPEED, limits=self.limits),
            purse=self,
            seed=self.seed,
            rows=self.rows,
        )
        self.trials = self.rows.judged

    @property
    def scene(self):
        return self.course.scene

    def run(self, sampler="staged"):
        """Measure the baseline, let the searcher search, decide."""
        baseline = Ask(config=self.space.baseline, stage=Stage.BASELINE, why="yours")
        if not self.course.ends_with(self.measure(baseline)):
            self.course.run(sampler, self.measure)
        self.answer = self.course.decide()
        return self

    def affords(self, stage, count):
        kept_back = 0 if stage in CLOSING else KEPT_BACK
        return len(self.asks) + count + kept_back <= self.most

    def measure(self, ask):
        """The row of a probe."""
        self.asks.append(ask)
        outcome = self.outcome(ask)
        failed = isinstance(outcome, Failure)
        row = Trial(
            number=len(self.trials),
            config=ask.config,
            stage=ask.stage,
            source=ask.source,
            sink=ask.sink,
            measurement=None if failed else outcome,
            failure=outcome if failed else None,
            probe_s=3.0,
            why=ask.why,
            round=ask.round,
        )
        return self.rows.take(row)

    def outcome(self, ask):
        law, config, cpus = self.law, ask.config, self.machine.cpus
        batch = self.space.micro_batch(config)
        if ask.source is Source.LOADER and law.hangs_with(config):
            return Failure(status=Status.TIMEOUT, message="no result after 20 s")
        too_large = batch > law.fails_above or law.memory(batch) > law.physical_bytes
        if ask.sink is Sink.TRAIN and too_large:
            return Failure(status=Status.OUT_OF_MEMORY, message="device: CUDA out of memory")
        if ask.sink is Sink.DISCARD:
            rate = law.loader(config, cpus)
        elif ask.source is Source.CACHED:
            rate = law.device(config, batch)
        else:
            rate = law.together(config, batch, cpus)
        if ask.beat is not None and rate < 0.9 * ask.beat:
            return replace(self.window(ask, rate, batch), stopped="dominated")
        return self.window(ask, rate, batch)

    def window(self, ask, rate, batch):
        between = math.exp(self.numbers.gauss(0, self.noise))
        device = self.law.device(ask.config, batch)
        waits = max(0.0, 1 - rate / device) if ask.sink is Sink.TRAIN else 0.0
        workers = int(ask.config.get(WORKERS) or 0) if ask.source is Source.LOADER else 0
        blocks = []
        for _ in range(12):
            seconds = BLOCK_S / between * math.exp(self.numbers.gauss(0, self.noise))
            taken = max(1, round(rate * BLOCK_S))
            blocks.append(
                Block(
                    seconds=seconds,
                    consumed=taken,
                    produced=taken,
                    wait_s=waits * seconds,
                    steps=10,
                )
            )
        spent_s = sum(block.seconds for block in blocks)
        loaded = sum(block.consumed for block in blocks)
        loading_s = loaded * self.law.load_s * self.law.computing
        kept = bool(ask.config.get("loader.persistent_workers")) or not workers
        memory = int(self.law.memory(batch))
        on_device = not self.machine.on_cpu and self.law.resident_bytes is not None
        return Measurement(
            blocks=tuple(blocks),
            stopped="narrow",
            batches=120,
            steps=120,
            optimizer_steps=120,
            restarts_s=() if kept else (self.law.restart_s,),
            epoch_samples=float(self.facts.dataset_len or 0) or None,
            memory_bytes=memory,
            resident_bytes=self.law.resident_bytes,
            allocated_bytes=memory if on_device else None,
            reserved_bytes=memory if on_device else None,
            alloc_retries=int(batch > self.law.retries_above) if on_device else None,
            workers=workers,
            cpus=self.machine.cpus,
            cpu_s=loading_s if ask.source is Source.LOADER else 0.0,
            worker_cpu_s=loading_s if workers else 0.0,
            start_ns=0,
            end_ns=int(spent_s * 1e9),
        )

    # --- what is true ---

    def truth(self, config):
        """Samples/s over whole epochs."""
        batch = self.space.micro_batch(config)
        if batch > self.law.fails_above or self.law.hangs_with(config):
            return 0.0
        rate = self.law.together(config, batch, self.machine.cpus)
        kept = bool(config.get("loader.persistent_workers")) or not config.get(WORKERS)
        border_s = 0.0 if kept else self.law.restart_s
        return 1 / (1 / rate + border_s / (self.facts.dataset_len or math.inf))

    def best(self):
        """The best rate of the space's grid."""
        return max(self.truth(config) for config in self.space.grid())

    def found(self):
        """The answer's rate, as a share of the best."""
        return self.truth(self.answer.config) / self.best()

    def asked(self, stage=None):
        return [ask for ask in self.asks if stage is None or ask.stage is stage]

    def end_to_end(self):
        return [a for a in self.asks if a.source is Source.LOADER and a.sink is Sink.TRAIN]


def fits_into(job):
    """The largest micro-batch of a config that was measured."""
    return max(int(t.config.get(BATCH) or 0) for t in job.trials if t.ok and t.sink is Sink.TRAIN)
