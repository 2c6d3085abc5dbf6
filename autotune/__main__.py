"""`python -m autotune`: the only place that sets the exit code."""

from __future__ import annotations

import sys

from autotune.errors import AutotuneError, InputError, StoppedError


def entry() -> None:
    """Run the command line and end the process with its exit code."""
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """0 answer found; 1 nothing ran; 2 wrong input; 130 or 143 after a signal."""
    from autotune import cli

    try:
        cli.main(arguments)
    except InputError as error:
        sys.stderr.write(f"autotune: {error}\n")
        return 2
    except StoppedError as interrupted:
        sys.stderr.write(f"autotune: {interrupted}\n")
        return 128 + interrupted.signal_number
    except KeyboardInterrupt:
        sys.stderr.write("autotune: interrupted\n")
        return 130
    except AutotuneError as error:
        sys.stderr.write(f"autotune: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    entry()
