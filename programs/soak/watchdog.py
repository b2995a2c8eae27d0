"""Nothing hangs: whatever is awaited is under watch, and what lasts longer than the bound is a violation.

Time is counted as this process lives it: it stands while the process is stopped, and while its loop is starved.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from tasks import Tasks

T = TypeVar("T")
TICK_S = 0.1
LONGEST_TICK_S = 0.3
TRAPS = "trio/_core/_traps.py"
"""In here every task of trio ends, which tells nobody what it awaits."""


class Watchdog:
    """The awaits of one process. `violation` is called for each that lasts longer than `bound` seconds."""

    def __init__(self, tasks: Tasks, bound: float, violation: Callable[[str], None]) -> None:
        self.tasks = tasks
        self.bound = bound
        self.lived = 0.0
        self.seen = 0
        self._violation = violation
        self._pending: dict[object, tuple[float, str, object]] = {}

    async def run(self) -> None:
        """Look, for ever."""
        last = time.monotonic()
        while True:
            await anyio.sleep(TICK_S)
            now = time.monotonic()
            self.lived += min(now - last, LONGEST_TICK_S)
            last = now
            for token, (since, what, coroutine) in tuple(self._pending.items()):
                if self.lived - since > self.bound:
                    del self._pending[token]
                    self._violation(f"stuck for {self.bound} s: {what}\n{stack(coroutine, self.tasks)}")

    @contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """Expect the body to end within the bound."""
        token = self.begin(what, self.tasks.current())
        try:
            yield
        finally:
            self.end(token)

    def begin(self, what: str, coroutine: object = None) -> object:
        """Expect something until `end` is called with what this returns; the coroutine is the task's that waits."""
        token = object()
        self.seen += 1
        self._pending[token] = (self.lived, what, coroutine)
        return token

    def end(self, token: object) -> None:
        """Expect it no longer."""
        self._pending.pop(token, None)

    async def over(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something that must end within the bound."""
        with self.expecting(what):
            return await awaitable


def stack(coroutine: object, tasks: Tasks) -> str:
    """Return where a task stands: every coroutine on the way to what it awaits, and every other task's innermost."""
    if coroutine is None:
        return ""
    others = [f"  {where(other)[-1]}" for other in tasks.coroutines() if other is not coroutine and where(other)]
    return "\n".join([*where(coroutine), "other tasks:", *sorted(set(others))])


def where(coroutine: object) -> list[str]:
    """Return a line for each coroutine that a task is in, from its outermost to what it awaits."""
    lines = []
    inner = coroutine
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.endswith(TRAPS):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        inner = (
            getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None) or getattr(inner, "gi_yieldfrom", None)
        )
    return lines
