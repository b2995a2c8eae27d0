"""A stream at the client: receive its items in any order, return them in order, and tell the server how far it was
read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ..aio import Waiter
from ..core.address import Address
from ..errors import UsageError
from .codec import LONG_ITEM, takes_long
from .definition import Method
from .errors import CallError, CallLostError, RemoteError
from .exchange import UnderWay, failure
from .frames import CallStatus, Credit, End, Items
from .link import Link
from .sending import FRAME_BYTES
from .values import UNFOLDING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["IncomingStream", "Stream"]

Hear: TypeAlias = Callable[[Any], object]
Ended: TypeAlias = Callable[[Exception | None], object]


class IncomingStream(UnderWay):
    """A stream in flight: the items that have arrived, in any order, and how many of them the reader has taken.

    Items are decoded on arrival, so that an unread item occupies no lent memory that other calls to this peer need.
    Long ones are decoded in a thread, one after the other.
    """

    __slots__ = (
        "_credited",
        "_damage",
        "_decoding",
        "_frames",
        "_largest",
        "_listener",
        "_method",
        "_ready",
        "_received",
        "_taken",
        "_unfolded",
        "_unread",
        "_waiter",
    )

    def __init__(self, link: Link, method: Method) -> None:
        super().__init__(link)
        self._method = method
        self._frames: dict[int, list[Any]] = {}
        self._decoding: dict[int, tuple[Items, int]] = {}
        self._ready: deque[Any] = deque()
        self._received = self._taken = self._credited = self._unread = self._largest = self._unfolded = 0
        self._waiter: Waiter | None = None
        self._listener: tuple[Hear, Ended] | None = None
        self._damage: RemoteError | None = None

    def receive_end(self, end: End | None, reason: str) -> None:
        """Process the end: `end`, before which every item has arrived, or the `reason` why the peer is lost."""
        self.end, self.reason = end, reason
        if self.abandoned and end is not None:
            self.link.values.free_pieces(end.pieces)
        self._wake()

    def items(self, frame: Items) -> None:
        """Process a frame. Raises ValueError if its items violate the protocol or exceed the limits of the stream."""
        limits = self.link.endpoint.limits
        last = frame.first + len(frame.bodies)
        # An abandoned stream has no reader, so count arrived items as taken. The server receives the Cancel soon.
        most = (self.arrived if self.abandoned else self._taken) + limits.stream_items
        known = frame.first in self._frames or frame.first in self._decoding
        if not frame.bodies or frame.first < self._received or last > most or known:
            raise ValueError(
                f"items {frame.first} to {last} are out of order or beyond the limit: the stream was read "
                f"up to item {self._taken}"
            )
        if frame.pieces and len(frame.bodies) > 1:
            raise ValueError("an item with arrays must be alone in its frame")
        self.arrived += len(frame.bodies)
        if self.abandoned:
            self.link.values.free_pieces(frame.pieces)
            return
        sizes = self._count(frame, limits.stream_bytes)
        if len(frame.bodies) == 1 and takes_long(frame.bodies[0], frame.pieces, frame.outside, LONG_ITEM):
            self._decoding[frame.first] = frame, sizes[0]
            if len(self._decoding) == 1:
                self._decode_next()
            return
        self._keep(frame.first, [self._read(frame, body, size) for body, size in zip(frame.bodies, sizes, strict=True)])
        self.link.values.free_pieces(frame.pieces)

    def _count(self, frame: Items, limit: int) -> list[int]:
        """Count the bytes of items until they are read, and return them. Raises ValueError beyond the limit."""
        pieces = sum([piece[2] for piece in frame.pieces])
        sizes = [len(body) + pieces for body in frame.bodies]
        self._unread += sum(sizes)
        self._largest = max(self._largest, *sizes)
        # A server that is below the limit sends one more item, of any size. So the largest item does not count.
        if self._unread - self._largest > limit:
            raise ValueError(f"the server sent {self._unread} unread bytes of a stream, over the limit of stream_bytes")
        return sizes

    def _read(self, frame: Items, body: bytes, size: int) -> tuple[Any, int, int]:
        """Decode an item; return it, or the RemoteError for it, with its bytes and those of its objects."""
        before = self._unfolded
        try:
            item = self.link.values.read_value(self._method.read_result, frame, body, self._charge)
        except ValueError as error:
            item = self._wrong(error)
        return item, size, self._unfolded - before

    def _decode_next(self) -> None:
        if self._decoding:
            frame, size = next(iter(self._decoding.values()))
            self.link.endpoint.loop.spawn(self._decode_long, frame, size, name="aiote service: decode an item")

    async def _decode_long(self, frame: Items, size: int) -> None:
        """Decode an item in a thread, and take it in a callback of the loop, as any other item."""
        before, objects, item = self._unfolded, 0, None
        try:
            if not self.abandoned:
                body, take = self.link.values.open_body(frame, frame.bodies[0], self._charge)
                objects = self._unfolded - before
                item = await self.link.endpoint.decode(self._method.read_result, body, take)
        except (ValueError, KeyError) as error:
            item = self._wrong(error)
        except Exception as error:  # Of this side, such as no thread left: without an item the reader would wait.
            item = RemoteError(self._method.name, type(error).__name__, f"an item could not be decoded: {error}")
        self.link.endpoint.loop.call_soon(partial(self._take_decoded, frame, (item, size, objects)))

    def _take_decoded(self, frame: Items, item: tuple[Any, int, int]) -> None:
        del self._decoding[frame.first]
        self.link.values.free_pieces(frame.pieces)
        self._decode_next()
        if self.abandoned:
            self._wake()
        else:
            self._keep(frame.first, [item])

    def _wrong(self, error: Exception) -> RemoteError:
        return RemoteError(self._method.name, "ValidationError", f"an item is not of the annotated type: {error}")

    def _keep(self, first: int, items: list[tuple[Any, int, int]]) -> None:
        self._frames[first] = items
        while (found := self._frames.pop(self._received, None)) is not None:
            self._received += len(found)
            self._ready += found
        self._wake()

    def _charge(self, nbytes: int) -> None:
        """Count the bytes of an item's Python objects until it is read. Raises ValueError if they exceed the limit."""
        if self._unfolded + nbytes > UNFOLDING * self.link.endpoint.limits.message_bytes:
            raise ValueError(
                f"unread items would take about {self._unfolded + nbytes} bytes as Python objects, over the limit"
            )
        self._unfolded += nbytes

    def _wake(self) -> None:
        if self._listener is not None:
            self._tell(*self._listener)
        elif self._waiter is not None:
            self.link.endpoint.wake(self._waiter)

    def listen(self, hear: Hear, ended: Ended) -> None:
        """Call `hear` with each item, including those already here, and `ended` at the end; see `Stream.listen`."""
        self._listener = hear, ended
        self._tell(hear, ended)

    def _tell(self, hear: Hear, ended: Ended) -> None:
        try:
            while self._ready:
                hear(self._take())
        except RemoteError as error:
            self._damage = error
            self.abandon()
        if self._over:
            self._listener = None
            ended(self._damage or self._outcome())

    async def next(self) -> Any:
        """Return the next item.

        Raises StopAsyncIteration at the end, CallError, and the exceptions that the method declares in `raises`.
        """
        while not self._ready:
            if self._over:
                raise self._outcome() or StopAsyncIteration
            self._waiter = self.link.endpoint.loop.waiter()
            await self._waiter
        return self._take()

    def _take(self) -> Any:
        """Return the next item, which has arrived. Raises RemoteError if the item could not be decoded."""
        item, size, unfolded = self._ready.popleft()
        self._taken += 1
        self._unread -= size
        self._unfolded -= unfolded
        # Send a Credit when half of `stream_items` was taken, or no item is left: the server's own limit may be lower,
        # so that it waits earlier.
        if self.end is None and (self._taken - self._credited >= self._half or not self._ready):
            self._credited = self._taken
            self.link.frames.post(Credit(self.slot, self.generation, self._taken), FRAME_BYTES)
        if isinstance(item, RemoteError):
            raise item
        return item

    @property
    def _over(self) -> bool:
        """Whether no more items come: the method has ended or the peer is lost, and all that arrived is decoded."""
        return (self.end is not None or bool(self.reason)) and not self._decoding

    @property
    def _half(self) -> int:
        return self.link.endpoint.limits.stream_items // 2

    async def wait_ended(self) -> None:
        """Wait until the method has ended at the server, or the peer is lost."""
        while self.end is None and not self.reason:
            self._waiter = self.link.endpoint.loop.waiter()
            await self._waiter

    def _outcome(self) -> Exception | None:
        """Return the error with which the stream has ended; None if it ended after its last item."""
        if self.end is None:
            return CallLostError(self._method.name, self.reason, "perhaps")
        if self.end.status != CallStatus.DONE:
            return failure(self._method, self.end, timed=False)
        return None

    def abandon(self) -> None:
        """Cancel the stream at the peer, and drop the items that have arrived."""
        super().abandon()
        self._frames.clear()
        self._ready.clear()


class Stream(AsyncIterator[Any]):
    """The items of a stream, for one reader: `async for item in client.tokens(...)`.

    The call begins when the first item is awaited. The server stays ahead of the reader by no more than `stream_items`
    and `stream_bytes`. Each of these cancels the stream at the server, without waiting: `close`, the end of an `async
    with`, the loss of the last reference to the stream, and a wait for an item that is cancelled or raises. `aclose`
    cancels it and waits until the method has ended at the server.
    """

    def __init__(
        self,
        start: Callable[[list[Address]], Awaitable[IncomingStream]],
        may_retry: Callable[[CallError, int, Link | None, list[Address]], bool],
    ) -> None:
        self._start, self._may_retry = start, may_retry
        self._incoming: IncomingStream | None = None
        self._over = self._reading = self._listened = False

    async def __anext__(self) -> Any:
        if self._over:
            raise StopAsyncIteration
        if self._reading:
            raise UsageError("the stream is being read already: await one item at a time, from one task")
        self._reading = True
        try:
            return await (self._first() if self._incoming is None else self._incoming.next())
        except BaseException:
            self.close()
            raise
        finally:
            self._reading = False

    async def _first(self) -> Any:
        """Begin the call and return the first item; repeat a failed call, perhaps at another member, if permitted."""
        avoid: list[Address] = []
        for attempt in itertools.count(1):
            self._incoming = None
            try:
                self._incoming = await self._start(avoid)
                return await self._incoming.next()
            except CallError as error:
                link = None if self._incoming is None else self._incoming.link
                if not self._may_retry(error, attempt, link, avoid):
                    raise
        raise AssertionError

    async def listen(self, hear: Hear, ended: Ended) -> None:
        """Begin the call, and pass its items to functions instead of a reader; return when the call is sent.

        `hear` is called with each item. `ended` is called once, when the method has ended at the server or the peer is
        lost: with None, or with the error that reading would have raised. Both are called in callbacks of the event
        loop, outside of any task, and must not raise. The caller need not keep a reference to the stream; `close`
        cancels it. Raises CallError if the call did not run. If the wait is cancelled, no call is sent.
        """
        if self._over or self._reading or self._incoming is not None:
            raise UsageError("listen: the stream was begun already; call it on a new stream")
        self._reading = self._listened = True
        incoming = self._incoming = await self._start([])
        if self._over:
            incoming.abandon()
        incoming.listen(hear, ended)

    def close(self) -> None:
        """Cancel the stream at the server and drop its items, without waiting. Idempotent."""
        self._over = True
        if self._incoming is not None:
            self._incoming.abandon()

    async def aclose(self) -> None:
        """Cancel the stream, and wait until its method has ended at the server, or the peer is lost.

        If the wait is cancelled, the stream is cancelled all the same, and `aclose` can be called again. Idempotent.
        """
        self.close()
        if self._incoming is not None:
            await self._incoming.wait_ended()

    def __del__(self) -> None:
        # This may run in any thread and between any two bytecodes, so let the loop cancel the stream in its next turn.
        if self._incoming is not None and not (self._over or self._listened):
            with suppress(RuntimeError):
                self._incoming.link.endpoint.loop.call_from_thread(self._incoming.abandon)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
