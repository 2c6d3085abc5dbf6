"""What the user asked of the search space: a space file, then Hydra overrides on top of it.

The only file that knows the layout of space files and Hydra's override grammar.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from autotune.errors import SpaceError
from autotune.knobs import AUTO, KNOBS, Knob, knob_named
from autotune.types import Value

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# A wheel carries the spaces inside the package, a source checkout beside it.
SPACE_FOLDERS = (
    Path(__file__).parent / "search_spaces",
    Path(__file__).parent.parent / "search_spaces",
)
SUFFIXES = (".yaml", ".yml")

MOST_VALUES = 10_000
"""A longer list of values is a slip of the pen, not a search."""

LISTING = ("choice", "range")
"""Hydra's functions that list values; its others sample, shuffle or cast."""

ALLOWED = (
    "write knob=value, knob=a,b,c, knob=[a,b,c], knob=choice(a,b,c), knob=range(start,stop,step), "
    "knob=auto or ~knob"
)

_CALL = re.compile(r"(\w+)\s*\(")
_GROUPS = frozenset(name.rpartition(".")[0] for name in KNOBS)


@dataclass(frozen=True, slots=True)
class Choice:
    """The values asked of one knob: one pins it, several list it, None is "from the machine"."""

    values: tuple[Value, ...] | None


@dataclass(frozen=True, slots=True)
class Request:
    """What may be searched. A knob that is absent stays at the baseline."""

    choices: Mapping[str, Choice]


def read_request(space: str, overrides: Sequence[str]) -> Request:
    """What the space file and the overrides ask for, in the knob table's order.

    Args:
        space: Name of a ready-made space, or path of a YAML file.
        overrides: Words in Hydra's override grammar; a later one wins.

    Raises:
        SpaceError: If either asks for something that does not exist; the text names which.
    """
    choices = _choices_in(_space_file(space))
    for word in overrides:
        _override(choices, word)
    return Request({name: choices[name] for name in KNOBS if name in choices})


def space_names() -> tuple[str, ...]:
    """The names of the ready-made search spaces."""
    return tuple(sorted(_spaces()))


def read_mapping(path: Path) -> dict[Any, Any]:
    """The mapping that a YAML or JSON file holds.

    Raises:
        SpaceError: If the file cannot be read, is malformed, names a key twice or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpaceError(f"{path}: cannot be read: {reason}") from error
    parse = _parse_json if path.suffix == ".json" else _parse_yaml
    content = parse(text, str(path))
    if not isinstance(content, dict):
        found = "an empty file" if content is None else f"a {type(content).__name__}"
        raise SpaceError(f"{path}: must be a mapping of names to values, but is {found}")
    return content


def _spaces() -> dict[str, Path]:
    folder = next(filter(Path.is_dir, SPACE_FOLDERS), SPACE_FOLDERS[0])
    return {path.stem: path for path in folder.glob("*.yaml")}


def _space_file(space: str) -> Path:
    separators = {os.sep, os.altsep or os.sep}
    if space.endswith(SUFFIXES) or not separators.isdisjoint(space):
        return Path(space)
    spaces = _spaces()
    if space in spaces:
        return spaces[space]
    near = difflib.get_close_matches(space, spaces, n=1, cutoff=0.5)
    nearest = f"did you mean {near[0]}? " if near else ""
    raise SpaceError(
        f"unknown search space {space!r}; {nearest}"
        f"Known spaces: {', '.join(sorted(spaces))}; or give the path of a YAML file"
    )


def _choices_in(path: Path) -> dict[str, Choice]:
    where = str(path)
    choices: dict[str, Choice] = {}
    for name, asked in _leaves(read_mapping(path), "", where):
        knob = knob_named(name, where)
        if name in choices:
            raise SpaceError(f"{where}: {name} is named twice")
        if isinstance(asked, str) and _CALL.match(asked):
            asked = _listed(_parse_override(f"{name}={asked}", where), where)
        choices[name] = _choice(knob, asked, where)
    return choices


def _leaves(tree: Mapping[Any, Any], prefix: str, where: str) -> Iterator[tuple[str, Any]]:
    """Every knob name that the nested mapping spells out, with what stands there."""
    for key, below in tree.items():
        name = f"{prefix}{key}"
        if name in _GROUPS:
            # A group whose every line is commented out reads as null.
            yield from _leaves(_group(below, name, where), f"{name}.", where)
        elif isinstance(below, Mapping) and name not in KNOBS:
            # The misspelt group: its first knob is what the suggestion can be made from.
            knob_named(f"{name}.{next(iter(below), '')}", where)
        else:
            yield name, below


def _group(below: Any, name: str, where: str) -> Mapping[Any, Any]:
    if below is None:
        return {}
    if isinstance(below, Mapping):
        return below
    knobs = ", ".join(knob.rpartition(".")[2] for knob in KNOBS if knob.startswith(f"{name}."))
    raise SpaceError(f"{where}: {name} is a group of knobs, to be named below it: {knobs}")


def _choice(knob: Knob, asked: Any, where: str) -> Choice:
    """What was asked of the knob, checked and without repeats."""
    if asked == AUTO:
        return Choice(None)
    values = asked if isinstance(asked, list) else [asked]
    if not values:
        raise SpaceError(
            f"{where}: {knob.name} lists no value; to leave it at the baseline, do not name it"
        )
    return Choice(tuple(dict.fromkeys(knob.check(value, where) for value in values)))


def _override(choices: dict[str, Choice], word: str) -> None:
    """Apply one word of the command line."""
    where = f"override {word}"
    override = _parse_override(word, where)
    knob = knob_named(override.key_or_group, where)
    if override.package is not None:
        raise SpaceError(f"{where}: a knob has no @package; {ALLOWED}")
    if not override.is_delete():
        choices[knob.name] = _choice(knob, _listed(override, where), where)
    elif override.value_type is None:
        choices.pop(knob.name, None)
    else:
        raise SpaceError(f"{where}: write ~{knob.name} to leave it at the baseline")


def _parse_override(word: str, where: str) -> Override:
    # Hydra is imported only when its grammar is needed: it would double our start-up.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = str(error).strip().partition("\n")[0]
        raise SpaceError(f"{where}: Hydra cannot read it ({reason}); {ALLOWED}") from error


def _listed(override: Override, where: str) -> Any:
    """A plain value, or the list of plain values that a sweep stands for."""
    calls = _CALL.findall(override.get_value_string())
    if others := [call for call in calls if call not in LISTING]:
        raise SpaceError(f"{where}: {others[0]}(...) does not list values; {ALLOWED}")
    if not override.is_sweep_override():
        return override.value()
    from hydra.errors import HydraException

    try:
        values = list(islice(override.sweep_iterator(), MOST_VALUES + 1))
    except (HydraException, ArithmeticError, ValueError) as error:
        raise SpaceError(f"{where}: {error}; {ALLOWED}") from error
    if len(values) > MOST_VALUES:
        raise SpaceError(f"{where}: lists more than {MOST_VALUES} values")
    # Only Hydra's quoted strings have a text of their own.
    return [getattr(value, "text", value) for value in values]


class _Loader(yaml.SafeLoader):
    """Refuses what plain YAML loading would silently overwrite: a key that is named twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is named twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        tabs = "; indent with blanks, not tabs" if "\\t" in (error.problem or "") else ""
        raise SpaceError(f"{where}{line}: not valid YAML: {error.problem}{tabs}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise SpaceError(f"{where}: not valid YAML: {reason}") from error


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except (ValueError, RecursionError) as error:
        raise SpaceError(f"{where}: not valid JSON: {error}") from error


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is named twice")
    return content
