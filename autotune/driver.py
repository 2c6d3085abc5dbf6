"""The loop: ask, probe, store, tell; then the answer."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from autotune import exporters, pareto, scene, search, space, store, telemetry
from autotune.errors import NothingRanError, OptionError, ResumeError, StoppedError
from autotune.knobs import check_values, environment_of
from autotune.launcher import Launcher
from autotune.metrics import rate
from autotune.options import Checked, Options, checked
from autotune.report.verdict import summary
from autotune.source import third_party_imports
from autotune.state import (
    RunState,
    answer_content,
    read_content,
    write_answer,
    write_diagnosis,
)
from autotune.types import (
    Config,
    Failure,
    Label,
    Machine,
    Measurement,
    ModelFacts,
    ProbeSpec,
    Sink,
    Source,
    Stage,
    Status,
    Trial,
    Value,
    WorkloadFacts,
    write_atomically,
)

STOCK_FILE = "samples.pkl"
WRITING_S = 1.0
"""Kept back from the budget for the files at its end."""
FINALS_RESERVED = 6
"""Baseline and one finalist, three times each."""
FIRST_PROBE_S = 4.0
"""What a probe is taken to cost before one has run."""
LEAST_TIMEOUT_S = 20.0
SAME_FAULT = 3
"""Failures of the first probes, all with one cause, that end the run."""


class Listener(Protocol):
    """Who is told how the run goes."""

    def note(self, text: str) -> None:
        """Something to know, in one line."""

    def begins(self, state: RunState) -> None:
        """The run folder exists; the budget runs."""

    def asks(self, ask: scene.Ask, left_s: float) -> None:
        """A probe starts."""

    def row(self, trial: Trial, run: RunState) -> None:
        """A row is finished and on disk."""


class Stop:
    """A wish to end the run: at once while nothing is measured yet, else between two rows.

    Raising inside a write would lose a finished row; a running probe looks here often.
    """

    def __init__(self) -> None:
        self.eager = True
        self._signal: int | None = None

    def request(self, number: int, _: object = None) -> None:
        """The handler for SIGINT and SIGTERM."""
        self._signal = number
        if self.eager:
            raise StoppedError(number)

    def check(self) -> None:
        """Raise StoppedError if a signal has come."""
        if self._signal is not None:
            raise StoppedError(self._signal)


def tune(
    options: Options,
    listener: Listener,
    *,
    resume: Path | None = None,
    force: bool = False,
    stop: Stop | None = None,
) -> RunState:
    """Run the whole job and leave a run folder.

    Raises:
        InputError: If the input is wrong; then nothing was created.
        NothingRanError: If no probe gave a number; the rows are in the folder.
        StoppedError: If a signal came; the rows and the best so far are in the folder.
    """
    known = checked(options)
    earlier = _earlier(resume, known, force=force) if resume else None
    folder = resume.resolve() if resume else _new_folder(known)
    launcher = Launcher(
        known.model,
        seed=options.seed,
        preload=third_party_imports(Path(known.model.path)),
        say=listener.note,
    )
    with launcher:
        started = time.monotonic()
        facts = launcher.load()
        keys, goal = _checked_with_file(known, facts)
        machine = telemetry.machine(launcher.settle())
        if earlier is not None:
            _same_machine(earlier, machine, force=force)
        state = RunState(
            checked=known, folder=folder, machine=machine, model_facts=facts, keys=keys
        )
        job = Job(state, launcher, listener, goal, stop=stop or Stop(), started=started)
        return job.run(resumed=earlier is not None)


class Job:
    """One run, from the inspecting probe to the files."""

    def __init__(
        self,
        state: RunState,
        launcher: Launcher,
        listener: Listener,
        goal: space.Goal,
        *,
        stop: Stop,
        started: float,
    ) -> None:
        self.state = state
        self.launcher = launcher
        self.listener = listener
        self.goal = goal
        self.stop = stop
        self.fresh = False
        self._started = started
        self._spent_before = 0.0
        self._stored: deque[Trial] = deque()
        self._store: store.Store | None = None

    def run(self, *, resumed: bool) -> RunState:
        """Inspect, search, decide, write."""
        self.stop.eager = False
        self._open(resumed=resumed)
        self.listener.begins(self.state)
        try:
            self._search()
        except NothingRanError:
            self.state.stopped_because = "nothing ran"
            self._finish()
            raise
        except (StoppedError, KeyboardInterrupt):
            self.state.stopped_because = "interrupted"
            self._finish()
            raise
        self._finish()
        if self.state.answer is None:
            raise NothingRanError(_why_nothing_ran(self.state))
        return self.state

    # --- before the search ---

    def _open(self, *, resumed: bool) -> None:
        folder = self.state.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._store = store.Store(folder, self.state.checked.objectives)
        if resumed:
            self._stored = deque(self._store.trials())
            self.state.trials = list(self._stored)
            self._spent_before = sum(trial.probe_s for trial in self._stored)
        self._write_run("running")
        _point_latest(folder)
        if reason := self.launcher.fallback:
            self._note(f"each probe builds model and dataset itself: {reason}")
        if (self.state.checked.options.devices or 1) > 1:
            self._note("one device is used: parallel.mode=single is the only mode so far")
        if self.state.model_facts.affinity_narrowed:
            self._note("importing the model file narrowed the CPU affinity")

    def _note(self, text: str) -> None:
        self.state.notes.append(text)
        self.listener.note(text)

    def _search(self) -> None:
        facts = self._inspect()
        state = self.state
        state.space = space.resolve(
            state.checked.request, state.model_facts.current, self.goal, state.machine, facts
        )
        view = scene.Scene(
            space=state.space,
            objective=state.checked.objectives[0],
            limits=state.checked.limits,
            seed=state.checked.options.seed,
            affords=self.affords,
            ambiguous=self._is_ambiguous,
            answer=self._answer_so_far,
            trials=state.trials,
            not_explored=state.not_explored,
        )
        self._refuse(state.space)
        baseline = self.measure(
            scene.Ask(config=state.baseline, stage=Stage.BASELINE, why="your config")
        )
        self._say_price(baseline)
        self._drive(search.plan(state.checked.options.sampler, view))
        state.stopped_because = state.stopped_because or (
            "the budget ended" if self.left_s() <= 2 * WRITING_S else "nothing more can pay"
        )

    def _inspect(self) -> WorkloadFacts:
        """Run the inspecting probe; where a fork may be to blame, again from scratch."""
        state = self.state
        config = space.first_baseline(
            state.checked.request, state.model_facts.current, self.goal, state.machine
        )
        ask = scene.Ask(config=config, stage=Stage.INSPECT, why="what the job is like")
        trial = self.measure(ask)
        if trial.status in (Status.TIMEOUT, Status.CRASH) and not self.launcher.fallback:
            self.fresh = True
            self._note("each probe builds model and dataset itself: forking failed")
            trial = self.measure(ask)
        if trial.measurement is None or trial.measurement.facts is None:
            raise NothingRanError(_why_nothing_ran(state))
        return WorkloadFacts(**trial.measurement.facts)

    def _refuse(self, known: space.Space) -> None:
        """One row for each knob or value that cannot be tried here."""
        stored = {(t.config, t.status) for t in self._stored}
        for refusal in known.refusals:
            value = refusal.value
            changes = {} if value is None else {refusal.knob: value}
            config = known.start.but(changes)
            if (config, Status.NOT_APPLICABLE) in stored:
                continue
            name = refusal.knob if refusal.whole or value is None else f"{refusal.knob}={value}"
            self._keep(
                Trial(
                    number=self._next_number(),
                    config=config,
                    stage=Stage.SEARCH,
                    source=Source.LOADER,
                    sink=Sink.TRAIN,
                    failure=Failure(
                        status=Status.NOT_APPLICABLE, message=f"{name}: {refusal.reason}"
                    ),
                )
            )

    def _say_price(self, baseline: Trial) -> None:
        cost = max(baseline.probe_s, 0.1)
        count = int(self.left_s() / cost)
        self.listener.note(f"a probe costs about {cost:.1f} s; the budget pays for about {count}")

    # --- the loop ---

    def _drive(self, plan: scene.Plan) -> None:
        try:
            ask = next(plan)
            while True:
                trial = self.measure(ask)
                if self._is_hopeless():
                    self.state.stopped_because = f"every probe fails: {trial.reason}"
                    return
                ask = plan.send(trial)
        except StopIteration:
            return

    def measure(self, ask: scene.Ask) -> Trial:
        """The row of an ask: stored by an interrupted run, or measured now."""
        if (earlier := self._take_stored(ask)) is not None:
            return earlier
        self.stop.check()
        self.listener.asks(ask, self.left_s())
        number = self._next_number()
        folder = self.state.folder / "probes" / f"{number:04d}-{ask.config.key}"
        shutil.rmtree(folder, ignore_errors=True)
        spec = self._spec(ask, folder)
        environment = environment_of(ask.config, load_time=True)
        outcome = self.launcher.run(spec, environment, self.stop.check)
        trial = Trial(
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
        self._keep(trial)
        return trial

    def _next_number(self) -> int:
        return 1 + max((trial.number for trial in self.state.trials), default=-1)

    def _keep(self, trial: Trial) -> None:
        assert self._store is not None
        self._store.add(trial)
        self.state.trials.append(trial)
        self.listener.row(trial, self.state)

    def _take_stored(self, ask: scene.Ask) -> Trial | None:
        for trial in self._stored:
            same = (trial.config, trial.stage, trial.source, trial.sink, trial.round)
            if same == (ask.config, ask.stage, ask.source, ask.sink, ask.round):
                if ask.stage is Stage.INSPECT and self._stock() is None:
                    return None
                self._stored.remove(trial)
                return trial
        return None

    def _spec(self, ask: scene.Ask, folder: Path) -> ProbeSpec:
        unit = min(max(self.state.checked.budget_s / 60, 1.5), 5.0)
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
            stock=self._stock(),
            max_window_s=window_s,
            min_blocks=blocks,
            want=want,
            beat=ask.beat,
            timeout_s=self._timeout_s(ask),
            cpus=self.state.machine.cpus,
            delivered_batch=self._delivered(),
        )

    def _global_batch(self, config: Mapping[str, Value]) -> int:
        batch = int(config.get(space.BATCH) or self._delivered())
        return batch * int(config.get(space.ACCUMULATION) or 1)

    def _delivered(self) -> int:
        return int(self.state.space.facts.delivered_batch) if self.state.space else 32

    def _stock(self) -> str | None:
        """Where the inspecting probe left the dataset's first samples."""
        for trial in self.state.trials:
            if trial.stage is Stage.INSPECT and trial.ok:
                name = f"{trial.number:04d}-{trial.config.key}"
                path = self.state.folder / "probes" / name / STOCK_FILE
                return str(path) if path.exists() else None
        return None

    # --- time ---

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        spent = time.monotonic() - self._started + self._spent_before
        return self.state.checked.budget_s - spent

    def affords(self, stage: Stage, count: int) -> bool:
        """Whether so many more probes of the stage can be paid for."""
        if not self._counts_allow(stage, count):
            return False
        reserve = WRITING_S
        if stage not in (Stage.FINAL, Stage.PATH):
            reserve += min(FINALS_RESERVED * self._cost_s(Stage.FINAL), self._half_budget_s())
        return self.left_s() >= reserve + count * self._cost_s(stage)

    def _counts_allow(self, stage: Stage, count: int) -> bool:
        most = self.state.checked.options.max_probes
        if most is None:
            return True
        launched = len([t for t in self._probed() if t.stage is not Stage.INSPECT])
        kept_back = 0 if stage in (Stage.FINAL, Stage.PATH) else min(FINALS_RESERVED, most // 2)
        return launched + count + kept_back <= most

    def _half_budget_s(self) -> float:
        return self.state.checked.budget_s / 2

    def _cost_s(self, stage: Stage) -> float:
        """What a probe of the stage cost so far, or what the baseline did."""
        same = [t.probe_s for t in self._probed() if t.stage is stage and t.ok]
        baseline = [t.probe_s for t in self._probed() if t.stage is Stage.BASELINE]
        return median(same or baseline or [FIRST_PROBE_S])

    def _timeout_s(self, ask: scene.Ask) -> float:
        """Several times what it should cost, and never beyond the deadline."""
        if ask.stage in (Stage.INSPECT, Stage.BASELINE):
            return max(1.0, self.left_s() - WRITING_S)
        known = [t.probe_s for t in self._probed() if t.ok and t.end_to_end]
        usual = max(known, default=FIRST_PROBE_S)
        return max(1.0, min(self.left_s() - WRITING_S, max(LEAST_TIMEOUT_S, 5 * usual)))

    def _probed(self) -> list[Trial]:
        return [
            t for t in self.state.trials if t.status not in (Status.NOT_APPLICABLE, Status.SKIPPED)
        ]

    def _is_hopeless(self) -> bool:
        """Whether everything so far failed for the same reason."""
        ran = [t for t in self._probed() if t.stage is not Stage.INSPECT and t.sink is Sink.TRAIN]
        if len(ran) < SAME_FAULT or any(t.ok for t in ran):
            return False
        return len({(t.status, t.reason) for t in ran}) == 1

    # --- the answer ---

    def _answer_so_far(self) -> Config:
        answer = self._decide()
        return self.state.baseline if answer is None else answer.config

    def _decide(self) -> pareto.Answer | None:
        state = self.state
        if state.space is None:
            return None
        allowed = {trial.config: state.space.admits(trial.config) for trial in state.trials}
        return pareto.decide(
            state.trials,
            state.baseline,
            allowed,
            objective=state.checked.objectives[0],
            limits=state.checked.limits,
            min_gain=state.checked.min_gain,
        )

    def _is_ambiguous(self) -> bool:
        """Whether the interval of the speed-up holds the least gain worth a change."""
        state = self.state
        finals = {t.config for t in state.trials if t.stage is Stage.FINAL}
        for config in finals - {state.baseline}:
            gain = pareto.ratio(state.trials, config, state.baseline, state.checked.objectives[0])
            if gain is not None and gain.low <= 1 + state.checked.min_gain < gain.high:
                return True
        return False

    # --- the files ---

    def _finish(self) -> None:
        state = self.state
        state.tuning_s = time.monotonic() - self._started + self._spent_before
        state.answer = self._decide()
        front = pareto.front(list(pareto.pool(state.trials).values()), state.checked.objectives)
        store.write_tables(state.folder, state.trials, front)
        verified = state.stopped_because != "interrupted"
        if not verified:
            state.answer = self._best_so_far() or state.answer
        if state.answer is not None:
            write_answer(state, verified=verified)
            write_atomically(state.folder / "summary.md", summary(state))
            write_diagnosis(state)
        if verified and (stock := self._stock()) is not None:
            Path(stock).unlink(missing_ok=True)
        self._write_run("finished" if verified else "interrupted")

    def _best_so_far(self) -> pareto.Answer | None:
        """What an interrupted run leaves, if nothing was verified yet."""
        if self.state.answer is not None and not self.state.answer.keep:
            return None
        fit = [t for t in self._probed() if t.ok and t.end_to_end and t.stage is not Stage.INSPECT]
        objective = self.state.checked.objectives[0]
        values = {t.config: objective.compute(t.measurement) for t in fit if t.measurement}
        known = {config: value for config, value in values.items() if value is not None}
        if not known:
            return None
        return pareto.Answer(
            keep=False,
            config=min(known, key=lambda config: objective.cost(known[config])),
            speedup=None,
            verified=False,
            reason="interrupted: the best row so far, not verified",
        )

    def _write_run(self, status: str) -> None:
        state = self.state
        known = state.checked
        content = {
            "schema": 1,
            "status": status,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "folder": os.getcwd(),
            "model": {**asdict(known.model), "sha256": file_hash(known.model.path)},
            "options": asdict(known.options),
            "machine": asdict(state.machine),
            "versions": versions(),
            "space": {
                "name": known.options.space,
                "overrides": list(known.options.overrides),
                "choices": {n: c.values for n, c in known.request.choices.items()},
                "baseline": None if state.space is None else dict(state.baseline),
                "values": None if state.space is None else _listed(state.space),
                "global_batch": self.goal.size,
            },
            "current": state.model_facts.current,
            "keys": state.keys,
            "unit": state.model_facts.unit,
            "workload": None if state.space is None else asdict(state.space.facts),
            "notes": state.notes,
            "answer": answer_content(state),
        }
        store.write_run(state.folder, content)


def file_hash(path: str) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("autotune-torch", "torch", "optuna", "numpy", "lightning", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _listed(known: space.Space) -> dict[str, Any]:
    most = 40  # a held global batch allows every accumulation: of no use to a reader
    return {name: values[:most] for name, values in known.values.items()}


def _labels(measurement: Measurement | None) -> tuple[Label, ...]:
    steady = None if measurement is None or not measurement.blocks else rate(measurement)
    return () if steady is None else steady.labels


def _checked_with_file(known: Checked, facts: ModelFacts) -> tuple[Mapping[str, Any], space.Goal]:
    """What only the imported file tells: CURRENT, KEYS, and the global batch they give."""
    path = known.model.path
    if facts.current is not None:
        check_values(facts.current, f"{path}: CURRENT")
    keys = exporters.check_keys(facts.keys, f"{path}: KEYS")
    if known.options.keys is not None:
        keys = exporters.read_keys(Path(known.options.keys))
    goal = space.goal_of(known.options.global_batch, facts.current)
    space.check_goal(goal, known.request)
    return keys, goal


def _new_folder(known: Checked) -> Path:
    """The run's folder, not yet made.

    Raises:
        OptionError: If it holds another run, or nothing can be written there.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    given = known.options.output
    folder = Path(given) if given else Path("results") / f"{known.model.name}-{stamp}"
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(
            f"--output {folder}: is not an empty folder; choose another, or --resume it"
        )
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"--output {folder}: {existing} is not writable")
    return folder


def _earlier(folder: Path, known: Checked, *, force: bool) -> Mapping[str, Any]:
    content = read_content(folder)
    if content["model"]["sha256"] != file_hash(known.model.path) and not force:
        raise ResumeError(
            f"{known.model.path} has changed since {folder} was measured; "
            "start a new run, or go on all the same with --force"
        )
    return content


def _same_machine(earlier: Mapping[str, Any], machine: Machine, *, force: bool) -> None:
    """The machine is its accelerators, driver, torch and CPU count, not its name."""
    then, now = earlier["machine"], asdict(machine)
    changed = [
        f"{name}: {_shown(then.get(name))} then, {_shown(now[name])} now"
        for name in ("devices", "driver_major", "torch", "cpus")
        if list(_tuple(then.get(name))) != list(_tuple(now[name]))
    ]
    if changed and not force:
        raise ResumeError(
            f"the machine has changed ({'; '.join(changed)}); "
            "start a new run, or go on all the same with --force"
        )


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _shown(value: Any) -> str:
    return ", ".join(str(entry) for entry in _tuple(value)) or "none"


def _point_latest(folder: Path) -> None:
    """results/latest points at the newest run; where links cannot be made, nothing does."""
    latest = folder.parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return
    part = folder.parent / f".latest.{os.getpid()}"
    try:
        part.symlink_to(folder.name)
        part.replace(latest)
    except OSError:
        part.unlink(missing_ok=True)


def _why_nothing_ran(state: RunState) -> str:
    failed = [trial for trial in state.trials if trial.failure is not None]
    if not failed:
        return "no probe could be run within the budget"
    reasons: dict[str, int] = {}
    for trial in failed:
        text = f"{trial.status}: {trial.reason}"
        reasons[text] = reasons.get(text, 0) + 1
    told = "\n".join(f"  {count} x {text}" for text, count in reasons.items())
    return f"no config ran:\n{told}\nlogs: {state.folder / 'probes'}"
