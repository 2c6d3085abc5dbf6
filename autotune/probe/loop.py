"""Warm-up and timed blocks: one loop for every source and every sink."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotune.ending import Enough
from autotune.probe.batches import moved
from autotune.probe.clocks import Clock, Counters
from autotune.probe.sinks import Sink
from autotune.probe.sources import CachedSource, LoaderSource
from autotune.steady import LEAST_COUNTED
from autotune.types import Block, ProbeSpec

WARM_STEPS = 2
WARM_DEVICE_S = 1.0
MOST_SKIPPED = 20
"""Steps after which fp16 warm-up gives up waiting for one that is not skipped."""
STARVED = 0.02
"""Share of waiting above which blocks are made of whole rounds of the workers."""

Source = LoaderSource | CachedSource


@dataclass
class Window:
    """What the timed blocks gave."""

    stopped: str = ""
    """Why it is over; "" while it goes on."""
    blocks: list[Block] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    counters: list[dict[str, int]] = field(default_factory=list)
    """What must stand still, read at the start and after each block."""
    batches: int = 0
    start_ns: int = 0
    end_ns: int = 0

    @property
    def unsettled(self) -> tuple[str, ...]:
        """What grew in the half that counts: a state with that in it is not steady."""
        if not self.counters:
            return ()
        first, last = self.counters[len(self.counters) // 2], self.counters[-1]
        return tuple(name for name in last if last[name] != first.get(name))

    @property
    def finite(self) -> bool:
        """Whether every block ended with a finite loss; synchronises."""
        return not self.losses or bool(torch.isfinite(torch.stack(self.losses)).all())


class Loop:
    """Draws from the source, feeds the sink, and times whole blocks of steps."""

    def __init__(
        self, source: Source, sink: Sink, clock: Clock, spec: ProbeSpec, counters: Counters
    ) -> None:
        self.source = source
        self.sink = sink
        self.clock = clock
        self.spec = spec
        self.counters = counters
        self._enough = Enough(
            max_window_s=spec.max_window_s,
            min_window_s=spec.min_window_s,
            min_blocks=spec.min_blocks,
            block_s=spec.block_s,
            want=spec.want,
            beat=spec.beat,
        )
        self._device = torch.device(spec.device)
        self._move = spec.sink.value == "train"
        self._started = 0.0
        self._steps = 0

    def draw(self) -> Any:
        """The next batch, on the device."""
        self.clock.before_draw()
        batch = self.source.draw()
        if self._move:
            batch = moved(batch, self._device, non_blocking=self.source.non_blocking)
            self.clock.after_copy()
        return batch

    def warm_up(self) -> None:
        """Run until the pipeline is primed and nothing lies in stock."""
        started = self._started = time.perf_counter()
        rounds = max(WARM_STEPS, math.ceil(self.source.workers / self.sink.accumulation))
        enough_s = WARM_DEVICE_S if self._device.type != "cpu" else 0.0
        most_s = max(enough_s, self.spec.max_window_s / 2)
        steps = 0
        while True:
            self._step()
            steps += 1
            spent = time.perf_counter() - started
            if steps >= WARM_STEPS and (spent >= most_s or (steps >= rounds and spent >= enough_s)):
                break
        self._await_unskipped()
        if self.source.workers:
            self.source.drain()
            self._step()  # waits for what the workers had only begun to make
        self.clock.settle()

    def timed(self) -> Window:
        """Blocks of whole steps until the interval is narrow, or it makes no sense to go on."""
        window = Window(counters=[self.counters()], start_ns=time.time_ns())
        started = time.perf_counter()
        pending: deque[Callable[[], Block]] = deque()
        while not window.stopped:
            pending.append(self._block(window))
            window.counters.append(self.counters())
            while len(pending) > self.clock.lag:
                window.blocks.append(pending.popleft()())
            window.stopped = self._reached(window, time.perf_counter() - started)
        self.clock.settle()
        window.blocks += [block() for block in pending]
        window.end_ns = time.time_ns()
        return window

    def _block(self, window: Window) -> Callable[[], Block]:
        """Run steps for a while; the block is read later, when its edges have been passed."""
        source = self.source
        consumed, produced = source.consumed, source.produced
        waited, restarts = source.waited_s, len(source.restarts_s)
        starved = source.starved
        together = self._steps_per_round()
        start, begun = self.clock.edge(), time.perf_counter()
        loss, steps = None, 0
        while not steps or steps % together or time.perf_counter() - begun < self.spec.block_s:
            loss = self._step()
            steps += 1
        end = self.clock.edge()
        if loss is not None:
            window.losses.append(loss)
        window.batches += steps * self.sink.accumulation
        gaps = self.clock.take_gaps()
        # An epoch's border is charged to the epoch, not to the block it happens to fall in.
        border = sum(source.restarts_s[restarts:])
        waited = source.waited_s - waited
        consumed = source.consumed - consumed
        produced = source.produced - produced
        starved = source.starved - starved

        def read() -> Block:
            gap = self.clock.gap_s(gaps)
            return Block(
                seconds=max(self.clock.seconds(start, end) - border, 1e-9),
                consumed=consumed,
                produced=produced,
                wait_s=max(0.0, waited if gap is None else gap - border),
                steps=steps,
                starved=starved,
            )

        return read

    def _step(self) -> Tensor | None:
        loss = self.sink.step(self.draw)
        self.clock.after_step()
        self._steps += 1
        return loss

    def _await_unskipped(self) -> None:
        """fp16 begins by skipping steps while its scale falls, and they are cheaper."""
        if not getattr(self.sink, "scaled", False):
            return
        for _ in range(MOST_SKIPPED):
            before = self.sink.optimizer_steps
            self._step()
            if self.sink.optimizer_steps > before:
                return

    def _steps_per_round(self) -> int:
        """Steps that a block is made of whole: those of a round of workers that are waited for.

        Workers finish in rounds: one slow batch, then at once a batch from each of the others.
        """
        spent = time.perf_counter() - self._started
        if not self.source.workers or self.source.waited_s < STARVED * spent:
            return 1
        accumulation = self.sink.accumulation
        steps = math.lcm(self.source.workers, accumulation) // accumulation
        longest_s = self.spec.max_window_s / (2 * LEAST_COUNTED)
        return steps if steps * spent / self._steps <= longest_s else 1

    def _reached(self, window: Window, elapsed_s: float) -> str:
        return self._enough.reached(window.blocks, elapsed_s, settled=not window.unsettled)
