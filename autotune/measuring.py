"""One probe, from what the search asks for to the row that came of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from autotune import space
from autotune.budget import Budget
from autotune.knobs import environment_of
from autotune.launcher import Launcher
from autotune.metrics import rate
from autotune.runfolder import probe_folder
from autotune.scene import Ask
from autotune.state import RunState
from autotune.stop import Stop
from autotune.types import Config, Label, Measurement, ProbeSpec, Stage, Trial, Value

STOCK_FILE = "samples.pkl"


class Prober:
    """Launches probes for one run, each in a folder of its own."""

    def __init__(self, state: RunState, launcher: Launcher, budget: Budget, stop: Stop) -> None:
        self.state = state
        self.launcher = launcher
        self.budget = budget
        self.stop = stop
        self.fresh = False
        """Whether every probe builds model and dataset for itself."""

    def probe(self, ask: Ask, number: int) -> Trial:
        """Launch the probe, wait for its end, and make a row of what came of it."""
        folder = self._folder(number, ask.config)
        shutil.rmtree(folder, ignore_errors=True)
        environment = environment_of(ask.config, load_time=True)
        outcome = self.launcher.run(self._spec(ask, folder), environment, self.stop.check)
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
        unit = self.budget.unit_s
        window_s, blocks, want = {
            Stage.LOADER: (unit, 6, 0.02),
            Stage.DEVICE: (unit, 6, 0.02),
            Stage.BASELINE: (2 * unit, 12, 0.01),
            Stage.FINAL: (2 * unit, 12, 0.01),
            Stage.PATH: (1.5 * unit, 10, 0.015),
        }.get(ask.stage, (1.5 * unit, 8, 0.015))
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
            max_window_s=window_s,
            min_blocks=blocks,
            want=want,
            beat=ask.beat,
            timeout_s=self.budget.timeout_s(ask.stage),
            cpus=self.state.machine.cpus,
            delivered_batch=self._delivered(),
        )

    def _global_batch(self, config: Mapping[str, Value]) -> int:
        batch = int(config.get(space.BATCH) or self._delivered())
        return batch * int(config.get(space.ACCUMULATION) or 1)

    def _delivered(self) -> int:
        return int(self.state.space.facts.delivered_batch) if self.state.space else 32


def _labels(measurement: Measurement | None) -> tuple[Label, ...]:
    steady = None if measurement is None or not measurement.blocks else rate(measurement)
    return () if steady is None else steady.labels
