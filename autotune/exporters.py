"""Exporters: one config, written the way a training script reads it.

A new format is a new row of `EXPORTERS`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import SpaceError
from autotune.knobs import KNOBS, Knob, environment_of, in_order, knob_named
from autotune.precision import PRECISIONS, Precision
from autotune.request import read_mapping
from autotune.types import ModelRef, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What there is to write: every knob that applies, and how its user calls it."""

    values: Mapping[str, Value]
    model: ModelRef
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Knob -> the user's own key, or {"key": own key, "values": {our value: own value}}."""
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """One format. The text ends without a newline: the caller decides where it goes."""

    name: str
    about: str
    text: Callable[[Export], str]


def read_keys(path: Path) -> Mapping[str, Any]:
    """The user's own keys from a YAML or JSON file.

    Raises:
        SpaceError: If the file cannot be read or does not map knobs to keys.
    """
    return check_keys(read_mapping(path), str(path))


def check_keys(keys: Mapping[Any, Any], where: str) -> Mapping[str, Any]:
    """The user's own keys, if every one can be written as an override and in YAML.

    Args:
        keys: Knob -> own key, or {"key": own key, "values": {our value: own value}}.
        where: Where they were written, for the error's text.

    Raises:
        SpaceError: If a knob does not exist, or an own key or value cannot be written.
    """
    if not isinstance(keys, Mapping):
        raise SpaceError(f"{where}: must map knobs to your own keys, but is {keys!r}")
    for name, entry in keys.items():
        _check_entry(knob_named(str(name), where), entry, where)
    paths = {name: _path(_own(entry)[0]) for name, entry in keys.items()}
    for name, path in paths.items():
        for other, longer in paths.items():
            if name != other and path == longer[: len(path)]:
                raise SpaceError(
                    f"{where}: {name} is {'.'.join(path)} and {other} is {'.'.join(longer)}; "
                    "one cannot be set beside the other"
                )
    return in_order(keys)


def overrides(export: Export) -> tuple[str, ...]:
    """The config as Hydra overrides, one `key=value` word each, without blanks."""
    return tuple(f"{key}={_word(value)}" for key, value in _settings(export))


def unmapped(export: Export) -> tuple[str, ...]:
    """The knobs that the user's own keys say nothing about: they are left out of the overrides."""
    return tuple(name for name in _overridable(export) if _renamed(export, name) is None)


def environment(export: Export) -> dict[str, str]:
    """The variables that must be set before the user's Python starts."""
    return environment_of(export.values, load_time=False)


def environment_prefix(export: Export) -> str:
    """The same variables as the start of a shell line: "NAME=value ", or nothing."""
    return "".join(f"{name}={shlex.quote(text)} " for name, text in environment(export).items())


def command(export: Export) -> str:
    """A line to paste into a shell, with its environment."""
    return environment_prefix(export) + shlex.join(["python", "train.py", *overrides(export)])


def best_yaml(export: Export) -> str:
    """The overrides as a Hydra config to be added with `+autotune=best`."""
    tree: dict[str, Any] = {}
    for key, value in _settings(export):
        *groups, leaf = _path(key)
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[leaf] = value
    return "# @package _global_\n" + yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


# A key that both Hydra's override grammar and nested YAML can express; + and ++ add it.
_KEY = re.compile(r"\+{0,2}[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)
_BARE = re.compile(r"[\w.+/%@:-]+", re.ASCII)
_CLOSING = re.compile(r"(\\*)('|\Z)")


def _check_entry(knob: Knob, entry: Any, where: str) -> None:
    """One row of the user's own keys, as a person wrote it."""
    shaped = isinstance(entry, Mapping) and "key" in entry and set(entry) <= {"key", "values"}
    if not isinstance(entry, str) and not shaped:
        raise SpaceError(
            f"{where}: {knob.name} must be your own key, or "
            f'{{"key": your key, "values": {{our value: your value}}}}, but is {entry!r}'
        )
    key, values = _own(entry)
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise SpaceError(f"{where}: {knob.name}: {key!r} is no dotted Hydra key, as a.b is")
    if not isinstance(values, Mapping):
        raise SpaceError(f"{where}: {knob.name}: values must be a mapping, but is {values!r}")
    for ours, theirs in values.items():
        knob.check(_ours(knob, ours), where)
        _check_word(theirs, f"{where}: {knob.name}={ours}")


def _ours(knob: Knob, written: Any) -> Any:
    """Our value, from a mapping's key: JSON turns 8 into "8" and True into "true"."""
    if knob.domain.least is not None:
        whole = isinstance(written, str) and re.fullmatch("0|[1-9][0-9]*", written)
        return int(written) if whole else written
    return next((word for word in knob.domain.words if _plain(word) == _plain(written)), written)


def _check_word(value: Any, where: str) -> None:
    if not isinstance(value, Value):
        raise SpaceError(f"{where}: your value must be a text, number, bool or null, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SpaceError(f"{where}: your value {value} is not finite")
    # The answer is one line that a shell splits at blanks: no quoting would survive that.
    if isinstance(value, str) and not (value.isprintable() and " " not in value):
        raise SpaceError(
            f"{where}: your value {value!r} holds a blank, so no override can carry it"
        )


def _own(entry: Any) -> tuple[Any, Any]:
    """The user's key and values of one row."""
    return (entry, {}) if isinstance(entry, str) else (entry["key"], entry.get("values", {}))


def _path(key: str) -> list[str]:
    return key.lstrip("+").split(".")


def _settings(export: Export) -> list[tuple[str, Value]]:
    """The user's keys with the user's values; ours where no own keys were given."""
    renamed = (_renamed(export, name) for name in _overridable(export))
    return [setting for setting in renamed if setting is not None]


def _overridable(export: Export) -> Iterator[str]:
    # A variable must be there before Python starts: no override comes early enough.
    return (name for name in in_order(export.values) if not KNOBS[name].environment)


def _renamed(export: Export, name: str) -> tuple[str, Value] | None:
    """The key and value to write for a knob; None where the user's keys do not say."""
    value = export.values[name]
    if not export.keys:
        return name, value
    if name not in export.keys:
        return None
    key, values = _own(export.keys[name])
    if not values:
        return key, value
    # Our word for a value that the user's side lacks would stop the training, or mislead it.
    theirs = {_plain(ours): own for ours, own in values.items()}
    return (key, theirs[_plain(value)]) if _plain(value) in theirs else None


def _plain(value: object) -> str:
    """A value as bare text, bools and null as Hydra, YAML and JSON spell them."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _word(value: Value) -> str:
    """A value in Hydra's grammar, so that reading it gives the same value back."""
    if not isinstance(value, str) or (_BARE.fullmatch(value) and not _looks_typed(value)):
        return _plain(value)
    # Hydra reads a backslash as itself, except in front of a quote.
    escaped = _CLOSING.sub(lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value)
    return f"'{escaped}'"


def _looks_typed(text: str) -> bool:
    """Whether bare text would be read as a number, a bool or null."""
    if text.lower() in ("true", "false", "null"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Dumper(yaml.SafeDumper):
    """Quotes text that OmegaConf would read as a number, though YAML 1.1 does not (1e5)."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'" if _looks_typed(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


_LOADER_ARGUMENTS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
_WORKER_ARGUMENTS = ("prefetch_factor", "persistent_workers")
_SPELT_OUT = (
    *(f"loader.{argument}" for argument in _LOADER_ARGUMENTS),
    "train.batch_size",
    "train.accumulation_steps",
    "train.precision",
    "host.threads",
    "host.omp_wait_policy",
)
"""The knobs that the plain PyTorch text turns into code."""


def _hydra_text(export: Export) -> str:
    return " ".join(overrides(export))


def _torch_text(export: Export) -> str:
    precision = PRECISIONS[str(export.values.get("train.precision", "default"))]
    device = export.device.partition(":")[0]
    parts = (
        _torch_header(export),
        _torch_switches(export, precision),
        _torch_loader(export),
        _torch_loop(export, precision, device),
    )
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _torch_header(export: Export) -> list[str]:
    lines = [f"# For {export.model.path!r}. Yours: dataset, model (on its device), optimizer,"]
    lines.append("# compute_loss(model, batch).")
    if prefix := environment_prefix(export):
        lines.append(f"# Start Python with {prefix}in front: later is too late.")
    lines += [
        f"# Not shown here: {name}={_plain(value)}"
        for name, value in in_order(export.values).items()
        if name not in _SPELT_OUT and value != KNOBS[name].default
    ]
    return [*lines, "import torch", "from torch.utils.data import DataLoader"]


def _torch_switches(export: Export, precision: Precision) -> list[str]:
    lines = []
    if threads := export.values.get("host.threads"):
        lines.append(f"torch.set_num_threads({threads})")
    if precision.matmul is not None:
        lines.append(f'torch.set_float32_matmul_precision("{precision.matmul}")')
    if precision.cudnn_tf32 is not None:
        lines.append(f"torch.backends.cudnn.allow_tf32 = {precision.cudnn_tf32}")
    return lines


def _torch_loader(export: Export) -> list[str]:
    arguments = {"batch_size": export.values.get("train.batch_size")}
    for argument in _LOADER_ARGUMENTS:
        # DataLoader refuses these two when there is no worker that they could be about.
        if export.values.get("loader.num_workers") or argument not in _WORKER_ARGUMENTS:
            arguments[argument] = export.values.get(f"loader.{argument}")
    return [
        "loader = DataLoader(",
        "    dataset,",
        "    shuffle=True,  # not for an IterableDataset",
        "    drop_last=True,",
        *(f"    {name}={value!r}," for name, value in arguments.items() if value is not None),
        ")",
    ]


def _torch_loop(export: Export, precision: Precision, device: str) -> list[str]:
    steps = export.values.get("train.accumulation_steps") or 1
    share = f" / {steps}  # the mean over the global batch" if steps != 1 else ""
    loss = [f"loss = compute_loss(model, batch){share}"]
    if precision.autocast:
        autocast = f'with torch.autocast("{device}", dtype=torch.{precision.autocast}):'
        loss = [autocast, *_indented(loss)]
    backward, step = _torch_step(scaled=precision.scaled)
    head = "for batch in loader:"
    if steps != 1:
        head = "for index, batch in enumerate(loader, start=1):"
        step = [f"if index % {steps} == 0:", *_indented(step)]
    body = [*_torch_copy(device), *loss, backward, *step]
    scaler = [f'scaler = torch.amp.GradScaler("{device}")'] if precision.scaled else []
    return [*scaler, "model.train()", "optimizer.zero_grad()", head, *_indented(body)]


def _torch_copy(device: str) -> list[str]:
    if device == "cpu":
        return []
    comment = "# a batch of tensors; copies overlap with computing if pinned"
    return [comment, f'batch = [part.to("{device}", non_blocking=True) for part in batch]']


def _torch_step(*, scaled: bool) -> tuple[str, list[str]]:
    """The backward line, and the lines of one optimizer step."""
    if not scaled:
        return "loss.backward()", ["optimizer.step()", "optimizer.zero_grad()"]
    # Unscaling is due once per optimizer step, before clipping; a second call would raise.
    return "scaler.scale(loss).backward()", [
        "scaler.unscale_(optimizer)  # clip gradients after this line",
        "scaler.step(optimizer)",
        "scaler.update()",
        "optimizer.zero_grad()",
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


EXPORTERS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        Exporter(name="hydra", about="one line of Hydra overrides", text=_hydra_text),
        Exporter(name="torch", about="plain PyTorch lines to paste", text=_torch_text),
    )
}
