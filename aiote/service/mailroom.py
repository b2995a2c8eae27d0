"""One reader of an engine's inbox, for all the services that share the engine.

The first byte of a message is its *kind*, and each kind has one taker: a function that is called at once, or a queue of
bounded length. A full queue makes the mailroom wait, which leaves messages in the peers' pools, which takes the
senders' credits: so a slow service makes its senders wait, and the other services of this engine with them. A service
that must not hold up the others is quick about its queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

import aiote

from .background import report
from .endpoint import Endpoint

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Letters", "Mailroom"]

QUEUE_LIMIT = 1 << 16


class Letters(AsyncIterator[aiote.Message]):
    """The queue of one kind: an iterator that ends with the mailroom, once what is in it has been taken.

    Cancelling a wait loses nothing. `close`, or leaving it as a context manager, gives the kind back; what is still in
    it is dropped.
    """

    def __init__(self, stream: MemoryObjectReceiveStream[aiote.Message], give_back: Callable[[], None]) -> None:
        self._stream = stream
        self._give_back = give_back

    def __len__(self) -> int:
        return self._stream.statistics().current_buffer_used

    async def __anext__(self) -> aiote.Message:
        try:
            return await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Take no more of this kind."""
        self._give_back()
        self._stream.close()

    def __del__(self) -> None:
        # It holds messages and nothing else: one that nobody reads any more may just go.
        self._stream.close()

    def __enter__(self) -> Letters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Taker = Callable[[aiote.Message], object] | MemoryObjectSendStream[aiote.Message]


class Mailroom:
    """Hand each message of an engine to the taker of its first byte; `async with Mailroom(engine) as mailroom:`.

    It owns the engine's inbox meanwhile: nobody else may call `recv` or `messages`. It ends quietly with the engine,
    and is entered and left in one task. `unknown` counts messages dropped because nobody takes their kind, `failed`
    calls that raised.
    """

    def __init__(self, engine: aiote.Engine) -> None:
        self.engine = engine
        self.unknown = 0
        self.failed = 0
        self._takers: dict[int, Taker] = {}
        self._held_up = 0.0
        self._held_since: float | None = None
        self._closed = False
        self._endpoint: Endpoint | None = None

    def handle(self, kind: int, function: Callable[[aiote.Message], object]) -> Callable[[], None]:
        """Call a function with each message of a kind (0 to 255); what is returned stops that.

        It must not wait. What it raises is reported and counted. Raises UsageError for a kind that is taken,
        ClosedError.
        """
        return self._take(kind, function)

    def queue(self, kind: int, size: int = 16) -> Letters:
        """Keep up to `size` messages of a kind (0 to 255) for whoever iterates over them; a full queue holds all up.

        Raises UsageError for a kind that is taken, ClosedError.
        """
        if not isinstance(size, int) or not 1 <= size <= QUEUE_LIMIT:
            raise aiote.UsageError(f"queue: size={size!r}: expected an integer from 1 to {QUEUE_LIMIT}")
        sending, receiving = anyio.create_memory_object_stream[aiote.Message](size)
        try:
            give_back = self._take(kind, sending)
        except BaseException:
            sending.close()
            receiving.close()
            raise
        return Letters(receiving, give_back)

    def _take(self, kind: int, taker: Taker) -> Callable[[], None]:
        if self._closed:
            raise aiote.ClosedError("the mailroom is closed")
        if not isinstance(kind, int) or not 0 <= kind <= 255:
            raise aiote.UsageError(f"kind={kind!r}: expected an integer from 0 to 255, the first byte of a message")
        if kind in self._takers:
            raise aiote.UsageError(f"kind={kind}: it is taken already; every kind has one taker")
        self._takers[kind] = taker

        def give_back() -> None:
            if self._takers.get(kind) is taker:
                del self._takers[kind]
            if isinstance(taker, MemoryObjectSendStream):
                taker.close()

        return give_back

    @property
    def held_up_s(self) -> float:
        """How many seconds full queues have held it up so far: while they do, it hears nobody."""
        current = 0.0 if self._held_since is None else anyio.current_time() - self._held_since
        return self._held_up + current

    async def __aenter__(self) -> Mailroom:
        if self._endpoint is not None or self._closed:
            raise aiote.UsageError("a mailroom is entered once")
        endpoint = Endpoint.of(self.engine)
        if endpoint.mailroom is not None:
            raise aiote.UsageError("the engine's messages are read by a Mailroom already")
        self._endpoint = endpoint
        endpoint.mailroom = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def deliver(self, message: aiote.Message) -> None:
        """Hand a message to its taker."""
        taker = self._takers.get(message.data[0]) if message.data else None
        if taker is None:
            self.unknown += 1
        elif isinstance(taker, MemoryObjectSendStream):
            await self._put(taker, message)
        else:
            try:
                taker(message)
            except Exception as error:
                self.failed += 1
                report(error)

    async def _put(self, queue: MemoryObjectSendStream[aiote.Message], message: aiote.Message) -> None:
        try:
            queue.send_nowait(message)
            return
        except anyio.WouldBlock:
            self._held_since = anyio.current_time()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.unknown += 1
            return
        try:
            await queue.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.unknown += 1
        finally:
            self._held_up, self._held_since = self.held_up_s, None

    def close(self) -> None:
        """Take no more messages. Idempotent."""
        self._closed = True
        if self._endpoint is not None and self._endpoint.mailroom is self:
            self._endpoint.mailroom = None
        for taker in self._takers.values():
            if isinstance(taker, MemoryObjectSendStream):
                taker.close()
        self._takers.clear()
