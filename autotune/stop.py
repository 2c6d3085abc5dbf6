"""The wish to end a run, as a signal brings it."""

from __future__ import annotations

from autotune.errors import StoppedError


class Stop:
    """A wish to end the run: at once while nothing is measured yet, else between two rows.

    Raising inside a write would lose a finished row; a running probe looks here often.
    """

    def __init__(self) -> None:
        self.eager = True
        self._signal: int | None = None

    def request(self, number: int, _: object = None) -> None:
        """The handler for SIGINT and SIGTERM."""
        self._signal = number
        if self.eager:
            raise StoppedError(number)

    def check(self) -> None:
        """Raise StoppedError if a signal has come."""
        if self._signal is not None:
            raise StoppedError(self._signal)
