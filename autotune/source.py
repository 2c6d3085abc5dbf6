"""What a model file imports and says, told without torch."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ModelFileError
from autotune.types import ModelRef

NOT_PRELOADED = {"torch", "autotune"}
LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def third_party_imports(path: Path) -> list[str]:
    """The installed modules, with dots, that the file imports at module level.

    A file that cannot be read or parsed has none: importing it will tell why.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names = dict.fromkeys(_imported(tree))
    return [name for name in names if _is_third_party(name.partition(".")[0], path.parent)]


def plain_dict(value: Any, name: str, ref: ModelRef) -> dict[str, Any] | None:
    """CURRENT or KEYS of a model file, as a dict of plain values; None for None.

    Raises:
        ModelFileError: If it is something else.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ModelFileError(f"{ref.path}: {name} must be a dict with knob names as keys")
    for key, entry in value.items():
        if not isinstance(entry, str | int | float | bool | dict | None):
            raise ModelFileError(
                f"{ref.path}: {name}[{key!r}] is {type(entry).__name__}; plain values only"
            )
    return dict(value)


def _imported(node: ast.AST) -> Iterator[str]:
    """What runs with the node; what functions hold runs later, if ever."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.module and not child.level:
                yield child.module
        elif not isinstance(child, LATER) and not _is_guard(child):
            yield from _imported(child)


def _is_guard(node: ast.AST) -> bool:
    """Whether it is an `if` about `__name__` or TYPE_CHECKING: false in an import."""
    if not isinstance(node, ast.If):
        return False
    words = {
        getattr(part, "id", None) or getattr(part, "attr", None) for part in ast.walk(node.test)
    }
    return bool(words & {"__name__", "TYPE_CHECKING"})


def _is_third_party(name: str, folder: Path) -> bool:
    """Whether it is installed, and not a module of the user's own beside the file."""
    if name in sys.stdlib_module_names or name in NOT_PRELOADED:
        return False
    if (folder / f"{name}.py").exists() or (folder / name).is_dir():
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    homes = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any({"site-packages", "dist-packages"} & set(Path(home).parts) for home in homes)
