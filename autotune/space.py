"""Which configs may be tried: the request, the machine and the model's facts, put together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autotune.errors import OptionError
from autotune.knobs import KNOBS, LARGEST_BATCH, Family, in_order
from autotune.request import Request
from autotune.types import Config, Machine, Value, WorkloadFacts, whole

WORKERS = "loader.num_workers"
PREFETCH = "loader.prefetch_factor"
PINNING = "loader.pin_memory"
BATCH = "train.batch_size"
ACCUMULATION = "train.accumulation_steps"
THREADS = "host.threads"
PERSISTENT = "loader.persistent_workers"
WAIT_POLICY = "host.omp_wait_policy"
FINENESS = 8
"""Micro-batches between the listed ones are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the global batch of every candidate must be; None leaves it free."""

    size: int | None
    asked: bool = False
    """Whether the user named the number, rather than keeping what they have."""

    @property
    def free(self) -> bool:
        """Whether the global batch may change."""
        return self.size is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A knob, or one value of it, that cannot be tried here, and why."""

    knob: str
    value: Value
    reason: str
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The baseline, and for each knob the values that may be tried."""

    baseline: Config
    values: Mapping[str, tuple[Value, ...]]
    goal: Goal
    machine: Machine
    facts: WorkloadFacts
    refusals: tuple[Refusal, ...] = ()
    asked: frozenset[str] = field(default_factory=frozenset)
    """Knobs whose values the user listed one by one: none of them may be left out."""

    def config(self, changes: Mapping[str, Value], base: Config | None = None) -> Config:
        """The base (the baseline) with changes, without the knobs that then mean nothing."""
        return self.normal({**_complete(self), **(base or self.baseline), **changes})

    def normal(self, values: Mapping[str, Value]) -> Config:
        """These values without those of knobs that do not apply beside them."""
        kept = {
            name: value
            for name, value in values.items()
            if not refused(name, values, self.machine, self.facts)
        }
        return Config(in_order(kept))

    @property
    def start(self) -> Config:
        """The baseline with every pin applied: what the search sets out from."""
        changes: dict[str, Value] = {
            name: _nearest(values, self.baseline[name])
            for name, values in self.values.items()
            if values and self.baseline.get(name, values[0]) not in values
        }
        config = self.config(changes)
        if self.batch_fits(config) or not self.pairs():
            return config
        own = self.micro_batch(config)
        batch, steps = min(self.pairs(), key=lambda pair: abs(pair[0] - own))
        return self.config({**changes, BATCH: batch, ACCUMULATION: steps})

    def step_alone(self, config: Mapping[str, Value]) -> Config:
        """The start with the config's settings, those of the loader apart: its device half."""
        rest = {n: v for n, v in config.items() if KNOBS[n].family is not Family.LOADER}
        return self.config(rest, self.start)

    def admits(self, config: Config) -> bool:
        """Whether every value of the config may be tried."""
        return all(
            config[name] in self.values.get(name, (self.baseline.get(name),))
            for name in config
            if name not in (BATCH, ACCUMULATION)
        ) and self.batch_fits(config)

    def batch_fits(self, config: Config) -> bool:
        """Whether micro-batch and accumulation are a pair that may be tried."""
        batch, steps = self.micro_batch(config), whole(config.get(ACCUMULATION, 1))
        pairs = self.pairs()
        if self.may_bisect and batch % FINENESS == 0 and pairs[0][0] < batch < pairs[-1][0]:
            return steps in {count for _, count in pairs}
        return (batch, steps) in pairs

    @property
    def may_bisect(self) -> bool:
        """Whether sizes between those listed may be tried, next to one that fails."""
        return self.goal.free and BATCH not in self.asked and BATCH in self.searched()

    def micro_batch(self, config: Mapping[str, Value]) -> int:
        """Samples of one micro-batch: the knob, or what the loader delivers anyway."""
        return int(config.get(BATCH) or self.facts.delivered_batch)

    def global_batch(self, config: Mapping[str, Value]) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch(config) * int(config.get(ACCUMULATION) or 1)

    def leaves_one(self, config: Mapping[str, Value]) -> bool:
        """Whether an epoch ends with a single sample, on which BatchNorm may not train."""
        length, size = self.facts.dataset_len or 0, self.micro_batch(config)
        return self.facts.batch_norm and size > 1 and length % size == 1

    def pairs(self) -> list[tuple[int, int]]:
        """Micro-batch and accumulation steps that may go together, by micro-batch."""
        batches = self.values.get(BATCH, (self.micro_batch(self.baseline),))
        steps = self.values.get(ACCUMULATION, (self.baseline.get(ACCUMULATION, 1),))
        return _pairs(batches, steps, self.goal, listed=ACCUMULATION in self.asked)

    def searched(self) -> tuple[str, ...]:
        """Knobs with more than one value to try."""
        return tuple(name for name, values in self.values.items() if len(values) > 1)

    def grid(self) -> Iterator[Config]:
        """Every config of the space once."""
        others = [name for name in self.values if name not in (BATCH, ACCUMULATION)]
        seen: set[Config] = set()
        for batch, steps in self.pairs():
            for chosen in itertools.product(*(self.values[name] for name in others)):
                changes: dict[str, Value] = dict(zip(others, chosen, strict=True))
                config = self.config({**changes, BATCH: batch, ACCUMULATION: steps})
                if config not in seen:
                    seen.add(config)
                    yield config


def goal_of(option: str, current: Mapping[str, Value] | None) -> Goal:
    """What `--global-batch` asks for.

    Raises:
        OptionError: If it is no known word or number.
    """
    names_batch = current is not None and BATCH in current
    word = option or ("keep" if names_batch else "free")
    if word == "free":
        return Goal(size=None)
    if word == "keep":
        values = baseline_values(current, {})
        return Goal(size=whole(values[BATCH]) * whole(values[ACCUMULATION]))
    if not word.isdigit() or int(word) < 1:
        raise OptionError(f"--global-batch {word!r}: allowed are keep, free or a positive number")
    return Goal(size=int(word), asked=True)


def check_goal(goal: Goal, request: Request) -> None:
    """Refuse a global batch that no listed micro-batch or accumulation divides.

    Raises:
        OptionError: If so.
    """
    if goal.size is None:
        return
    batches, steps = _listed(request, BATCH), _listed(request, ACCUMULATION)
    if not (batches or steps):
        return
    if _pairs(batches or _divisors(goal.size), steps, goal, listed=bool(steps)):
        return
    told = {"micro-batches": batches, "accumulation steps": steps}
    asked = " with ".join(
        f"{what} {', '.join(str(value) for value in values)}"
        for what, values in told.items()
        if values
    )
    raise OptionError(f"a global batch of {goal.size}: none of the {asked} divides it")


def _divisors(size: int) -> tuple[int, ...]:
    small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    return tuple(sorted({*small, *(size // number for number in small)}))


def _listed(request: Request, name: str) -> tuple[Value, ...]:
    """The values that were named one by one."""
    choice = request.choices.get(name)
    return (choice.values if choice else None) or ()


def baseline_values(
    current: Mapping[str, Value] | None, pinned: Mapping[str, Value]
) -> dict[str, Value]:
    """The user's values; pins fill what they do not name, PyTorch's defaults the rest."""
    defaults = {name: knob.default for name, knob in KNOBS.items()}
    return in_order({**defaults, **pinned, **(current or {})})


def resolve(
    request: Request,
    current: Mapping[str, Value] | None,
    goal: Goal,
    machine: Machine,
    facts: WorkloadFacts,
) -> Space:
    """The space of this request on this machine for this model."""
    baseline = _baseline(request, current, goal, machine, facts)
    values: dict[str, tuple[Value, ...]] = {}
    refusals: list[Refusal] = []
    for name in KNOBS:
        asked = _asked(request, name, machine, facts, baseline, goal)
        if reason := refused(name, _everything(baseline), machine, facts):
            if request.choices.get(name) and request.choices[name].values:
                refusals += [_whole(name, asked[0], reason)]
            elif name in facts.not_applicable:
                refusals += [_whole(name, None, reason)]
            continue
        values[name], no = _possible(name, asked, machine, facts)
        refusals += no
    listed = {name for name, choice in request.choices.items() if choice.values is not None}
    space = Space(
        baseline=Config(baseline),
        values=values,
        goal=goal,
        machine=machine,
        facts=facts,
        refusals=tuple(refusals),
        asked=frozenset(listed),
    )
    return replace(space, baseline=space.normal(space.baseline))


def refused(name: str, values: Mapping[str, Value], machine: Machine, facts: WorkloadFacts) -> str:
    """Why the knob means nothing beside these values ("" where it does)."""
    return facts.not_applicable.get(name, "") or KNOBS[name].refuses(values, machine)


def first_baseline(
    request: Request, current: Mapping[str, Value] | None, goal: Goal, machine: Machine
) -> Config:
    """The baseline before anything is known of the model: what the inspecting probe runs."""
    values = baseline_values(current, _pins(request))
    _set_batch(values, goal)
    kept = {
        name: value
        for name, value in values.items()
        if value is not None and not KNOBS[name].refuses(values, machine)
    }
    return Config(kept)


def _baseline(
    request: Request,
    current: Mapping[str, Value] | None,
    goal: Goal,
    machine: Machine,
    facts: WorkloadFacts,
) -> dict[str, Value]:
    values = baseline_values(current, _pins(request))
    if BATCH in facts.not_applicable:
        values[BATCH] = int(facts.delivered_batch)
    _set_batch(values, goal)
    values[THREADS] = values[THREADS] or facts.default_threads
    return values


def _set_batch(values: dict[str, Value], goal: Goal) -> None:
    """The user's micro-batch, or the largest below it that divides, and what is left of it."""
    if goal.size is None or not goal.asked:
        return
    micro = min(whole(values[BATCH]), goal.size)
    while goal.size % micro:
        micro -= 1
    values[BATCH], values[ACCUMULATION] = micro, goal.size // micro


def _pins(request: Request) -> dict[str, Value]:
    return {
        name: choice.values[0]
        for name, choice in request.choices.items()
        if choice.values is not None and len(choice.values) == 1
    }


def _asked(
    request: Request,
    name: str,
    machine: Machine,
    facts: WorkloadFacts,
    baseline: Mapping[str, Value],
    goal: Goal,
) -> tuple[Value, ...]:
    """The values to try, before it is known which of them can run."""
    choice = request.choices.get(name)
    own = baseline[name]
    if choice is None:
        return (own,)
    if choice.values is not None:
        return choice.values
    candidates = KNOBS[name].candidates(machine, facts)
    if name == BATCH:
        candidates = _micro_batches(whole(own), candidates, goal, facts)
    elif name == ACCUMULATION:
        return _divisors(goal.size or whole(own))
    return _with(own, candidates)


def _micro_batches(
    own: int, powers: tuple[Value, ...], goal: Goal, facts: WorkloadFacts
) -> tuple[Value, ...]:
    """Powers of two, the user's own times and through powers of two, divisors of what is held."""
    most = facts.dataset_len or LARGEST_BATCH
    sizes = {whole(power) for power in powers}
    sizes |= {own << shift for shift in range(17)}
    sizes |= {own >> shift for shift in range(17) if own % (1 << shift) == 0}
    if goal.size is not None:
        sizes |= {goal.size >> shift for shift in range(17) if goal.size % (1 << shift) == 0}
        sizes = {size for size in sizes if goal.size % size == 0}
    return tuple(sorted(size for size in sizes if 0 < size <= most))


def _with(own: Value, candidates: tuple[Value, ...]) -> tuple[Value, ...]:
    if own in candidates:
        return candidates
    if isinstance(own, int) and not isinstance(own, bool):
        return tuple(sorted((*candidates, own), key=lambda value: whole(value)))
    return (own, *candidates)


def _possible(
    name: str, asked: tuple[Value, ...], machine: Machine, facts: WorkloadFacts
) -> tuple[tuple[Value, ...], list[Refusal]]:
    """The values that can run here, and why the others cannot."""
    possible: list[Value] = []
    refusals: list[Refusal] = []
    for value in asked:
        reason = _why_not(name, value, machine, facts)
        if reason:
            refusals.append(Refusal(knob=name, value=value, reason=reason))
        else:
            possible.append(value)
    return tuple(possible), refusals


def _why_not(name: str, value: Value, machine: Machine, facts: WorkloadFacts) -> str:
    if name == WORKERS and isinstance(value, int) and value > 1:
        several = facts.not_applicable.get(f"{WORKERS}>1")
        if several:
            return several
    if name == BATCH and facts.dataset_len and whole(value) > facts.dataset_len:
        return f"more than the dataset's {facts.dataset_len} samples"
    return KNOBS[name].forbids(value, machine)


def _pairs(
    batches: tuple[Value, ...], steps: tuple[Value, ...], goal: Goal, *, listed: bool
) -> list[tuple[int, int]]:
    sizes = [whole(batch) for batch in batches]
    if goal.size is None:
        return [(size, whole(count)) for size in sizes for count in steps]
    pairs = [(size, goal.size // size) for size in sizes if goal.size % size == 0]
    return [pair for pair in pairs if not listed or pair[1] in steps]


def _everything(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """The same values as if there were workers: what depends on them is judged per config."""
    return {**values, WORKERS: values.get(WORKERS) or 1}


def _whole(name: str, value: Value, reason: str) -> Refusal:
    return Refusal(knob=name, value=value, reason=reason, whole=True)


def _nearest(values: tuple[Value, ...], own: Value) -> Value:
    """The number nearest to the user's own; of words the first."""
    if not isinstance(own, int) or isinstance(own, bool):
        return values[0]
    return min(values, key=lambda value: abs(whole(value) - own))


def _complete(space: Space) -> dict[str, Value]:
    """Values for knobs that the baseline has no use for, but a change may bring in."""
    complete: dict[str, Value] = {}
    for name, values in space.values.items():
        usual = space.baseline.get(name, KNOBS[name].default)
        complete[name] = usual if usual in values or not values else values[0]
    return complete
