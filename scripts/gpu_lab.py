"""What the GPU scripts share: single probes, a clock, NVML beside them, where results go."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from autotune.checkup import TorchFacts, torch_facts
from autotune.home import Deadlines
from autotune.knobs import environment_of
from autotune.launcher import Launcher, Outcome
from autotune.machine import cpus_granted, machine_of, memory_granted
from autotune.source import third_party_imports
from autotune.types import (
    ModelRef,
    ProbeSpec,
    Sink,
    Source,
    Stage,
    Value,
    WorkloadFacts,
    write_atomically,
)

ROOT = Path(__file__).resolve().parent.parent
MODELS = {name: ROOT / "scripts" / "gpu_models" / f"{name}.py" for name in
          ("cnn", "transformer", "mlp")}  # fmt: skip
STOCK = "samples.pkl"
START_S = 60.0
CANARY_S = 30.0
GRACE_S = 5.0
READ_EVERY_S = 0.2


class OutOfTimeError(Exception):
    """A deadline has passed."""


class SkipError(Exception):
    """It makes no sense to do this here; the text says why."""


class Clock:
    """Counts down; may be asked from anywhere."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end_s - time.monotonic())

    def check(self) -> None:
        """Raise if the time is up."""
        if not self.left_s:
            raise OutOfTimeError

    def part(self, seconds: float) -> Clock:
        """A clock that shows so many seconds, or what is left."""
        return Clock(min(seconds, self.left_s))


# --- the machine ----------------------------------------------------------------------------------


def choose_device(asked: str) -> tuple[str, TorchFacts]:
    """The device that is asked for (auto, cpu, cuda), and what torch tells.

    Raises:
        SkipError: If torch does not compute here, or has no such device.
    """
    if asked == "cpu":
        # The models' processes and those of the command line inherit both.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        os.environ["GPU_MODELS"] = "small"
    facts = torch_facts(START_S)
    if not facts.device:
        raise SkipError(f"torch does not compute here: {facts.trouble}")
    if asked == "cuda" and facts.kind != "cuda":
        raise SkipError(f"torch finds no CUDA device here, only {facts.kind}")
    if facts.kind == "cpu":
        os.environ["GPU_MODELS"] = "small"
        return "cpu", facts
    return f"{facts.kind}:0", facts


def fingerprint(facts: TorchFacts) -> dict[str, Any]:
    """On what hardware, and with which versions, something was measured."""
    cpus, limit = cpus_granted()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": cpus,
        "cpus_limited_by": limit,
        "memory_bytes": memory_granted(),
        "torch": dict(facts.told),
        "load": os.getloadavg()[0],
    }


def _cpu_name() -> str | None:
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return found[1] if found else None
    return None


# --- single probes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a probe is to measure."""

    source: Source = Source.LOADER
    sink: Sink = Sink.TRAIN
    window_s: float = 1.5
    min_blocks: int = 8
    block_s: float = 0.25
    want: float = 0.015


class Lab:
    """One model's probes on one device, as the tuner launches them."""

    def __init__(self, model: Path, device: str, folder: Path, clock: Clock) -> None:
        self.model = ModelRef(path=str(model))
        self.device = device
        self.folder = folder / model.stem
        self.notes: list[str] = []
        """What the launcher could not do as planned."""
        self._count = 0
        started = time.monotonic()
        self._stock: str | None = None
        self.launcher = Launcher(
            self.model,
            seed=0,
            preload=third_party_imports(model),
            say=self.notes.append,
            deadlines=Deadlines(
                start_s=START_S, import_s=START_S, build_s=START_S, canary_s=CANARY_S
            ),
        )
        try:
            self.current = self.launcher.load().current
            self.machine = machine_of(self.launcher.settle())
            self.facts = self._inspected(clock)
            self.startup_s = time.monotonic() - started
        except BaseException:
            self.close()
            raise

    def _inspected(self, clock: Clock) -> WorkloadFacts:
        config = {"train.batch_size": 32, **(self.current or {})}
        outcome = self._launch(Stage.INSPECT, config, Wish(), clock)
        if outcome.measurement is None or outcome.measurement.facts is None:
            failure = outcome.failure
            assert failure is not None
            raise RuntimeError(f"inspecting: {failure.status}: {failure.message}")
        self._stock = str(self.folder / "0001" / STOCK)
        return WorkloadFacts(**outcome.measurement.facts)

    def probe(self, config: Mapping[str, Value], wish: Wish, clock: Clock) -> Outcome:
        """Run one probe in a fresh process; what comes of it.

        Raises:
            OutOfTimeError: If the clock stops first; the probe is ended.
        """
        return self._launch(Stage.SEARCH, config, wish, clock)

    def _launch(
        self, stage: Stage, config: Mapping[str, Value], wish: Wish, clock: Clock
    ) -> Outcome:
        clock.check()
        self._count += 1
        spec = ProbeSpec(
            model=self.model,
            config=dict(config),
            stage=stage,
            source=wish.source,
            sink=wish.sink,
            folder=str(self.folder / f"{self._count:04d}"),
            device=self.device,
            seed=0,
            global_batch=int(config.get("train.batch_size") or 32),
            stock=self._stock,
            max_window_s=wish.window_s,
            min_blocks=wish.min_blocks,
            block_s=wish.block_s,
            want=wish.want,
            timeout_s=wish.window_s * 4 + 40,
            cpus=self.machine.cpus,
        )
        environment = environment_of(config, load_time=True)
        return self.launcher.run(spec, environment, should_stop=clock.check)

    def close(self) -> None:
        """End every process."""
        self.launcher.close()


class Labs:
    """A lab for each model, made when it is first needed, kept until the end."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self._made: dict[str, Lab] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, model: str, clock: Clock) -> Lab:
        """The model's lab."""
        if model not in self._made:
            lab = Lab(MODELS[model], self.device, self.folder, clock)
            self._stack.callback(lab.close)
            self._made[model] = lab
        return self._made[model]


def told_of(outcome: Outcome) -> dict[str, Any]:
    """How a probe ended, and all that it told, its blocks apart."""
    if outcome.failure is not None:
        failure = outcome.failure
        return {
            "status": str(failure.status),
            "message": failure.message,
            "phase": failure.phase,
            "log_tail": failure.log_tail[-500:],
            "probe_s": round(outcome.probe_s, 3),
        }
    assert outcome.measurement is not None
    known = asdict(outcome.measurement)
    del known["blocks"]
    return {"status": "ok", "probe_s": round(outcome.probe_s, 3), **known}


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


def command(words: Sequence[str], clock: Clock) -> Ran:
    """Run a module of this Python in the project's folder, to its end.

    Raises:
        OutOfTimeError: If the clock stops first; the text is the end of what it said.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=clock.left_s)
    except subprocess.TimeoutExpired:
        out, err = _ended(process)
        raise OutOfTimeError(f"{out[-300:]} {err[-700:]}".strip()) from None
    except BaseException:
        _ended(process)
        raise
    return Ran(code=process.returncode, out=out, err=err)


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the process and its group, politely at first; what it had said."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


# --- NVML -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a GPU; what cannot be read is None."""

    at_ns: int
    busy_pct: float | None
    used_bytes: int | None
    energy_j: float | None
    power_w: float | None
    clock_mhz: float | None


@dataclass
class Watcher:
    """Reads NVML several times a second, apart from what the tuner itself reads."""

    uuid: str
    readings: list[Reading] = field(default_factory=list)
    baseline: Reading | None = None

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._nvml, self._handle = _opened(self.uuid)
        self.baseline = self._read()
        self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(GRACE_S)
        self._nvml.nvmlShutdown()

    def within(self, start_ns: int, end_ns: int) -> list[Reading]:
        """The readings of a window."""
        return [reading for reading in self.readings if start_ns <= reading.at_ns <= end_ns]

    def _watch(self) -> None:
        while not self._stop.wait(READ_EVERY_S):
            self.readings.append(self._read())

    def _read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        return Reading(
            at_ns=time.time_ns(),
            busy_pct=self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            used_bytes=self._value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            energy_j=self._value(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
            power_w=self._value(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            clock_mhz=self._value(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        )

    def _value(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._nvml.NVMLError:
            return None


def _opened(uuid: str) -> tuple[Any, Any]:
    """NVML and the GPU's handle.

    Raises:
        SkipError: If NVML does not know it.
    """
    try:
        import pynvml
    except ImportError as error:
        raise SkipError(f"no NVML: {error}") from None
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SkipError(f"no NVML: {error}") from None
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        raise SkipError(f"NVML does not know {name}: {error}") from None


def mean_read(values: Sequence[float | None]) -> float | None:
    """Mean of what was read."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# --- results --------------------------------------------------------------------------------------


def result_path(kind: str, device: str, facts: TorchFacts, suffix: str = ".json") -> Path:
    """Where a result is written: `$OUT` if it is set, else `results/recorded/`."""
    folder = Path(os.environ.get("OUT") or ROOT / "results" / "recorded")
    names = facts.device.get("names") or [device]
    machine = re.sub(r"[^a-z0-9]+", "-", str(names[0] or device).lower()).strip("-")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return folder / f"{kind}-{machine}-{stamp}{suffix}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1, default=str) + "\n")


def say(text: str) -> None:
    """Tell how it goes on, on stderr."""
    print(text, file=sys.stderr, flush=True)
