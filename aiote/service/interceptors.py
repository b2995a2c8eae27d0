"""Interceptors: functions that run around each call, at the client or at the server."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiote

from .endpoint import CallEndpoint

__all__ = ["CallInfo", "Interceptor", "intercept_all", "run_interceptors"]


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


def intercept_all(
    engine: aiote.Engine, *, client: Sequence[Interceptor] = (), server: Sequence[Interceptor] = ()
) -> Callable[[], None]:
    """Run interceptors around every call that an engine makes and serves; return a function that ends this.

    That includes the calls of KV caches, weight updates, registries and groups on the engine. These interceptors are
    outside of those that `client` and `serve` were given. The engine's limits on calls are set by then: to other ones
    than the defaults by a `serve` or `client` before. Raises UsageError, ClosedError.
    """
    endpoint = CallEndpoint.of(engine)
    mine = tuple(client), tuple(server)
    endpoint.client_interceptors += mine[0]
    endpoint.server_interceptors += mine[1]
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            endpoint.client_interceptors = _without(endpoint.client_interceptors, mine[0])
            endpoint.server_interceptors = _without(endpoint.server_interceptors, mine[1])

    return stop


def _without(interceptors: tuple[Interceptor, ...], some: tuple[Interceptor, ...]) -> tuple[Interceptor, ...]:
    left = list(interceptors)
    for one in some:
        left.remove(one)
    return tuple(left)
