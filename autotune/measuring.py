"""One probe, from what the search asks for to the row that came of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autotune import space
from autotune.budget import Budget
from autotune.knobs import environment_of
from autotune.launcher import Launcher, Outcome
from autotune.metrics import rate
from autotune.readings import LEAST_ENERGY_S
from autotune.scene import Ask
from autotune.state import RunState
from autotune.stop import Stop
from autotune.telemetry import Telemetry, Watch
from autotune.types import (
    Config,
    Failure,
    Label,
    Measurement,
    ProbeSpec,
    Sink,
    Stage,
    Status,
    Trial,
    Value,
)

STOCK_FILE = "samples.pkl"
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
        folder = self._folder(number, ask.config)
        shutil.rmtree(folder, ignore_errors=True)
        outcome = self._watched(self._spec(ask, folder))
        return Trial(
            number=number,
            config=ask.config,
            stage=ask.stage,
            source=ask.source,
            sink=ask.sink,
            measurement=outcome.measurement,
            failure=outcome.failure,
            labels=_labels(outcome.measurement),
            probe_s=outcome.probe_s,
            why=ask.why,
            round=ask.round,
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
        return self.state.folder / "probes" / f"{number:04d}-{config.key}"

    def _spec(self, ask: Ask, folder: Path) -> ProbeSpec:
        unit = self.budget.unit_s
        window_s, blocks, want = {
            Stage.LOADER: (unit, 6, 0.02),
            Stage.DEVICE: (unit, 6, 0.02),
            Stage.BASELINE: (2 * unit, 12, 0.01),
            Stage.FINAL: (2 * unit, 12, 0.01),
            Stage.PATH: (1.5 * unit, 10, 0.015),
        }.get(ask.stage, (1.5 * unit, 8, 0.015))
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
            max_window_s=max(window_s, least_s),
            min_window_s=least_s,
            min_blocks=blocks,
            want=want,
            beat=ask.beat,
            timeout_s=self.budget.timeout_s(ask.stage),
            cpus=self.state.machine.cpus,
            delivered_batch=self._delivered(),
        )

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


def _labels(measurement: Measurement | None) -> tuple[Label, ...]:
    steady = None if measurement is None or not measurement.blocks else rate(measurement)
    return () if steady is None else steady.labels
