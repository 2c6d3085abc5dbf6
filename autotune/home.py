"""Where probes come from: which processes are kept ready, and how probes start there."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from autotune.channel import Message
from autotune.errors import LaunchError, ModelFileError
from autotune.forkserver import (
    EndedError,
    Job,
    ShouldStop,
    SpawnedJob,
    Template,
    Zygote,
    canary,
    carry_on,
    tail,
)
from autotune.types import ModelFacts, ModelRef, ProbeSpec

CAN_FORK = sys.platform == "linux"

FRESH = "the model file says FRESH"
UNFORKABLE = (
    "building model and dataset started threads or used a device, "
    "which a process forked afterwards cannot do"
)
LOST = "the process that had built model and dataset was lost twice"
SPAWNED = "forked processes cannot compute here; every probe starts Python anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long to wait for what happens before the first probe."""

    start_s: float = 120.0
    import_s: float = 120.0
    build_s: float = 120.0
    canary_s: float = 60.0
    later_canary_s: float = 5.0
    """At least; ten times as long as the first canary took, if that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all homes of a run share."""

    model: ModelRef
    seed: int
    preload: tuple[str, ...]
    folder: Path
    deadlines: Deadlines = Deadlines()


class Home:
    """The processes that fork probes with one set of load-time variables.

    Probes are forked from the template; from the zygote if they must build for themselves (then
    there is no template); or started anew if forking cannot work (then there is no zygote).
    """

    def __init__(
        self, plan: Plan, variables: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.fallback = ""
        self.skipped: tuple[str, ...] = ()
        self._model = plan.model
        self._seed = plan.seed
        self._limits = plan.deadlines
        self._folder = plan.folder
        self._variables = variables
        self._say = say
        self._should_stop: ShouldStop = carry_on
        self._preload = plan.preload if CAN_FORK else ()
        self._zygote: Zygote | None = None
        self._template: Template | None = None
        self._facts: ModelFacts | None = None
        self._device: Message = {}
        self._about: Message = {}
        self._canary_s = 0.0
        self._inherited_threads: int | None = None
        self._losses = 0

    def load(self) -> ModelFacts:
        """Start zygote and template; return what the model file tells."""
        if self._facts is None:
            self._facts = self._open()
        return self._facts

    def settle(self, should_stop: ShouldStop = carry_on) -> Message:
        """Make sure that probes can start, and find out how; return the device facts."""
        self._should_stop = should_stop
        facts = self.load()
        if not self._device:
            self._device = self._explore(facts) | self._about
        elif not self._alive():
            self._revive()
        return self._device

    def threads(self, spec: ProbeSpec) -> int | None:
        """The threads that the user's code set while the template built; else the probe's own."""
        return self._inherited_threads if self._inherits(spec) else None

    def start(self, spec: ProbeSpec) -> Job:
        """Start the probe whose spec.json lies in its folder."""
        path = str(Path(spec.folder, "spec.json"))
        log = Path(spec.folder, "log.txt")
        if self._zygote is None:
            return SpawnedJob(["autotune.probe", path], log, self._variables)
        parent = self._template if self._inherits(spec) else self._zygote
        assert parent is not None
        if isinstance(parent, Zygote):
            parent.complete(self._limits.start_s)
        return parent.server.start("probe", spec=path, log=str(log))

    def close(self) -> None:
        """End every process."""
        if self._template is not None:
            self._template.forget()
        if self._zygote is not None:
            self._zygote.close()
        self._template = self._zygote = None

    def _open(self) -> ModelFacts:
        try:
            self._zygote = self._started(self._preload)
        except LaunchError:
            if not self._leave_out_culprits():
                raise
            self._zygote = self._started(self._preload)
        return self._import(self._zygote)

    def _started(self, preload: Sequence[str]) -> Zygote:
        # A short name: sockets go there, whose paths may not be long.
        zygote = Zygote(self._folder / uuid4().hex[:8], self._variables, self._model)
        try:
            ready = zygote.prepare(preload, self._limits.start_s, self._should_stop)
        except BaseException:
            zygote.close()
            raise
        self._about = {name: ready[name] for name in ("torch", "default_threads")}
        return zygote

    def _import(self, zygote: Zygote) -> ModelFacts:
        self._template = Template(zygote, self._model, self._seed, alone=not CAN_FORK)
        path, limit_s = self._model.path, self._limits.import_s
        try:
            facts = self._template.facts(limit_s, self._should_stop)
        except EndedError as end:
            told = f"{end}\n{users_part(tail(self._template.log))}".rstrip()
            raise ModelFileError(f"importing {path}, the process {told}") from None
        if facts is None:
            raise ModelFileError(
                f"importing {path} took longer than {limit_s:g} s: "
                "guard training code with if __name__ == '__main__':"
            )
        return facts

    def _explore(self, facts: ModelFacts) -> Message:
        device = self._first_canary()
        if device is None:
            return self._spawn_from_now_on()
        if facts.fresh:
            self._build_in_probes(FRESH)
        else:
            self._await_template()
        return device

    def _first_canary(self) -> Message | None:
        """The device facts; None if forked processes cannot compute."""
        if self._zygote is None or not CAN_FORK:
            return None
        device = self._canary(self._zygote)
        if device is None and self._leave_out_culprits():
            self.close()
            self._facts = self._open()
            device = self._canary(self._zygote)
        return device

    def _canary(self, parent: Zygote | Template) -> Message | None:
        if isinstance(parent, Zygote):
            parent.complete(self._limits.start_s)
        limit_s = self._limits.canary_s
        if self._canary_s:
            limit_s = max(self._limits.later_canary_s, 10 * self._canary_s)
        started = time.monotonic()
        facts = canary(parent.server, parent.log.with_name("canary.json"), limit_s)
        if facts is not None and not self._canary_s:
            self._canary_s = time.monotonic() - started
        return facts

    def _leave_out_culprits(self) -> bool:
        """Drop from the preload what breaks forked processes; whether that helps."""
        if not self._preload or not self._works(()):
            return False
        sound = longest_sound(self._preload, self._works)
        self.skipped = tuple(name for name in self._preload if name not in sound)
        self._preload = sound
        for name in self.skipped:
            self._say(f"{name} is not imported ahead: processes forked afterwards cannot compute")
        return True

    def _works(self, preload: Sequence[str]) -> bool:
        """Whether a process that has imported these modules forks processes that compute."""
        try:
            zygote = self._started(preload)
        except LaunchError:
            return False
        try:
            return self._canary(zygote) is not None
        finally:
            zygote.close()

    def _await_template(self) -> None:
        assert self._template is not None
        limit_s = self._limits.build_s
        try:
            built = self._template.built(limit_s, self._should_stop)
        except EndedError as end:
            self._build_in_probes(f"building model and dataset ahead, the process {end}")
            return
        if built is None:
            self._template.close()
            self._template = None
            raise ModelFileError(
                f"{self._model.path}: building model and dataset took longer than {limit_s:g} s"
            )
        self._inherited_threads = built["threads"]
        if self._canary(self._template) is None:
            self._build_in_probes(UNFORKABLE)

    def _build_in_probes(self, reason: str) -> None:
        if self._template is not None:
            self._template.close()
        self._template = None
        self.fallback = reason

    def _spawn_from_now_on(self) -> Message:
        self.close()
        self.fallback = SPAWNED
        zygote = self._started(())
        out = zygote.log.with_name("canary.json")
        try:
            device = canary(zygote.server, out, self._limits.canary_s, alone=True)
            if device is None:
                raise LaunchError(f"no process can compute here\n{tail(out.with_suffix('.log'))}")
        finally:
            zygote.close()
        return device

    def _inherits(self, spec: ProbeSpec) -> bool:
        return self._template is not None and not spec.fresh

    def _alive(self) -> bool:
        return all(
            process is None or process.server.alive for process in (self._zygote, self._template)
        )

    def _revive(self) -> None:
        """Start lost processes anew; a template only once."""
        self._losses += 1
        inherits = self._template is not None
        self.close()
        if inherits and self._losses == 1:
            self._facts = self._open()
            self._await_template()
            return
        self._zygote = self._started(self._preload)
        if inherits:
            self._build_in_probes(LOST)
            self._say(f"from now on each probe builds model and dataset itself: {LOST}")


def users_part(log: str) -> str:
    """What a log tells the user: not through which of our frames a crash came."""
    places = (Path(__file__).parent, importlib.__file__, "<frozen ")
    hidden = (*(f'File "{place}' for place in places), "Extension modules:")
    return "\n".join(line for line in log.splitlines() if not line.strip().startswith(hidden))


def longest_sound(names: Sequence[str], works: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The names, in order, without those that break the rest; together they do not work."""
    kept: list[str] = []
    left = list(names)
    while left:
        works_with, fails_with = 0, len(left)
        while fails_with - works_with > 1:
            middle = (works_with + fails_with) // 2
            if works([*kept, *left[:middle]]):
                works_with = middle
            else:
                fails_with = middle
        kept += left[:works_with]
        left = left[fails_with:]
        if left and works([*kept, *left]):
            break
    return (*kept, *left)
