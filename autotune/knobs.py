"""The knobs: what each may be set to, where it applies, and what it does to a probe.

A new knob is a new row of `KNOBS`; everything else (columns, overrides, help) follows from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from autotune.errors import SpaceError
from autotune.parallel import MODES
from autotune.precision import PRECISIONS
from autotune.types import Machine, Value, WorkloadFacts

if TYPE_CHECKING:
    from autotune.probe.setup import Setup

AUTO = "auto"


class Exactness(StrEnum):
    """What turning a knob does to the numbers that training computes."""

    EXACT = "exact"
    REORDERS = "reorders arithmetic"
    NUMERICS = "changes numerics"


class Family(StrEnum):
    """The steps, in order, of the path from the baseline to the answer."""

    LOADER = "loader"
    BATCH = "batch"
    COMPUTE = "precision and compute"
    SYNC = "synchronisation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The values a knob can have at all, on any machine."""

    words: tuple[Value, ...] = ()
    least: int | None = None

    def __contains__(self, value: object) -> bool:
        if self.least is None:
            return any(value == word and type(value) is type(word) for word in self.words)
        return isinstance(value, int) and not isinstance(value, bool) and value >= self.least

    def __str__(self) -> str:
        if self.least is None:
            return ", ".join(_word(word) for word in self.words)
        return f"a whole number, at least {self.least}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that the tuner may turn."""

    name: str
    domain: Domain
    default: Value
    family: Family
    act: Callable[[Setup, Value], None]
    exactness: Exactness = Exactness.EXACT
    candidates: Callable[[Machine, WorkloadFacts], tuple[Value, ...]] = lambda machine, facts: ()
    """What to try on this machine when the space says `auto`."""
    refuses: Callable[[Mapping[str, Value], Machine], str] = lambda values, machine: ""
    """Why the knob means nothing beside these values on this machine ("" where it does)."""
    forbids: Callable[[Value, Machine], str] = lambda value, machine: ""
    """Why this one value cannot run on this machine ("" where it can)."""
    environment: str = ""
    """The variable that carries the value into the user's own training."""
    load_time: bool = False
    """Whether libraries read that variable only while they are loaded."""

    def check(self, value: Value, where: str) -> Value:
        """The value, if the knob can have it.

        Raises:
            SpaceError: If it lies outside the domain; the text names what is allowed.
        """
        if value not in self.domain:
            raise SpaceError(
                f"{where}: {self.name}={_quoted(value)} is not possible; allowed: {self.domain}"
            )
        return value


def knob_named(name: str, where: str) -> Knob:
    """The knob of that name.

    Raises:
        SpaceError: If there is none; the text suggests the nearest and lists all.
    """
    if name in KNOBS:
        return KNOBS[name]
    near = difflib.get_close_matches(name, KNOBS, n=1, cutoff=0.5)
    nearest = f" (did you mean {near[0]}?)" if near else ""
    raise SpaceError(f"{where}: unknown knob {name}{nearest}. Known knobs: {', '.join(KNOBS)}")


def check_values(values: Mapping[str, Value], where: str) -> dict[str, Value]:
    """Knob values that exist, in the table's order.

    Raises:
        SpaceError: If a name or a value does not exist.
    """
    checked = {name: knob_named(name, where).check(value, where) for name, value in values.items()}
    return in_order(checked)


def in_order(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same values, in the table's order."""
    return {name: values[name] for name in KNOBS if name in values}


def environment_of(values: Mapping[str, Value], *, load_time: bool) -> dict[str, str]:
    """Variables that the values set: those read at load time, or all of them."""
    return {
        knob.environment: str(values[name])
        for name, knob in KNOBS.items()
        if knob.environment
        and values.get(name) not in (None, knob.default)
        and (knob.load_time or not load_time)
    }


def _word(value: Value) -> str:
    """The value as Hydra writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(value: Value) -> str:
    return repr(value) if isinstance(value, str) else _word(value)


def _without_workers(values: Mapping[str, Value], machine: Machine) -> str:
    return "" if values.get("loader.num_workers") else "needs loader workers"


def _without_accelerator(values: Mapping[str, Value], machine: Machine) -> str:
    return "no accelerator copies from pinned memory here" if machine.on_cpu else ""


def _on_accelerator(values: Mapping[str, Value], machine: Machine) -> str:
    return "" if machine.on_cpu else "acts on CPU training only"


def _loader_argument(name: str) -> Callable[[Setup, Value], None]:
    def act(setup: Setup, value: Value) -> None:
        setup.loader[name] = value

    return act


def _attribute(name: str) -> Callable[[Setup, Value], None]:
    def act(setup: Setup, value: Value) -> None:
        setattr(setup, name, value)

    return act


def _nothing(setup: Setup, value: Value) -> None:
    """The parent acts on this knob: it shapes the processes, not the training."""


def _doubling(first: int, last: int) -> tuple[Value, ...]:
    values: list[Value] = []
    while first < last:
        values.append(first)
        first *= 2
    return (*values, last)


MOST_WORKERS = 64
LARGEST_BATCH = 65_536


def _workers(machine: Machine, facts: WorkloadFacts) -> tuple[Value, ...]:
    # Past the cores too: the search goes there only while the workers mostly wait.
    return (0, *_doubling(1, MOST_WORKERS))


def _batches(machine: Machine, facts: WorkloadFacts) -> tuple[Value, ...]:
    return _doubling(1, min(facts.dataset_len or LARGEST_BATCH, LARGEST_BATCH))


def _precisions(machine: Machine, facts: WorkloadFacts) -> tuple[Value, ...]:
    return tuple(
        name
        for name, precision in PRECISIONS.items()
        if precision.pays_on(machine) and not precision.refuses(machine)
    )


def _threads(machine: Machine, facts: WorkloadFacts) -> tuple[Value, ...]:
    return _doubling(1, max(machine.cpus, facts.default_threads))


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            name="loader.num_workers",
            domain=Domain(least=0),
            default=0,
            family=Family.LOADER,
            act=_loader_argument("num_workers"),
            candidates=_workers,
        ),
        Knob(
            name="loader.prefetch_factor",
            domain=Domain(least=1),
            default=2,
            family=Family.LOADER,
            act=_loader_argument("prefetch_factor"),
            candidates=lambda machine, facts: (2, 4, 8),
            refuses=_without_workers,
        ),
        Knob(
            name="loader.pin_memory",
            domain=Domain(words=(True, False)),
            default=False,
            family=Family.LOADER,
            act=_loader_argument("pin_memory"),
            candidates=lambda machine, facts: (True, False),
            refuses=_without_accelerator,
        ),
        Knob(
            name="loader.persistent_workers",
            domain=Domain(words=(True, False)),
            default=False,
            family=Family.LOADER,
            act=_loader_argument("persistent_workers"),
            candidates=lambda machine, facts: (False, True),
            refuses=_without_workers,
        ),
        Knob(
            name="train.batch_size",
            domain=Domain(least=1),
            default=32,
            family=Family.BATCH,
            act=_loader_argument("batch_size"),
            exactness=Exactness.REORDERS,
            candidates=_batches,
        ),
        Knob(
            name="train.accumulation_steps",
            domain=Domain(least=1),
            default=1,
            family=Family.BATCH,
            act=_attribute("accumulation"),
            exactness=Exactness.REORDERS,
            candidates=lambda machine, facts: (1,),
        ),
        Knob(
            name="train.precision",
            domain=Domain(words=tuple(PRECISIONS)),
            default="default",
            family=Family.COMPUTE,
            act=_attribute("precision"),
            exactness=Exactness.NUMERICS,
            candidates=_precisions,
            forbids=lambda value, machine: PRECISIONS[str(value)].refuses(machine),
        ),
        Knob(
            name="parallel.mode",
            domain=Domain(words=tuple(MODES)),
            default="single",
            family=Family.SYNC,
            act=_nothing,
        ),
        Knob(
            name="host.threads",
            domain=Domain(least=1),
            default=None,
            family=Family.COMPUTE,
            act=_attribute("threads"),
            exactness=Exactness.REORDERS,
            candidates=_threads,
            refuses=_on_accelerator,
            environment="OMP_NUM_THREADS",
        ),
        Knob(
            name="host.omp_wait_policy",
            domain=Domain(words=("default", "active", "passive")),
            default="default",
            family=Family.COMPUTE,
            act=_nothing,
            candidates=lambda machine, facts: ("default", "passive"),
            refuses=_on_accelerator,
            environment="OMP_WAIT_POLICY",
            load_time=True,
        ),
    )
}
