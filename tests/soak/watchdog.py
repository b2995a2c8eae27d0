"""Nothing hangs: whatever is awaited is under watch, and what lasts longer than the bound is a violation.

Time is counted as this process lives it: it stands while the process is stopped, and while its loop is starved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
TICK_S = 0.1
LONGEST_TICK_S = 0.3


class Watchdog:
    """The awaits of one process. `violation` is called for each that lasts longer than `bound` seconds."""

    def __init__(self, bound: float, violation: Callable[[str], None]) -> None:
        self.bound = bound
        self.lived = 0.0
        self.seen = 0
        self._violation = violation
        self._pending: dict[object, tuple[float, str, asyncio.Task[object] | None]] = {}

    async def run(self) -> None:
        """Look, for ever."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.lived += min(now - last, LONGEST_TICK_S)
            last = now
            for token, (since, what, task) in tuple(self._pending.items()):
                if self.lived - since > self.bound:
                    del self._pending[token]
                    self._violation(f"stuck for {self.bound} s: {what}\n{stack(task)}")

    @contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """Expect the body to end within the bound."""
        token = self.begin(what, asyncio.current_task())
        try:
            yield
        finally:
            self.end(token)

    def begin(self, what: str, task: asyncio.Task[object] | None = None) -> object:
        """Expect something until `end` is called with what this returns."""
        token = object()
        self.seen += 1
        self._pending[token] = (self.lived, what, task)
        return token

    def end(self, token: object) -> None:
        """Expect it no longer."""
        self._pending.pop(token, None)

    async def over(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something that must end within the bound."""
        with self.expecting(what):
            return await awaitable


def stack(task: asyncio.Task[object] | None) -> str:
    """Return where a task stands: every coroutine on the way to what it awaits, and every other task's innermost."""
    if task is None:
        return ""
    others = [f"  {where(other)[-1]}" for other in asyncio.all_tasks() if other is not task and where(other)]
    return "\n".join([*where(task), "other tasks:", *sorted(set(others))])


def where(task: asyncio.Task[object]) -> list[str]:
    """Return a line for each coroutine that a task is in, from the outermost to what it awaits."""
    lines = []
    inner: object = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        inner = (
            getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None) or getattr(inner, "gi_yieldfrom", None)
        )
    return lines
