"""Exchange calls with one peer: batch the frames, keep the slots of calls, and manage the memory on both sides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy
from numpy.typing import NDArray

import aiote

from ..aio import Condition, report_callback_error
from ..rails import unfolded_bytes
from .codec import decode
from .frames import VERSION, Ask, CallFrame, Cancel, End, Frame, Free, Grant, HelloFrame, Items, Piece, Return
from .memory import BorrowedMemory, LentMemory, Staging
from .unsent import Unsent

if TYPE_CHECKING:
    from .endpoint import CallEndpoint

__all__ = ["Link", "OutgoingCall", "Parcel", "kept_bytes"]

FRAME_BYTES = 96
"""An upper bound of a frame's size without its body, its pieces and the name of its method."""
PIECE_BYTES = 27
PIECE_OBJECT_BYTES = 160
"""The size of a piece in memory: a tuple of three integers."""
MAX_PIECES = 256
LEAST_MESSAGE = 4096
"""The smallest `config.message_bytes` for calls: a lease's descriptor and a method's name fit in it."""
MAX_UNSENT = 4
"""A peer that takes no messages is disconnected when more than this many frames for each slot wait for it."""
MAX_SENDING = 256
"""The most messages in flight to one peer; further frames wait unsent."""
BATCH_FRAMES = 256
UNCOUNTED_BYTES = 512
"""The decoded objects of bodies up to this length take at most 112 KiB and are not counted."""
UNFOLDING = 24
"""The decoded objects of a message may take at most this many times `message_bytes`; numbers and words take less."""


def kept_bytes(frame: CallFrame) -> int:
    """Return an upper bound of the bytes that a call takes while the server keeps it."""
    return FRAME_BYTES + len(frame.method) + len(frame.body) + PIECE_OBJECT_BYTES * len(frame.pieces)


class Parcel:
    """An encoded value: a body, and pieces that have been written to the receiver's memory already."""

    __slots__ = ("body", "outside", "pieces")

    def __init__(self, body: bytes, pieces: list[Piece], outside: bool) -> None:
        self.body, self.pieces, self.outside = body, pieces, outside


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
        engine, loop = endpoint.engine, endpoint.loop
        self.lost = ""
        self.identity = peer.address.identity
        self.share = endpoint.budget.share_of(self.identity)
        self.share.refuse = lambda: peer.disconnect("more waits for it than for anybody else, and there is no room")
        self.lent_memory = LentMemory(engine, loop, peer, endpoint.budget)
        self.staging = Staging(engine, loop, endpoint.budget, self.share)
        self.borrowed_memory = BorrowedMemory(
            engine,
            loop,
            peer,
            ask=lambda nbytes: self.post_frame(Ask(nbytes), FRAME_BYTES),
            give_back=lambda number: self.post_frame(Return(number), FRAME_BYTES),
        )
        self.hello: HelloFrame | None = None
        self.calls: dict[int, OutgoingCall] = {}
        self.running: dict[int, Served] = {}
        self.arrived: dict[int, int] = {}
        self.early: dict[int, int] = {}
        self._early_ends: dict[int, End] = {}
        self.ending = False
        self._unread: set[Piece] = set()
        self._generations: list[int] = []
        self._free: deque[int] = deque()
        self._changed = Condition(loop)
        self._greeted = False
        self.unsent = Unsent(loop, endpoint.budget, self.share)
        self._sending: deque[aiote.Transfer] = deque()
        self._scheduled = self._waiting = self._flushing = False
        self._held_bytes = self.unfolded_bytes = 0
        self._asking = False
        self.parked: list[CallFrame] = []
        self.incoming: Iterator[Frame] = iter(())  # the remaining frames of the message that is being read
        self.room = 0  # bytes for the body of a frame that is alone in its message

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
        self.post_frame(hello, FRAME_BYTES, now=True)

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
            self.room = min(hello.message_bytes, own, 1 << 20) - 2 * FRAME_BYTES
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
        self.take_back(caller.pieces)
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

    def on_ask(self, frame: Ask) -> None:
        """Lend memory, or tell the peer why not. Raises ValueError if the peer asks again before the last answer."""
        if self._asking:
            raise ValueError("it asks for memory before its last request was answered")
        self._asking = True
        self.endpoint.spawn(self._lend_memory, frame.nbytes, name="aiote service: lend memory")

    async def _lend_memory(self, nbytes: int) -> None:
        try:
            grant = Grant(*await self.lent_memory.lend(nbytes))
        except (BlockingIOError, aiote.AioteError) as error:
            grant = Grant(0, 0, b"", str(error)[:500])
        finally:
            self._asking = False
        self.post_frame(grant, FRAME_BYTES + len(grant.descriptor) + len(grant.reason.encode()))

    def on_grant(self, frame: Grant) -> None:
        """Take the answer to this engine's Ask. Raises ValueError if this engine did not ask for it."""
        self.borrowed_memory.granted(frame.number, frame.nbytes, frame.descriptor, frame.reason)
        self.endpoint.watch_memory()

    def on_return(self, frame: Return) -> None:
        """Take lent memory back. Raises KeyError if it is not lent."""
        region = self.lent_memory.returned(frame.number)
        self.endpoint.spawn(self.lent_memory.take_back, region, name="aiote service: take memory back")

    def sweep(self) -> bool:
        """Return borrowed segments, and close staging segments, that are idle; tell whether other segments remain."""
        self.borrowed_memory.sweep()
        self.staging.sweep()
        return bool(self.borrowed_memory.segments or self.staging.segments)

    # Bytes that the peer has placed in this engine's memory.

    def hold_pieces(self, pieces: list[Piece]) -> None:
        """Record the pieces that a frame has placed here, until `release`.

        Raises ValueError if the pieces together have more bytes than the lent memory: then they overlap, and the peer
        could make this engine read one place again and again.
        """
        if pieces:
            self._held_bytes += sum([piece[2] for piece in pieces])
            if self._held_bytes > self.lent_memory.nbytes:
                raise ValueError("pieces in lent memory overlap: they have more bytes than it")

    def release(self, pieces: list[Piece]) -> None:
        """Record that these pieces were read."""
        self._held_bytes -= sum([piece[2] for piece in pieces])

    def free_pieces(self, pieces: list[Piece]) -> None:
        """Record that these pieces were read, and tell the peer."""
        if pieces:
            self.release(pieces)
            self.post_frame(Free(pieces), FRAME_BYTES + PIECE_BYTES * len(pieces))

    # Values.

    def inline(self, body: bytes, arrays: list[NDArray[Any]], fixed: int = 0) -> Parcel | None:
        """Return the parcel of a value that fits into its frame, otherwise None. Raises UsageError if `body` is too
        long.

        `fixed` is the size of the other variable parts of the frame in bytes.
        """
        self.endpoint.check_message(len(body))
        return Parcel(body, [], False) if not arrays and len(body) <= self.room - fixed else None

    async def place_arrays(
        self, body: bytes, arrays: list[NDArray[Any]], fixed: int = 0, *, kept: bool = False
    ) -> Parcel:
        """Write the arrays of a value, and a body that is too long, into the peer's memory; return the parcel.

        The bytes are there when this returns. `kept` keeps the registrations of the arrays for the next call. Raises
        UsageError for too many arrays, BlockingIOError if the peer lends no memory, TransferError and PeerError. If it
        raises or is cancelled, it keeps no places in the peer's memory.
        """
        room = self.room - fixed
        if len(arrays) >= MAX_PIECES or PIECE_BYTES * (len(arrays) + 1) > room:
            raise aiote.UsageError(f"{len(arrays)} large arrays in one value are too many: concatenate some of them")
        pieces: list[Piece] = []
        try:
            for array in arrays:
                pieces.append(await self._push_bytes(array, kept))
            outside = len(body) + PIECE_BYTES * len(pieces) > room
            if outside:
                pieces.append(await self._push_bytes(body, False))
                body = b""
        except BaseException:
            self.take_back(pieces)
            raise
        return Parcel(body, pieces, outside)

    async def _push_bytes(self, data: NDArray[Any] | bytes, kept: bool) -> Piece:
        """Write bytes into memory that the peer lends, and return their place."""
        endpoint = self.endpoint
        array = numpy.frombuffer(data, numpy.uint8) if isinstance(data, bytes) else numpy.ascontiguousarray(data)
        piece, remote = await self.borrowed_memory.place(array.nbytes)
        try:
            if kept and array is data:
                held = endpoint.hold(array)
                try:
                    await endpoint.engine.write(held.region, remote)
                finally:
                    endpoint.let_go(held)
            else:
                async with endpoint.engine.register(array, access="local") as region:
                    await endpoint.engine.write(region, remote)
        except BaseException:
            self.borrowed_memory.give(piece)
            raise
        endpoint.array_bytes += array.nbytes
        return piece

    def take_back(self, pieces: list[Piece]) -> None:
        """Free places in the memory that the peer lends."""
        for piece in pieces:
            self.borrowed_memory.give(piece)

    def hand_over(self, pieces: list[Piece]) -> None:
        """Keep places occupied until the peer says that it has read them."""
        self._unread.update(pieces)

    def on_free(self, frame: Free) -> None:
        """Free places that the peer has read. Raises KeyError for places that were not handed over."""
        for piece in frame.pieces:
            self._unread.remove(piece)
            self.borrowed_memory.give(piece)

    def read_value(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        frame: CallFrame | End | Items,
        body: bytes,
        charge: Callable[[int], object] | None = None,
    ) -> Any:
        """Decode the value of a body; the value owns its arrays.

        `charge` is called with the estimated bytes of the decoded objects, unless the body is short. Raises ValueError,
        and the exceptions of `charge`.
        """
        body, take = self.open_body(frame, body, charge)
        return decode(decoder, body, take)

    def open_body(
        self, frame: CallFrame | End | Items, body: bytes, charge: Callable[[int], object] | None = None
    ) -> tuple[bytes, Callable[[int, int], memoryview]]:
        """Check the bounds of a body; return it and the function that finds its arrays, for `decode`."""
        unread = dict(enumerate(frame.pieces))

        def take(number: int, nbytes: int) -> memoryview:
            piece = unread.pop(number, None)
            if piece is None or piece[2] != nbytes:
                raise ValueError(f"piece {number} is missing, or is not the array of {nbytes} bytes")
            return self.lent_memory.view(piece)

        if frame.outside:
            if not unread:
                raise ValueError("the message does not say where its body is")
            _, piece = unread.popitem()
            self.endpoint.check_message(piece[2])
            # Copy the body, because the peer can still write to the lent memory while it is decoded.
            body = bytes(self.lent_memory.view(piece))
        if len(body) > UNCOUNTED_BYTES:
            nbytes = unfolded_bytes(body)
            if nbytes > UNFOLDING * self.endpoint.limits.message_bytes:
                raise ValueError(f"values would take about {nbytes} bytes as objects; put them in arrays")
            if charge is not None:
                charge(nbytes)
        return body, take

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

    # Frames.

    def post_frame(self, frame: Frame, nbytes: int, *, now: bool = False) -> None:
        """Send a frame of at most `nbytes` bytes, together with the other frames of this turn of the loop, or `now`.

        If too many frames wait for the peer because it takes no messages, disconnect it.
        """
        if self.lost:
            return
        try:
            self.unsent.put(frame, nbytes)
        except BlockingIOError as error:
            self.peer.disconnect(f"it does not read the answers to its calls: {error}"[:200])
            return
        if ((now and not self.endpoint.reading) or len(self.unsent) >= BATCH_FRAMES) and not self._waiting:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self.endpoint.flush_later(self)
        # Count the slots that this engine grants the peer, and this engine's calls in flight to the peer. The number of
        # slots that the peer announces does not raise the bound.
        if len(self.unsent) > MAX_UNSENT * (self.endpoint.limits.slots + len(self.calls) + 64):
            self.peer.disconnect("it does not read the answers to its calls")

    def flush(self) -> None:
        """Send the unsent frames."""
        self._scheduled = False
        if self._flushing:
            return
        self._flushing = True
        try:
            while self.unsent and not self._waiting and not self.lost:
                self._send_some()
        except aiote.AioteError as error:
            self._give_up(error)
        finally:
            self._flushing = False

    def _send_some(self) -> None:
        data, count = self.unsent.batch(self.room or LEAST_MESSAGE - 2 * FRAME_BYTES)
        while self._sending and self._sending[0].done():
            # A message that failed may have carried ends of calls. Its failure disconnects the peer, so that the peer's
            # callers do not wait for these ends.
            self._sending.popleft().raise_failure()
        try:
            if len(self._sending) >= MAX_SENDING:
                raise aiote.QueueFull("as many messages are on their way as may be")
            self._sending.append(self.endpoint.engine.submit_send(self.peer, data))
        except aiote.QueueFull:
            self._waiting = True
            self.endpoint.spawn(self._wait_for_room, name="aiote service: wait for room")
            return
        self.endpoint.messages += 1
        self.endpoint.message_bytes += len(data)
        self.unsent.record_sent(count)

    async def _wait_for_room(self) -> None:
        try:
            if self._sending:
                await self._sending[0]
            await self.peer.room()
        except aiote.AioteError as error:
            self._give_up(error)
            return
        finally:
            self._waiting = False
        self.flush()

    def _give_up(self, error: aiote.AioteError) -> None:
        """Disconnect a peer because sending to it failed. If it is lost already, an event tells the endpoint."""
        if not (self.peer.lost or self.endpoint.engine.closed):
            # Do not report a connection that has just broken: the callers get its error.
            if not isinstance(error, aiote.TransferError | aiote.PeerError):
                report_callback_error(error)
            self.peer.disconnect("what this side has to say cannot be sent")

    def cancel(self, slot: int, generation: int) -> None:
        """Tell the peer that a call is cancelled."""
        self.post_frame(Cancel(slot, generation), FRAME_BYTES, now=True)

    # The end.

    def end(self, reason: str) -> None:
        """Drop the unsent frames and end every call and wait, because the peer is lost. Idempotent."""
        if self.lost:
            return
        self.lost = reason or "it was lost"
        self.unsent.close()
        self.unpark()
        self.borrowed_memory.close(aiote.PeerLostError(str(self.peer.address), self.lost))
        calls, self.calls = tuple(self.calls.values()), {}
        for caller in calls:
            caller.receive_end(None, self.lost)
        self._changed.wake_all()
