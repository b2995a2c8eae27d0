"""The command line: `aiote`, also `python -m aiote`.

This floor stands on the public API alone. typer and rich come with the `cli` extra and are imported when a command
runs, so that importing this package, which the demo's processes do, needs neither.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit status.

    0: done. 1: it failed, and standard error says why. 2: the arguments were wrong, or the `cli` extra is missing.
    130: interrupted.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'aiote: the command line needs {" and ".join(missing)}; install with: pip install "aiote[cli]"',
            file=sys.stderr,
        )
        return 2
    status = 130
    # An interrupt may come while the imports are at it; the command's own handling turns one into a status.
    with contextlib.suppress(KeyboardInterrupt):
        from aiote.cli.app import run

        status = run(sys.argv[1:] if arguments is None else arguments)
    if status == 130:
        print("aiote: interrupted", file=sys.stderr)
    return status
