"""Flags in, text out: the only file that prints."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.errors import InputError, OptionError, UnfitError
from autotune.options import SAMPLERS, Options
from autotune.runfolder import Order, new_run, read_content, resumed_run
from autotune.stop import Stop

if TYPE_CHECKING:
    from autotune.scene import Ask
    from autotune.state import RunState
    from autotune.types import Trial

COMMANDS = ("tune", "report", "export", "doctor")
USAGE = "python -m autotune --model FILE[:FACTORY] [options] [HYDRA OVERRIDES]"


def main(arguments: Sequence[str]) -> None:
    """Run one command.

    Raises:
        AutotuneError: If it cannot be done; the text is for the user.
    """
    words = list(arguments)
    command = words.pop(0) if words and words[0] in COMMANDS else "tune"
    {"tune": _tune, "report": _report, "export": _export, "doctor": _doctor}[command](words)


class _Parser(argparse.ArgumentParser):
    """One message instead of a usage text and a message."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see python -m autotune --help)")


def _tune(words: list[str]) -> None:
    given = _tune_parser().parse_intermixed_args(words)
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.request)
    # Before the heavy imports: what is wrong here answers at once.
    order = _order(given)
    from autotune import driver

    with _listener(quiet=given.quiet) as listener:
        state = driver.tune(order, listener, stop=stop)
    _show(state, quiet=given.quiet, verbose=given.verbose)


def _order(given: argparse.Namespace) -> Order:
    if given.resume:
        return resumed_run(Path(given.resume), force=given.force)
    return new_run(_options(given))


def _show(state: RunState, *, quiet: bool, verbose: bool) -> None:
    """The verdict on stderr, the answer's one line on stdout."""
    from autotune import exporters
    from autotune.report.verdict import first_line, verdict

    assert state.answer is not None
    export = state.export(state.answer.config)
    missing = ", ".join(exporters.unmapped(export))
    unsaid = f"; not in KEYS, set by hand: {missing}" if missing else ""
    _say(f"{first_line(state)}{unsaid}" if quiet else f"\n{verdict(state)}")
    if verbose:
        from autotune.store import table

        _say(table(state.trials).to_string(max_colwidth=60))
    print(" ".join(exporters.overrides(export)), flush=True)


def _options(given: argparse.Namespace) -> Options:
    if given.model is None:
        first = next(iter(given.overrides), "")
        if first.isalpha():
            raise OptionError(f"unknown command {first!r}; known: {', '.join(COMMANDS)}")
        raise OptionError(f"--model is missing: {USAGE}")
    return Options(
        model=given.model,
        space=given.space,
        overrides=tuple(given.overrides),
        budget=given.budget,
        max_probes=given.max_probes,
        global_batch=given.global_batch,
        objectives=given.objectives,
        limits=tuple(given.limit),
        min_gain=given.min_gain,
        devices=given.devices,
        sampler=given.sampler,
        output=given.output,
        no_reuse=given.no_reuse,
        keys=given.keys,
        seed=given.seed,
    )


def _tune_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m autotune",
        usage=f"{USAGE}\n       python -m autotune doctor | report DIR | "
        "export DIR --format F [--to FILE]",
        description="Find the fastest way to train your own PyTorch model on this machine.",
    )
    add = parser.add_argument
    add("--model", metavar="FILE[:FACTORY]", help="the model file")
    add("--space", default="default", metavar="NAME|FILE", help="what may be tried")
    add("--budget", default="10m", metavar="T", help="90s, 10m, 1h; default 10m")
    add("--max-probes", type=int, metavar="N", help="launch at most N probes")
    add("--global-batch", default="", metavar="keep|N|free", help="what is held")
    add("--objectives", default="samples_per_s,memory_gb", metavar="A,B")
    add("--limit", action="append", default=[], metavar="'memory_gb<=40'", help="repeatable")
    add("--min-gain", default="2%", metavar="G", help="the least gain worth a change; default 2%%")
    add("--devices", type=int, metavar="N", help="accelerators to use")
    add("--sampler", default="staged", metavar="|".join(SAMPLERS))
    add("--output", metavar="DIR", help="default results/<model>-<date>-<time>")
    add("--resume", metavar="DIR", help="go on with an interrupted run")
    add("--force", action="store_true", help="resume although file or machine changed")
    add("--no-reuse", action="store_true", help="ignore earlier runs")
    add("--keys", metavar="FILE", help="your own Hydra keys for the answer's line")
    add("--seed", type=int, default=0, metavar="N")
    add("--quiet", action="store_true", help="only the verdict's first line on stderr")
    add("-v", "--verbose", action="store_true", help="all rows on stderr, too")
    add("overrides", nargs="*", metavar="OVERRIDE", help="Hydra overrides of the search space")
    return parser


def _report(words: list[str]) -> None:
    parser = _Parser(prog="python -m autotune report")
    parser.add_argument("folder", type=Path, metavar="DIR")
    state = _answered(parser.parse_args(words).folder)
    from autotune.report.verdict import verdict

    print(verdict(state))


def _answered(folder: Path) -> RunState:
    """A run with an answer; a folder that holds none is told before the heavy imports."""
    read_content(folder.expanduser())
    from autotune.state import load_state

    state = load_state(folder)
    if state.answer is None:
        raise InputError(f"{state.folder}: this run has no answer")
    return state


def _export(words: list[str]) -> None:
    from autotune.exporters import EXPORTERS
    from autotune.types import write_atomically

    parser = _Parser(prog="python -m autotune export")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--format", default="hydra", metavar="|".join(EXPORTERS))
    parser.add_argument("--to", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    if given.format not in EXPORTERS:
        raise OptionError(f"--format {given.format!r}: allowed are {', '.join(EXPORTERS)}")
    state = _answered(given.folder)
    assert state.answer is not None
    text = EXPORTERS[given.format].text(state.export(state.answer.config))
    if given.to is None:
        print(text)
        return
    try:
        given.to.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(given.to, text + "\n")
    except OSError as error:
        raise OptionError(f"--to {given.to}: cannot be written: {error.strerror}") from None
    _say(f"written to {given.to}")


def _doctor(words: list[str]) -> None:
    _Parser(prog="python -m autotune doctor").parse_args(words)
    from autotune import doctor

    checks = doctor.examine()
    print(doctor.text(checks, width=shutil.get_terminal_size().columns), flush=True)
    if reasons := doctor.broken(checks):
        raise UnfitError(f"nothing can be tuned here: {'; '.join(reasons)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Lines:
    """Plain lines on stderr: a log, a pipe, or nothing at all when quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def note(self, text: str) -> None:
        self._tell(text)

    def begins(self, state: RunState) -> None:
        self._tell(f"tuning {state.checked.model.path} for at most {state.checked.options.budget}")

    def asks(self, ask: Ask, left_s: float) -> None:
        return

    def row(self, trial: Trial, state: RunState) -> None:
        from autotune.report import progress

        self._tell(progress.line(trial, state))

    def _tell(self, text: str) -> None:
        if not self._quiet:
            _say(text)


class _Live:
    """A live table on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from autotune.report.progress import Screen

        self._screen = Screen()
        self._console = Console(stderr=True)
        self._live = Live(self._screen, console=self._console, transient=True)

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def begins(self, state: RunState) -> None:
        self._screen.budget_s = state.checked.budget_s
        self._screen.state = state

    def asks(self, ask: Ask, left_s: float) -> None:
        self._screen.asks(ask, left_s)
        self._live.refresh()

    def row(self, trial: Trial, state: RunState) -> None:
        self._live.refresh()


def _listener(*, quiet: bool) -> _Lines | _Live:
    if quiet or not sys.stderr.isatty():
        return _Lines(quiet=quiet)
    return _Live()
