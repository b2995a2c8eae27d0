"""Putting functions around an engine's verbs, which cost nothing where there are none.

A wrapper shadows the engine's method by an attribute of that one engine. An engine without wrappers runs the very code
that it would run without this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["SUBMITS", "VERBS", "Verb", "Wrap", "wrap_verbs"]

Verb: TypeAlias = Callable[..., Any]
Wrap: TypeAlias = Callable[[str, Verb], Verb]
"""Takes a verb's name and the verb, and returns what is called instead."""

_Wrapper: TypeAlias = tuple[Wrap, tuple[str, ...]]

VERBS = ("write", "write_imm", "read", "write_pages", "read_pages", "scatter", "send")
"""The awaited forms. They do not go through the `submit_` forms."""
SUBMITS = tuple(f"submit_{name}" for name in VERBS)
WRAPPERS = "_verb_wrappers"


def wrap_verbs(engine: Any, wrap: Wrap, names: tuple[str, ...] = VERBS) -> Callable[[], None]:
    """Have `wrap` surround these verbs of an engine, the latest outermost; what is returned ends that."""
    wrappers: list[_Wrapper] = vars(engine).setdefault(WRAPPERS, [])
    mine = wrap, names
    wrappers.append(mine)
    _shadow(engine, wrappers)

    def stop() -> None:
        if mine in wrappers:
            wrappers.remove(mine)
            _shadow(engine, wrappers)

    return stop


def _shadow(engine: Any, wrappers: list[_Wrapper]) -> None:
    for name in (*VERBS, *SUBMITS):
        vars(engine).pop(name, None)
        verb: Verb = getattr(engine, name)
        wraps = [wrap for wrap, names in wrappers if name in names]
        for wrap in wraps:
            verb = wrap(name, verb)
        if wraps:
            setattr(engine, name, verb)
