"""Progress of a run: lines for a log, a live table for a terminal. Nothing is printed here."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotune.metrics import throughput
from autotune.report import words
from autotune.scene import Ask
from autotune.state import RunState
from autotune.types import REFUSED, Sink, Source, Stage, Status, Trial

SHOWN_ROWS = 8


def halves(source: Source, sink: Sink) -> str:
    """What a probe runs, in plain words."""
    if source is Source.CACHED:
        return "device alone"
    return "loader alone" if sink is Sink.DISCARD else "together"


def line(trial: Trial, state: RunState) -> str:
    """One finished row, as a line of a log."""
    return f"[{trial.number:>3}] {_what(trial, state)}: {result(trial)}"


def result(trial: Trial) -> str:
    """What came of a row, in words."""
    if trial.status is Status.DOMINATED:
        return "stopped: cannot win"
    if trial.failure is not None:
        return f"{trial.status}: {trial.reason}"
    if trial.stage is Stage.INSPECT:
        return "ok"
    assert trial.measurement is not None
    speed = throughput(trial.measurement)
    labels = f" ({', '.join(trial.labels)})" if trial.labels else ""
    return f"{words.rate(speed)}{labels}" if speed else "no rate"


def _what(trial: Trial, state: RunState) -> str:
    kind = halves(trial.source, trial.sink)
    if trial.stage in (Stage.INSPECT, Stage.BASELINE):
        return str(trial.stage)
    if trial.status in REFUSED:
        return "not tried"
    change = words.change(trial.config, state.baseline) or "as now"
    return f"{_STAGES.get(trial.stage, kind)}, {change}"


_STAGES = {Stage.FINAL: "final", Stage.PATH: "step of the path"}


class Screen:
    """The live table: budget, the probe that runs and why, the best so far, the last rows."""

    def __init__(self) -> None:
        self.budget_s = 1.0
        self.left_s = 1.0
        self.running = "starting"
        self.notes: list[str] = []
        self.state: RunState | None = None

    def asks(self, ask: Ask, left_s: float) -> None:
        """A probe starts."""
        self.left_s = left_s
        kind = halves(ask.source, ask.sink)
        self.running = ask.why if ask.why.startswith(kind) else f"{kind}: {ask.why}"

    def __rich__(self) -> RenderableType:
        spent = min(max(self.budget_s - self.left_s, 0.0), self.budget_s)
        head = Table.grid(padding=(0, 1))
        head.add_row(
            "budget",
            ProgressBar(total=self.budget_s, completed=spent, width=30),
            f"{words.duration(spent)} of {words.duration(self.budget_s)}",
        )
        return Group(head, Text(f"now: {self.running}"), Text(self._best()), self._rows())

    def _best(self) -> str:
        state = self.state
        if state is None or state.space is None:
            return ""
        speeds = {
            trial.config: speed
            for trial in state.trials
            if trial.ok and trial.end_to_end and trial.measurement is not None
            if (speed := throughput(trial.measurement)) is not None
        }
        baseline = speeds.get(state.baseline)
        if baseline is None:
            return ""
        best = max(speeds, key=lambda config: speeds[config].value)
        change = words.change(best, state.baseline) or state.baseline_name
        gain = speeds[best].value / baseline.value
        return f"best so far: {words.number(speeds[best].value)} samples/s, {gain:.2f}x ({change})"

    def _rows(self) -> Table:
        table = Table(box=None, padding=(0, 1), expand=False)
        table.add_column("", no_wrap=True, min_width=3, justify="right")
        for title in ("probe", "result"):
            table.add_column(title, overflow="ellipsis", no_wrap=True)
        state = self.state
        if state is None or state.space is None:
            return table
        for trial in state.trials[-SHOWN_ROWS:]:
            table.add_row(str(trial.number), _what(trial, state), result(trial))
        return table
