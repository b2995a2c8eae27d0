"""The conversation with one peer: frames in batches, slots of calls, and memory on both sides."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from numpy.typing import NDArray

import aiote

from ..aio import Signal
from .codec import decode, encode
from .frames import VERSION, Ask, Call, Cancel, End, Frame, Free, Grant, Hello, Items, Piece, pack
from .memory import Borrowed, Lent, Staging

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["Caller", "Link", "Parcel"]

FRAME_BYTES = 96
"""More than a frame takes beside its body, its pieces and the name of its method."""
PIECE_BYTES = 27
LEAST_MESSAGE = 4096
"""What `config.message_bytes` has to be for calls: a lease's descriptor and a method's name fit in it."""
UNSENT_FRAMES = 4
"""A peer that takes no messages is lost when so many frames for each slot wait for it."""


class Parcel:
    """A value as it travels: a body, and pieces that are in the receiver's memory already."""

    __slots__ = ("body", "outside", "pieces")

    def __init__(self, body: bytes, pieces: list[Piece], outside: bool) -> None:
        self.body, self.pieces, self.outside = body, pieces, outside


class Caller(Protocol):
    """A call of ours that is under way, as its slot has it."""

    generation: int
    pieces: list[Piece]
    """Where its arguments are, in the peer's memory."""
    arrived: int
    """How many items of a stream have come."""

    def ended(self, end: End | None, reason: str) -> None:
        """Take its end, or None and why there will be none."""

    def items(self, frame: Items) -> None:
        """Take items of a stream. Raises ValueError for what cannot be."""


class Served(Protocol):
    """A call of the peer's that is under way here, as its slot has it."""

    generation: int

    def cancel(self) -> None:
        """End it: nobody waits for it any more."""

    def credit(self, taken: int) -> None:
        """Take note that so many items of a stream were taken. Raises ValueError for more than were sent."""


class Link:
    """The conversation with one peer. Made by `Endpoint.link_to`."""

    def __init__(self, endpoint: Endpoint, peer: aiote.Peer) -> None:
        self.endpoint, self.peer = endpoint, peer
        engine, loop = endpoint.engine, endpoint.loop
        self.lost = ""
        self.lent = Lent(engine, peer, endpoint.budget)
        self.staging = Staging(engine, endpoint.budget)
        self.borrowed = Borrowed(engine, loop, lambda nbytes: self.post(Ask(nbytes), FRAME_BYTES))
        self.hello: Hello | None = None
        self.calls: dict[int, Caller] = {}
        self.running: dict[int, Served] = {}
        self.arrived: dict[int, int] = {}
        self.early: dict[int, int] = {}
        self._early_ends: dict[int, End] = {}
        self.ending = False
        self._unread: set[Piece] = set()
        self._generations: list[int] = []
        self._free: deque[int] = deque()
        self._changed = Signal(loop)
        self._greeted = False
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        self._scheduled = self._waiting = False
        self.room = 0  # for the body of a frame that goes alone

    # Greeting.

    async def greet(self) -> None:
        """Wait until the peer has said what it takes, or is lost."""
        if self.hello is None and not self._greeted:
            self._greet(asks=True)
        while self.hello is None and not self.lost:
            await self._changed.wait()

    def _greet(self, *, asks: bool) -> None:
        self._greeted = True
        endpoint = self.endpoint
        limits = endpoint.limits
        message_bytes = endpoint.engine.config.message_bytes
        hello = Hello(VERSION, asks, message_bytes, limits.slots, limits.stream_items, limits.stream_bytes)
        self.post(hello, FRAME_BYTES, now=True)

    def greeted(self, hello: Hello) -> None:
        """Take what the peer takes. Raises ValueError where the two cannot talk."""
        if hello.version != VERSION:
            raise ValueError(f"it speaks version {hello.version} of the protocol of calls, this side version {VERSION}")
        if hello.message_bytes < LEAST_MESSAGE or not 1 <= hello.slots <= 1 << 16:
            raise ValueError(f"it takes messages of {hello.message_bytes} bytes and {hello.slots} calls")
        if self.hello is None:
            self.hello = hello
            self.room = hello.message_bytes - 2 * FRAME_BYTES
            self._generations = [0] * hello.slots
            self._free.extend(range(hello.slots))
            self._changed.set()
        if hello.asks:
            self._greet(asks=False)

    # Slots.

    @property
    def has_slot(self) -> bool:
        """Whether one more call may begin now."""
        return bool(self._free)

    async def take_slot(self, caller: Caller) -> int:
        """Take a slot for a call, waiting until there is one, or the peer is lost; -1 then."""
        while not self._free:
            if self.lost:
                return -1
            await self._changed.wait()
        slot = self._free.popleft()
        self._generations[slot] += 1
        caller.generation = self._generations[slot]
        self.calls[slot] = caller
        return slot

    def give_slot(self, slot: int) -> None:
        """Give a slot back: the call is over, or never began."""
        if self.calls.pop(slot, None) is not None:
            self._free.append(slot)
            self._changed.wake_one()

    def on_end(self, frame: End) -> None:
        """Hand an end to its call, once every item before it has come. Raises ValueError for one of no call."""
        caller = self._caller(frame)
        if frame.items > caller.arrived:
            self._early_ends[frame.slot] = frame
            return
        self.give_slot(frame.slot)
        self.take_back(caller.pieces)
        caller.ended(frame, "")

    def on_items(self, frame: Items) -> None:
        """Hand items to their call. Raises ValueError for those of no call."""
        caller = self._caller(frame)
        caller.items(frame)
        end = self._early_ends.get(frame.slot)
        if end is not None and end.items <= caller.arrived:
            self.on_end(self._early_ends.pop(frame.slot))

    def _caller(self, frame: End | Items) -> Caller:
        caller = self.calls.get(frame.slot)
        if caller is None or caller.generation != frame.generation:
            raise ValueError(f"{type(frame).__name__} of a call that there is not, in slot {frame.slot}")
        return caller

    def on_ask(self, frame: Ask) -> None:
        """Lend memory, or say why not."""
        try:
            number, nbytes, descriptor = self.lent.lend(frame.nbytes)
            grant = Grant(number, nbytes, descriptor)
        except (BlockingIOError, aiote.AioteError) as error:
            grant = Grant(0, 0, b"", str(error)[:500])
        self.post(grant, FRAME_BYTES + len(grant.descriptor) + len(grant.reason.encode()))

    # Values.

    async def parcel(self, value: object, *, kept: bool = False) -> Parcel:
        """Bring a value on its way: what is long of it is in the peer's memory when this returns.

        `kept` keeps the registrations of its arrays for the next call. Raises UsageError for what cannot travel,
        BlockingIOError where the peer lends no memory, TransferError, PeerError. Cancelled, it has taken nothing.
        """
        body, arrays = encode(value)
        if not arrays and len(body) <= self.room:
            return Parcel(body, [], False)
        pieces: list[Piece] = []
        try:
            for array in arrays:
                pieces.append(await self._push(array, kept))
            outside = len(body) + PIECE_BYTES * len(pieces) > self.room
            if outside:
                self.endpoint.check_message(len(body))
                pieces.append(await self._push(body, False))
                body = b""
        except BaseException:
            self.take_back(pieces)
            raise
        return Parcel(body, pieces, outside)

    async def _push(self, data: NDArray[Any] | bytes, kept: bool) -> Piece:
        """Write bytes into memory that the peer lends us."""
        endpoint = self.endpoint
        array = endpoint.contiguous(data)
        kept = kept and array is data
        piece, remote = await self.borrowed.place(array.nbytes)
        try:
            if kept:
                region = endpoint.registrations.take(array)
                try:
                    await endpoint.engine.write(region, remote)
                finally:
                    endpoint.registrations.give(array)
            else:
                async with endpoint.engine.register(array, access="local") as region:
                    await endpoint.engine.write(region, remote)
        except BaseException:
            self.borrowed.give(piece)
            raise
        endpoint.array_bytes += array.nbytes
        return piece

    def take_back(self, pieces: list[Piece]) -> None:
        """Take places again in the memory that the peer lends us."""
        for piece in pieces:
            self.borrowed.give(piece)

    def hand_over(self, pieces: list[Piece]) -> None:
        """Leave places to the peer until it says that it has read them."""
        self._unread.update(pieces)

    def on_free(self, frame: Free) -> None:
        """Take places back that the peer has read. Raises KeyError for others."""
        for piece in frame.pieces:
            self._unread.remove(piece)
            self.borrowed.give(piece)

    def free(self, pieces: list[Piece]) -> None:
        """Tell the peer that these pieces were read."""
        if pieces:
            self.post(Free(pieces), FRAME_BYTES + PIECE_BYTES * len(pieces))

    def read(
        self, decoder: msgspec.msgpack.Decoder[Any], frame: Call | End | Items, body: bytes, *, copied: bool
    ) -> Any:
        """Return the value of a body, its arrays as views of our memory, or as copies. Raises ValueError."""
        pieces = frame.pieces

        def take(number: int, nbytes: int) -> memoryview:
            if not 0 <= number < len(pieces) or pieces[number][2] != nbytes:
                raise ValueError(f"an array of {nbytes} bytes is not piece {number}")
            return self.lent.view(pieces[number])

        if frame.outside:
            if not pieces:
                raise ValueError("a body is nowhere")
            self.endpoint.check_message(pieces[-1][2])
            # A copy: the peer may write there while it is being read.
            body = bytes(self.lent.view(pieces[-1]))
        return decode(decoder, body, take, copied=copied)

    # Frames.

    def post(self, frame: Frame, nbytes: int, *, now: bool = False) -> None:
        """Send a frame of at most so many bytes: with others of this turn of the loop, or `now`."""
        if self.lost:
            return
        self._frames.append(frame)
        self._sizes.append(nbytes)
        if len(self._frames) > UNSENT_FRAMES * (self.endpoint.limits.slots + 64):
            self.peer.disconnect("it does not take the answers to its calls")
        elif now and not self._waiting:
            self._flush()
        elif not self._scheduled:
            self._scheduled = True
            self.endpoint.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        limit = self.room or LEAST_MESSAGE - 2 * FRAME_BYTES
        while self._frames and not self._waiting and not self.lost:
            count, total = 1, self._sizes[0]
            while count < len(self._frames) and total + self._sizes[count] <= limit:
                total += self._sizes[count]
                count += 1
            data = pack(self._frames[:count])
            try:
                self.endpoint.engine.submit_send(self.peer, data)
            except aiote.QueueFull:
                self._waiting = True
                self.endpoint.spawn(self._wait_for_room, name="aiote service: wait for room")
                return
            except aiote.AioteError:
                return  # it is lost, of which the endpoint hears
            self.endpoint.messages += 1
            self.endpoint.message_bytes += len(data)
            del self._frames[:count], self._sizes[:count]

    async def _wait_for_room(self) -> None:
        try:
            await self.peer.room()
        except aiote.AioteError:
            return
        finally:
            self._waiting = False
        self._flush()

    def cancel(self, slot: int, generation: int) -> None:
        """Tell the peer that nobody waits for a call any more."""
        self.post(Cancel(slot, generation), FRAME_BYTES, now=True)

    # The end.

    def end(self, reason: str) -> None:
        """End all that waits for the peer, which is lost. Idempotent."""
        if self.lost:
            return
        self.lost = reason or "it was lost"
        self._frames.clear()
        self._sizes.clear()
        self.borrowed.close(aiote.PeerLostError(str(self.peer.address), self.lost))
        calls, self.calls = tuple(self.calls.values()), {}
        for caller in calls:
            caller.ended(None, self.lost)
        self._changed.set()
