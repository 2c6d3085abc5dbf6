"""What a model file imports, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

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
