"""What the user asked of a run, checked before anything starts."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import exporters
from autotune.errors import ModelFileError, OptionError
from autotune.knobs import check_values
from autotune.metrics import Limit, Metric, read_limit, read_objectives
from autotune.request import Choice, Request, read_request
from autotune.source import plain_dict
from autotune.space import Goal, check_goal, goal_of
from autotune.types import ModelRef, Value

SAMPLERS = ("staged", "random", "tpe", "grid")
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
LEAST_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run's options, as they were given; `checked` turns them into what they mean."""

    model: str
    space: str = "default"
    overrides: tuple[str, ...] = ()
    budget: str = "10m"
    max_probes: int | None = None
    global_batch: str = ""
    objectives: str = "samples_per_s,memory_gb"
    limits: tuple[str, ...] = ()
    min_gain: str = "2%"
    devices: int | None = None
    sampler: str = "staged"
    output: str | None = None
    no_reuse: bool = False
    keys: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Options whose meaning is known and allowed."""

    options: Options
    model: ModelRef
    request: Request
    budget_s: float
    objectives: tuple[Metric, ...]
    limits: tuple[Limit, ...]
    min_gain: float
    keys: Mapping[str, Any] | None = None
    """The user's own Hydra keys from `--keys`; those of the model file count without it."""


def checked(options: Options) -> Checked:
    """The options' meaning.

    Raises:
        InputError: If anything is wrong that can be seen without running the model file.
    """
    refuse_several_tasks(os.environ)
    if options.sampler not in SAMPLERS:
        raise OptionError(f"--sampler {options.sampler!r}: allowed are {', '.join(SAMPLERS)}")
    if options.max_probes is not None and options.max_probes < 1:
        raise OptionError("--max-probes: at least 1")
    if options.devices is not None and options.devices < 1:
        raise OptionError("--devices: at least 1")
    known = Checked(
        options=options,
        model=_model_ref(options.model),
        request=read_request(options.space, options.overrides),
        budget_s=read_budget(options.budget),
        objectives=read_objectives(options.objectives),
        limits=tuple(read_limit(text) for text in options.limits),
        min_gain=read_share(options.min_gain),
        keys=None if options.keys is None else exporters.read_keys(Path(options.keys)),
    )
    _check_source(known)
    return known


def restored(content: Mapping[str, Any]) -> Checked:
    """The options of a run folder: its model file need not be there any more."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content["options"].items()
    }
    options = Options(**given)
    choices = content["space"]["choices"].items()
    return Checked(
        options=options,
        model=ModelRef(path=content["model"]["path"], factory=content["model"]["factory"]),
        request=Request({name: Choice(_as_tuple(values)) for name, values in choices}),
        budget_s=read_budget(options.budget),
        objectives=read_objectives(options.objectives),
        limits=tuple(read_limit(text) for text in options.limits),
        min_gain=read_share(options.min_gain),
        keys=None if options.keys is None else content["keys"],
    )


def _as_tuple(values: list[Value] | None) -> tuple[Value, ...] | None:
    return None if values is None else tuple(values)


def read_budget(text: str) -> float:
    """Seconds of a budget such as 90s, 10m or 1h.

    Raises:
        OptionError: If it is no such text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None:
        raise OptionError(f"--budget {text!r}: write it like 90s, 10m or 1h")
    seconds = float(match[1]) * UNITS_S[match[2]]
    if seconds < LEAST_BUDGET_S:
        raise OptionError(f"--budget {text!r}: at least {LEAST_BUDGET_S:g}s")
    return seconds


def read_share(text: str) -> float:
    """A share such as 2% or 0.02.

    Raises:
        OptionError: If it is none between 0 and 100 %.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share < 1:
        raise OptionError(f"--min-gain {text!r}: write it like 2%")
    return share


def refuse_several_tasks(environment: Mapping[str, str]) -> None:
    """Under torchrun or srun every task would tune on its own, on the same devices.

    Raises:
        OptionError: If this is one of several.
    """
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        started_by = "TORCHELASTIC_RUN_ID" if name == "WORLD_SIZE" else "SLURM_PROCID"
        count = environment.get(name, "")
        if started_by in environment and count.isdigit() and int(count) > 1:
            raise OptionError(
                f"start me once: this is one of {count} tasks ({name}), "
                "and probes start their own ranks; under Slurm use srun --ntasks=1"
            )


def _model_ref(text: str) -> ModelRef:
    file, separator, factory = text.partition(":")
    if separator and not factory.isidentifier():
        raise OptionError(f"--model {text!r}: write it like FILE.py or FILE.py:FACTORY")
    path = Path(file).expanduser().absolute()
    if not path.exists():
        raise ModelFileError(f"no model file {path}")
    if path.is_dir() or path.suffix != ".py":
        raise ModelFileError(f"{path} is not a Python file (.py)")
    return ModelRef(path=str(path), factory=factory or None)


def with_file(
    known: Checked, current: Mapping[str, Value] | None, keys: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Goal]:
    """The user's own keys and the global batch, with what the model file says of both.

    Raises:
        InputError: If it names what does not exist, or no candidate has that global batch.
    """
    path = known.model.path
    if current is not None:
        check_values(current, f"{path}: CURRENT")
    own = exporters.check_keys(keys, f"{path}: KEYS")
    goal = goal_of(known.options.global_batch, current)
    check_goal(goal, known.request)
    return own if known.keys is None else known.keys, goal


def _check_source(known: Checked) -> None:
    """Find the errors that show without running the file."""
    ref = known.model
    try:
        tree = ast.parse(Path(ref.path).read_bytes(), filename=ref.path)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ModelFileError(f"{ref.path}{where} is not valid Python: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{ref.path} cannot be read: {error}") from None
    names = dict(_bound(tree.body))
    if "*" in names:
        return
    wanted = (ref.factory,) if ref.factory else ("build_model", "build_dataset")
    for name in wanted:
        if name not in names:
            raise ModelFileError(_missing(ref, name, tree))
    if not ref.factory:
        _check_literals(known, tree, names)


def _check_literals(known: Checked, tree: ast.Module, names: Mapping[str, ast.expr | None]) -> None:
    """Check CURRENT and KEYS where they are plain to see; what is computed shows when it runs."""
    plain: dict[str, Any] = {}
    for name in ("CURRENT", "KEYS"):
        mentioned = [node for node in ast.walk(tree) if getattr(node, "id", None) == name]
        node = names.get(name)
        if not mentioned and name not in names:
            continue
        if node is None or len(mentioned) > 1:
            return
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            return
        plain[name] = plain_dict(value, name, known.model)
    with_file(known, plain.get("CURRENT"), plain.get("KEYS") or {})


def _missing(ref: ModelRef, name: str, tree: ast.Module) -> str:
    if ref.factory:
        return f"{ref.path} has no {name}"
    hint = ""
    if not any(isinstance(node, ast.FunctionDef) for node in tree.body):
        hint = "; it looks like a script"
    return (
        f"{ref.path} defines no {name}(){hint}. A model file defines build_model() -> nn.Module "
        "and build_dataset() -> Dataset; compute_loss(model, batch) is optional"
    )


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Names bound at module level, with the expression where there is one."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, None) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((n.id, node.value) for t in node.targets for n in _names(t))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound(handler.body)


def _names(target: ast.expr) -> Iterator[ast.Name]:
    return (node for node in ast.walk(target) if isinstance(node, ast.Name))
