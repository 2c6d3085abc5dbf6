"""The loop: ask, probe, store, tell; then the answer."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from autotune import causes, pareto, reuse, scene, space, store
from autotune.budget import Budget
from autotune.course import Aim, Course, depends_on_size
from autotune.errors import DiskFullError, NothingRanError
from autotune.evidence import Rows
from autotune.launcher import OOM_KILLED, Launcher
from autotune.machine import machine_of
from autotune.measuring import Prober
from autotune.options import with_file
from autotune.report.verdict import summary
from autotune.runfolder import Order, check_machine, claimed, point_latest, write_content
from autotune.source import third_party_imports
from autotune.state import RunState, load_state, run_content, write_answer, write_diagnosis
from autotune.stop import Stop
from autotune.telemetry import Telemetry
from autotune.types import (
    REFUSED,
    Config,
    Failure,
    Sink,
    Source,
    Stage,
    Status,
    Trial,
    WorkloadFacts,
    whole,
    write_atomically,
)

_KEPT_WHEN_LOST = "the device was lost before anything else was verified"
_BEST_WHEN_LOST = "the best measured before the device was lost; it is not verified"
FINISHED = "finished"
"""What run.json calls a run that ended by itself."""
SMALLER = 8
"""How many times smaller the next micro-batch is, where the first may be too large to inspect."""


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


def tune(order: Order, listener: Listener, *, stop: Stop | None = None) -> RunState:
    """Run the whole job and leave a run folder.

    Raises:
        InputError: If the input is wrong; then nothing was created.
        NothingRanError: If no probe gave a number; the rows are in the folder.
        StoppedError: If a signal came; the rows and the best so far are in the folder.
    """
    known = order.checked
    launcher = Launcher(
        known.model,
        seed=known.options.seed,
        preload=third_party_imports(Path(known.model.path)),
        say=listener.note,
    )
    with launcher, ExitStack() as held:
        started = time.monotonic()
        facts = launcher.load()
        keys, goal = with_file(known, facts.current, facts.keys)
        device_facts = launcher.settle()
        telemetry = held.enter_context(closing(Telemetry.open(device_facts)))
        machine = machine_of(device_facts, telemetry.pick())
        if order.earlier is not None:
            check_machine(order.earlier, machine, force=order.force)
            if order.earlier["status"] == FINISHED:
                return _finished(order.folder)
        state = RunState(
            checked=known, folder=order.folder, machine=machine, model_facts=facts, keys=keys
        )
        job = Job(state, launcher, listener, goal, stop=stop or Stop(), started=started)
        job.prober.read_with(telemetry)
        return job.run(resumed=order.earlier is not None)


def _finished(folder: Path) -> RunState:
    """A run that needs no more probes."""
    state = load_state(folder)
    if state.answer is None:
        raise NothingRanError(_why_nothing_ran(state))
    return state


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
        self.budget = Budget(
            state.checked.budget_s, state.checked.options.max_probes, state.trials, started
        )
        self.prober = Prober(state, launcher, self.budget, self.stop)
        self._stored: deque[Trial] = deque()
        self._rows = Rows(state.trials)
        self._course: Course | None = None
        """The search, once it is known what may be tried."""
        self._store: store.Store | None = None
        self._earlier: reuse.Earlier | None = None
        """A run of the same job whose rows count, too."""

    def run(self, *, resumed: bool) -> RunState:
        """Inspect, search, decide, write."""
        self.stop.eager = False
        with claimed(self.state.folder, resumed=resumed):
            try:
                self._open(resumed=resumed)
                return self._run()
            except Exception as error:
                if store.is_full(error):
                    raise DiskFullError(self._where_it_stands()) from error
                raise
            finally:
                if self._store is not None:
                    self._store.close()

    def _run(self) -> RunState:
        self.listener.begins(self.state)
        try:
            self._search()
        except NothingRanError:
            self.state.stopped_because = "nothing ran"
            self._finish(verified=True)
            raise
        except BaseException:  # whatever ends the run, a fault of ours too: no row is lost
            self.state.stopped_because = "interrupted"
            self._finish(verified=False)
            raise
        self._finish(verified=True)
        if self.state.answer is None:
            raise NothingRanError(_why_nothing_ran(self.state))
        return self.state

    def _where_it_stands(self) -> str:
        folder, rows = self.state.folder, len(self._rows.measured)
        return (
            f"{folder}: the disk is full; {rows} finished rows are kept in study.db. "
            f"Make room, then go on with --resume {folder}"
        )

    # --- before the search ---

    def _open(self, *, resumed: bool) -> None:
        folder = self.state.folder
        self._store = store.Store(folder, self.state.checked.objectives)
        if resumed:
            self._stored = deque(self._store.trials())
            self.listener.note(f"{len(self._stored)} finished rows are kept")
        self._write_run("running")
        point_latest(folder)
        if reason := self.launcher.fallback:
            self._note(f"each probe builds model and dataset itself: {reason}")
        if (self.state.checked.options.devices or 1) > 1:
            self._note("one device is used: parallel.mode=single is the only mode so far")
        if self.state.model_facts.affinity_narrowed:
            self._note("importing the model file narrowed the CPU affinity")
        for text in self.prober.telemetry.notes:
            self._note(text)

    def _note(self, text: str) -> None:
        self.state.notes.append(text)
        self.listener.note(text)

    def _search(self) -> None:
        started_s = self.budget.spent_s
        facts = self._inspect()
        state = self.state
        for note in facts.notes:
            self._note(note)
        state.space = space.resolve(
            state.checked.request, state.model_facts.current, self.goal, state.machine, facts
        )
        self._course = course = Course(
            space=state.space,
            aim=Aim(
                objective=state.checked.objectives[0],
                limits=state.checked.limits,
                min_gain=state.checked.min_gain,
            ),
            purse=self.budget,
            seed=state.checked.options.seed,
            rows=self._rows,
            not_explored=state.not_explored,
        )
        self._refuse(state.space)
        baseline = self.measure(
            scene.Ask(config=state.baseline, stage=Stage.BASELINE, why=state.baseline_name)
        )
        if not course.ends_with(baseline):
            self._say_price(baseline, started_s)
            self._reuse(baseline)
            course.run(state.checked.options.sampler, self.measure)
        state.stopped_because = course.stopped_because

    def _inspect(self) -> WorkloadFacts:
        """Run the inspecting probe; where a fork may be to blame, again from scratch."""
        state = self.state
        config = space.first_baseline(
            state.checked.request, state.model_facts.current, self.goal, state.machine
        )
        ask = scene.Ask(config=config, stage=Stage.INSPECT, why="what the job is like")
        trial = self.measure(ask)
        if trial.status in (Status.TIMEOUT, Status.CRASH) and not self.launcher.fallback:
            self.prober.fresh = True
            self._note("each probe builds model and dataset itself: forking failed")
            trial = self.measure(ask)
        while (smaller := _smaller(trial)) is not None:
            trial = self.measure(replace(ask, config=smaller))
        if trial.measurement is None or trial.measurement.facts is None:
            raise NothingRanError(_why_nothing_ran(state))
        return WorkloadFacts(**trial.measurement.facts)

    def _refuse(self, known: space.Space) -> None:
        """One row for each knob or value that cannot be tried here."""
        for refusal in known.refusals:
            value = refusal.value
            changes = {} if value is None else {refusal.knob: value}
            config = known.start.but(changes)
            if self._stored_refusal(config):
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

    def _reuse(self, baseline: Trial) -> None:
        """Let an earlier run count, if the baseline's probe verifies it; else order by it."""
        if self.state.checked.options.no_reuse or self._course is None:
            return
        earlier = reuse.find(self.state)
        if earlier is None:
            return
        name = earlier.folder.name
        if earlier.agrees(baseline):
            self._earlier = earlier
            self._note(
                f"rows of {name} count here too: the same job on this machine, and "
                f"{self.state.baseline_name} makes what it made then (--no-reuse ignores it)"
            )
        elif earlier.answer is not None:
            self._course.guesses = (earlier.answer,)
            why = "makes something else than then" if earlier.same else "was measured differently"
            self._note(
                f"the answer of {name} is tried first; its rows do not count: "
                f"{self.state.baseline_name} {why}"
            )

    def _say_price(self, baseline: Trial, started_s: float) -> None:
        cost = max(baseline.probe_s, 0.1)
        count = int(self.budget.left_s / cost)
        self.listener.note(
            f"starting took {started_s:.1f} s; a probe costs about {cost:.1f} s; "
            f"the budget pays for about {count}"
        )

    # --- rows ---

    def measure(self, ask: scene.Ask) -> Trial:
        """The row of an ask: stored by an interrupted run, or measured now."""
        if (stored := self._take_stored(ask)) is not None:
            return stored
        self._take_all_stored()
        if self._earlier is not None:
            known = self._earlier.row_for(ask, self._next_number())
            if known is not None:
                return self._keep(known)
        self.stop.check()
        self.listener.asks(ask, self.budget.left_s)
        return self._keep(self.prober.probe(ask, self._next_number()))

    def _next_number(self) -> int:
        known = (*self.state.trials, *self._stored)
        return 1 + max((trial.number for trial in known), default=-1)

    def _keep(self, trial: Trial) -> Trial:
        """The row, on disk as it was measured, as the rows so far let it be judged."""
        assert self._store is not None
        self._store.add(trial)
        kept = self._rows.take(trial)
        self.listener.row(kept, self.state)
        return kept

    def _take_stored(self, ask: scene.Ask) -> Trial | None:
        """A row that an interrupted run left, as if it had just been measured."""
        for trial in self._stored:
            if trial.status is Status.DEVICE_LOST:
                continue  # it says nothing of the config; the device may be back
            same = (trial.config, trial.stage, trial.source, trial.sink, trial.round)
            if same == (ask.config, ask.stage, ask.source, ask.sink, ask.round):
                if ask.stage is Stage.INSPECT and trial.ok and not self._has_stock(trial):
                    return None
                return self._replay(trial)
        return None

    def _has_stock(self, inspected: Trial) -> bool:
        return self.prober.stock_of(inspected).exists()

    def _stored_refusal(self, config: Config) -> bool:
        for trial in self._stored:
            if trial.config == config and trial.status is Status.NOT_APPLICABLE:
                self._replay(trial)
                return True
        return False

    def _take_all_stored(self) -> None:
        """What the search did not ask for again counts all the same."""
        for trial in list(self._stored):
            self._replay(trial)

    def _replay(self, trial: Trial) -> Trial:
        self._stored.remove(trial)
        # Row by row: with all of it spent at once, the search would take another way than before.
        self.budget.spent_before_s += trial.probe_s
        return self._rows.take(trial)

    # --- the files ---

    def _finish(self, *, verified: bool) -> None:
        state = self.state
        self._take_all_stored()
        state.tuning_s = round(self.budget.spent_s, 3)
        course = self._course
        state.answer = None if course is None else course.decide()
        front = pareto.front(list(pareto.pool(state.trials).values()), state.checked.objectives)
        store.write_tables(state.folder, state.trials, front)
        lost = course is not None and course.lost
        if course is not None and not verified and not (state.answer and state.answer.verified):
            state.answer = course.best_so_far() or state.answer
        elif lost and state.answer is not None and not state.answer.verified:
            told = _KEPT_WHEN_LOST if state.answer.keep else _BEST_WHEN_LOST
            state.answer = replace(state.answer, reason=told)
        if state.answer is not None:
            write_answer(state, verified=verified)
            write_atomically(state.folder / "summary.md", summary(state))
            write_diagnosis(state)
        ended = verified and not lost  # a lost device may come back, and the run go on
        if ended and (stock := self.prober.stock()) is not None:
            Path(stock).unlink(missing_ok=True)
        self._write_run(FINISHED if ended else "interrupted")

    def _write_run(self, status: str) -> None:
        write_content(self.state.folder, run_content(self.state, self.goal, status))


def _smaller(inspected: Trial) -> Config | None:
    """The micro-batch to look at the job with, where its own may be what fails.

    After an illegal memory access the probe itself cannot go on with a smaller one: only a fresh
    process can.
    """
    size = whole(inspected.config.get(space.BATCH))
    if inspected.ok or not depends_on_size(inspected) or size <= 1:
        return None
    return inspected.config.but({space.BATCH: max(1, size // SMALLER)})


def _why_nothing_ran(state: RunState) -> str:
    found = causes.grouped(state.trials)
    ran = len(pareto.pool(state.trials))
    if not found and not ran:
        return "no probe could be run within the budget"
    told = "\n".join(f"  {cause}" for cause in found)
    if ran:
        asked = " and ".join(["the values asked for", *map(str, state.checked.limits)])
        why = f"no answer: of {ran} measured, none keeps {asked}"
        return f"{why}\n{told}\nrows: {state.folder / 'trials.csv'}".replace("\n\n", "\n")
    shown = causes.last_frame(found[0].first, state.checked.model.path)
    remedies = _remedies([trial for trial in state.trials if trial.failure is not None])
    return f"no config ran:\n{told}{remedies}\n{shown}log: {state.folder / found[0].log}"


def _remedies(failed: list[Trial]) -> str:
    """What is left to do where not even a single sample fits."""
    ran = [t for t in failed if t.status not in REFUSED]
    if not ran or any(t.status is not Status.OUT_OF_MEMORY for t in ran):
        return ""
    # The inspecting probe halves its batch down to one, unless the kernel ends it before.
    down_to_one = any(
        t.config.get(space.BATCH) == 1
        or (t.stage is Stage.INSPECT and not t.reason.startswith(OOM_KILLED))
        for t in ran
    )
    size = "at batch 1" if down_to_one else "at any batch that was tried"
    return (
        f"\nit does not fit {size}: recompute activations (torch.utils.checkpoint), "
        "train in a lower precision (bf16), shard the model (FSDP), or take a smaller one"
    )
