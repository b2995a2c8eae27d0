"""Send the frames for one peer: several to a message, in order, and only as many as the peer takes."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import anyio

import aiote

from ..aio import Condition, TransferWindow, report_callback_error
from .frames import Frame
from .memory import Share
from .unsent import Unsent

if TYPE_CHECKING:
    from .endpoint import CallEndpoint

__all__ = ["FRAME_BYTES", "LEAST_MESSAGE", "FrameSender"]

FRAME_BYTES = 96
"""An upper bound of a frame's size without its body, its pieces and the name of its method."""
LEAST_MESSAGE = 4096
"""The smallest `config.message_bytes` for calls: a lease's descriptor and a method's name fit in it."""
MAX_UNSENT = 4
"""A peer that takes no messages is disconnected when more than this many frames for each slot wait for it."""
MAX_SENDING = 256
"""The most messages in flight to one peer; further frames wait unsent."""
BATCH_FRAMES = 256
LATE_FRAMES = 8
"""Frames that are not urgent are sent when so many of them wait, or after LATE_S seconds, or with a frame that is."""
LATE_S = 0.005


class FrameSender:
    """The frames for one peer that are not sent yet, and the messages that are on their way there."""

    def __init__(self, endpoint: CallEndpoint, peer: aiote.Peer, share: Share, calls: Sized) -> None:
        self._endpoint, self._peer, self._calls = endpoint, peer, calls
        self.unsent = Unsent(endpoint.loop, endpoint.budget, share)
        self.room = 0
        """How many bytes the body of a frame may have that is alone in its message; 0 before the handshake."""
        self._window = TransferWindow[aiote.Transfer](Condition(endpoint.loop), MAX_SENDING)
        self._scheduled = self._waiting = self._flushing = self._closed = self._late = False

    def post(self, frame: Frame, nbytes: int, *, now: bool = False) -> None:
        """Send a frame of at most `nbytes` bytes, together with the other frames of this turn of the loop, or `now`.

        If too many frames wait for the peer because it takes no messages, disconnect it.
        """
        if not self._put(frame, nbytes):
            return
        if ((now and not self._endpoint.reading) or len(self.unsent) >= BATCH_FRAMES) and not self._waiting:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._endpoint.flush_later(self)
        # Count the slots that this engine grants the peer, and this engine's calls in flight to the peer. The number of
        # slots that the peer announces does not raise the bound.
        if len(self.unsent) > MAX_UNSENT * (self._endpoint.limits.slots + len(self._calls) + 64):
            self._peer.disconnect("it does not read the answers to its calls")

    def post_late(self, frame: Frame, nbytes: int) -> None:
        """Send a frame together with the next urgent one, with LATE_FRAMES others, or after LATE_S seconds."""
        if not self._put(frame, nbytes) or self._scheduled or self._waiting:
            return
        if len(self.unsent) >= min(LATE_FRAMES, self._endpoint.limits.slots // 2):
            self.flush()
        elif not self._late:
            self._late = True
            self._endpoint.loop.spawn(self._flush_late, name="aiote service: send ends of calls")

    async def _flush_late(self) -> None:
        await anyio.sleep(LATE_S)
        self._late = False
        if not self._waiting:
            self.flush()

    def _put(self, frame: Frame, nbytes: int) -> bool:
        """Queue a frame; return whether it is to be sent. Disconnect a peer whose share is used up."""
        if self._closed:
            return False
        try:
            self.unsent.put(frame, nbytes)
        except BlockingIOError as error:
            self._peer.disconnect(f"it does not read the answers to its calls: {error}"[:200])
            return False
        return True

    def flush(self) -> None:
        """Send the unsent frames."""
        self._scheduled = False
        if self._flushing:
            return
        self._flushing = True
        try:
            while self.unsent and not self._waiting and not self._closed:
                self._send_some()
        except aiote.AioteError as error:
            self._give_up(error)
        finally:
            self._flushing = False

    def _send_some(self) -> None:
        data, count = self.unsent.batch(self.room or LEAST_MESSAGE - 2 * FRAME_BYTES)
        # A message that failed may have carried ends of calls. Its failure disconnects the peer, so that the peer's
        # callers do not wait for these ends.
        self._window.raise_failure()
        try:
            if not self._window.has_room:
                raise aiote.QueueFull(f"{MAX_SENDING} messages are in flight to this peer")
            self._window.add(self._endpoint.engine.submit_send(self._peer, data))
        except aiote.QueueFull:
            self._waiting = True
            self._endpoint.loop.spawn(self._wait_for_room, name="aiote service: wait for room")
            return
        self._endpoint.messages += 1
        self._endpoint.message_bytes += len(data)
        self.unsent.record_sent(count)

    async def _wait_for_room(self) -> None:
        try:
            await self._window.room()
            await self._peer.room()
        except aiote.AioteError as error:
            self._give_up(error)
            return
        finally:
            self._waiting = False
        self.flush()

    def _give_up(self, error: aiote.AioteError) -> None:
        """Disconnect a peer because sending to it failed. If it is lost already, an event tells the endpoint."""
        if not (self._peer.lost or self._endpoint.engine.closed):
            # Do not report a connection that has just broken: the callers get its error.
            if not isinstance(error, aiote.TransferError | aiote.PeerError):
                report_callback_error(error)
            self._peer.disconnect("what this side has to say cannot be sent")

    def close(self) -> None:
        """Drop the unsent frames, and send no more. Idempotent."""
        self._closed = True
        self.unsent.close()
