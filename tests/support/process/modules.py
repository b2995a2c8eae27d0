"""Modules of the tests as programs in processes of their own."""

from __future__ import annotations

import sys

from support import TESTS

RUN = "import runpy, sys; sys.path.append({path!r}); runpy.run_module({module!r}, run_name='__main__')"


def command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module, as `python -m` would, where `support` can be imported."""
    return [sys.executable, "-P", "-c", RUN.format(path=str(TESTS), module=module), *map(str, arguments)]
