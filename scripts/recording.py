"""Records a grid of configs as raw series, from which searches are replayed.

FILE.parquet has one row per probe, in the order in which they were made:

    number, turn   its place in time; 0 is the first pass over the grid
    kind           both (loader and training), device (cached batches), loader (batches dropped)
    key            eight hex digits of the config; one column per knob of the grid
    status         ok, out_of_memory, timeout, crash, error, invalid; message, phase, suspect if not
    probe_s        seconds from the request to the end, all included
    blocks         the window: [{seconds, consumed, produced, wait_s, steps, starved}], in order.
                   The stock of ready samples at a block's edge is what was produced up to there
                   less what was consumed: a window begins with an empty queue.
    ...            every other fact of `autotune.types.Measurement` by its name

What could not be read is null. Nothing is averaged and nothing is left out. The schema's metadata
hold, as JSON under `autotune`, the machine, versions, seed, window, model file and grid, and what
the tuner has to know to rebuild the space.
"""

from __future__ import annotations

import json
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.knobs import KNOBS, Family
from autotune.launcher import Outcome
from autotune.metrics import throughput
from autotune.request import Choice, Request
from autotune.space import BATCH, PERSISTENT, Goal, Space, resolve
from autotune.types import (
    Block,
    Config,
    DeviceReading,
    Failure,
    Machine,
    Measurement,
    Sink,
    Source,
    Status,
    Suspect,
    Value,
    WorkloadFacts,
)
from scripts.gpu_lab import ROOT, Clock, Lab, OutOfTimeError, Wish, say

FORMAT = 2
META = b"autotune"
WRITE_EVERY = 10
WINDOW_S = 3.0
PASSES = 2
BEST_SHARE = 0.05
BEST_PASSES = 8
"""The best configs are the ones that everything is compared with: they get more processes."""

KINDS = {
    "both": Wish(),
    "device": Wish(source=Source.CACHED),
    "loader": Wish(sink=Sink.DISCARD),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which configs of which job."""

    model: Path
    values: Mapping[str, tuple[Value, ...]]
    at_once: int = 1
    """Probes that run side by side: only where they sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One probe that is to be made."""

    turn: int
    kind: str
    config: Config


class Record:
    """The probes so far, and what they were made on."""

    def __init__(self, about: dict[str, Any], probes: list[dict[str, Any]]) -> None:
        self.about = about
        self.probes = probes
        self.space = space_of(about)

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record of a file.

        Raises:
            ValueError: If it is no record, or one of another format.
        """
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        told = (table.schema.metadata or {}).get(META)
        about = json.loads(told) if told else {}
        if about.get("format") != FORMAT:
            raise ValueError(f"{path}: no record of format {FORMAT}")
        return cls(about, table.to_pylist())

    def write(self, path: Path) -> None:
        """The file, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(self.probes)
        metadata = {META: json.dumps(self.about).encode()}
        part = path.with_suffix(".parquet.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(metadata), part, compression="zstd")
        part.replace(path)

    def add(self, visit: Visit, outcome: Outcome) -> None:
        """One more probe: what it told, as it told it."""
        knobs = {name: visit.config.get(name) for name in KNOBS if name in self.about["values"]}
        found: dict[str, Any] = {
            "number": len(self.probes),
            "turn": visit.turn,
            "kind": visit.kind,
            "key": visit.config.key,
            **knobs,
            "probe_s": outcome.probe_s,
        }
        self.probes.append(found | told_of(outcome))

    def done(self) -> Counter[tuple[str, str]]:
        """How often each kind of each config has been probed."""
        return Counter((probe["kind"], probe["key"]) for probe in self.probes)

    def rates(self) -> dict[str, float]:
        """Samples/s of each config that ran, by key: the mean over its processes."""
        found: dict[str, list[float]] = {}
        for probe in self.probes:
            if probe["kind"] == "both" and (measured := measurement_of(probe)) is not None:
                speed = throughput(measured)
                if speed is not None:
                    found.setdefault(probe["key"], []).append(speed.value)
        return {key: fmean(values) for key, values in found.items()}

    def told(self) -> str:
        """How far it is."""
        statuses = Counter(str(probe["status"]) for probe in self.probes)
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        configs = sum(1 for _ in self.space.grid())
        return f"{configs} configs, {len(self.probes)} probes ({counts})"


# --- what is recorded of a probe ------------------------------------------------------------------

UNRECORDED = ("facts",)


def told_of(outcome: Outcome) -> dict[str, Any]:
    """How a probe ended, and all facts."""
    failure = outcome.failure
    known: dict[str, Any] = {"status": "ok", "message": None, "phase": None, "suspect": None}
    if failure is not None:
        suspect = None if failure.suspect is None else str(failure.suspect)
        known |= {"status": str(failure.status), "message": failure.message}
        known |= {"phase": failure.phase, "suspect": suspect}
    measured = outcome.measurement
    facts = {} if measured is None else asdict(measured)
    names = [field.name for field in fields(Measurement) if field.name not in UNRECORDED]
    return known | {name: facts.get(name) for name in names}


def measurement_of(probe: Mapping[str, Any]) -> Measurement | None:
    """What an ok probe measured."""
    if probe["status"] != "ok":
        return None
    known: dict[str, Any] = {field.name: probe.get(field.name) for field in fields(Measurement)}
    for name, value in known.items():
        if isinstance(value, list):
            known[name] = tuple(value)
    known["blocks"] = tuple(Block(**block) for block in probe["blocks"])
    known["devices"] = tuple(DeviceReading(**one) for one in probe["devices"] or ())
    return Measurement(**known)


def failure_of(probe: Mapping[str, Any]) -> Failure | None:
    """How a failed probe failed."""
    if probe["status"] == "ok":
        return None
    suspect = probe["suspect"]
    return Failure(
        status=Status(probe["status"]),
        message=probe["message"],
        phase=probe["phase"] or "",
        suspect=None if suspect is None else Suspect(suspect),
    )


# --- what is visited ------------------------------------------------------------------------------


def space_of(about: Mapping[str, Any]) -> Space:
    """The space that a search of the grid has: the values that were recorded, any global batch."""
    machine = dict(about["machine"])
    lists = {name: tuple(machine[name]) for name in ("devices", "capability")}
    return resolve(
        Request({name: Choice(tuple(values)) for name, values in about["values"].items()}),
        about["current"],
        Goal(size=None),
        Machine(**{**machine, **lists}),
        WorkloadFacts(**about["facts"]),
    )


def half_of(kind: str, config: Config, space: Space) -> Config:
    """The config whose probe of that kind tells of this one's half, too."""
    if kind == "both":
        return config
    if kind == "loader":
        of_loader = {
            name: value
            for name, value in config.items()
            if KNOBS[name].family is Family.LOADER and name != PERSISTENT
        }
        return space.config({**of_loader, BATCH: config[BATCH]}, space.start)
    return space.step_alone(config)


def halves(space: Space) -> Iterator[tuple[str, Config]]:
    """The device with each of its settings; the loader with its own, at the user's batch."""
    seen = set()
    own = space.micro_batch(space.start)
    for config in space.grid():
        for kind, part in (
            ("device", half_of("device", config, space)),
            ("loader", half_of("loader", config.but({BATCH: own}), space)),
        ):
            if (kind, part) not in seen:
                seen.add((kind, part))
                yield kind, part


def one_pass(space: Space, turn: int, seed: int) -> list[Visit]:
    """Every config, and every half, once, in an order of its own."""
    visits = [Visit(turn=turn, kind="both", config=config) for config in space.grid()]
    visits += [Visit(turn=turn, kind=kind, config=config) for kind, config in halves(space)]
    random.Random(seed + turn).shuffle(visits)
    return visits


def best_again(record: Record, turn: int) -> list[Visit]:
    """The best configs so far, once more."""
    rates = record.rates()
    configs = list(record.space.grid())
    count = max(3, round(BEST_SHARE * len(configs)))
    known = [config for config in configs if config.key in rates]
    best = sorted(known, key=lambda config: -rates[config.key])[:count]
    visits = [Visit(turn=turn, kind="both", config=config) for config in best]
    random.Random(turn).shuffle(visits)
    return visits


# --- recording ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be recorded, where to, and for how long at most."""

    grid: Grid
    about: Mapping[str, Any]
    """What else the file tells of itself; its `seed` shuffles the passes."""
    path: Path
    scratch: Path
    device: str
    passes: int = PASSES
    best_passes: int = BEST_PASSES
    window_s: float = WINDOW_S
    """Short windows suffice where fresh processes repeat them; none ends early."""
    block_s: float = 0.25

    def wish(self, kind: str) -> Wish:
        """How a probe of the kind measures."""
        return replace(KINDS[kind], window_s=self.window_s, block_s=self.block_s, min_blocks=10**6)


def record_grid(order: Order, clock: Clock) -> Record:
    """Fill the file, or go on filling it, until all is visited or the clock stops."""
    with ExitStack() as stack:
        labs = []
        for number in range(order.grid.at_once):
            folder = order.scratch / f"lab{number}"
            labs.append(Lab(order.grid.model, order.device, folder, clock))
            stack.callback(labs[-1].close)
        record = _opened(order, labs[0])
        crew = Crew(labs, clock, record, order)
        try:
            for turn in range(order.passes):
                crew.visit(one_pass(record.space, turn, order.about["seed"]))
            for turn in range(order.passes, order.best_passes if order.passes >= PASSES else 0):
                crew.visit(best_again(record, turn))
        except OutOfTimeError:
            say("the time is over")
        finally:
            record.write(order.path)
    return record


def _opened(order: Order, lab: Lab) -> Record:
    """The record of the file, or an empty one.

    Raises:
        SystemExit: If the file holds another grid.
    """
    values = {name: list(values) for name, values in order.grid.values.items()}
    if order.path.exists():
        record = Record.read(order.path)
        if record.about["values"] != values:
            raise SystemExit(f"{order.path} holds another grid: {record.about['values']}")
        say(f"going on: {record.told()}")
        return record
    about = {
        "format": FORMAT,
        **order.about,
        "model": str(order.grid.model.resolve().relative_to(ROOT)),
        "values": values,
        "window_s": order.window_s,
        "block_s": order.block_s,
        "at_once": order.grid.at_once,
        "startup_s": lab.startup_s,
        "current": dict(lab.current or {}),
        "machine": asdict(lab.machine),
        "facts": asdict(lab.facts),
    }
    return Record(about, [])


class Crew:
    """Labs that share the visits of a pass between them."""

    def __init__(self, labs: Sequence[Lab], clock: Clock, record: Record, order: Order) -> None:
        self._labs = labs
        self._clock = clock
        self._record = record
        self._order = order
        self._lock = threading.Lock()

    def visit(self, visits: Iterable[Visit]) -> None:
        """Make those that have not been made yet.

        Raises:
            OutOfTimeError: If the clock stops first; probes in flight are dropped.
        """
        done = self._record.done()
        left: queue.SimpleQueue[Visit] = queue.SimpleQueue()
        for visit in visits:
            if done[visit.kind, visit.config.key] <= visit.turn:
                left.put(visit)
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=self._work, args=(lab, left, errors)) for lab in self._labs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _work(self, lab: Lab, left: queue.SimpleQueue[Visit], errors: list[BaseException]) -> None:
        try:
            while not errors:
                visit = left.get_nowait()
                outcome = lab.probe(visit.config, self._order.wish(visit.kind), self._clock)
                self._keep(visit, outcome)
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            errors.append(error)

    def _keep(self, visit: Visit, outcome: Outcome) -> None:
        with self._lock:
            self._record.add(visit, outcome)
            if len(self._record.probes) % WRITE_EVERY == 0:
                self._record.write(self._order.path)
                say(f"{self._record.told()}; {self._clock.left_s:.0f} s left")
