"""Exchange calls with one peer: the handshake, and the slots of calls.

`sending` has how frames are sent, `values` how values get from one memory to the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import aiote

from ..aio import Condition
from .frames import VERSION, CallFrame, Cancel, End, Frame, HelloFrame, Items, Piece
from .sending import FRAME_BYTES, LEAST_MESSAGE, FrameSender
from .values import PIECE_OBJECT_BYTES, Values

if TYPE_CHECKING:
    from .endpoint import CallEndpoint

__all__ = ["Link", "OutgoingCall", "kept_bytes"]


def kept_bytes(frame: CallFrame) -> int:
    """Return an upper bound of the bytes that a call takes while the server keeps it."""
    return FRAME_BYTES + len(frame.method) + len(frame.body) + PIECE_OBJECT_BYTES * len(frame.pieces)


class OutgoingCall(Protocol):
    """A call of this engine in flight, as the link keeps it by its slot."""

    generation: int
    slot: int
    """The call's slot after it was sent; -1 before."""
    pieces: list[Piece]
    """The places of its arguments in the peer's memory."""
    arrived: int
    """The number of stream items that have arrived."""

    def receive_end(self, end: End | None, reason: str) -> None:
        """Take the call's End, or None and the reason why no End will come."""

    def items(self, frame: Items) -> None:
        """Take items of a stream. Raises ValueError if they violate the protocol."""


class Served(Protocol):
    """A call of the peer that this engine serves, as the link keeps it by its slot."""

    generation: int

    def cancel(self) -> None:
        """Cancel the call, because the peer no longer waits for it."""

    def credit(self, taken: int) -> None:
        """Record that the peer has taken the first `taken` items of a stream. Raises ValueError if fewer were sent."""


class Link:
    """The calls, frames and memory that this engine shares with one peer. Made by `CallEndpoint.link_to`."""

    def __init__(self, endpoint: CallEndpoint, peer: aiote.Peer) -> None:
        self.endpoint, self.peer = endpoint, peer
        self.lost = ""
        self.identity = peer.address.identity
        self.share = endpoint.budget.share_of(self.identity)
        self.share.refuse = lambda: peer.disconnect("more waits for it than for anybody else, and there is no room")
        self.hello: HelloFrame | None = None
        self.calls: dict[int, OutgoingCall] = {}
        self.frames = FrameSender(endpoint, peer, self.share, self.calls)
        self.values = Values(endpoint, peer, self.share, self.frames)
        self.running: dict[int, Served] = {}
        self.arrived: dict[int, int] = {}
        self.early: dict[int, int] = {}
        self._early_ends: dict[int, End] = {}
        self.ending = False
        self._generations: list[int] = []
        self._free: deque[int] = deque()
        self._changed = Condition(endpoint.loop)
        self._greeted = False
        self.unfolded_bytes = 0
        self.parked: list[CallFrame] = []
        self.incoming: Iterator[Frame] = iter(())  # the remaining frames of the message that is being read

    # Handshake.

    async def greet(self) -> None:
        """Send the HelloFrame, and wait until the peer's HelloFrame has arrived or the peer is lost."""
        if self.hello is None and not self._greeted:
            self._greet(asks=True)
        await self._changed.until(lambda: self.hello is not None or self.lost)

    def _greet(self, *, asks: bool) -> None:
        self._greeted = True
        endpoint = self.endpoint
        limits = endpoint.limits
        message_bytes = endpoint.engine.config.message_bytes
        hello = HelloFrame(VERSION, asks, message_bytes, limits.slots, limits.stream_items, limits.stream_bytes)
        self.frames.post(hello, FRAME_BYTES, now=True)

    def receive_hello(self, hello: HelloFrame) -> None:
        """Take the peer's HelloFrame; answer it if it asks. Raises ValueError if its version or limits do not fit."""
        if hello.version != VERSION:
            raise ValueError(f"it speaks version {hello.version} of the protocol of calls, expected version {VERSION}")
        if hello.message_bytes < LEAST_MESSAGE or not 1 <= hello.slots <= 1 << 16:
            raise ValueError(f"its limits are impossible: {hello.message_bytes} message_bytes, {hello.slots} slots")
        if self.hello is None:
            self.hello = hello
            # The engine knows the peer's real limit, so the first longer message disconnects a peer that claims more.
            # This engine's own limit bounds the messages to the peer, too.
            own = self.endpoint.engine.config.message_bytes
            self.frames.room = min(hello.message_bytes, own, 1 << 20) - 2 * FRAME_BYTES
            self._changed.wake_all()
        if hello.asks:
            self._greet(asks=False)

    # Slots.

    @property
    def has_slot(self) -> bool:
        """Whether one more call may begin now."""
        return bool(self._free) or (self.hello is not None and len(self._generations) < self.hello.slots)

    async def take_slot(self, caller: OutgoingCall) -> int:
        """Wait for a free slot and take it for a call; return -1 if the peer is lost."""
        while not self.has_slot:
            if self.lost:
                return -1
            await self._changed.wait()
        if not self._free:  # Slots take memory once they are used, because the peer says how many there are.
            self._free.append(len(self._generations))
            self._generations.append(0)
        slot = self._free.popleft()
        self._generations[slot] += 1
        caller.generation = self._generations[slot]
        self.calls[slot] = caller
        return slot

    def give_slot(self, slot: int, caller: OutgoingCall) -> None:
        """Give a slot back, because its call has ended or never began."""
        if self.calls.get(slot) is caller:
            del self.calls[slot]
            self._free.append(slot)
            # A waiting caller takes the slot before the caller whose call has ended can ask for it again.
            self._changed.wake_one(self.endpoint.wake)

    def on_end(self, frame: End) -> None:
        """Hand an End to its call once every item before it has arrived. Raises ValueError if there is no such call."""
        caller = self._caller(frame)
        if frame.items > caller.arrived:
            self._early_ends[frame.slot] = frame
            return
        self.give_slot(frame.slot, caller)
        self.values.take_back(caller.pieces)
        caller.receive_end(frame, "")

    def on_items(self, frame: Items) -> None:
        """Hand items to their call. Raises ValueError if there is no such call."""
        caller = self._caller(frame)
        caller.items(frame)
        end = self._early_ends.get(frame.slot)
        if end is not None and end.items <= caller.arrived:
            self.on_end(self._early_ends.pop(frame.slot))

    def _caller(self, frame: End | Items) -> OutgoingCall:
        caller = self.calls.get(frame.slot)
        # A call that has a slot but was not sent yet (slot -1) cannot have items or an end.
        if caller is None or caller.generation != frame.generation or caller.slot < 0:
            raise ValueError(f"{type(frame).__name__} for slot {frame.slot}, in which no call is under way")
        return caller

    # Calls that arrived before the handshake.

    def park(self, frame: CallFrame) -> None:
        """Keep a call that has overtaken the HelloFrame. Raises ValueError if there are too many or too large ones."""
        if len(self.parked) >= self.endpoint.limits.slots:
            raise ValueError("more calls than slots arrived before the handshake")
        try:
            self.endpoint.budget.wait(self.share, kept_bytes(frame))
        except BlockingIOError as error:
            raise ValueError(f"calls arrived before the handshake: {error}") from error
        self.parked.append(frame)

    def unpark(self) -> list[CallFrame]:
        """Return the calls that have overtaken the HelloFrame, and forget them."""
        parked, self.parked = self.parked, []
        self.endpoint.budget.over(self.share, sum(map(kept_bytes, parked)))
        return parked

    def cancel(self, slot: int, generation: int) -> None:
        """Tell the peer that a call is cancelled."""
        self.frames.post(Cancel(slot, generation), FRAME_BYTES, now=True)

    # The end.

    def end(self, reason: str) -> None:
        """Drop the unsent frames and end every call and wait, because the peer is lost. Idempotent."""
        if self.lost:
            return
        self.lost = reason or "it was lost"
        self.frames.close()
        self.unpark()
        self.values.borrowed_memory.close(aiote.PeerLostError(str(self.peer.address), self.lost))
        calls = tuple(self.calls.values())
        self.calls.clear()
        for caller in calls:
            caller.receive_end(None, self.lost)
        self._changed.wake_all()
