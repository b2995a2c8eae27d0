"""One timer for all peers of an engine: it sends heartbeats to them, and finds those that fell silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..aio import Condition, LoopTask, report, run_within
from ..rails import check_pulses

if TYPE_CHECKING:
    from ..aio import EventLoop
    from ..rails import BeatCounts, Pulse

__all__ = ["EARLY", "HeartbeatTimer"]

LEAST_S = 0.001
"""The shortest sleep between two passes, in seconds."""
EARLY = 0.25
"""Heartbeats that will be due within a quarter of their interval are sent together with one that is due."""


class HeartbeatTimer:
    """Calls beats. A beat does what is due for one peer at the given time, and returns when to call it again at the
    latest.

    When one beat is due, the timer looks at all of them, so even many peers wake the event loop rarely. One native pass
    over their pulses (`check_pulses`) skips the beats that have nothing to do. The pass also sends and hears the
    heartbeats of plain TCP connections, and adds them to `counts`. A beat without a pulse is called each time. Before
    each pass, `tell` counts up the heartbeats that the peers on this host read in shared memory, so that they see this
    one no later than a sent heartbeat. Without beats no task runs.
    """

    def __init__(self, loop: EventLoop, counts: BeatCounts, tell: Callable[[], object] | None = None) -> None:
        self._loop = loop
        self._counts = counts
        self._tell = tell
        self._beats: dict[Callable[[float], float], Pulse | None] = {}
        self._changed = Condition(loop)
        self._task: LoopTask | None = None
        self.afterwards: Callable[[float], object] | None = None
        """Called with the time after each pass, for work that is due now and then while there are peers."""

    def add(self, beat: Callable[[float], float], pulse: Pulse | None = None) -> None:
        """Call `beat` from now on, first very soon, then whenever its pulse asks for it."""
        self._beats[beat] = pulse
        if self._task is None or self._task.has_ended:
            self._task = self._loop.spawn(self._run, name="aiote heartbeats")
        else:
            self._changed.wake_all()

    def check_soon(self) -> None:
        """Look at all beats soon: one may have become due earlier than it said."""
        self._changed.wake_all()

    def remove(self, beat: Callable[[float], float]) -> None:
        """Stop calling `beat`."""
        self._beats.pop(beat, None)
        if not self._beats:
            self._changed.wake_all()

    async def _run(self) -> None:
        alarm = self._loop.alarm(self._changed.wake_all)
        try:
            while self._beats:
                now = self._loop.time()
                due = self._check_beats(now)
                self._call_afterwards(now)
                if alarm is None:
                    await run_within(max(LEAST_S, due - now), self._changed.wait)
                else:
                    alarm.set(max(LEAST_S, due - now))
                    await self._changed.wait()
        finally:
            if alarm is not None:
                alarm.close()

    def _check_beats(self, now: float) -> float:
        """Call the beats that have something to do; return when to look again."""
        if self._tell is not None:
            self._tell()
        wanted, due = check_pulses(self._beats, now, EARLY, self._counts)
        return min([due, *[self._call_beat(beat, now) for beat in wanted if beat in self._beats]])

    def _call_beat(self, beat: Callable[[float], float], now: float) -> float:
        try:
            return beat(now)
        except Exception as error:
            # A beat that fails must not keep the others from being called.
            report(error)
            self.remove(beat)
            return math.inf

    def _call_afterwards(self, now: float) -> None:
        """Call `afterwards`. If it fails, it is not called again, and the peers are unaffected."""
        try:
            if self.afterwards is not None:
                self.afterwards(now)
        except Exception as error:
            self.afterwards = None
            report(error)

    def abandon(self) -> None:
        """Stop calling beats, without waiting for the timer's end."""
        self._beats.clear()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop calling beats, and wait for the timer's end."""
        self.abandon()
        if self._task is not None:
            await self._task.join()
