"""NVML beside a run: what its GPUs do while a probe trains, and who else is on them.

The parent reads it. That needs no CUDA context, so the probe does not notice. What may be read is
a row of `fields.FIELDS`; where a GPU or its driver does not tell one of them, only that is missing.
Nothing here raises, and nothing is wrong with a run that reads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from autotune.telemetry.fields import FIELDS, prepare
from autotune.telemetry.nvml import Gpu, LostError, end, find, start
from autotune.telemetry.surveys import Survey, SurveyedGpu, survey, users_of
from autotune.telemetry.watch import Watch

__all__ = ["Gpu", "Survey", "SurveyedGpu", "Telemetry", "Watch", "survey"]

RELEASE_S = 10.0
"""How long to wait for the memory of a probe that has ended."""
PASSING_S = 2.0
"""How long what has just ended may still look like somebody else."""
LOOK_S = 0.1


class Telemetry:
    """NVML, opened once for a run, which keeps the driver loaded, too.

    Args:
        gpus: The devices that PyTorch sees and NVML knows.
        problem: Why nothing is read, in one sentence; "" if there is no reason.
    """

    def __init__(self, gpus: Sequence[Gpu] = (), problem: str = "") -> None:
        self.gpus = tuple(gpus)
        self.problem = problem
        self.notes: list[str] = []
        """What the user is to know, once."""
        self._open = bool(gpus)

    @classmethod
    def open(cls, device_facts: Mapping[str, Any]) -> Telemetry:
        """Find the devices that a child process saw.

        By UUID, else by PCI address: so every form of CUDA_VISIBLE_DEVICES is right without being
        understood, and whatever order NVML has. Nothing is read where training runs on the CPU.
        """
        kind = str(device_facts.get("type") or "cpu")
        if kind == "cpu":
            return cls()
        if kind != "cuda":
            return cls(problem=f"only NVIDIA GPUs are read, not devices of type {kind}")
        if problem := start():
            return cls(problem=problem)
        count = int(device_facts.get("count") or 0)
        found = [find(device_facts, index, alone=count == 1) for index in range(count)]
        gpus = [gpu for gpu in found if gpu is not None]
        if not gpus:
            end()
            return cls(problem="NVML does not know the devices that PyTorch sees")
        for gpu in gpus:
            prepare(gpu)
        return cls(gpus)

    def close(self) -> None:
        """Let go of NVML; where it hangs, the end of the process does that."""
        if self._open:
            end()
        self._open = False
        self.gpus = ()

    def unread(self, indices: Sequence[int] | None = None) -> list[str]:
        """What these devices do not tell (default: what one of all does not), in words."""
        chosen = self.gpus if indices is None else self._chosen(indices)
        missing = (row for row in FIELDS if any(row.name not in gpu.ways for gpu in chosen))
        return [row.title for row in missing]

    def reads(self, index: int, *names: str) -> bool:
        """Whether a device tells one of these fields."""
        return any(name in gpu.ways for gpu in self._chosen([index]) for name in names)

    def tenants(self, index: int) -> str:
        """Why a device is not free, in words; "" if it is. For a time without a probe."""
        deadline_s = time.monotonic() + PASSING_S
        for gpu in self._chosen([index]):
            if gpu.lost:
                return f"NVML says: {gpu.lost}"
            while (users := users_of(gpu)).told:
                if users.certain or time.monotonic() > deadline_s:
                    return users.told
                time.sleep(LOOK_S)
        return ""

    def pick(self) -> int:
        """The first device that is free; what is to be said about it is in `notes`."""
        index, said = self._first_free()
        self.notes += [said] if said else []
        if self.problem:
            self.notes.append(f"GPU columns stay empty: {self.problem}")
        elif missing := self.unread([index]):
            self.notes.append(f"not read from this GPU: {', '.join(missing)}")
        return index

    def _first_free(self) -> tuple[int, str]:
        busy: list[str] = []
        for gpu in self.gpus:
            if not (told := self.tenants(gpu.index)):
                return gpu.index, f"left out: {'; '.join(busy)}" if busy else ""
            busy.append(f"GPU {gpu.index}, where {told}")
        if not busy:
            return 0, ""
        return self.gpus[0].index, f"no GPU is free, so figures may be too low: {'; '.join(busy)}"

    def watch(self, indices: Sequence[int]) -> Watch:
        """Reads these devices while it is entered; one that is named twice counts once."""
        unique: dict[str, Gpu] = {}
        for gpu in self._chosen(indices):
            unique.setdefault(gpu.uuid or str(gpu.index), gpu)
        return Watch(list(unique.values()))

    def await_release(self, watch: Watch, should_stop: Callable[[], None]) -> bool:
        """Wait until the memory of the watched probe is back; False if it does not come.

        Then what is missing counts as somebody else's in the rows that follow.
        """
        if watch.stuck:
            self.gpus, self._open = (), False
            self.problem = "NVML does not answer any more"
            return True
        deadline_s = time.monotonic() + RELEASE_S
        with suppress(LostError):
            while not watch.lost and not all(one.is_free_again() for one in watch.watched):
                if time.monotonic() > deadline_s:
                    return False
                should_stop()
                time.sleep(LOOK_S)
        return True

    def _chosen(self, indices: Sequence[int]) -> list[Gpu]:
        known = {gpu.index: gpu for gpu in self.gpus}
        return [known[index] for index in indices if index in known]
