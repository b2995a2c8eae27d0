"""The values of calls between this engine and one peer: encoded into frames, or placed in the other's memory.

A value that fits goes in its frame. Arrays, and a body that is too long, are written into memory that the receiver
lends (`memory`); the frame then has *pieces*, which say where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy
from numpy.typing import NDArray

import aiote

from ..rails import unfolded_bytes
from .codec import decode
from .frames import Ask, CallFrame, End, Free, Grant, Items, Piece, Return
from .memory import BorrowedMemory, LentMemory, Share, Staging
from .sending import FRAME_BYTES, FrameSender

if TYPE_CHECKING:
    from .endpoint import CallEndpoint

__all__ = ["PIECE_BYTES", "PIECE_OBJECT_BYTES", "UNFOLDING", "Parcel", "Values"]

PIECE_BYTES = 27
PIECE_OBJECT_BYTES = 160
"""The size of a piece in memory: a tuple of three integers."""
MAX_PIECES = 256
UNCOUNTED_BYTES = 512
"""The decoded objects of bodies up to this length take at most 112 KiB and are not counted."""
UNFOLDING = 24
"""The decoded objects of a message may take at most this many times `message_bytes`; numbers and words take less."""


class Parcel:
    """An encoded value: a body, and pieces that have been written to the receiver's memory already."""

    __slots__ = ("body", "outside", "pieces")

    def __init__(self, body: bytes, pieces: list[Piece], *, outside: bool = False) -> None:
        self.body, self.pieces, self.outside = body, pieces, outside


class Values:
    """The memory that this engine lends to one peer, and borrows from it, and the values that are written there."""

    def __init__(self, endpoint: CallEndpoint, peer: aiote.Peer, share: Share, frames: FrameSender) -> None:
        self._endpoint, self._frames = endpoint, frames
        engine, loop = endpoint.engine, endpoint.loop
        self.lent_memory = LentMemory(engine, loop, peer, endpoint.budget)
        self.staging = Staging(engine, loop, endpoint.budget, share)
        self.borrowed_memory = BorrowedMemory(
            engine,
            loop,
            peer,
            ask=lambda nbytes: frames.post(Ask(nbytes), FRAME_BYTES),
            give_back=lambda number: frames.post(Return(number), FRAME_BYTES),
        )
        self._unread: set[Piece] = set()
        self._held_bytes = 0
        self._asking = False

    def on_ask(self, frame: Ask) -> None:
        """Lend memory, or tell the peer why not. Raises ValueError if the peer asks again before the last answer."""
        if self._asking:
            raise ValueError("it asks for memory before its last request was answered")
        self._asking = True
        self._endpoint.loop.spawn(self._lend_memory, frame.nbytes, name="aiote service: lend memory")

    async def _lend_memory(self, nbytes: int) -> None:
        try:
            grant = Grant(*await self.lent_memory.lend(nbytes))
        except (BlockingIOError, aiote.AioteError) as error:
            grant = Grant(0, 0, b"", str(error)[:500])
        finally:
            self._asking = False
        self._frames.post(grant, FRAME_BYTES + len(grant.descriptor) + len(grant.reason.encode()))

    def on_grant(self, frame: Grant) -> None:
        """Take the answer to this engine's Ask. Raises ValueError if this engine did not ask for it."""
        self.borrowed_memory.granted(frame.number, frame.nbytes, frame.descriptor, frame.reason)
        self._endpoint.watch_memory()

    def on_return(self, frame: Return) -> None:
        """Take lent memory back. Raises KeyError if it is not lent."""
        region = self.lent_memory.returned(frame.number)
        self._endpoint.loop.spawn(self.lent_memory.take_back, region, name="aiote service: take memory back")

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
            self._frames.post(Free(pieces), FRAME_BYTES + PIECE_BYTES * len(pieces))

    # Values.

    def inline(self, body: bytes, arrays: list[NDArray[Any]], fixed: int = 0) -> Parcel | None:
        """Return the parcel of a value that fits into its frame, otherwise None. Raises UsageError if `body` is too
        long.

        `fixed` is the size of the other variable parts of the frame in bytes.
        """
        self._endpoint.check_message(len(body))
        return Parcel(body, []) if not arrays and len(body) <= self._frames.room - fixed else None

    async def place_arrays(
        self, body: bytes, arrays: list[NDArray[Any]], fixed: int = 0, *, kept: bool = False
    ) -> Parcel:
        """Write the arrays of a value, and a body that is too long, into the peer's memory; return the parcel.

        The bytes are there when this returns. `kept` keeps the registrations of the arrays for the next call. Raises
        UsageError for too many arrays, BlockingIOError if the peer lends no memory, TransferError and PeerError. If it
        raises or is cancelled, it keeps no places in the peer's memory.
        """
        room = self._frames.room - fixed
        if len(arrays) >= MAX_PIECES or PIECE_BYTES * (len(arrays) + 1) > room:
            raise aiote.UsageError(f"{len(arrays)} large arrays in one value are too many: concatenate some of them")
        pieces: list[Piece] = []
        try:
            for array in arrays:
                pieces.append(await self._push_bytes(array, kept=kept))
            outside = len(body) + PIECE_BYTES * len(pieces) > room
            if outside:
                pieces.append(await self._push_bytes(body))
                body = b""
        except BaseException:
            self.take_back(pieces)
            raise
        return Parcel(body, pieces, outside=outside)

    async def _push_bytes(self, data: NDArray[Any] | bytes, *, kept: bool = False) -> Piece:
        """Write bytes into memory that the peer lends, and return their place."""
        endpoint = self._endpoint
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
            self._endpoint.check_message(piece[2])
            # Copy the body, because the peer can still write to the lent memory while it is decoded.
            body = bytes(self.lent_memory.view(piece))
        if len(body) > UNCOUNTED_BYTES:
            nbytes = unfolded_bytes(body)
            if nbytes > UNFOLDING * self._endpoint.limits.message_bytes:
                raise ValueError(f"values would take about {nbytes} bytes as objects; put them in arrays")
            if charge is not None:
                charge(nbytes)
        return body, take
