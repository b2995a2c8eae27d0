"""The conversation with one peer: frames in batches, slots of calls, and memory on both sides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy
from numpy.typing import NDArray

import aiote

from ..aio import Signal
from ..rails import unfolded_bytes
from .background import report
from .codec import decode
from .frames import VERSION, Ask, CallFrame, Cancel, End, Frame, Free, Grant, HelloFrame, Items, Piece, Return
from .memory import Borrowed, Lent, Staging
from .unsent import Unsent

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["Link", "OutgoingCall", "Parcel", "kept_bytes"]

FRAME_BYTES = 96
"""More than a frame takes beside its body, its pieces and the name of its method."""
PIECE_BYTES = 27
PIECE_OBJECT_BYTES = 160
"""A piece as it is kept: a tuple of three integers."""
MAX_PIECES = 256
LEAST_MESSAGE = 4096
"""What `config.message_bytes` has to be for calls: a lease's descriptor and a method's name fit in it."""
MAX_UNSENT = 4
"""A peer that takes no messages is lost when so many frames for each slot wait for it."""
MAX_SENDING = 256
"""Messages to one peer that it has not taken yet; what comes behind them waits as frames."""
BATCH_FRAMES = 256
UNCOUNTED_BYTES = 512
"""The objects of bodies up to this length take 112 KiB at most, and are not counted."""
UNFOLDING = 24
"""The objects of a message take at most so many times `message_bytes`: those of numbers and words take less."""


def kept_bytes(frame: CallFrame) -> int:
    """Return how many bytes a call takes at most while it is kept."""
    return FRAME_BYTES + len(frame.method) + len(frame.body) + PIECE_OBJECT_BYTES * len(frame.pieces)


class Parcel:
    """A value as it travels: a body, and pieces that are in the receiver's memory already."""

    __slots__ = ("body", "outside", "pieces")

    def __init__(self, body: bytes, pieces: list[Piece], outside: bool) -> None:
        self.body, self.pieces, self.outside = body, pieces, outside


class OutgoingCall(Protocol):
    """A call of ours that is under way, as its slot has it."""

    generation: int
    slot: int
    """Its slot, once it was sent; -1 before."""
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
        self.lent = Lent(engine, loop, peer, endpoint.budget)
        self.staging = Staging(engine, loop, endpoint.budget)
        self.borrowed = Borrowed(
            engine,
            loop,
            peer,
            ask=lambda nbytes: self.post(Ask(nbytes), FRAME_BYTES),
            give_back=lambda number: self.post(Return(number), FRAME_BYTES),
        )
        self.identity = peer.address.identity
        self.share = endpoint.budget.share_of(self.identity)
        self.share.refuse = lambda: peer.disconnect("more waits for it than for anybody else, and there is no room")
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
        self._changed = Signal(loop)
        self._greeted = False
        self.unsent = Unsent(loop, endpoint.budget, self.share)
        self._sending: deque[aiote.Transfer] = deque()
        self._scheduled = self._waiting = self._flushing = False
        self._held_bytes = self.unfolded_bytes = 0
        self._asking = False
        self.parked: list[CallFrame] = []
        self.incoming: Iterator[Frame] = iter(())  # what is left of the message that is being read
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
        hello = HelloFrame(VERSION, asks, message_bytes, limits.slots, limits.stream_items, limits.stream_bytes)
        self.post(hello, FRAME_BYTES, now=True)

    def greeted(self, hello: HelloFrame) -> None:
        """Take what the peer takes. Raises ValueError where the two cannot talk."""
        if hello.version != VERSION:
            raise ValueError(f"it speaks version {hello.version} of the protocol of calls, this side version {VERSION}")
        if hello.message_bytes < LEAST_MESSAGE or not 1 <= hello.slots <= 1 << 16:
            raise ValueError(f"it takes messages of {hello.message_bytes} bytes and {hello.slots} calls")
        if self.hello is None:
            self.hello = hello
            # What it truly takes the engine knows; a peer that says more is disconnected by the first frame. What waits
            # for it is made of no larger ones than this side takes.
            own = self.endpoint.engine.config.message_bytes
            self.room = min(hello.message_bytes, own, 1 << 20) - 2 * FRAME_BYTES
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

    async def take_slot(self, caller: OutgoingCall) -> int:
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

    def give_slot(self, slot: int, caller: OutgoingCall) -> None:
        """Give a slot back: the call is over, or never began."""
        if self.calls.get(slot) is caller:
            del self.calls[slot]
            self._free.append(slot)
            # Who waits takes it before the caller whose call has ended may come for it again.
            self._changed.wake_one(self.endpoint.wake)

    def on_end(self, frame: End) -> None:
        """Hand an end to its call, once every item before it has come. Raises ValueError for one of no call."""
        caller = self._caller(frame)
        if frame.items > caller.arrived:
            self._early_ends[frame.slot] = frame
            return
        self.give_slot(frame.slot, caller)
        self.take_back(caller.pieces)
        caller.ended(frame, "")

    def on_items(self, frame: Items) -> None:
        """Hand items to their call. Raises ValueError for those of no call."""
        caller = self._caller(frame)
        caller.items(frame)
        end = self._early_ends.get(frame.slot)
        if end is not None and end.items <= caller.arrived:
            self.on_end(self._early_ends.pop(frame.slot))

    def _caller(self, frame: End | Items) -> OutgoingCall:
        caller = self.calls.get(frame.slot)
        # One that has a slot and was not sent yet has no end.
        if caller is None or caller.generation != frame.generation or caller.slot < 0:
            raise ValueError(f"{type(frame).__name__} of a call that there is not, in slot {frame.slot}")
        return caller

    def on_ask(self, frame: Ask) -> None:
        """Lend memory, or say why not. Raises ValueError for what is asked before the last answer."""
        if self._asking:
            raise ValueError("it asks for memory while it is given some")
        self._asking = True
        self.endpoint.spawn(self._lend, frame.nbytes, name="aiote service: lend memory")

    async def _lend(self, nbytes: int) -> None:
        try:
            grant = Grant(*await self.lent.lend(nbytes))
        except (BlockingIOError, aiote.AioteError) as error:
            grant = Grant(0, 0, b"", str(error)[:500])
        finally:
            self._asking = False
        self.post(grant, FRAME_BYTES + len(grant.descriptor) + len(grant.reason.encode()))

    def on_grant(self, frame: Grant) -> None:
        """Take the answer to what was asked. Raises ValueError for what was not asked for."""
        self.borrowed.granted(frame.number, frame.nbytes, frame.descriptor, frame.reason)
        self.endpoint.watch_memory()

    def on_return(self, frame: Return) -> None:
        """Take lent memory back. Raises KeyError for what is not lent."""
        region = self.lent.returned(frame.number)
        self.endpoint.spawn(self.lent.take_back, region, name="aiote service: take memory back")

    def sweep(self) -> bool:
        """Give back and give up what was not used for a while; tell whether there is more."""
        self.borrowed.sweep()
        self.staging.sweep()
        return bool(self.borrowed.segments or self.staging.segments)

    # What the peer has placed in our memory.

    def hold(self, pieces: list[Piece]) -> None:
        """Take note of what a frame has placed here, until `release`. Raises ValueError where it is more than is lent:
        then places overlap, and one place would be read again and again.
        """
        if pieces:
            self._held_bytes += sum([piece[2] for piece in pieces])
            if self._held_bytes > self.lent.nbytes:
                raise ValueError("more is placed in lent memory than there is of it")

    def release(self, pieces: list[Piece]) -> None:
        """Take note that these pieces were read."""
        self._held_bytes -= sum([piece[2] for piece in pieces])

    def free(self, pieces: list[Piece]) -> None:
        """Tell the peer that these pieces were read."""
        if pieces:
            self.release(pieces)
            self.post(Free(pieces), FRAME_BYTES + PIECE_BYTES * len(pieces))

    # Values.

    def inline(self, body: bytes, arrays: list[NDArray[Any]], fixed: int = 0) -> Parcel | None:
        """Return what lies in its frame as a whole, None for what does not. Raises UsageError for what is too long.

        `fixed` are bytes that the frame has beside it.
        """
        self.endpoint.check_message(len(body))
        return Parcel(body, [], False) if not arrays and len(body) <= self.room - fixed else None

    async def bring(self, body: bytes, arrays: list[NDArray[Any]], fixed: int = 0, *, kept: bool = False) -> Parcel:
        """Bring what is long into the peer's memory; it is there when this returns.

        `kept` keeps the registrations of the arrays for the next call. Raises UsageError for too many arrays,
        BlockingIOError where the peer lends no memory, TransferError, PeerError. Cancelled, it has taken nothing.
        """
        room = self.room - fixed
        if len(arrays) >= MAX_PIECES or PIECE_BYTES * (len(arrays) + 1) > room:
            raise aiote.UsageError(f"{len(arrays)} large arrays in one value: put them together")
        pieces: list[Piece] = []
        try:
            for array in arrays:
                pieces.append(await self._push(array, kept))
            outside = len(body) + PIECE_BYTES * len(pieces) > room
            if outside:
                pieces.append(await self._push(body, False))
                body = b""
        except BaseException:
            self.take_back(pieces)
            raise
        return Parcel(body, pieces, outside)

    async def _push(self, data: NDArray[Any] | bytes, kept: bool) -> Piece:
        """Write bytes into memory that the peer lends us."""
        endpoint = self.endpoint
        array = numpy.frombuffer(data, numpy.uint8) if isinstance(data, bytes) else numpy.ascontiguousarray(data)
        piece, remote = await self.borrowed.place(array.nbytes)
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

    def read(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        frame: CallFrame | End | Items,
        body: bytes,
        charge: Callable[[int], object] | None = None,
    ) -> Any:
        """Return the value of a body; its arrays are its own. Raises ValueError, and what `charge` does, which is told
        about how many bytes its objects will take; those of short bodies do not count.
        """
        body, take = self.opened(frame, body, charge)
        return decode(decoder, body, take)

    def opened(
        self, frame: CallFrame | End | Items, body: bytes, charge: Callable[[int], object] | None = None
    ) -> tuple[bytes, Callable[[int, int], memoryview]]:
        """Return a body that is bounded, and what finds its arrays: what `decode` takes. See `read`."""
        unread = dict(enumerate(frame.pieces))

        def take(number: int, nbytes: int) -> memoryview:
            piece = unread.pop(number, None)
            if piece is None or piece[2] != nbytes:
                raise ValueError(f"an array of {nbytes} bytes is not piece {number}")
            return self.lent.view(piece)

        if frame.outside:
            if not unread:
                raise ValueError("a body is nowhere")
            _, piece = unread.popitem()
            self.endpoint.check_message(piece[2])
            # A copy: the peer may write there while it is being read.
            body = bytes(self.lent.view(piece))
        if len(body) > UNCOUNTED_BYTES:
            nbytes = unfolded_bytes(body)
            if nbytes > UNFOLDING * self.endpoint.limits.message_bytes:
                raise ValueError(f"values that take about {nbytes} bytes as objects; put them in arrays")
            if charge is not None:
                charge(nbytes)
        return body, take

    # Calls that have come.

    def park(self, frame: CallFrame) -> None:
        """Keep a call that has overtaken the greeting. Raises ValueError for more than may be."""
        if len(self.parked) >= self.endpoint.limits.slots:
            raise ValueError("more calls than there are slots, and no greeting")
        try:
            self.endpoint.budget.wait(self.share, kept_bytes(frame))
        except BlockingIOError as error:
            raise ValueError(f"calls without a greeting: {error}") from error
        self.parked.append(frame)

    def unpark(self) -> list[CallFrame]:
        """Return the calls that have overtaken the greeting, and keep them no more."""
        parked, self.parked = self.parked, []
        self.endpoint.budget.over(self.share, sum(map(kept_bytes, parked)))
        return parked

    # Frames.

    def post(self, frame: Frame, nbytes: int, *, now: bool = False) -> None:
        """Send a frame of at most so many bytes: with others of this turn of the loop, or `now`.

        A peer is lost that does not take what waits for it.
        """
        if self.lost:
            return
        try:
            self.unsent.put(frame, nbytes)
        except BlockingIOError as error:
            self.peer.disconnect(f"it does not take the answers to its calls: {error}"[:200])
            return
        if ((now and not self.endpoint.reading) or len(self.unsent) >= BATCH_FRAMES) and not self._waiting:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self.endpoint.flush_later(self)
        # Its own calls' slots and ours of it; of what it says, no more than this engine would use itself.
        if len(self.unsent) > MAX_UNSENT * (self.endpoint.limits.slots + len(self.calls) + 64):
            self.peer.disconnect("it does not take the answers to its calls")

    def flush(self) -> None:
        """Send the frames that wait."""
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
            # A message that did not arrive takes the ends of calls with it: who waits for those has to hear.
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
        self.unsent.sent(count)

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
        """Lose a peer to which messages do not go any more; where it is lost already, the endpoint hears of it."""
        if not (self.peer.lost or self.endpoint.engine.closed):
            # A connection that has just broken is nothing to report: whoever waits for a call hears of it.
            if not isinstance(error, aiote.TransferError | aiote.PeerError):
                report(error)
            self.peer.disconnect("what this side has to say cannot be sent")

    def cancel(self, slot: int, generation: int) -> None:
        """Tell the peer that nobody waits for a call any more."""
        self.post(Cancel(slot, generation), FRAME_BYTES, now=True)

    # The end.

    def end(self, reason: str) -> None:
        """End all that waits for the peer, which is lost. Idempotent."""
        if self.lost:
            return
        self.lost = reason or "it was lost"
        self.unsent.close()
        self.unpark()
        self.borrowed.close(aiote.PeerLostError(str(self.peer.address), self.lost))
        calls, self.calls = tuple(self.calls.values()), {}
        for caller in calls:
            caller.ended(None, self.lost)
        self._changed.set()
