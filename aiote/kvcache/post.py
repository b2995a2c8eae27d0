"""Short messages that are sent without waiting: what prefillers answer, and what decoders call off."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import aiote

from ..service.background import Crew
from .transferwire import Accepted, Cancel, Ended, Queued, encode, frames

__all__ = ["Post"]

MOST_LATE = 4096


class Post:
    """Sends messages of one engine, each to a peer and no other: what a lost one was to hear, no later one does.

    A message is on its way at once, unless as many transfers toward its peer are unfinished as the engine admits; then
    it waits in line in a task of the crew, up to 4096 of them. `dropped` counts what was beyond: who waits for one of
    these has a limit.
    """

    def __init__(self, engine: aiote.Engine, crew: Callable[[], Crew]) -> None:
        self.dropped = 0
        self._engine = engine
        self._crew = crew
        self._late = 0
        self._numbers = itertools.count(1)

    def say(self, peer: aiote.Peer, message: Accepted | Cancel | Ended | Queued) -> None:
        """Send a message, which fits a frame, if the peer is there."""
        (frame,) = frames(encode(message), next(self._numbers))
        try:
            self._engine.submit_send(peer, frame)
        except aiote.QueueFull:
            if self._late >= MOST_LATE:
                self.dropped += 1
                return
            self._late += 1
            self._crew().start(self._send, peer, frame)
        except aiote.AioteError:
            return  # the peer is lost, or the engine closed: whoever asked knows it

    async def _send(self, peer: aiote.Peer, frame: bytes) -> None:
        try:
            await self._engine.send(peer, frame)
        except aiote.AioteError:
            return
        finally:
            self._late -= 1
