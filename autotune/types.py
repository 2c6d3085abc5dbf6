"""Facts that cross a process or file border. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = 2

GIB = 1024**3

DEVICE_MEMORY = "device memory"
"""What an accelerator's allocator holds, where it is named among what still grew."""

T = TypeVar("T")

Value = str | int | float | bool | None
"""What a knob can be set to."""


def whole(value: Value) -> int:
    """The value as a whole number; 0 for none."""
    return int(value or 0)


class Status(StrEnum):
    """How one row of the trials table ended."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    INVALID = "invalid"
    NOT_APPLICABLE = "not_applicable"
    DOMINATED = "dominated"
    SKIPPED = "skipped"
    DEVICE_LOST = "device_lost"


FAILED = frozenset(
    {
        Status.OUT_OF_MEMORY,
        Status.TIMEOUT,
        Status.CRASH,
        Status.ERROR,
        Status.INVALID,
        Status.DEVICE_LOST,
    }
)
"""The statuses of a probe that ran and gave no usable number."""

REFUSED = frozenset({Status.NOT_APPLICABLE, Status.SKIPPED})
"""The statuses of a row for which nothing ran."""


class Stage(StrEnum):
    """Why a probe was launched."""

    INSPECT = "inspect"
    BASELINE = "baseline"
    LOADER = "loader"
    DEVICE = "device"
    VERIFY = "verify"
    CLIMB = "climb"
    LOCAL = "local"
    SEARCH = "search"
    PATH = "path"
    FINAL = "final"


class Source(StrEnum):
    """Where a probe's batches come from."""

    LOADER = "loader"
    CACHED = "cached"


class Sink(StrEnum):
    """Where a probe's batches go."""

    TRAIN = "train"
    DISCARD = "discard"


class Suspect(StrEnum):
    """What a failure may come from although its text does not prove it: other rows decide."""

    DEVICE_MEMORY = "device memory"
    SIZE = "size"
    HOST_MEMORY = "host memory"
    PINNING = "pinning"


class Label(StrEnum):
    """What qualifies an ok row."""

    BALANCED = "balanced"
    NOT_STEADY = "not_steady"
    NOISY = "noisy"
    HEAVY_TAIL = "heavy_tail"
    CONTENDED = "contended"
    THROTTLED = "throttled"
    COLD = "cold"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} lies outside its interval [{self.low}, {self.high}]")

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another (positive) unit."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class Config(Mapping[str, Value]):
    """An opaque, hashable name for one experiment: knob values in the table's order."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._values == other._values

    def __repr__(self) -> str:
        return f"Config({self._values!r})"

    @property
    def key(self) -> str:
        """Eight hex digits of the knob values, equal for repeats."""
        text = json.dumps(self._values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def but(self, changes: Mapping[str, Value]) -> Config:
        """This config with some values replaced or added."""
        return Config({**self._values, **changes})

    def changed_from(self, other: Config) -> tuple[str, ...]:
        """Names of the knobs whose value differs from the other config's."""
        names = dict.fromkeys([*self, *other])
        return tuple(name for name in names if self.get(name) != other.get(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Which model file, and which factory in it, a run is about."""

    path: str
    factory: str | None = None

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.path).stem


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the process may use, not what the box contains."""

    cpus: int
    cpu_limited_by: str
    memory_bytes: int
    shm_bytes: int
    device_memory_bytes: int = 0
    """Of the first device; 0 on the CPU, and where it could not be read."""
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)
    driver_major: str = ""
    torch: str = ""
    python: str = ""
    default_threads: int = 1

    @property
    def on_cpu(self) -> bool:
        """Whether training runs on the CPU."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What loading the model file told, before anything ran."""

    current: Mapping[str, Value] | None
    keys: Mapping[str, Any]
    unit: str
    cacheable: bool
    fresh: bool
    own_loader: bool
    loader_accepts: tuple[str, ...]
    affinity_narrowed: bool = False
    fallback: str = ""
    """Why probes build for themselves ("" when they inherit the template's model and dataset)."""
    skipped_preloads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """What the inspecting probe found out about the model and its data."""

    parameters: int
    parameter_bytes: int
    dataset_len: int | None
    sample_bytes: float
    sample_s: float
    delivered_batch: float
    stock: int
    dtype: str
    batch_norm: bool
    exact_split: bool
    """Whether loss(whole) equals the mean of loss(halves) in eval mode."""
    default_threads: int
    step_batch: int = 0
    """The user's micro-batch, or the first half of it, and half of that, that makes a step."""
    varies: bool = False
    """Whether samples differ in size, so that one batch needs more memory than another."""
    longest_ratio: float = 1.0
    """Size of the longest stocked sample over their mean."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Knob or knob=value -> reason."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """All a child is told."""

    model: ModelRef
    config: Mapping[str, Value]
    stage: Stage
    source: Source
    sink: Sink
    folder: str
    device: str
    seed: int
    global_batch: int
    fresh: bool = False
    stock: str | None = None
    """File with the dataset's first samples, written by the inspecting probe."""
    max_window_s: float = 5.0
    min_window_s: float = 0.0
    """No window ends narrow before: the energy counter ticks too slowly for a shorter one."""
    min_blocks: int = 12
    block_s: float = 0.25
    want: float = 0.01
    """Relative half-width at which the probe stops."""
    beat: float | None = None
    """Samples/s of the incumbent's lower end: a probe clearly below it stops."""
    timeout_s: float = 60.0
    requested_s: float = 0.0
    """When the driver asked, on the system-wide monotonic clock."""
    default_threads: int | None = None
    """What the process has before any knob: PyTorch's count, or the one the user's code sets."""
    cpus: int = 1
    """CPUs that the probe's processes may keep busy."""
    delivered_batch: int = 32
    """The micro-batch where the loader ignores the knob."""
    longest: bool = False
    """Whether one step on the longest stocked samples belongs to the peak of memory."""
    memory_fraction: float | None = None
    """Share of the accelerator's memory at which its allocator refuses."""
    memory_limit_bytes: int | None = None
    """What the training process may hold, where that is host memory."""
    host_limit_bytes: int | None = None
    """What all processes of the probe may hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some whole optimizer steps (or batches), timed at their edges."""

    seconds: float
    consumed: int
    produced: int
    wait_s: float
    steps: int
    starved: int = 0
    """Batches that were asked for while none lay ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What a GPU told of itself over exactly the timed window; None where it was not read."""

    index: int
    """Its ordinal among the devices that PyTorch sees."""
    uuid: str = ""
    gpu_util_pct: float | None = None
    """Share of time in which any kernel ran."""
    memory_util_pct: float | None = None
    """Share of time in which its memory was read or written."""
    sm_active_pct: float | None = None
    sm_occupancy_pct: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    """DRAM bandwidth, of the most there is."""
    power_w: float | None = None
    energy_j: float | None = None
    """Only from windows that are long against the ticks of the counter."""
    estimated: bool = False
    """Whether the energy is integrated from power, for want of a counter."""
    sm_clock_mhz: float | None = None
    sm_clock_first_mhz: float | None = None
    """In the first third of the window."""
    sm_clock_later_mhz: float | None = None
    """In the slower one of the other two thirds."""
    memory_clock_mhz: float | None = None
    event_reasons: int | None = None
    """Every reason, as NVML's bits, for which the clocks were held back at any time."""
    temperature_c: float | None = None
    pcie_tx_mib_per_s: float | None = None
    pcie_rx_mib_per_s: float | None = None
    used_bytes: int | None = None
    """The most that was in use on it, by whomever."""
    used_before_bytes: int | None = None
    """In use just before the probe."""
    process_bytes: int | None = None
    """The most that the probe's own processes held: allocator, context and libraries."""
    others: int | None = None
    """Other processes that held memory on it."""
    others_bytes: int | None = None
    others_util_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Raw facts of one probe. Every number that a person sees is computed from them later."""

    blocks: tuple[Block, ...]
    stopped: str
    """narrow, noise, limit or dominated."""
    restarts_s: tuple[float, ...] = ()
    epoch_samples: float | None = None
    batches: int = 0
    steps: int = 0
    skipped_steps: int = 0
    optimizer_steps: int = 0
    """Real optimizer steps in the window, counted by a hook; 0 for discard."""
    build_s: float = 0.0
    startup_s: float = 0.0
    first_step_s: float | None = None
    parity_loss: float | None = None
    finite: bool = True
    memory_bytes: int | None = None
    """Peak of the training process: on an accelerator reserved and other memory."""
    resident_bytes: int | None = None
    """Parameters, buffers and optimizer state."""
    allocated_bytes: int | None = None
    """Peak of the accelerator's allocator, the first steps included; a ring's surplus is off."""
    reserved_bytes: int | None = None
    """Peak of what that allocator holds, the same way."""
    other_bytes: int | None = None
    """The accelerator's context and libraries."""
    foreign_bytes: int | None = None
    """What other processes held of the accelerator."""
    alloc_retries: int | None = None
    """How often its allocator emptied its cache and tried again, within the window."""
    longest_of: int = 0
    """Samples whose longest ones one of the first steps was made of; 0 for none."""
    host_memory_bytes: int | None = None
    cpu_s: float | None = None
    """Of the probe's processes in the window."""
    worker_cpu_s: float | None = None
    each_worker_cpu_s: tuple[float, ...] = ()
    """Of each worker that lived all through the window."""
    others_cpu_s: float | None = None
    """What everybody else used of the CPUs that the probe may run on."""
    idle_cpu_s: float | None = None
    storage_bytes: int | None = None
    """Read from storage in the window: what the page cache did not hold."""
    asked_bytes: int | None = None
    """Asked of the file system in the window."""
    unsettled: tuple[str, ...] = ()
    """What still grew while it was counted: memory of the allocator, compiled graphs."""
    workers: int = 0
    cpus: int = 1
    threads: int = 1
    start_ns: int = 0
    end_ns: int = 0
    devices: tuple[DeviceReading, ...] = ()
    """One for each accelerator it trained on, added by the process that watched them."""
    facts: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a config gave no measurement. The search learns from it and goes on."""

    status: Status
    message: str
    phase: str = ""
    log_tail: str = ""
    suspect: Suspect | None = None
    """What it may come from; `evidence.judged` decides by the other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row: an experiment and what came of it."""

    number: int
    config: Config
    stage: Stage
    source: Source
    sink: Sink
    measurement: Measurement | None = None
    failure: Failure | None = None
    labels: tuple[Label, ...] = ()
    probe_s: float = 0.0
    why: str = ""
    round: int = 0
    """Which interleaved round of finals it belongs to."""
    reused: str = ""
    """The earlier run in which it was measured; "" for this one."""

    @property
    def status(self) -> Status:
        """How the row ended."""
        if self.failure is not None:
            return self.failure.status
        if self.measurement is not None and self.measurement.stopped == "dominated":
            return Status.DOMINATED
        return Status.OK

    @property
    def reason(self) -> str:
        """Why there is no usable number; what is to be known of an ok row."""
        told = [f"reused from {self.reused}"] if self.reused else []
        if self.failure is not None:
            told.insert(0, self.failure.message)
        elif self.status is Status.DOMINATED:
            told.insert(0, "stopped: cannot win")
        elif self.measurement is not None:
            told[:0] = self.measurement.notes
        return "; ".join(told)

    @property
    def ok(self) -> bool:
        """Whether it gave a usable number."""
        return self.status is Status.OK

    @property
    def end_to_end(self) -> bool:
        """Whether loader and training ran together."""
        return self.source is Source.LOADER and self.sink is Sink.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that holds the job back, with its evidence."""

    bottleneck: str
    evidence: str
    advice: str
    gain: float | None = None


def encode(fact: object) -> str:
    """A fact as JSON text, with the format's number."""
    return json.dumps({"schema": SCHEMA, **_plain(fact)}, default=_plain)


def _plain(fact: Any) -> Any:
    if isinstance(fact, Mapping):
        return dict(fact)
    # Not `asdict`: it would copy a Config field by field, which has none.
    return {name.name: getattr(fact, name.name) for name in fields(fact)}


def decode(kind: Callable[..., T], text: str) -> T:
    """The fact that `encode` wrote.

    Raises:
        ValueError: If the text was written by another version of the format.
    """
    raw = json.loads(text)
    schema = raw.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"format {schema}, this version reads format {SCHEMA}")
    return kind(**_revive(raw))


def _revive(raw: dict[str, Any]) -> dict[str, Any]:
    """JSON has no enums, tuples or nested facts: bring back those that we use."""
    for name, revive in _REVIVERS.items():
        if raw.get(name) is not None:
            raw[name] = revive(raw[name])
    return raw


_REVIVERS: dict[str, Callable[[Any], Any]] = {
    "model": lambda value: ModelRef(**value),
    "stage": Stage,
    "source": Source,
    "sink": Sink,
    "status": Status,
    "suspect": Suspect,
    "config": Config,
    "blocks": lambda value: tuple(Block(**block) for block in value),
    "restarts_s": tuple,
    "each_worker_cpu_s": tuple,
    "unsettled": tuple,
    "notes": tuple,
    "labels": lambda value: tuple(Label(label) for label in value),
    "measurement": lambda value: Measurement(**_revive(value)),
    "failure": lambda value: Failure(**_revive(value)),
    "loader_accepts": tuple,
    "skipped_preloads": tuple,
    "devices": lambda value: tuple(DeviceReading(**reading) for reading in value),
}


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk half a file takes room from the next one
        raise
