"""The command line: `aiote`, also `python -m aiote`.

The commands move data only through the public API. typer and rich come with the `cli` extra and are imported when a
command runs, so that the demo's processes can import this package without them. It must not know how a service works.
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

    0: done. 1: it failed, and standard error says why. 2: the arguments were wrong, or the `cli` extra is missing. 130:
    interrupted.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'aiote: the command line needs {" and ".join(missing)}; install with: pip install "aiote[cli]"',
            file=sys.stderr,
        )
        return 2
    status = 130
    # An interrupt may come during the imports. Once a command runs, its own handling turns an interrupt into a status.
    with contextlib.suppress(KeyboardInterrupt):
        from aiote.cli.app import run

        status = run(sys.argv[1:] if arguments is None else arguments)
    if status == 130:
        print("aiote: interrupted", file=sys.stderr)
    return status
