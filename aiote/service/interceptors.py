"""Functions around each call, on either side."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiote

__all__ = ["CallInfo", "Interceptor", "intercepted"]


@dataclass(frozen=True, slots=True)
class CallInfo:
    """A call: the method's name on the wire, and the peer on the other side, whose identity its key has proven.

    `context`: at the server, the trace that the caller says it is part of (`aiote.observe.tracing`).
    """

    method: str
    peer: aiote.Peer
    context: str = ""


Interceptor: TypeAlias = Callable[[CallInfo, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""`await proceed()` goes on with the call, and returns its result or raises its error. One that raises instead refuses
the call. Of a stream it surrounds the beginning at the client, and all of it at the server.
"""


async def intercepted(
    interceptors: Sequence[Interceptor], info: CallInfo, proceed: Callable[[], Awaitable[Any]]
) -> Any:
    """Run a call through interceptors, the first outermost."""
    for interceptor in reversed(interceptors):
        proceed = functools.partial(interceptor, info, proceed)
    return await proceed()
