"""One call at the client: its beginning, its end, and its result or error."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NoReturn

import msgspec

import aiote

from ..observe.context import CONTEXT_BYTES, call_context
from .codec import encode, takes_long
from .definition import Method
from .errors import (
    BusyError,
    CallError,
    CallLostError,
    DrainingError,
    InvalidCallError,
    NotServedError,
    RemoteError,
)
from .frames import MAX_LEFT_S, CallFrame, CallStatus, End, Items, Piece
from .link import Link
from .sending import FRAME_BYTES
from .values import PIECE_BYTES

__all__ = ["PendingCall", "UnderWay", "begin", "failure", "long_result_of", "result_of"]

REFUSALS: dict[int, tuple[type[CallError], str]] = {
    CallStatus.BUSY: (BusyError, "the server has no room for it"),
    CallStatus.DRAINING: (DrainingError, "the server is draining, it takes no new calls"),
    CallStatus.NOT_SERVED: (NotServedError, "the peer serves no such method"),
    CallStatus.INVALID: (InvalidCallError, "the arguments do not fit the method"),
}
_failure = msgspec.msgpack.Decoder(tuple[list[str], str])


class UnderWay(ABC):
    """A call in flight, as the link keeps it by its slot."""

    __slots__ = ("abandoned", "arrived", "deadline", "end", "generation", "link", "pieces", "reason", "slot")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.slot, self.generation, self.arrived = -1, 0, 0
        self.pieces: list[Piece] = []
        self.end: End | None = None
        self.reason = ""
        self.abandoned = False
        self.deadline = math.inf

    @abstractmethod
    def receive_end(self, end: End | None, reason: str) -> None:
        """Take the call's End, or None and the reason why no End will come."""

    @abstractmethod
    def items(self, frame: Items) -> None:
        """Take items of a stream. Raises ValueError if they violate the protocol."""

    def abandon(self) -> None:
        """Cancel the call at the peer, because no caller waits for it any more.

        The call's slot, and the memory of its arguments, become free when its End comes. Idempotent.
        """
        if self.abandoned:
            return
        self.abandoned = True
        if self.end is not None:
            self.link.values.free_pieces(self.end.pieces)
        elif self.slot >= 0 and not self.reason:
            self.link.cancel(self.slot, self.generation)


class PendingCall(UnderWay):
    """A call with one result. `long_result_of` takes a result that `is_long`, `result_of` any other end."""

    __slots__ = ("waiter",)

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.waiter = link.endpoint.loop.waiter()

    def receive_end(self, end: End | None, reason: str) -> None:
        """Take the end and wake the caller; if the call is abandoned, only free the memory of its pieces."""
        self.end, self.reason = end, reason
        if self.abandoned:
            if end is not None:
                self.link.values.free_pieces(end.pieces)
        else:
            self.link.endpoint.wake(self.waiter)

    @property
    def is_long(self) -> bool:
        """Whether decoding the result would take long."""
        end = self.end
        return end is not None and end.status == CallStatus.DONE and takes_long(end.body, end.pieces, end.outside)

    def items(self, frame: Items) -> None:
        """Refuse items, because this call is not a stream. Raises ValueError."""
        raise ValueError("items for a call that is not a stream")


async def begin(pending: UnderWay, method: Method, bound: Any, *, wait: bool) -> None:
    """Send a call as soon as there is a slot for it. Raises CallError if the call did not run, and UsageError.

    If `wait` is False, raises BusyError instead of waiting for a slot. A call with one result carries the time that is
    left to the caller. A stream does not, because it may outlive the scope in which its first item was awaited; a
    Cancel tells the server when it is no longer wanted.
    """
    link, context = pending.link, call_context.get()
    if len(context) > CONTEXT_BYTES:
        raise aiote.UsageError(f"call_context has {len(context)} characters: expected at most {CONTEXT_BYTES}")
    if not (link.has_slot or wait):
        raise BusyError(
            method.name,
            f"{len(link.calls)} calls of this engine are under way there, and the server accepts no more at once",
        )
    slot = await link.take_slot(pending)
    if slot < 0:
        raise CallLostError(method.name, link.lost, "no")
    try:
        body, arrays = encode(bound)
        fixed = 2 * len(method.name) + len(context.encode())
        values = link.values
        parcel = values.inline(body, arrays, fixed) or await values.place_arrays(body, arrays, fixed, kept=True)
    except BaseException as error:
        link.give_slot(slot, pending)
        _explain(method, error)
    if link.lost:
        raise CallLostError(method.name, link.lost, "no")
    pending.slot, pending.pieces = slot, parcel.pieces
    left = 0.0
    if not method.stream and (deadline := link.endpoint.deadline()) < math.inf:
        left, pending.deadline = min(max(deadline - link.endpoint.loop.time(), 1e-6), MAX_LEFT_S), deadline
    size = FRAME_BYTES + fixed + len(parcel.body) + PIECE_BYTES * len(parcel.pieces)
    frame = CallFrame(slot, pending.generation, method.name, left, parcel.body, parcel.pieces, parcel.outside, context)
    # Send at once if no other call could travel in the same message. Streams are few, so do not batch them either.
    link.frames.post(frame, size, now=method.stream or len(link.calls) == 1)


def _explain(method: Method, error: BaseException) -> NoReturn:
    if isinstance(error, BlockingIOError):
        raise BusyError(method.name, str(error)) from error
    if isinstance(error, aiote.TransferError | aiote.PeerError):
        raise CallLostError(method.name, str(error), "no") from error
    raise error


def result_of(pending: PendingCall, method: Method) -> Any:
    """Return the result of a call that has ended.

    Raises CallError, TimeoutError after the caller's deadline, and the exceptions that the method declares in `raises`.
    """
    end, link = pending.end, pending.link
    if end is None:
        raise CallLostError(method.name, pending.reason, "perhaps")
    try:
        if end.status != CallStatus.DONE:
            raise failure(method, end, timed=pending.deadline < math.inf)
        return link.values.read_value(method.read_result, end, end.body)
    except ValueError as error:
        if end.status != CallStatus.DONE:
            raise
        raise _wrong_result(method, error) from error
    finally:
        link.values.free_pieces(end.pieces)


async def long_result_of(pending: PendingCall, method: Method) -> Any:
    """Return the result of a call that ended with one, and decode it in a thread. Raises RemoteError."""
    end, link = pending.end, pending.link
    assert end is not None
    try:
        body, take = link.values.open_body(end, end.body)
        return await link.endpoint.decode(method.read_result, body, take)
    except ValueError as error:
        raise _wrong_result(method, error) from error
    finally:
        # The thread has ended: also a cancelled wait waits for it.
        link.values.free_pieces(end.pieces)


def _wrong_result(method: Method, error: ValueError) -> RemoteError:
    return RemoteError(method.name, "ValidationError", f"the result is not of the annotated type: {error}")


def failure(method: Method, end: End, *, timed: bool) -> Exception:
    """Return the error with which a call ended. `timed`: the call carried a deadline."""
    if end.status in REFUSALS:
        kind, reason = REFUSALS[end.status]
        return kind(method.name, end.body.decode(errors="replace") or reason)
    if end.status == CallStatus.CANCELLED:
        return (
            TimeoutError(f"{method.name}: the deadline passed before the method had ended")
            if timed
            else RemoteError(method.name, "Cancelled", "")
        )
    if end.status == CallStatus.STOPPED:
        return CallLostError(method.name, "its server was stopped", "perhaps")
    try:
        names, text = _failure.decode(end.body)
    except ValueError:
        names, text = [], ""
    for name in names:
        if name in method.raises:
            try:
                return method.raises[name](text)
            except Exception:  # Its constructor takes something else than a text.
                break
    return RemoteError(method.name, names[0] if names else "Exception", text)
