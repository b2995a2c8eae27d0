"""One timer for all peers of an engine: they are told that it lives, and those that fell silent are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..aio import LoopTask, Signal, report, within
from ..rails import look_over

if TYPE_CHECKING:
    from ..aio import EventLoop
    from ..rails import Pulse

__all__ = ["EARLY", "HeartbeatTimer"]

LEAST_S = 0.001
EARLY = 0.25
"""Heartbeats that will be due within a quarter of their time go along with one that is."""


class HeartbeatTimer:
    """Calls each `beat` with the present time; it says when it has to be called again, at the latest.

    All are looked at when one is due, so that what they do falls on few moments, however many there are: in one native
    pass over their pulses (`look_over`), which leaves those alone that have nothing to do. One without a pulse is
    called each time. `tell` is called before, so that peers that read it see it no later than what is sent. While there
    is nobody to call there is no timer.
    """

    def __init__(self, loop: EventLoop, tell: Callable[[], object] | None = None) -> None:
        self._loop = loop
        self._tell = tell
        self._beats: dict[Callable[[float], float], Pulse | None] = {}
        self._changed = Signal(loop)
        self._task: LoopTask | None = None
        self.afterwards: Callable[[float], object] | None = None
        """Called with the time when all have been: for what is to be done now and then while there are peers."""

    def add(self, beat: Callable[[float], float], pulse: Pulse | None = None) -> None:
        """Call it from now on, soon for the first time, whenever its pulse asks for it."""
        self._beats[beat] = pulse
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
                due = self._look(now)
                self._call_afterwards(now)
                if alarm is None:
                    await within(max(LEAST_S, due - now), self._changed.wait)
                else:
                    alarm.set(max(LEAST_S, due - now))
                    await self._changed.wait()
        finally:
            if alarm is not None:
                alarm.close()

    def _look(self, now: float) -> float:
        """Call those that have something to do; return when to look again."""
        if self._tell is not None:
            self._tell()
        wanted, due = look_over(self._beats, now, EARLY)
        return min([due, *[self._call(beat, now) for beat in wanted if beat in self._beats]])

    def _call(self, beat: Callable[[float], float], now: float) -> float:
        try:
            return beat(now)
        except Exception as error:
            # One that fails must not keep the others from being called.
            report(error)
            self.remove(beat)
            return math.inf

    def _call_afterwards(self, now: float) -> None:
        """Call what is to be done besides; one that fails is not called again, and no peer is lost for it."""
        try:
            if self.afterwards is not None:
                self.afterwards(now)
        except Exception as error:
            self.afterwards = None
            report(error)

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
