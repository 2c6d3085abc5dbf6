"""Which config to try next. Only this file and `store.py` know Optuna.

A searcher is a generator: it yields what to measure and receives the row that came of it. So it
reads downwards like the method it implements, and a resumed run replays it with stored rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.knobs import KNOBS, Family
from autotune.metrics import Limit, Metric, rate, restart_s_per_sample, throughput
from autotune.space import ACCUMULATION, BATCH, PREFETCH, THREADS, WORKERS, Space
from autotune.types import Config, Estimate, Sink, Source, Stage, Trial, Value, whole

if TYPE_CHECKING:
    import optuna

PERSISTENT = "loader.persistent_workers"
WAIT_POLICY = "host.omp_wait_policy"

HEADROOM = 1.25
"""A loader this much faster than the device costs the device nothing (METHODS 2.1)."""
SLACK = 0.03
"""What a bound is widened by before anything is dropped because of it."""
WORTH = 1.02
"""A step of a ladder that gains less ends the ladder."""
BUSY_WORKER = 0.85
"""Share of a core above which a worker does not wait any more."""
RESTART_MATTERS = 0.005
"""Share of an epoch's time above which workers are kept from epoch to epoch."""
MOST_VERIFIED = 6
MOST_END_TO_END = 25
MOST_FINALISTS = 3
ROUNDS = 3
MOST_ROUNDS = 6
MOST_PATH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One probe that a searcher wants."""

    config: Config
    stage: Stage
    why: str
    source: Source = Source.LOADER
    sink: Sink = Sink.TRAIN
    beat: float | None = None
    """Samples/s of the incumbent's lower end: a probe clearly below it may stop early."""
    fresh: bool = False
    round: int = 0


Plan = Generator[Ask, Trial, None]


@dataclass
class Scene:
    """What a searcher may look at: the space, the rows so far, and how much time is left."""

    space: Space
    objective: Metric
    limits: tuple[Limit, ...]
    seed: int
    affords: Callable[[Stage, int], bool]
    """Whether so many more probes of a stage can be paid for; finals keep their reserve."""
    ambiguous: Callable[[], bool]
    """Whether one more round of finals could change the answer."""
    answer: Callable[[], Config]
    """The answer that the rows so far stand behind."""
    trials: list[Trial] = field(default_factory=list)
    not_explored: list[str] = field(default_factory=list)
    """What was left out, and why, in words for the verdict."""

    @property
    def end_to_end(self) -> list[Trial]:
        """The rows of loader and training together."""
        return [t for t in self.trials if t.end_to_end and t.stage is not Stage.INSPECT]

    def best(self) -> Trial | None:
        """The best ok end-to-end row that pins and limits allow."""
        fit = [t for t in self.end_to_end if t.ok and self.fits(t)]
        return max(fit, key=self.score) if fit else None

    def fits(self, trial: Trial) -> bool:
        """Whether the row's config could be the answer."""
        measured = trial.measurement
        return (
            measured is not None
            and self.space.admits(trial.config)
            and all(limit.holds(limit.metric.compute(measured)) for limit in self.limits)
        )

    def score(self, trial: Trial) -> float:
        """The leading objective, turned so that higher is better; below all where unread."""
        value = self.objective.compute(trial.measurement) if trial.measurement else None
        return float("-inf") if value is None else -self.objective.cost(value)

    def row_of(self, config: Config) -> Trial | None:
        """The newest end-to-end row of a config."""
        rows = [t for t in self.end_to_end if t.config == config]
        return rows[-1] if rows else None

    def to_beat(self) -> float | None:
        """What the incumbent makes at least, where speed is what counts."""
        best = self.best()
        if best is None or best.measurement is None or self.objective.name != "samples_per_s":
            return None
        speed = throughput(best.measurement)
        return None if speed is None else speed.low

    def may_measure(self, stage: Stage) -> bool:
        """Whether one more end-to-end probe fits the count and the time."""
        planned = ROUNDS * 2 if stage is not Stage.FINAL else 0
        return len(self.end_to_end) + planned < MOST_END_TO_END and self.affords(stage, 1)


def plan(sampler: str, scene: Scene) -> Plan:
    """The whole run after inspection and baseline: search, finals, path."""
    yield from SAMPLERS[sampler](scene)
    yield from finals(scene)
    yield from path(scene)


# --- staged: add the two halves instead of multiplying them -----------------------------------


def staged(scene: Scene) -> Plan:
    """Ceilings of each half, composed, verified in the order of their bounds, then climbed."""
    ceilings = Ceilings(scene)
    yield from ceilings.device_ladder()
    yield from ceilings.screen()
    yield from ceilings.loader_ladder()
    yield from verify(scene, ceilings)
    yield from climb(scene, ceilings)
    yield from simplify(scene)


class Ceilings:
    """What the loader alone and the device alone can do."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.start = scene.space.start
        self.loader: dict[int, Trial] = {}
        self.device: dict[Config, Estimate] = {}
        self.base = self.start

    # The device half: the batch that costs least a sample, then the precision and the like.

    def device_ladder(self) -> Plan:
        """Micro-batches upward from the user's own, downward when that does not pay."""
        yield from self._device_probe(self.start, "device alone, your settings")
        own = self.scene.space.micro_batch(self.start)
        pairs = self.scene.space.pairs()
        up = [pair for pair in pairs if pair[0] > own]
        down = [pair for pair in reversed(pairs) if pair[0] < own]
        if self.start in self.device:
            yield from self._climb_batches(up)
        else:
            yield from self._descend(down, own)
        if self._best_device() == self.start:
            yield from self._climb_batches(down[:3])
        yield from self._price_of_the_global_batch(own)
        self.base = self._smallest_near_best()

    def screen(self) -> Plan:
        """Each compute knob by itself at the best micro-batch; what gains is kept."""
        for name in self.scene.space.searched():
            if KNOBS[name].family is not Family.COMPUTE or name == WAIT_POLICY:
                continue
            before = self.device.get(self.base)
            for value in self.scene.space.values[name]:
                if value == self.base.get(name) or not self.scene.affords(Stage.DEVICE, 1):
                    continue
                changed = self.scene.space.config({name: value}, self.base)
                yield from self._device_probe(changed, f"device alone, {name}={value}")
            best = self._best_device()
            if before is not None and self.device[best].value > WORTH * before.value:
                self.base = best

    def _climb_batches(self, pairs: Iterable[tuple[int, int]]) -> Plan:
        best = self.device.get(self.start)
        for batch, steps in pairs:
            if not self.scene.affords(Stage.DEVICE, 1):
                return
            config = self.scene.space.config({BATCH: batch, ACCUMULATION: steps}, self.start)
            if config in self.device:
                continue
            yield from self._device_probe(config, f"device alone, micro-batch {batch}")
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
            if not self.scene.affords(Stage.DEVICE, 1):
                return
            config = self.scene.space.config({BATCH: batch, ACCUMULATION: steps}, self.start)
            yield from self._device_probe(config, f"device alone, micro-batch {batch}")
            if config in self.device:
                yield from self._bisect(failing)
                return
            failing = batch

    def _bisect(self, failing: int) -> Plan:
        """The largest multiple of eight that runs, below a size that does not."""
        if not self.scene.space.goal.free:
            return
        sizes = [self.scene.space.micro_batch(config) for config in self.device]
        low = max((size for size in sizes if size < failing), default=0)
        steps = int(self.start.get(ACCUMULATION) or 1)
        allowed = {batch for batch, _ in self.scene.space.pairs()}
        while low and failing - low > 8 and self.scene.affords(Stage.DEVICE, 1):
            middle = (low + failing) // 16 * 8
            if middle <= low or middle not in allowed and BATCH in self.scene.space.asked:
                return
            config = self.scene.space.config({BATCH: middle, ACCUMULATION: steps}, self.start)
            yield from self._device_probe(config, f"device alone, micro-batch {middle}")
            if config in self.device:
                low = middle
            else:
                failing = middle

    def _price_of_the_global_batch(self, own: int) -> Plan:
        """What a larger batch would allow, where the global batch forbids it."""
        goal = self.scene.space.goal
        if goal.size is None or not self.device or BATCH in self.scene.space.asked:
            return
        largest = max(self.scene.space.micro_batch(config) for config in self.device)
        facts = self.scene.space.facts
        beyond = 2 * goal.size
        if largest < goal.size or (facts.dataset_len and beyond > facts.dataset_len):
            return
        if not self.scene.affords(Stage.DEVICE, 1):
            return
        config = self.scene.space.config({BATCH: beyond, ACCUMULATION: 1}, self.start)
        trial = yield _device_ask(config, f"device alone, micro-batch {beyond} (outside)")
        reached = _speed(trial)
        best = self.device[self._best_device()]
        if reached is not None and reached.low > best.high * (1 + SLACK):
            gain = reached.value / best.value
            self.scene.not_explored.append(
                f"a global batch of {beyond} would allow up to {gain:.1f}x on the device; "
                "not verified end to end"
            )

    def _device_probe(self, config: Config, why: str) -> Plan:
        trial = yield _device_ask(config, why)
        speed = _speed(trial)
        if speed is not None:
            self.device[config] = speed

    def _best_device(self) -> Config:
        return max(self.device, key=lambda c: self.device[c].value, default=self.start)

    def _smallest_near_best(self) -> Config:
        """With a free batch the smallest within 2 % of the fastest; else the fastest."""
        best = self._best_device()
        if not self.scene.space.goal.free or best not in self.device:
            return best
        near = [c for c in self.device if WORTH * self.device[c].value >= self.device[best].value]
        return min(near, key=self.scene.space.micro_batch)

    # The loader half: workers until the device is fed with something to spare.

    def loader_ladder(self) -> Plan:
        """Worker counts upward until the device is fed, or more of them gain nothing."""
        own = whole(self.start.get(WORKERS))
        yield from self._loader_probe(own)
        if WORKERS not in self.scene.space.searched():
            return
        if own in self.loader and self._loader_cannot_pay(own):
            return
        if own not in self.loader and own != 0:
            yield from self._loader_probe(0)
        previous = None
        for workers in self._worker_counts(own):
            if self._fed(workers, previous) or not self.scene.affords(Stage.LOADER, 1):
                return
            yield from self._loader_probe(workers)
            if workers not in self.loader:
                return
            previous = workers

    def _worker_counts(self, own: int) -> list[int]:
        counts = [int(v) for v in self.scene.space.values[WORKERS] if v]
        return [count for count in counts if count != own]

    def _fed(self, workers: int, previous: int | None) -> bool:
        """Whether more workers than before cannot help."""
        if previous is None:
            return False
        device = self.device.get(self.base)
        if device is not None and self.rate(previous).low >= HEADROOM * device.high:
            return True
        smaller = [count for count in self.loader if 0 < count < previous]
        if not smaller:
            return False
        grew = self.rate(previous).value / self.rate(max(smaller)).value
        past_cores = workers > self.scene.space.machine.cpus
        return grew < 1.1 or (past_cores and self._worker_share(previous) > BUSY_WORKER)

    def _worker_share(self, workers: int) -> float:
        """How much of a core each worker uses: what waits leaves its core to others."""
        measured = self.loader[workers].measurement
        assert measured is not None
        seconds = (measured.end_ns - measured.start_ns) / 1e9
        cores = min(workers, self.scene.space.machine.cpus)
        return (measured.worker_cpu_s or 0.0) / max(seconds, 1e-9) / cores

    def _loader_cannot_pay(self, own: int) -> bool:
        """Skip the family, and say so, when the device is the limit by far."""
        device = self.device.get(self.base)
        if device is None:
            return False
        loader = self.rate(own)
        # Without workers loading and training take turns: loading costs its share in full.
        fed = loader.low if own else 1 / (1 / device.low + 1 / loader.low)
        gain = max(0.0, device.high / fed - 1)
        if gain >= WORTH - 1:
            return False
        self.scene.not_explored.append(
            f"loader settings can gain at most {100 * gain:.1f} %: not searched"
        )
        return True

    def _loader_probe(self, workers: int) -> Plan:
        config = self.scene.space.config({WORKERS: workers}, self.start)
        trial = yield Ask(
            config=config,
            stage=Stage.LOADER,
            sink=Sink.DISCARD,
            why=f"loader alone, {workers} workers",
        )
        if trial.ok and trial.measurement is not None and rate(trial.measurement) is not None:
            self.loader[workers] = trial

    def rate(self, workers: int) -> Estimate:
        """The loader's ceiling with so many workers, samples/s."""
        measured = self.loader[workers].measurement
        assert measured is not None
        speed = rate(measured)
        assert speed is not None
        return speed.estimate

    # Both halves together.

    def candidates(self) -> list[Candidate]:
        """Pairs of a loader and a device setting, the best prediction first."""
        options = self._device_options()
        pairs = [
            self._candidate(device, workers)
            for device in options
            for workers in self._loader_options(self.device[device])
        ]
        return sorted(pairs, key=lambda c: (-round(c.predicted, 1), c.workers))

    def _device_options(self) -> list[Config]:
        known = sorted(self.device, key=lambda c: -self.device[c].value)
        fit = [c for c in known if self.scene.space.admits(c)]
        near = [c for c in fit if self.device[c].value > 0.85 * self.device[fit[0]].value][:3]
        kept = {c: None for c in (self.base, *near, self.start) if c in fit}
        return list(kept)

    def _loader_options(self, device: Estimate) -> list[int]:
        """The fewest workers that feed the device, the fastest, and the user's own."""
        counts = sorted(self.loader)
        fed = [w for w in counts if w and self.rate(w).low >= HEADROOM * device.high][:1]
        fastest = [max(counts, key=lambda w: self.rate(w).value)] if counts else []
        own = whole(self.start.get(WORKERS))
        return list(dict.fromkeys([*fed, *fastest, *([own] if own in self.loader else [])]))

    def _candidate(self, device: Config, workers: int) -> Candidate:
        config = self.with_workers(device, workers)
        compute, loader = self.device[device], self.rate(workers)
        if workers == 0:
            return Candidate(
                config=config,
                workers=0,
                predicted=1 / (1 / compute.value + 1 / loader.value),
                bound=1 / (1 / compute.high + 1 / loader.high),
            )
        return Candidate(
            config=config,
            workers=workers,
            predicted=min(compute.value, loader.value),
            bound=min(compute.high, loader.high),
        )

    def with_workers(self, config: Config, workers: int) -> Config:
        """The config with so many workers, kept from epoch to epoch where that pays."""
        changes: dict[str, Value] = {WORKERS: workers}
        values = self.scene.space.values.get(PERSISTENT, ())
        if workers and True in values and len(values) > 1 and self._restart_matters(workers):
            changes[PERSISTENT] = True
        return self.scene.space.config(changes, config)

    def _restart_matters(self, workers: int) -> bool:
        measured = self.loader[workers].measurement if workers in self.loader else None
        if measured is None:
            return False
        return restart_s_per_sample(measured) * self.rate(workers).value > RESTART_MATTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A composed config: what it should make, and what it cannot exceed."""

    config: Config
    workers: int
    predicted: float
    bound: float


def verify(scene: Scene, ceilings: Ceilings) -> Plan:
    """End to end, in descending order; stops when no remaining bound beats the incumbent."""
    holds = True
    for count, candidate in enumerate(ceilings.candidates()):
        if scene.row_of(candidate.config) is not None:
            continue
        incumbent = scene.to_beat()
        if holds and incumbent and candidate.bound * (1 + SLACK) < incumbent:
            scene.not_explored.append("other pairs of loader and device: their bounds are lower")
            return
        if count >= MOST_VERIFIED or not scene.may_measure(Stage.VERIFY):
            scene.not_explored.append("some pairs of loader and device: no probes left for them")
            return
        trial = yield Ask(
            config=candidate.config, stage=Stage.VERIFY, why="together", beat=incumbent
        )
        speed = _speed(trial)
        if speed is not None and speed.low > candidate.bound * (1 + SLACK):
            holds = False  # a rate above its own bound: these ceilings bound nothing


def climb(scene: Scene, ceilings: Ceilings) -> Plan:
    """One notch at a time on the knobs that the two halves share, while that gains."""
    tried: set[Config] = set()
    improved = True
    while improved:
        improved = False
        best = scene.best()
        if best is None:
            return
        for config, why in _neighbours(scene, ceilings, best):
            if config in tried or scene.row_of(config) is not None:
                continue
            if not scene.may_measure(Stage.CLIMB):
                scene.not_explored.append("more neighbours of the best config: no probes left")
                return
            tried.add(config)
            trial = yield Ask(config=config, stage=Stage.CLIMB, why=why, beat=scene.to_beat())
            if trial.ok and scene.fits(trial) and _gain(scene, trial, best) > 1.01:
                improved = True
                break


def _neighbours(scene: Scene, ceilings: Ceilings, best: Trial) -> Iterator[tuple[Config, str]]:
    """Configs one notch away, the likeliest gain first."""
    space, config = scene.space, best.config
    workers = whole(config.get(WORKERS))
    waits = _data_wait(best) > 0.02
    if workers and WAIT_POLICY in space.searched() and config.get(WAIT_POLICY) == "default":
        yield space.config({WAIT_POLICY: "passive"}, config), "threads that do not spin"
    # Loader workers and the step share the cores of a CPU machine: fewer threads may be faster.
    if workers and THREADS in space.searched():
        for value in _notches(space.values[THREADS], config.get(THREADS)):
            yield space.config({THREADS: value}, config), f"{value} threads beside the workers"
    if WORKERS in space.searched() and waits:
        for value in _notches(space.values[WORKERS], workers, up_first=True):
            # A ladder that ended there has said already that more of them gain nothing.
            changed = ceilings.with_workers(config, whole(value))
            yield changed, f"{value} workers"
    if workers and PREFETCH in space.searched() and waits:
        for value in _notches(space.values[PREFETCH], config.get(PREFETCH), up_first=True):
            yield space.config({PREFETCH: value}, config), f"prefetch factor {value}"


def simplify(scene: Scene) -> Plan:
    """Take back each change that does not pay by itself."""
    best = scene.best()
    if best is None:
        return
    base = scene.space.start
    for group in _changed_groups(best.config, base):
        best = scene.best() or best
        reverted = scene.space.config({name: base.get(name) for name in group}, best.config)
        if reverted == best.config or scene.row_of(reverted) is not None:
            continue
        if not scene.may_measure(Stage.LOCAL) or not scene.space.batch_fits(reverted):
            return
        yield Ask(
            config=reverted,
            stage=Stage.LOCAL,
            why=f"without the change of {', '.join(group)}",
            beat=scene.to_beat(),
        )


def _changed_groups(config: Config, base: Config) -> list[tuple[str, ...]]:
    """Changed knobs, those together that only make sense together, cheapest doubt first."""
    changed = config.changed_from(base)
    groups: list[tuple[str, ...]] = []
    for name in changed:
        if name in (PREFETCH, PERSISTENT) and WORKERS in changed:
            continue
        if name == ACCUMULATION and BATCH in changed:
            continue
        groups.append((BATCH, ACCUMULATION) if name == BATCH else (name,))
    return [tuple(n for n in group if n in config or n in base) for group in reversed(groups)]


# --- what every searcher ends with ------------------------------------------------------------


def finals(scene: Scene) -> Plan:
    """Fresh processes of the finalists and the baseline, interleaved, order reversed each round."""
    finalists = _finalists(scene)
    baseline = scene.space.baseline
    if not finalists or finalists == [baseline]:
        if len(finalists) == 1:
            scene.not_explored.append("nothing measured came near your config: no finals needed")
        return
    order = [baseline, *(config for config in finalists if config != baseline)]
    for turn in range(MOST_ROUNDS):
        if not scene.affords(Stage.FINAL, len(order)):
            return
        if turn >= ROUNDS and not scene.ambiguous():
            return
        for config in order if turn % 2 == 0 else order[::-1]:
            last = turn == ROUNDS - 1 and config == finalists[0]
            yield Ask(
                config=config, stage=Stage.FINAL, why=f"final {turn + 1}", fresh=last, round=turn
            )


def _finalists(scene: Scene) -> list[Config]:
    """The best config, and others that could be tied with it, best first."""
    best = scene.best()
    if best is None:
        return []
    rows = {t.config: t for t in scene.end_to_end if t.ok and scene.fits(t)}
    ranked = sorted(rows.values(), key=scene.score, reverse=True)
    near = [t.config for t in ranked if _gain(scene, best, t) < 1.05]
    most = MOST_FINALISTS if scene.affords(Stage.FINAL, ROUNDS * MOST_FINALISTS) else 1
    others = [config for config in near if config != scene.space.baseline]
    return others[: max(1, most - 1)] if others else [best.config]


def path(scene: Scene) -> Plan:
    """The measured steps from the baseline to the answer, one family of knobs at a time."""
    answer, baseline = scene.answer(), scene.space.baseline
    measured = 0
    for config in path_configs(scene.space, baseline, answer)[1:-1]:
        row = scene.row_of(config)
        if measured >= MOST_PATH or (row is not None and row.ok):
            continue
        if not scene.affords(Stage.PATH, 1):
            return
        measured += 1
        yield Ask(config=config, stage=Stage.PATH, why="a step of the path")


def path_configs(space: Space, baseline: Config, answer: Config) -> list[Config]:
    """Cumulative configs from the baseline to the answer; each differs from the one before."""
    steps = [baseline]
    for family in Family:
        names = [n for n in answer if KNOBS[n].family is family]
        if family is Family.LOADER:
            names += [n for n in (PREFETCH, PERSISTENT) if n in answer]
        config = space.config({name: answer[name] for name in names}, steps[-1])
        if config != steps[-1]:
            steps.append(config)
    return steps


# --- the general searchers ----------------------------------------------------------------------


def grid(scene: Scene) -> Plan:
    """Every config, in order."""
    yield from _measure_all(scene, scene.space.grid())


def randomly(scene: Scene) -> Plan:
    """Every config, shuffled."""
    configs = list(scene.space.grid())
    random.Random(scene.seed).shuffle(configs)
    yield from _measure_all(scene, configs)


def tpe(scene: Scene) -> Plan:
    """Optuna's TPE; a failure is told as one, never as a slow config."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=scene.seed)
    )
    total = sum(1 for _ in scene.space.grid())
    seen: set[Config] = set()
    for _ in range(10 * total):
        if len(seen) >= total or not scene.affords(Stage.SEARCH, 1):
            return
        asked = study.ask()
        config = _suggested(asked, scene.space)
        row = scene.row_of(config)
        if row is None:
            row = yield Ask(config=config, stage=Stage.SEARCH, why="TPE")
        seen.add(config)
        _tell(study, asked, scene, row)


def _tell(study: optuna.Study, asked: Any, scene: Scene, row: Trial) -> None:
    import optuna

    if row.ok and scene.fits(row):
        study.tell(asked, scene.score(row))
    else:
        study.tell(asked, state=optuna.trial.TrialState.FAIL)


def _suggested(asked: Any, space: Space) -> Config:
    pairs = {f"{batch}x{steps}": (batch, steps) for batch, steps in space.pairs()}
    batch, steps = pairs[asked.suggest_categorical("batch x accumulation", list(pairs))]
    changes: dict[str, Value] = {BATCH: batch, ACCUMULATION: steps}
    for name in space.searched():
        if name not in (BATCH, ACCUMULATION):
            changes[name] = asked.suggest_categorical(name, list(space.values[name]))
    return space.config(changes)


def _measure_all(scene: Scene, configs: Iterable[Config]) -> Plan:
    for config in configs:
        if scene.row_of(config) is not None:
            continue
        if not scene.affords(Stage.SEARCH, 1):
            scene.not_explored.append("the rest of the space: the budget ended")
            return
        yield Ask(config=config, stage=Stage.SEARCH, why="search", beat=None)


SAMPLERS: Mapping[str, Callable[[Scene], Plan]] = {
    "staged": staged,
    "random": randomly,
    "tpe": tpe,
    "grid": grid,
}


# --- small readings -------------------------------------------------------------------------------


def _device_ask(config: Config, why: str) -> Ask:
    return Ask(config=config, stage=Stage.DEVICE, source=Source.CACHED, why=why)


def _speed(trial: Trial) -> Estimate | None:
    if not trial.ok or trial.measurement is None:
        return None
    return throughput(trial.measurement)


def _gain(scene: Scene, trial: Trial, over: Trial) -> float:
    assert trial.measurement is not None
    assert over.measurement is not None
    a = scene.objective.compute(trial.measurement)
    b = scene.objective.compute(over.measurement)
    return scene.objective.gain(a, b) if a and b else 1.0


def _data_wait(trial: Trial) -> float:
    measured = trial.measurement
    if measured is None or not measured.blocks:
        return 1.0
    return sum(b.wait_s for b in measured.blocks) / sum(b.seconds for b in measured.blocks)


def _notches(values: tuple[Value, ...], current: Value, *, up_first: bool = False) -> list[Value]:
    """The values next to the current one."""
    ordered = sorted(values, key=lambda value: whole(value))
    below = [v for v in ordered if whole(v) < whole(current)][-1:]
    above = [v for v in ordered if whole(v) > whole(current)][:1]
    return [*above, *below] if up_first else [*below, *above]
