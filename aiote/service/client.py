"""Calling methods of a service on another engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import anyio
import numpy
from numpy.typing import NDArray

import aiote

from .background import to_the_end
from .codec import describe_array
from .definition import Method, Service, methods_of
from .endpoint import Endpoint, Limits
from .errors import CallError, CallLostError, NotServedError
from .exchange import Pending, begin, result_of
from .frames import OutSpec
from .interceptors import CallInfo, Interceptor, intercepted
from .link import Link
from .memory import LEND_BYTES
from .stream import Incoming, Stream

__all__ = ["Members", "client"]

S = TypeVar("S", bound=Service)
ATTEMPTS = 3


class Members(Protocol):
    """Several servers of one service."""

    async def addresses(self) -> Sequence[aiote.Address]:
        """Return where they are reached now; wait while there are none."""


class Caller:
    """Calls the methods of one service, on one peer or on several."""

    def __init__(
        self,
        engine: aiote.Engine,
        target: Target,
        interceptors: Sequence[Interceptor],
        wait: bool,
        limits: Limits | None,
    ) -> None:
        self.endpoint = Endpoint.of(engine, limits)
        self.wait = wait
        self._interceptors = tuple(interceptors)
        self._target = target
        self._link: Link | None = None
        self._links: dict[aiote.Address, Link] = {}

    # Where to.

    async def link(self, method: Method, avoid: Sequence[aiote.Address] = ()) -> Link:
        """Return the link for the next call, greeted. Raises PeerError, NotServedError, CallLostError."""
        link = self._link
        if link is not None and not link.lost:
            return link
        if isinstance(self._target, aiote.Address | str | aiote.Peer):
            link = self._link = await self._reach(self._target, method)
            return link
        return await self._choose(self._target, method, avoid)

    async def _choose(self, members: Members, method: Method, avoid: Sequence[aiote.Address]) -> Link:
        """Return the link to the member with the fewest calls of ours, one to avoid where there is no other."""
        addresses = await members.addresses()
        self._links = {one: link for one, link in self._links.items() if one in addresses and not link.lost}

        def rank(address: aiote.Address) -> tuple[bool, int]:
            link = self._links.get(address)
            return address in avoid, len(link.calls) if link is not None else 0

        failure: Exception = NotServedError(method.name, "there are no members")
        for address in sorted(addresses, key=rank):
            try:
                if address not in self._links:
                    self._links[address] = await self._reach(address, method)
                return self._links[address]
            except (aiote.PeerError, CallError) as error:
                failure = error
        raise failure

    async def _reach(self, target: aiote.Address | str | aiote.Peer, method: Method) -> Link:
        engine = self.endpoint.engine
        peer = target if isinstance(target, aiote.Peer) else await engine.connect(target)
        link = self.endpoint.link_to(peer)
        with anyio.move_on_after(engine.config.connect_timeout) as scope:
            await link.greet()
        if link.lost:
            raise CallLostError(method.name, link.lost, "no")
        if scope.cancelled_caught:
            raise NotServedError(
                method.name, f"{peer.address} answered nothing within connect_timeout; does it run aiote.service.serve?"
            )
        return link

    # One call.

    async def call(self, method: Method, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method and return its result; call once more where that is allowed."""
        bound = _bound(method, arguments, named)
        avoid: list[aiote.Address] = []
        for attempt in range(ATTEMPTS):
            link = await self.link(method, avoid)
            try:
                if not self._interceptors:
                    return await self._once(link, method, bound)
                proceed = functools.partial(self._once, link, method, bound)
                return await intercepted(self._interceptors, CallInfo(method.name, link.peer), proceed)
            except CallError as error:
                if attempt == ATTEMPTS - 1 or not self._again(method, error):
                    raise
                avoid.append(link.peer.address)
        raise AssertionError

    def _again(self, method: Method, error: CallError) -> bool:
        """Tell whether to call once more: what did not run, or may run twice, and where that may help."""
        if error.ran == "yes" or (error.ran == "perhaps" and not method.idempotent):
            return False
        return isinstance(error, CallLostError) or not isinstance(self._target, aiote.Address | str | aiote.Peer)

    async def _once(self, link: Link, method: Method, bound: Any) -> Any:
        if not method.outs:
            return await self._exchange(link, method, bound)
        outs = [_check_out(method, name, getattr(bound, name)) for name in method.outs]
        leases: list[tuple[NDArray[Any], aiote.Lease]] = []
        try:
            specs = [self._lend(link, array, leases) for array in outs]
            fields = {name: getattr(bound, name) for name in bound.__struct_fields__}
            lent = method.arguments(**{**fields, **dict(zip(method.outs, specs, strict=True))})
            result, filled = await self._exchange(link, method, lent)
        finally:
            # Nobody can write there any more when this has ended, whatever became of the call.
            if leases:
                await to_the_end(functools.partial(self._revoke, leases))
        small = [array for array in outs if array.nbytes < LEND_BYTES]
        if [(array.shape, array.dtype) for array in small] != [(array.shape, array.dtype) for array in filled]:
            raise CallError(method.name, "the arrays that it has filled are not those that it was given")
        for array, values in zip(small, filled, strict=True):
            array[...] = values
        return result

    def _lend(self, link: Link, array: NDArray[Any], leases: list[tuple[NDArray[Any], aiote.Lease]]) -> OutSpec:
        descriptor = b""
        if array.nbytes >= LEND_BYTES:
            region = self.endpoint.registrations.take(array)
            try:
                leases.append((array, region.lease(slice(0, array.nbytes), link.peer)))
            except BaseException:
                self.endpoint.registrations.give(array)
                raise
            descriptor = leases[-1][1].descriptor
        return OutSpec(describe_array(array), list(array.shape), descriptor)

    async def _revoke(self, leases: list[tuple[NDArray[Any], aiote.Lease]]) -> None:
        for _, lease in leases:
            lease.begin_revoking()
        while leases:
            array, lease = leases[-1]
            await lease.revoke()
            leases.pop()
            self.endpoint.registrations.give(array)

    async def _exchange(self, link: Link, method: Method, bound: Any) -> Any:
        """Send a call and return its result; a cancelled one is told to the peer."""
        pending = Pending(link)
        await begin(pending, method, bound, wait=self.wait)
        try:
            await pending.waiter
        except BaseException:
            pending.abandon()
            raise
        return result_of(pending, method)

    def stream(self, method: Method, arguments: tuple[Any, ...], named: dict[str, Any]) -> Stream:
        """Return the items of a stream; it begins when the first is awaited."""
        bound = _bound(method, arguments, named)

        async def start() -> Incoming:
            link = await self.link(method)
            incoming = Incoming(link, method)

            async def proceed() -> None:
                await begin(incoming, method, bound, wait=self.wait)

            await intercepted(self._interceptors, CallInfo(method.name, link.peer), proceed)
            return incoming

        return Stream(start)


def _bound(method: Method, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        return method.arguments(*arguments, **named)
    except TypeError as error:
        raise TypeError(f"{method.name}: {error}") from None


def _check_out(method: Method, name: str, array: object) -> NDArray[Any]:
    if not isinstance(array, numpy.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise aiote.UsageError(f"{method.name}: {name} must be a numpy array, contiguous and writable: it is filled")
    return array


Target: TypeAlias = aiote.Address | str | aiote.Peer | Members


def client(
    engine: aiote.Engine,
    target: Target,
    service: type[S],
    *,
    wait: bool = True,
    interceptors: Sequence[Interceptor] = (),
    limits: Limits | None = None,
) -> S:
    """Return an object with the methods of a service, which runs on another engine.

    `target` is that engine's address or Peer, or the members of a registry, of which the one with the fewest calls of
    this client takes the next. Nothing is connected before the first call. Where the peer runs as many calls of this
    engine as it takes, a call waits, or (`wait` False) raises BusyError. `interceptors` run around each call, the first
    outermost. `limits` are this engine's, as in `serve`.

    A call ends with its result or a CallError that says whether the method ran. The time that is left in the caller's
    scope (`anyio.fail_after`) travels; a cancelled call is cancelled there, too. When the await has ended, nothing of
    the call lands in the caller's arrays any more. Raises UsageError for a service whose annotations do not do.
    """
    caller = Caller(engine, target, interceptors, wait, limits)
    namespace: dict[str, Any] = {"__slots__": ("_caller",)}
    for method in methods_of(service):
        namespace[method.attribute] = _proxy(method)
    made: Any = object.__new__(type(f"{service.__name__}Client", (service,), namespace))
    made._caller = caller
    return cast("S", made)


def _proxy(method: Method) -> Callable[..., Any]:
    if method.stream:

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            return self._caller.stream(method, arguments, named)

    else:

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            return self._caller.call(method, arguments, named)

    call.__name__ = call.__qualname__ = method.attribute
    return call
