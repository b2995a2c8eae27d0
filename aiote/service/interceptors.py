"""Interceptors: functions that run around each call, at the client or at the server."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiote

__all__ = ["CallInfo", "Interceptor", "run_interceptors"]


@dataclass(frozen=True, slots=True)
class CallInfo:
    """A call: the method's name on the wire, and the peer on the other side, which has proven its identity by its key.

    `context`: at the server, the call's trace as the caller states it (`aiote.observe.tracing`).
    """

    method: str
    peer: aiote.Peer
    context: str = ""


Interceptor: TypeAlias = Callable[[CallInfo, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""`await proceed()` continues the call and returns its result or raises its error. An interceptor refuses the call by
raising an exception instead. For a stream, an interceptor runs around the beginning at the client, and around the whole
stream at the server.
"""


async def run_interceptors(
    interceptors: Sequence[Interceptor], info: CallInfo, proceed: Callable[[], Awaitable[Any]]
) -> Any:
    """Run a call through interceptors; the first one is outermost."""
    for interceptor in reversed(interceptors):
        proceed = functools.partial(interceptor, info, proceed)
    return await proceed()
