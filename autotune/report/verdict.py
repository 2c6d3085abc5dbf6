"""The verdict: what the person reads when the run is over, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune import causes, exporters, guard, pareto, search
from autotune.diagnosis import diagnose
from autotune.metrics import METRICS
from autotune.report import words
from autotune.state import RunState, numerics_changed
from autotune.types import Config

WIDTH = 80


def verdict(state: RunState) -> str:
    """All of it; the first line is what `--quiet` leaves."""
    sections = (
        [first_line(state)],
        _why(state),
        list(_bottleneck(state)),
        list(_path(state)),
        list(_before_and_after(state)),
        list(_memory(state)),
        list(_problem(state)),
        list(_failures(state)),
        list(_not_explored(state)),
        list(_cost(state)),
        list(_apply(state)),
        _how_to_add_current(state),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def first_line(state: RunState) -> str:
    """The user's speed as we ran it and the gain, or `keep yours`."""
    answer = state.answer
    assert answer is not None
    baseline = _speed(state, state.baseline)
    unit = state.model_facts.unit
    measured = words.rate(baseline.speed, unit) if baseline else "no measurement"
    if answer.keep:
        kept = "keep yours" if state.has_current else "keep PyTorch's defaults"
        return f"{kept}: {measured}"
    gain = f" -> {words.times(answer.speedup)}" if answer.speedup else ""
    them = "it" if state.has_current else "them"
    return f"{state.baseline_name}, as we ran {them}: {measured}{gain}"


def path_rows(state: RunState) -> list[PathRow]:
    """The measured steps from the baseline to the answer."""
    answer = state.answer
    assert answer is not None
    assert state.space is not None
    configs = search.path_configs(state.space, state.baseline, answer.config)
    pooled = pareto.pool(state.trials)
    rows = []
    for before, config in zip([None, *configs], configs, strict=False):
        title = "start" if before is None else f"+ {words.change(config, before)}"
        rows.append(PathRow(title=title, point=pooled.get(config)))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRow:
    """One step of the path, with what was measured of it."""

    title: str
    point: pareto.Pooled | None

    @property
    def busy_pct(self) -> float | None:
        """NVML's figure where there is one, else what waiting for data leaves."""
        if self.point is None:
            return None
        busy = self.point.value(METRICS["gpu_util_pct"])
        if busy is not None:
            return busy
        waited = self.point.value(METRICS["data_wait_pct"])
        return None if waited is None else 100 - waited


def summary(state: RunState) -> str:
    """summary.md: the verdict as Markdown, for a pull request."""
    return f"# autotune: {state.checked.model.name}\n\n```text\n{verdict(state)}\n```\n"


def _why(state: RunState) -> list[str]:
    answer = state.answer
    assert answer is not None
    if answer.keep:
        return _wrapped(f"{answer.reason}.")
    if not answer.verified:
        return _wrapped(f"This is {answer.reason}.")
    if answer.speedup is None:
        return _wrapped(f"{_whose(state)} gave no measurement, so there is no speed-up to state.")
    than = "yours" if state.has_current else "PyTorch's defaults"
    point = _speed(state, answer.config)
    assert point is not None
    compared = "faster than" if answer.speedup.value >= 1 else "the speed of"
    return _wrapped(
        f"The answer makes {words.rate(point.speed, state.model_facts.unit)}: "
        f"{words.times(answer.speedup)} {compared} {than}.{_why_not_kept(state)}"
    )


def _why_not_kept(state: RunState) -> str:
    """What rules the baseline out as an answer, where something does."""
    space = state.space
    if space is None or space.admits(space.baseline):
        return ""
    reasons = [
        f"{words.told(refusal.knob, refusal.value)}: {refusal.reason}"
        for refusal in space.refusals
        if refusal.value is not None and space.baseline.get(refusal.knob) == refusal.value
    ]
    return f" It cannot be kept: {'; '.join(reasons) or 'the search space rules it out'}."


def _whose(state: RunState) -> str:
    return f"{state.baseline_name[0].upper()}{state.baseline_name[1:]}"


def _bottleneck(state: RunState) -> Iterator[str]:
    """What holds the baseline back, and what it would gain without that."""
    for finding in diagnose(state.trials, state.baseline):
        could = f" Never waiting, it could be {finding.gain:.1f}x as fast." if finding.gain else ""
        yield from _wrapped(f"{_whose(state)}: {finding.bottleneck}. {finding.evidence}.{could}")


def _path(state: RunState) -> Iterator[str]:
    answer = state.answer
    assert answer is not None
    rows = path_rows(state)
    if len(rows) < 2:
        return
    width = min(46, max(len(row.title) for row in rows))
    yield f"{'':{width}}  device busy  {state.model_facts.unit + '/s':>11}"
    for number, row in enumerate(rows):
        speed = words.number(row.point.speed.value) if row.point else "not measured"
        gain = f"  = {words.times(answer.speedup)}" if answer.speedup else ""
        shown = gain if number == len(rows) - 1 else ""
        head, *more = textwrap.wrap(row.title, width, subsequent_indent="    ") or [""]
        yield f"{head:{width}}  {words.percent(row.busy_pct):>11}  {speed:>11}{shown}"
        yield from more


def _before_and_after(state: RunState) -> Iterator[str]:
    answer = state.answer
    assert answer is not None
    before, after = _speed(state, state.baseline), _speed(state, answer.config)
    if before is None or after is None:
        return
    for title, name, unit in _COMPARED:
        old, new = before.value(METRICS[name]), after.value(METRICS[name])
        if old is None or new is None:
            continue
        same = before.config == after.config
        told = words.brief(old) if same else f"{words.brief(old)} -> {words.brief(new)}"
        yield f"{title:<14}{told} {unit}"


_COMPARED = (
    ("data wait", "data_wait_pct", "%"),
    ("device memory", "memory_gb", "GiB"),
    ("host memory", "host_memory_gb", "GiB"),
    ("energy", "joules_per_sample", "J a sample"),
)


def _memory(state: RunState) -> Iterator[str]:
    """What the figures of memory stand for, where one batch needs more than another."""
    answer, known = state.answer, state.space
    assert answer is not None
    assert known is not None
    if not known.facts.varies:
        return
    point = _speed(state, answer.config)
    measured = [t.measurement for t in point.trials if t.measurement] if point else []
    seen = max((measurement.longest_of for measurement in measured), default=0)
    told = f"the longest of {seen} samples seen" if seen else "typical samples only"
    text = f"Samples vary in length: memory was measured on {told}"
    if (share := guard.margin(known.facts)) < 1:
        text += f"; {100 * (1 - share):.0f} % of each limit on memory stays free for longer ones"
    yield from _wrapped(f"{text}.")


def _problem(state: RunState) -> Iterator[str]:
    """What the answer changes in the training problem, if anything."""
    answer, known = state.answer, state.space
    assert answer is not None
    assert known is not None
    before, after = known.global_batch(state.baseline), known.global_batch(answer.config)
    if before == after:
        yield from _wrapped(f"Training problem: the global batch stays {after}.")
    else:
        yield from _wrapped(
            f"Training problem: the global batch changes from {before} to {after}: "
            "look at the learning rate again, or hold it with --global-batch keep."
        )
    if known.goal.asked:
        yield from _wrapped(
            f"--global-batch {known.goal.size}: the baseline was run as micro-batch "
            f"{known.micro_batch(state.baseline)} with as many accumulation steps as that takes."
        )
    if known.leaves_one(answer.config):
        yield from _wrapped(
            "BatchNorm: an epoch's last micro-batch would hold a single sample, on which it may "
            "fail; set drop_last=True."
        )
    if changed := numerics_changed(state, answer.config):
        told = ", ".join(words.told(name, answer.config.get(name)) for name in changed)
        yield from _wrapped(f"Changes numerics: {told}. Compare a short training run.")


def _failures(state: RunState) -> Iterator[str]:
    found = causes.grouped(state.trials)
    if not found:
        return
    yield "Failed probes:"
    for cause in found[:4]:
        yield from _wrapped(str(cause), indent="  ")
        yield f"    log: {cause.log}"
    if len(found) > 4:
        yield f"  and {len(found) - 4} other causes, in failed.csv"


def _not_explored(state: RunState) -> Iterator[str]:
    reasons = list(dict.fromkeys(state.not_explored))
    if state.stopped_because:
        yield from _wrapped(f"Stopped: {state.stopped_because}.")
    if reasons:
        yield "Not explored:"
        for reason in reasons:
            yield from _wrapped(reason, indent="  ")
    for note in state.notes:
        yield from _wrapped(f"Note: {note}.")


def _cost(state: RunState) -> Iterator[str]:
    answer = state.answer
    assert answer is not None
    text = f"Tuning took {words.duration(state.tuning_s)}"
    if answer.speedup is not None and answer.speedup.value > 1:
        paid_s = state.tuning_s / (1 - 1 / answer.speedup.value)
        text += f"; it has paid after {words.duration(paid_s)} of training"
    yield from _wrapped(f"{text}.")


def _apply(state: RunState) -> Iterator[str]:
    answer = state.answer
    assert answer is not None
    export = state.export(answer.config)
    yield "Apply:"
    prefix = exporters.environment_prefix(export)
    yield from _wrapped(
        f"{prefix}python train.py {' '.join(exporters.overrides(export))}", indent="  "
    )
    if missing := exporters.unmapped(export):
        yield from _wrapped(f"Not in KEYS, set by hand: {', '.join(missing)}.")
    yield f"Results: {_short(state.folder)}"


def _how_to_add_current(state: RunState) -> list[str]:
    if state.has_current:
        return []
    example = '{"loader.num_workers": 2, "train.batch_size": 64}'
    return _wrapped(
        f"To compare with what you train with today, add to {state.checked.model.name}.py: "
        f"CURRENT = {example}"
    )


def _short(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _speed(state: RunState, config: Config) -> pareto.Pooled | None:
    return pareto.pool(state.trials).get(config)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + ("  " if indent else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )
