"""Which cases of EFA's tests over the stand-in are tried: by `make test` one of each test, by `make test-all` all."""

from __future__ import annotations

import pytest

from support.machine import LONG
from support.rails.standin_efa import libraries, spoken


def named(value: str | int) -> str:
    return spoken(value) if isinstance(value, str) else str(value)


def tried(at: int, *nics: int) -> pytest.MarkDecorator:
    """Have a test tried with one library, of which `at` is the number, and the first count of NICs; or with all."""
    every = [(library, count) for library in libraries() for count in nics]
    chosen = every if LONG else [(libraries()[at % len(libraries())], nics[0])]
    return pytest.mark.parametrize(("library", "nics"), chosen, ids=named)
