"""One call at the server: it runs the method, brings results to the caller, and sends the items of a stream."""

from __future__ import annotations

import contextvars
import functools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import numpy
from numpy.typing import NDArray

import aiote

from ..aio import Condition, LoopTask
from .codec import array_of, check_dtype, encode, takes_long
from .definition import DirectCall, Method
from .frames import CallFrame, CallStatus, End, Items, OutSpec
from .interceptors import CallInfo, run_interceptors
from .link import Link, kept_bytes
from .memory import LEND_BYTES
from .sending import FRAME_BYTES
from .values import PIECE_BYTES, Parcel

if TYPE_CHECKING:
    from .server import Server

__all__ = ["Running", "current_call"]

MAX_TEXT = 4096
BATCH_ITEMS = 64
RESULT_S = 60.0
"""How long a result may wait for a place in its caller's memory, and be written there, before the peer is disconnected.
"""


_current: contextvars.ContextVar[Running] = contextvars.ContextVar("aiote service: current call")


def current_call() -> CallInfo:
    """Return the call that the current task runs: the method and its caller. Raises UsageError outside of a method."""
    running = _current.get(None)
    if running is None:
        raise aiote.UsageError(
            "current_call: no remote call runs here; use it within a service's method that another engine has called"
        )
    return running.info


class _Invalid(Exception):
    """The arguments do not fit the method."""


class _NoRoom(Exception):
    """There is no memory for the arguments, or for the arrays that the method would fill."""


class Running:
    """A call that another engine makes, from its arrival to its end."""

    def __init__(
        self, server: Server, link: Link, frame: CallFrame, method: Method, function: Callable[..., Any]
    ) -> None:
        """Charge the call to the caller's share. Raises BlockingIOError if the share, or the total, is used up."""
        self._waiting_bytes = kept_bytes(frame)
        link.endpoint.budget.wait(link.share, self._waiting_bytes)
        self.link, self.frame = link, frame
        self.generation = frame.generation
        self._server, self._method, self._function = server, method, function
        self._task: LoopTask | None = None
        self._status_if_cancelled: int | None = None
        # Use the loop's own clock: this runs in a callback of the loop, where anyio cannot find the loop.
        self._deadline = link.endpoint.loop.time() + frame.left if frame.left else math.inf
        self._parcels: list[Parcel] = []
        self.queued = self._ended = False
        self._unfolded_bytes = 0
        self._outgoing: _Outgoing | None = None
        self._direct: DirectCall | None = None

    @property
    def info(self) -> CallInfo:
        """The method, its caller, and the trace of the call."""
        return CallInfo(self._method.name, self.link.peer, self.frame.context)

    # From start to end.

    def start(self) -> None:
        """Run the call: in a task, unless its method is a direct one."""
        endpoint, frame = self.link.endpoint, self.frame
        if self._method.direct and not (
            endpoint.server_interceptors
            or self._server.interceptors
            or frame.left  # only a task ends at the caller's deadline; our clients send none with streams
            or takes_long(frame.body, frame.pieces, frame.outside)
        ):
            self._start_direct()
            return
        spawn = functools.partial(
            self.link.endpoint.loop.spawn, self._run, name=self._method.name, after=self._record_end
        )
        self._task = self._server.context.run(spawn)

    def _start_direct(self) -> None:
        token = _current.set(self)
        try:
            self._direct = self._function(*msgspec.structs.astuple(self._bound()))
            self._direct.begin(self._finish)
        except Exception as error:
            self._finish(error)
        finally:
            _current.reset(token)

    def _finish(self, error: Exception | None) -> None:
        """End a direct call, with its error or as it was stopped."""
        if not self._ended:
            if self._status_if_cancelled is None:
                self._end(*self._outcome(error))
            self._record_end()

    def _outcome(self, error: Exception | None) -> tuple[int, Parcel]:
        """Return the status and the body with which a call ends."""
        match error:
            case None:
                return CallStatus.DONE, Parcel(b"", [])
            case _Invalid():
                return CallStatus.INVALID, Parcel(str(error).encode()[:500], [])
            case _NoRoom():
                return CallStatus.BUSY, Parcel(str(error).encode()[:500], [])
        return CallStatus.FAILED, Parcel(_describe_error(error, self.link.frames.room), [])

    def cancel(self) -> None:
        """Cancel the call, because the caller has cancelled it or is lost."""
        self.stop(CallStatus.CANCELLED)

    def stop(self, status: int) -> None:
        """Cancel the call, and end it with this status. The first status counts; no effect after the end."""
        if self._ended:
            return
        if self._status_if_cancelled is None:
            self._status_if_cancelled = status
        if self._task is not None:
            self._task.cancel()
        elif self._direct is not None:
            self._direct.cancel()
        else:
            self._record_end()

    def credit(self, taken: int) -> None:
        """Record that the caller has taken the first `taken` items. Raises ValueError if fewer were sent."""
        if self._outgoing is not None:
            self._outgoing.credit(taken)

    def _record_end(self) -> None:
        """Record that the call's task has ended, even if it never began."""
        if not self._ended:
            self._end(CallStatus.CANCELLED if self._status_if_cancelled is None else self._status_if_cancelled)
        # The task's context and the stream refer to this object. Break these cycles: with them, the garbage collector
        # would run every few calls.
        self._task = self._outgoing = self._direct = None
        self._server.record_end(self)

    def _end(self, status: int, parcel: Parcel | None = None) -> None:
        self._ended = True
        link, parcel = self.link, parcel or Parcel(b"", [])
        link.running.pop(self.frame.slot, None)
        link.values.release(self.frame.pieces)
        link.unfolded_bytes -= self._unfolded_bytes
        link.endpoint.budget.give(link.share, self._unfolded_bytes)
        link.endpoint.budget.over(link.share, self._waiting_bytes)
        link.frames.unsent.ends.add(self.frame.slot)
        for other in self._parcels:
            if other is not parcel:
                link.values.take_back(other.pieces)
        items = self._outgoing.sent if self._outgoing is not None else 0
        link.values.hand_over(parcel.pieces)
        size = FRAME_BYTES + len(parcel.body) + PIECE_BYTES * len(parcel.pieces)
        end = End(self.frame.slot, self.generation, status, parcel.body, parcel.pieces, parcel.outside, items)
        if status == CallStatus.DONE and self._direct is not None and self._direct.end_may_wait:
            link.frames.post_late(end, size)
            return
        # Send the end of the peer's last running call at once: no other end could travel in the same message.
        link.frames.post(end, size, now=not link.running)

    async def _run(self) -> None:
        """Run the method and send the call's End, however the method ends."""
        token = _current.set(self)
        try:
            parcel = await self._within_deadline()
        except anyio.get_cancelled_exc_class():
            # `_record_end` sends the End of a call that `stop` cancelled. A method that cancels itself has failed.
            if self._status_if_cancelled is None:
                self._end(*self._outcome(RuntimeError("the method cancelled itself")))
        except Exception as error:
            self._end(*self._outcome(error))
        else:
            if parcel is not None:
                self._end(CallStatus.DONE, parcel)
        finally:
            _current.reset(token)

    async def _within_deadline(self) -> Parcel | None:
        """Return the result's parcel, or None if the caller's deadline passed first."""
        if self._deadline == math.inf:
            return await self._call()
        with anyio.CancelScope(deadline=self._deadline):
            return await self._call()
        self._status_if_cancelled = CallStatus.CANCELLED
        return None

    async def _call(self) -> Parcel:
        interceptors = self.link.endpoint.server_interceptors + self._server.interceptors
        if not interceptors:
            return await self._proceed()

        async def proceed() -> Any:
            # An interceptor does not get the result itself: the result is already encoded or written to the caller.
            if self._parcels:
                raise RuntimeError("an interceptor called proceed twice; call it once")
            self._parcels.append(await self._proceed())

        await run_interceptors(interceptors, self.info, proceed)
        if not self._parcels:
            raise RuntimeError("an interceptor did not call proceed; call it, or raise an error")
        return self._parcels[0]

    async def _proceed(self) -> Parcel:
        method, frame, link = self._method, self.frame, self.link
        if takes_long(frame.body, frame.pieces, frame.outside):
            try:
                body, take = link.values.open_body(frame, frame.body, self.charge)
                bound = await link.endpoint.decode(method.read_arguments, body, take)
            except ValueError as error:
                raise _Invalid(str(error)) from error
        else:
            bound = self._bound()
        arguments = [getattr(bound, name) for name in bound.__struct_fields__]
        if method.stream:
            return await self._stream(self._function(*arguments))
        if not method.outs:
            return await self.place(await self._function(*arguments))
        try:
            return await self._fill(bound, arguments)
        except anyio.get_cancelled_exc_class() as error:
            # A frame that keeps the error, as asyncio.TaskGroup does, would keep the arrays until a garbage collection.
            error.__traceback__ = None
            raise

    def _bound(self) -> Any:
        """Decode the arguments. Raises _Invalid, and _NoRoom beyond the limits."""
        try:
            return self.link.values.read_value(self._method.read_arguments, self.frame, self.frame.body, self.charge)
        except ValueError as error:
            raise _Invalid(str(error)) from error

    def charge(self, nbytes: int) -> None:
        """Charge bytes of objects to the caller's share until the call's end. Raises _NoRoom beyond the limits."""
        try:
            self.link.endpoint.budget.charge(self.link.share, nbytes, self.link.unfolded_bytes)
        except BlockingIOError as error:
            raise _NoRoom(str(error)) from error
        self.link.unfolded_bytes += nbytes
        self._unfolded_bytes += nbytes

    async def place(self, value: object) -> Parcel:
        """Encode a result or an item, and write its long parts into the caller's memory; return its parcel.

        If the peer does not take it within RESULT_S, disconnect the peer, because other calls wait for the room.
        """
        body, arrays = encode(value)
        parcel = self.link.values.inline(body, arrays)
        if parcel is not None:
            return parcel
        # The length of a result is known only once the result exists, so a peer's results may exceed its share here.
        # While they do, the server starts none of the peer's calls.
        budget, nbytes = self.link.endpoint.budget, len(body) + sum(array.nbytes for array in arrays)
        budget.wait(self.link.share, nbytes, max(budget.peer, budget.total // 2))
        try:
            with anyio.move_on_after(RESULT_S) as scope:
                return await self.link.values.place_arrays(body, arrays)
        finally:
            budget.over(self.link.share, nbytes)
            self._server.start_waiting()
        if scope.cancelled_caught:
            self.link.peer.disconnect(f"it took no results for {RESULT_S:.0f} s")
        raise RuntimeError("the result could not be written to the caller in time")

    # The caller's arrays.

    async def _fill(self, bound: Any, arguments: list[Any]) -> Parcel:
        fields = bound.__struct_fields__
        outs = [_Filled(self, arguments[fields.index(name)], kind) for name, kind in self._method.outs.items()]
        for name, out in zip(self._method.outs, outs, strict=True):
            arguments[fields.index(name)] = out.open()
        result = await self._function(*arguments)
        for out in outs:
            await out.write()
        return await self.place((result, [out.array for out in outs if out.remote is None]))

    # The items of a stream.

    async def _stream(self, items: AsyncIterator[Any]) -> Parcel:
        outgoing = self._outgoing = _Outgoing(self)
        if not hasattr(items, "__anext__"):
            items = await items  # type: ignore[misc]
        try:
            async for item in items:
                await outgoing.send(item)
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()
        outgoing.flush()
        return Parcel(b"", [])


def _describe_error(error: Exception, room: int) -> bytes:
    """Encode an exception for the caller: the names of its classes, so that the caller may know one, and its text."""
    names = [kind.__name__[:200] for kind in type(error).__mro__ if kind not in (Exception, BaseException, object)][:8]
    text = str(error)[: min(MAX_TEXT, room // 8)]
    return msgspec.msgpack.encode((names, text.encode("utf-8", "replace").decode()))


class _Filled:
    """A caller's array that the method fills: it lies in this engine's memory and is then written to the caller's."""

    def __init__(self, running: Running, spec: OutSpec, kind: Any) -> None:
        self._running, self._link = running, running.link
        self.remote: aiote.RemoteRegion | None = None
        try:
            self._dtype, self._shape, self._nbytes = array_of(spec.dtype, spec.shape)
            check_dtype(kind, self._dtype)
            if spec.descriptor:
                engine = self._link.endpoint.engine
                found = engine.attach(spec.descriptor, owner=self._link.peer, access="write", nbytes=self._nbytes)
                self.remote = found[0 : self._nbytes]
        except ValueError as error:
            raise _Invalid(str(error)) from error
        self.array: NDArray[Any]

    def open(self) -> NDArray[Any]:
        """Return the array for the method. Raises _Invalid if it should be lent and is not, _NoRoom without memory."""
        if self.remote is None:
            if self._nbytes >= LEND_BYTES:
                raise _Invalid(
                    f"the array of {self._nbytes} bytes to be filled was not lent; a caller lends an array of this size"
                )
            self._running.charge(self._nbytes)
            self.array = numpy.zeros(self._shape, self._dtype)
        else:
            try:
                memory, self._region = self._link.values.staging.take(self._nbytes)
                self._link.endpoint.watch_memory()
            except BlockingIOError as error:
                raise _NoRoom(str(error)) from error
            self.array = memory.view(self._dtype).reshape(self._shape)
        return self.array

    async def write(self) -> None:
        """Write the array to the caller's array, if that is lent; otherwise the End carries it."""
        if self.remote is not None:
            endpoint = self._link.endpoint
            await endpoint.engine.write(self._region, self.remote)
            endpoint.array_bytes += self._nbytes


class _Outgoing:
    """The outgoing items of a stream: sends items and stays ahead of the reader only as far as both sides allow."""

    def __init__(self, running: Running) -> None:
        self._running, self._link = running, running.link
        endpoint, hello = self._link.endpoint, self._link.hello
        assert hello is not None
        self._most_items = max(1, min(endpoint.limits.stream_items, hello.stream_items))
        self._most_bytes = min(endpoint.limits.stream_bytes, hello.stream_bytes)
        self._sizes: deque[int] = deque()
        self._unread_bytes = 0
        self._taken = 0
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._credit = Condition(endpoint.loop)
        self._scheduled = False
        self.sent = 0

    async def send(self, item: object) -> None:
        """Send an item as soon as the reader has taken enough of the earlier items."""
        link = self._link
        while self._sizes and (len(self._sizes) >= self._most_items or self._unread_bytes >= self._most_bytes):
            self.flush()
            await self._credit.wait()
        if link.frames.unsent.is_crowded:
            self.flush()
            await link.frames.unsent.wait_uncrowded()
        parcel = await self._running.place(item)
        size = len(parcel.body) + sum(piece[2] for piece in parcel.pieces)
        if parcel.pieces or self._batch_bytes + size + 8 > link.frames.room:
            self.flush()
        self.sent += 1
        self._sizes.append(size)
        self._unread_bytes += size
        self._batch.append(parcel.body)
        self._batch_bytes += size + 8
        if parcel.pieces:
            self._post(parcel)
        elif len(self._batch) >= BATCH_ITEMS:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            link.endpoint.loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send the gathered items."""
        if self._batch:
            self._post(Parcel(b"", []))

    def _post(self, parcel: Parcel) -> None:
        bodies, self._batch, self._batch_bytes = self._batch, [], 0
        self._link.values.hand_over(parcel.pieces)
        frame = self._running.frame
        first = self.sent - len(bodies)
        items = Items(frame.slot, frame.generation, first, bodies, parcel.pieces, parcel.outside)
        size = FRAME_BYTES + sum(map(len, bodies)) + 8 * len(bodies) + PIECE_BYTES * len(parcel.pieces)
        self._link.frames.post(items, size)

    def credit(self, taken: int) -> None:
        """Record that the reader has taken the first `taken` items. Raises ValueError if fewer were sent."""
        if taken > self.sent:
            raise ValueError(f"it claims to have read {taken} items of a stream, but {self.sent} were sent")
        while self._taken < taken:
            self._taken += 1
            self._unread_bytes -= self._sizes.popleft()
        self._credit.wake_all()
