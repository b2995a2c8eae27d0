"""Interruptions where a signal handler could raise one: at each step of Python that a wait takes, and at each await.

A signal handler runs between two steps of the main thread. Here the step is chosen, so that all of them are tried.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiote

__all__ = ["Interrupts", "thrown_at"]

OURS = tuple(str(Path(aiote.__file__).parent / folder) for folder in ("bridge", "connectors", "aio/waiting.py"))
"""Whose functions are interrupted, with what they call."""
FINALIZERS = ("weakref.py", "_weakrefset.py")
"""What is raised there reaches nobody."""
DEEP = 12


class Interrupts:
    """Raises KeyboardInterrupt at one step of this thread; `happened` tells whether it took so many.

    A step is a call's begin or end, where Python looks whether a signal has come.
    """

    def __init__(self, at: int, *, awaited: bool = False) -> None:
        """awaited: what an event loop calls is left alone, and its tasks are interrupted."""
        self.left, self.happened, self._awaited = at, False, awaited

    @contextmanager
    def armed(self) -> Generator[None]:
        """Count steps for the length of a `with`, without those of what a collection calls, whose errors are lost."""
        gc.disable()
        sys.setprofile(self._step)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    def _step(self, frame: types.FrameType, event: str, argument: object) -> None:
        # A coroutine's return is told where it awaits, too; a return from what we called is our own next step.
        ended = event == "return" and (frame.f_code.co_flags & inspect.CO_COROUTINE or not self._is_ours(frame.f_back))
        if event in ("call", "return", "c_return") and not ended and self._is_ours(frame):
            self.left -= 1
            if self.left < 0:
                self.happened = True
                # Python ends the profile of a thread whose function raises.
                raise KeyboardInterrupt

    def _is_ours(self, frame: types.FrameType | None) -> bool:
        ours = False
        for _ in range(DEEP):
            if frame is None:
                break
            code = frame.f_code
            if code.co_filename.endswith(FINALIZERS) or code.co_name == "__del__":
                return False
            ours |= code.co_filename.startswith(OURS) and bool(
                not self._awaited or code.co_flags & inspect.CO_COROUTINE
            )
            frame = frame.f_back
        return ours


@types.coroutine
def thrown_at(
    work: Coroutine[Any, Any, Any], at: int, told: Callable[[], object], kind: type[BaseException] = KeyboardInterrupt
) -> Generator[Any, Any, Any]:
    """Await a coroutine, and throw an exception into it where it awaits, after `at` other times; `told` hears of it.

    The event loop never sees that await, as when the interruption comes before it has.
    """
    send: Callable[[Any], Any] = work.send
    value: Any = None
    for number in itertools.count():
        try:
            item = send(value)
            if number == at:
                told()
                item = work.throw(kind())
        except StopIteration as end:
            return end.value
        try:
            send, value = work.send, (yield item)
        except BaseException as error:
            send, value = work.throw, error
