"""Find the fastest way to train your own PyTorch model on your own hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Run, load_run, tune

__all__ = ["Run", "load_run", "tune"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is asked for: probes import this package, too."""
    if name in __all__:
        from autotune import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
