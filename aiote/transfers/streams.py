"""The order of transfers with the streams of the GPUs whose memory they use.

A verb's `stream` is a stream as DLPack and the array libraries name one: a number, or an object that has the number.
The transfer waits for the work that the stream has when the verb is called, as a kernel that is launched there would.
The stream itself goes on, and no host thread waits for it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError
from ..rails import EventPool, LocalMemory, Order, is_stream

__all__ = ["order_behind", "pools_of"]

READY = -1
LEGACY = 1
"""The legacy default stream, which waits for all streams of its context except those made as non-blocking."""
EXPECTED = (
    "None or 1 (the legacy default stream), 2 (the thread's default), -1 (ready now), a stream's address, or an object "
    "with __cuda_stream__, .cuda_stream (torch), .ptr (cupy) or .handle (numba)"
)


def _handle(stream: Any, verb: str) -> int:
    """Ask a stream object for the number that the driver knows it by."""
    if hasattr(stream, "__cuda_stream__"):
        given = stream.__cuda_stream__
        said = given() if callable(given) else given
        try:
            version, handle = (operator.index(item) for item in said)
        except (TypeError, ValueError):
            raise UsageError(
                f"{verb}: __cuda_stream__ of the stream returned {said!r}, expected (0, address)"
            ) from None
        if version != 0:
            raise UsageError(f"{verb}: __cuda_stream__ of the stream has version {version}, expected 0")
        return handle
    for name in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, name):
            handle = getattr(stream, name)
            # numba gives a c_void_p, whose value is None for 0.
            return operator.index(getattr(handle, "value", handle) or 0)
    raise TypeError(f"it is {type(stream).__name__}")


def _number(stream: Any, verb: str) -> int:
    """Return the driver's number of a stream, or READY. Raises UsageError."""
    if stream is None:
        return LEGACY
    try:
        if isinstance(stream, bool):
            raise TypeError("it is a bool")
        number = operator.index(stream)
    except TypeError:
        try:
            # An object's 0 is its library's default stream, the legacy one; a plain 0 could mean either default.
            number = _handle(stream, verb) or LEGACY
        except TypeError as error:
            raise UsageError(f"{verb}: stream={stream!r}: {error}; expected {EXPECTED}") from None
    if number == 0:
        raise UsageError(
            f"{verb}: stream=0 may mean either default stream: give 1 for the legacy one, or 2 for the thread's"
        )
    if number != READY and not is_stream(number):
        raise UsageError(f"{verb}: stream={number}; expected {EXPECTED}")
    return number


def pools_of(memories: Iterable[LocalMemory]) -> tuple[EventPool, ...]:
    """Return the event pools of the devices that hold these memories, each once; host memory has no pool."""
    return tuple(dict.fromkeys(memory.events for memory in memories if memory.events is not None))


def order_behind(pools: Iterable[EventPool], stream: Any, verb: str) -> Order | None:
    """Record the work that a new transfer must wait for, and return it; None if there is none.

    Raises UsageError if the stream is not one of the memory's device or is being captured, or if a stream is given and
    no memory is a GPU's. A transfer that waits on a failed device ends with TransferError.
    """
    number = _number(stream, verb)
    if number == READY:
        return None
    order = Order()
    for pool in pools:
        try:
            order.add(pool, number)
        except ValueError as error:
            raise UsageError(f"{verb}: {error}") from None
    if order.empty:
        if stream is not None:
            raise UsageError(
                f"{verb}: stream= orders a transfer with the kernels that use memory of a GPU, and this is the host's: "
                "synchronize the stream that fills it, and leave stream out"
            )
        return None
    return order
