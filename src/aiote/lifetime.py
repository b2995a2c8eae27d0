"""The life of an engine: open, closing, closed; left open at the exit; carried into a forked child."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING

from .aio import wake
from .errors import ClosedError, UsageError
from .rails import after_fork

if TYPE_CHECKING:
    from .aio import EventLoop, Waiter
    from .engine import Engine

__all__ = ["Lifetime"]

_live: weakref.WeakSet[Engine] = weakref.WeakSet()
_forks = 0


def _in_child() -> None:
    global _forks
    _forks += 1
    after_fork()
    _live.clear()


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _at_exit() -> None:
    """Close what was left open: a native thread must not outlive the interpreter, and a provider's memory not its
    library.
    """
    for engine in tuple(_live):
        engine._lifetime.dropped(engine)


class Lifetime:
    """Where an engine is in its life."""

    def __init__(self, engine: Engine) -> None:
        self._epoch = _forks
        self._opened = False
        self._closing = False
        self._closed = False
        self._waiters: list[Waiter] = []
        # Where it was made, for whoever forgets to close it; only in development mode, for it costs a millisecond.
        self._made_at = "".join(traceback.format_stack()[:-3]) if sys.flags.dev_mode else ""
        self._name = ""

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def inherited(self) -> bool:
        """Whether this is the child of a fork, and the engine its parent's."""
        return self._epoch != _forks

    def opened(self) -> None:
        """Take note that the engine was opened and has to be closed."""
        self._opened = True

    def register(self, engine: Engine) -> None:
        """Have the engine closed at the interpreter's exit."""
        _live.add(engine)

    def require_open(self) -> None:
        if self.inherited:
            raise UsageError("this engine belongs to the parent process: open one of the child's own after a fork")
        if self._closing:
            raise ClosedError("the engine is closed")

    def begin_close(self) -> bool:
        """Say that the engine is being closed; False when that was said before."""
        first = not self._closing
        self._closing = True
        return first

    async def wait_closed(self, loop: EventLoop) -> None:
        """Wait until whoever closes it is done."""
        while not self._closed:
            waiter = loop.waiter()
            self._waiters.append(waiter)
            await waiter

    def closed_now(self) -> None:
        """Say that everything is closed."""
        self._closed = True
        for waiter in self._waiters:
            wake(waiter)
        self._waiters.clear()

    def dropped(self, engine: Engine) -> None:
        """Close an engine that nobody closed, and say so; in a child of a fork it is the parent's, and left alone."""
        if self._closed or self.inherited:
            return
        if self._opened:
            made = (
                f"; it was opened at:\n{self._made_at}"
                if self._made_at
                else " (python -X dev tells where it was opened)"
            )
            warnings.warn(f"{engine!r} was never closed{made}", ResourceWarning, source=engine, stacklevel=2)
        engine.abort()
