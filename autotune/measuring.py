"""One probe, from what the search asks for to the row that came of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune import guard, space
from autotune.budget import Budget
from autotune.knobs import environment_of
from autotune.launcher import Launcher, Outcome
from autotune.machine import memory_free
from autotune.metrics import rate
from autotune.readings import LEAST_ENERGY_S
from autotune.runfolder import probe_folder
from autotune.scene import Ask
from autotune.shm import shm_free
from autotune.state import RunState
from autotune.stop import Stop
from autotune.telemetry import Telemetry, Watch
from autotune.types import (
    GIB,
    Config,
    Failure,
    Label,
    Measurement,
    ProbeSpec,
    Sink,
    Source,
    Stage,
    Status,
    Trial,
    Value,
    whole,
)

STOCK_FILE = "samples.pkl"
BUSY = "busy or unavailable"
"""What CUDA says of a device that another process holds; just after a kill that passes."""
WINDOW_SHARE = 0.5
"""Share of the time that a probe may take which its timed window may fill."""
ENERGY_WINDOW_S = LEAST_ENERGY_S + 0.1
"""The child's clock for spans and the one of its time stamps need not agree to the last digit."""


class DeviceLostError(Exception):
    """Ends the wait for a probe whose device is gone."""


class Prober:
    """Launches probes for one run, each in a folder of its own."""

    def __init__(self, state: RunState, launcher: Launcher, budget: Budget, stop: Stop) -> None:
        self.state = state
        self.launcher = launcher
        self.budget = budget
        self.stop = stop
        self.telemetry = Telemetry()
        self.fresh = False
        """Whether every probe builds model and dataset for itself."""

    def read_with(self, telemetry: Telemetry) -> None:
        """Read the devices beside each probe; finals then last as long as their energy takes."""
        self.telemetry = telemetry
        self.budget.least_final_s = self._least_window_s(Stage.FINAL)

    def probe(self, ask: Ask, number: int) -> Trial:
        """Launch the probe, wait for its end, and make a row of what came of it."""
        outcome = self._refused(ask) or self._measured(ask, number)
        return Trial(
            number=number,
            config=ask.config,
            stage=ask.stage,
            source=ask.source,
            sink=ask.sink,
            measurement=outcome.measurement,
            failure=outcome.failure,
            labels=labels_of(outcome.measurement),
            probe_s=outcome.probe_s,
            why=ask.why,
            round=ask.round,
        )

    def _measured(self, ask: Ask, number: int) -> Outcome:
        """Run the probe; once more if the device was still held by one that was just ended."""
        folder = self._folder(number, ask.config)
        shutil.rmtree(folder, ignore_errors=True)
        outcome = self._watched(self._spec(ask, folder))
        if outcome.failure is None or BUSY not in outcome.failure.message:
            return outcome
        shutil.rmtree(folder, ignore_errors=True)
        again = self._watched(self._spec(ask, folder))
        return replace(again, probe_s=outcome.probe_s + again.probe_s)

    def _refused(self, ask: Ask) -> Outcome | None:
        """What comes of a probe for which there is no memory: nothing is started.

        The user's own config runs as it does every day, and may show for itself that it fails.
        """
        if self.state.space is not None and ask.config == self.state.space.baseline:
            return None
        room = guard.Room(free_bytes=memory_free(), shm_bytes=shm_free())
        reason = guard.shortage(self._need(ask), room)
        if not reason:
            return None
        return Outcome(failure=Failure(status=Status.SKIPPED, message=reason), probe_s=0.0)

    def _need(self, ask: Ask) -> guard.Need:
        """What the probe surely holds on the host; before anything is known, nothing."""
        known = self.state.space
        if known is None:
            return guard.Need(workers=0, prefetch=0, batch_bytes=0.0)
        config = ask.config
        loads = ask.source is Source.LOADER
        trains_here = ask.sink is Sink.TRAIN and self.state.machine.on_cpu
        return guard.Need(
            workers=whole(config.get(space.WORKERS)) if loads else 0,
            prefetch=whole(config.get(space.PREFETCH)) or 2,
            batch_bytes=known.micro_batch(config) * known.facts.sample_bytes,
            resident_bytes=known.facts.parameter_bytes if trains_here else 0.0,
        )

    def _watched(self, spec: ProbeSpec) -> Outcome:
        """Run the probe, and read its devices meanwhile."""
        with self.telemetry.watch(self._devices(spec)) as watch:
            outcome = self._run(spec, watch)
        self.telemetry.await_release(watch, self.stop.check)
        if watch.lost:
            failure = Failure(status=Status.DEVICE_LOST, message=watch.lost)
            return Outcome(failure=failure, probe_s=outcome.probe_s)
        if outcome.measurement is None:
            return outcome
        measured = outcome.measurement
        devices = watch.readings(measured.start_ns, measured.end_ns)
        return replace(outcome, measurement=replace(measured, devices=devices))

    def _run(self, spec: ProbeSpec, watch: Watch) -> Outcome:
        started_s = time.monotonic()

        def should_stop() -> None:
            self.stop.check()
            if watch.lost:  # the probe would hang until its deadline
                raise DeviceLostError(watch.lost)

        try:
            environment = environment_of(spec.config, load_time=True)
            return self.launcher.run(spec, environment, should_stop)
        except DeviceLostError as error:
            failure = Failure(status=Status.DEVICE_LOST, message=str(error))
            return Outcome(failure=failure, probe_s=time.monotonic() - started_s)

    def _devices(self, spec: ProbeSpec) -> list[int]:
        """The devices that the probe trains on, by PyTorch's numbers."""
        trains = spec.sink is Sink.TRAIN and not self.state.machine.on_cpu
        return [_index(spec.device)] if trains else []

    def stock(self) -> str | None:
        """Where the inspecting probe left the dataset's first samples."""
        inspected = [t for t in self.state.trials if t.stage is Stage.INSPECT and t.ok]
        paths = (self.stock_of(trial) for trial in inspected)
        return next((str(path) for path in paths if path.exists()), None)

    def stock_of(self, trial: Trial) -> Path:
        """Where this inspecting probe would have left them."""
        return self._folder(trial.number, trial.config) / STOCK_FILE

    def _folder(self, number: int, config: Config) -> Path:
        return self.state.folder / probe_folder(number, config)

    def _spec(self, ask: Ask, folder: Path) -> ProbeSpec:
        effort = effort_of(ask.stage, self.budget.unit_s)
        timeout_s = self.budget.timeout_s(ask.stage)
        least_s = self._least_window_s(ask.stage)
        return ProbeSpec(
            model=self.state.checked.model,
            config=dict(ask.config),
            stage=ask.stage,
            source=ask.source,
            sink=ask.sink,
            folder=str(folder),
            device=self.state.machine.device,
            seed=self.state.checked.options.seed,
            global_batch=self._global_batch(ask.config),
            fresh=ask.fresh or self.fresh,
            stock=self.stock(),
            # Near the budget's end a short window is worth more than one that is cut off.
            max_window_s=min(max(effort.window_s, least_s), WINDOW_SHARE * timeout_s),
            min_window_s=least_s,
            min_blocks=effort.blocks,
            want=effort.half_width,
            beat=ask.beat,
            timeout_s=timeout_s,
            cpus=self.state.machine.cpus,
            delivered_batch=self._delivered(),
            longest=self.state.space is not None and self.state.space.facts.varies,
            **self._memory_limits(ask),
        )

    def _memory_limits(self, ask: Ask) -> dict[str, Any]:
        """What the probe may hold. Limits bind the search, not the user's own config."""
        known, machine = self.state.space, self.state.machine
        if known is None or ask.config == known.baseline:
            return {}
        limits = {
            limit.metric.name: int(limit.bound * GIB)
            for limit in self.state.checked.limits
            if limit.metric.name in ("memory_gb", "host_memory_gb")
        }
        own, host = limits.get("memory_gb"), limits.get("host_memory_gb")
        if machine.on_cpu:
            return {"memory_limit_bytes": own, "host_limit_bytes": host}
        return {"memory_fraction": self._fraction(own), "host_limit_bytes": host}

    def _fraction(self, limit_bytes: int | None) -> float | None:
        """The share of the accelerator's memory at which the probe's allocator refuses."""
        total = self.state.machine.device_memory_bytes
        if not total:
            return None
        foreign, other = guard.beside_the_allocator(self.state.trials)
        allowed = guard.plannable_bytes(total, foreign)
        if limit_bytes is not None:
            allowed = min(allowed, limit_bytes)
        return guard.allocator_share(total, allowed, other)

    def _least_window_s(self, stage: Stage) -> float:
        """Finals are long enough to tell energy, where that can be read and paid for."""
        index = _index(self.state.machine.device)
        tells = self.telemetry.reads(index, "energy_j", "power_w")
        affordable = 2 * self.budget.unit_s >= LEAST_ENERGY_S
        return ENERGY_WINDOW_S if stage is Stage.FINAL and tells and affordable else 0.0

    def _global_batch(self, config: Mapping[str, Value]) -> int:
        batch = int(config.get(space.BATCH) or self._delivered())
        return batch * int(config.get(space.ACCUMULATION) or 1)

    def _delivered(self) -> int:
        return int(self.state.space.facts.delivered_batch) if self.state.space else 32


def _index(device: str) -> int:
    """A device's number: 1 for cuda:1."""
    return int(device.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a probe may measure, and when it knows enough."""

    window_s: float
    blocks: int
    """At least."""
    half_width: float
    """Relative, of the interval that ends it."""


def effort_of(stage: Stage, unit_s: float) -> Effort:
    """What a probe of the stage is worth, in windows of a simple probe."""
    windows, blocks, half_width = {
        Stage.LOADER: (1.0, 6, 0.02),
        Stage.DEVICE: (1.0, 6, 0.02),
        Stage.BASELINE: (2.0, 12, 0.01),
        Stage.FINAL: (2.0, 12, 0.01),
        Stage.PATH: (1.5, 10, 0.015),
    }.get(stage, (1.5, 8, 0.015))
    return Effort(window_s=windows * unit_s, blocks=blocks, half_width=half_width)


def labels_of(measurement: Measurement | None) -> tuple[Label, ...]:
    """What qualifies the number of a row."""
    steady = None if measurement is None or not measurement.blocks else rate(measurement)
    return () if steady is None else steady.labels
