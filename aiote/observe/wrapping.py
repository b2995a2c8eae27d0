"""Wrap an engine's verbs in functions, at no cost to engines without wrappers.

A wrapper is an attribute of one engine that shadows its method. An engine without wrappers runs the same code as it
would without this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["SUBMITS", "VERBS", "Verb", "Wrap", "is_wrapped", "wrap_verbs"]

Verb: TypeAlias = Callable[..., Any]
Wrap: TypeAlias = Callable[[str, Verb], Verb]
"""A function that takes a verb's name and the verb, and returns the function to call instead."""

_Wrapper: TypeAlias = tuple[Wrap, tuple[str, ...]]

VERBS = ("write", "write_imm", "read", "write_pages", "read_pages", "scatter", "send")
"""The awaited forms. They do not call the `submit_` forms."""
SUBMITS = tuple(f"submit_{name}" for name in VERBS)
WRAPPERS = "_verb_wrappers"


def wrap_verbs(engine: Any, wrap: Wrap, names: tuple[str, ...] = VERBS) -> Callable[[], None]:
    """Wrap these verbs of an engine with `wrap`, the newest wrapper outermost; return a function that removes it."""
    wrappers: list[_Wrapper] = vars(engine).setdefault(WRAPPERS, [])
    mine = wrap, names
    wrappers.append(mine)
    _shadow(engine, wrappers)

    def stop() -> None:
        if mine in wrappers:
            wrappers.remove(mine)
            _shadow(engine, wrappers)

    return stop


def is_wrapped(engine: Any, name: str) -> bool:
    """Return whether a verb of an engine is wrapped; a caller with a faster path then uses the verb instead."""
    return name in vars(engine)


def _shadow(engine: Any, wrappers: list[_Wrapper]) -> None:
    for name in (*VERBS, *SUBMITS):
        vars(engine).pop(name, None)
        verb: Verb = getattr(engine, name)
        wraps = [wrap for wrap, names in wrappers if name in names]
        for wrap in wraps:
            verb = wrap(name, verb)
        if wraps:
            setattr(engine, name, verb)
