"""One timer for all peers of an engine: they are told that it lives, and those that fell silent are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..aio import LoopTask, Signal, report, within

if TYPE_CHECKING:
    from ..aio import EventLoop

__all__ = ["HeartbeatTimer"]

LEAST_S = 0.001


class HeartbeatTimer:
    """Calls each `beat` with the present time; it says when it has to be called again, at the latest.

    All are called when one is due, so that what they do falls on few moments, however many there are. While there is
    nobody to call there is no timer.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._beats: dict[Callable[[float], float], None] = {}
        self._changed = Signal(loop)
        self._task: LoopTask | None = None

    def add(self, beat: Callable[[float], float]) -> None:
        """Call it from now on, soon for the first time."""
        self._beats[beat] = None
        if self._task is None or self._task.ended:
            self._task = self._loop.spawn(self._run, name="aiote heartbeats")
        else:
            self._changed.set()

    def look(self) -> None:
        """Call them all soon: one may have become due earlier than it said."""
        self._changed.set()

    def remove(self, beat: Callable[[float], float]) -> None:
        """Call it no more."""
        self._beats.pop(beat, None)
        if not self._beats:
            self._changed.set()

    async def _run(self) -> None:
        alarm = self._loop.alarm(self._changed.set)
        try:
            while self._beats:
                now = self._loop.time()
                due = min([self._call(beat, now) for beat in tuple(self._beats)])
                if alarm is None:
                    await within(max(LEAST_S, due - now), self._changed.wait)
                else:
                    alarm.set(max(LEAST_S, due - now))
                    await self._changed.wait()
        finally:
            if alarm is not None:
                alarm.close()

    def _call(self, beat: Callable[[float], float], now: float) -> float:
        try:
            return beat(now)
        except Exception as error:
            # One that fails must not keep the others from being called.
            report(error)
            self.remove(beat)
            return math.inf

    def abandon(self) -> None:
        """Call nobody any more, without waiting for the timer's end."""
        self._beats.clear()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Call nobody any more."""
        self.abandon()
        if self._task is not None:
            await self._task.join()
