"""One probe, start to end: spec.json in, result.json out. Never raises."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from autotune.probe import host
from autotune.probe.batches import moved
from autotune.probe.clocks import clock_for, counters_for
from autotune.probe.failures import failure_of
from autotune.probe.inspecting import as_plain, inspect
from autotune.probe.loop import Loop, Window
from autotune.probe.memory import DeviceMemory
from autotune.probe.setup import Setup, apply_to_process, setup_of
from autotune.probe.sinks import Discard, Train
from autotune.probe.sources import (
    SOURCES,
    CachedSource,
    LoaderSource,
    longest_first,
    plain_loader,
    read_stock,
    stock_batch,
)
from autotune.probe.workload import Workload, load, seed_everything
from autotune.shm import shm_used
from autotune.steady import drift
from autotune.types import (
    SCHEMA,
    Failure,
    Measurement,
    ProbeSpec,
    Sink,
    Stage,
    Status,
    decode,
    write_atomically,
)

PARITY_STEPS = 3
DRIFT_TOLD = 0.05
"""A change of speed within the window that is worth a word."""


def run_probe(spec_path: Path, workload: Workload | None) -> None:
    """Measure what the spec asks for and leave the result beside it."""
    probe = Probe(decode(ProbeSpec, spec_path.read_text(encoding="utf-8")), workload)
    spare = os.open(os.devnull, os.O_RDONLY)  # what opens too many files must still be told
    try:
        outcome: Measurement | Failure = probe.run()
    except BaseException as error:  # noqa: BLE001 - SystemExit in user code is a row, too
        os.close(spare)
        traceback.print_exc()
        outcome = failure_of(error, probe.phase, probe.spec.model)
    else:
        os.close(spare)
    kind = "failure" if isinstance(outcome, Failure) else "measurement"
    text = json.dumps({"schema": SCHEMA, kind: asdict(outcome)}, default=str)
    write_atomically(spec_path.with_name("result.json"), text)
    sys.stdout.flush()
    sys.stderr.flush()


class Probe:
    """The steps of one probe, in order, each one named for the row of a failure."""

    def __init__(self, spec: ProbeSpec, workload: Workload | None) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.phase = "start"
        self.memory = DeviceMemory(torch.device("cpu"), None)
        self._inherited = workload
        self._longest_peak = 0
        """Of the step on the longest samples, where training runs on the CPU."""
        self._longest_of = 0

    def run(self) -> Measurement | Failure:
        """Build, prime, measure."""
        spec = self.spec
        setup = setup_of(spec.config, spec.delivered_batch)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index or 0)
        self.memory = DeviceMemory(self.device, spec.memory_fraction)
        self._enter("build")
        workload = self._inherited or load(spec.model)
        build_s = workload.complete(spec.seed, self.device)
        if spec.default_threads is not None:
            torch.set_num_threads(spec.default_threads)
        apply_to_process(setup)
        if self.device.type == "cpu":
            host.wall_in(spec.memory_limit_bytes, spec.host_limit_bytes, workload.rss_bytes)
        seed_everything(spec.seed)
        if spec.stage is Stage.INSPECT:
            return self._inspected(workload, setup, build_s)
        return self._measured(workload, setup, build_s)

    def _inspected(self, workload: Workload, setup: Setup, build_s: float) -> Measurement:
        self._enter("inspect")
        facts = inspect(workload, setup, self.spec)
        return Measurement(
            blocks=(),
            stopped="limit",
            build_s=workload.build_s or build_s,
            startup_s=time.monotonic() - self.spec.requested_s - build_s,
            facts=as_plain(facts),
            threads=torch.get_num_threads(),
            **self.memory.facts(0),
        )

    def _measured(self, workload: Workload, setup: Setup, build_s: float) -> Measurement | Failure:
        spec = self.spec
        shm = shm_used()
        sink = Train(workload, setup, self.device) if spec.sink is Sink.TRAIN else Discard()
        self._enter("loader")
        source = SOURCES[spec.source](workload, setup, spec)
        self.memory.allow(_surplus(source))
        start_s = source.start()
        startup_s = time.monotonic() - spec.requested_s - build_s
        first_step_s, parity = None, None
        if isinstance(sink, Train):
            first_step_s, parity = self._first_steps(workload, setup, sink)
            self._step_on_longest(workload, setup, sink)
        self._enter("warm-up")
        loop = Loop(source, sink, clock_for(self.device), spec, counters_for(self.device))
        loop.warm_up()
        self._enter("window")
        self.memory.begin_window()
        host.reset_peak()
        used = host.usage()
        skipped = sink.optimizer_steps
        window = loop.timed()
        self._enter("result")
        measured = Measurement(
            blocks=tuple(window.blocks),
            stopped=window.stopped,
            restarts_s=_restarts(source, start_s),
            epoch_samples=_epoch_samples(source, window),
            batches=window.batches,
            steps=sum(block.steps for block in window.blocks),
            optimizer_steps=sink.optimizer_steps - skipped,
            build_s=build_s,
            startup_s=startup_s,
            first_step_s=first_step_s,
            parity_loss=parity,
            finite=window.finite,
            unsettled=window.unsettled,
            notes=_notes(window, source),
            workers=source.workers,
            threads=torch.get_num_threads(),
            cpus=spec.cpus,
            start_ns=window.start_ns,
            end_ns=window.end_ns,
        )
        measured = self._with_host_facts(measured, used, shm, source)
        return _judged(self._with_memory(measured, workload, source, sink), sink)

    def _first_steps(
        self, workload: Workload, setup: Setup, sink: Train
    ) -> tuple[float, float | None]:
        """The first optimizer step's seconds, and the mean loss of the third.

        Taken over the dataset's first samples in order: the same for every config of one global
        batch, so that a config that changes the training problem shows.
        """
        self._enter("first step")
        seed_everything(self.spec.seed)
        loader = plain_loader(workload, setup, self.spec.seed)
        samples = read_stock(self.spec)
        if not samples:
            return self._first_step_unstocked(sink, iter(loader)), None
        size, taken, losses, spent = setup.batch_size, 0, [], []

        def draw() -> object:
            nonlocal taken
            _, batch = stock_batch(workload, loader, samples, taken, size)
            taken += size
            return moved(batch, self.device, non_blocking=False)

        for _ in range(PARITY_STEPS):
            started = time.perf_counter()
            losses.append(float(sink.step(draw)))
            spent.append(time.perf_counter() - started)
        return spent[0], losses[-1]

    def _first_step_unstocked(self, sink: Train, batches: object) -> float:
        started = time.perf_counter()
        loss: Tensor = sink.step(
            lambda: moved(next(batches), self.device, non_blocking=False)  # type: ignore[call-overload]
        )
        float(loss)
        return time.perf_counter() - started

    def _step_on_longest(self, workload: Workload, setup: Setup, sink: Train) -> None:
        """One whole step on the longest samples known: typical ones need less memory."""
        samples = longest_first(self.spec) if self.spec.longest else []
        if not samples:
            return
        self._enter("longest samples")
        loader = plain_loader(workload, setup, self.spec.seed)

        def draw() -> object:
            _, batch = stock_batch(workload, loader, samples, 0, setup.batch_size)
            return moved(batch, self.device, non_blocking=False)

        host.reset_peak()
        sink.step(draw)
        self._longest_peak = host.peak_bytes() or 0
        self._longest_of = len(samples)

    def _with_host_facts(
        self,
        measured: Measurement,
        used: host.Usage,
        shm: int,
        source: LoaderSource | CachedSource,
    ) -> Measurement:
        facts = host.spent(used, host.usage())
        pss = host.proportional_bytes()
        in_flight = max(0, shm_used() - shm)
        surplus = _surplus(source) if self.device.type == "cpu" else 0
        return replace(
            measured,
            **facts,
            host_memory_bytes=None if pss is None else max(0, pss + in_flight - surplus),
        )

    def _with_memory(
        self,
        measured: Measurement,
        workload: Workload,
        source: LoaderSource | CachedSource,
        sink: Train | Discard,
    ) -> Measurement:
        resident = sink.resident_bytes if isinstance(sink, Train) else None
        measured = replace(measured, resident_bytes=resident, longest_of=self._longest_of)
        surplus = _surplus(source)
        if self.device.type != "cpu":
            return replace(measured, **self.memory.facts(surplus))
        peak = host.peak_bytes()
        if peak is None:
            return measured
        used = max(0, peak - workload.rss_bytes - surplus)
        longest = self._longest_peak - workload.rss_bytes - surplus
        return replace(measured, memory_bytes=max(used, longest))

    def _enter(self, phase: str) -> None:
        self.phase = phase
        write_atomically(Path(self.spec.folder, "phase"), phase)


def _notes(window: Window, source: LoaderSource | CachedSource) -> tuple[str, ...]:
    """What to know of an ok row: what shows, and does not make the number wrong."""
    notes = []
    change = drift(window.blocks)
    if abs(change) > DRIFT_TOLD:
        word = "slower" if change < 0 else "faster"
        notes.append(f"its speed still changed: {100 * abs(change):.0f} % {word} towards the end")
    if source.idle_workers:
        notes.append(f"{source.idle_workers} of {source.workers} workers delivered nothing")
    return tuple(notes)


def _surplus(source: LoaderSource | CachedSource) -> int:
    """Bytes that no real run would hold."""
    return source.extra_bytes if isinstance(source, CachedSource) else 0


def _judged(measured: Measurement, sink: Train | Discard) -> Measurement | Failure:
    """A number that means nothing is no measurement."""
    if not any(block.consumed for block in measured.blocks):
        return Failure(status=Status.INVALID, message="count_samples counts none", phase="window")
    if isinstance(sink, Discard):
        return measured
    if measured.optimizer_steps == 0:
        skipped = "all fp16 steps skipped: " if sink.scaled else ""
        return Failure(
            status=Status.INVALID,
            message=f"{skipped}no optimizer step in {measured.steps} steps",
            phase="window",
        )
    if not measured.finite:
        return Failure(status=Status.INVALID, message="non-finite loss", phase="window")
    return replace(measured, skipped_steps=max(0, measured.steps - measured.optimizer_steps))


def _restarts(source: LoaderSource | CachedSource, start_s: float) -> tuple[float, ...]:
    """What an epoch's border costs; where none was seen, as much as the first epoch's start."""
    if source.restarts_s or not source.workers:
        return tuple(source.restarts_s)
    return (start_s,)


def _epoch_samples(source: LoaderSource | CachedSource, window: Window) -> float | None:
    """Samples (or tokens) of a whole epoch; None where the loader has no length."""
    if source.epoch_samples is not None or not isinstance(source, LoaderSource):
        return source.epoch_samples
    consumed = sum(block.consumed for block in window.blocks)
    try:
        return consumed / window.batches * len(source.loader)
    except TypeError:
        return None
