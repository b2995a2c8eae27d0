"""Call the methods of a service on another engine."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import anyio
import numpy
from numpy.typing import NDArray

import aiote

from ..aio import run_shielded
from ..transfers import SharedRegistration
from .codec import check_dtype, describe_array
from .definition import Method, Service, methods_of
from .endpoint import CallEndpoint, Limits
from .errors import CallError, CallLostError, NotServedError, RemoteError
from .exchange import PendingCall, begin, long_result_of, result_of
from .frames import CallStatus, OutSpec
from .interceptors import CallInfo, Interceptor, run_interceptors
from .link import Link
from .members import Chooser, MemberSource
from .memory import LEND_BYTES
from .stream import IncomingStream, Stream

__all__ = ["MemberSource", "client"]

S = TypeVar("S", bound=Service)
ATTEMPTS = 3
LATE_S = 1.0
"""How long after its deadline a call waits to be cancelled by the caller's own scope, in seconds."""


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
        self.endpoint = CallEndpoint.of(engine, limits)
        self.wait = wait
        self._interceptors = tuple(interceptors)
        self._link: Link | None = None
        if isinstance(target, aiote.Address | str | aiote.Peer):
            self._target: aiote.Address | str | aiote.Peer | Chooser = target
        else:
            self._target = Chooser(target, self.endpoint, self._connect)

    # Choosing a link.

    async def link(self, method: Method, avoid: Sequence[aiote.Address] = ()) -> Link:
        """Return the link for the next call, after its handshake. Raises CallError if no server can be reached."""
        if isinstance(self._target, Chooser):
            return await self._target.choose(method.name, avoid)
        if self._link is None or self._link.lost:
            self._link = await self._connect(self._target, method.name)
        return self._link

    async def _connect(self, target: aiote.Address | str | aiote.Peer, method: str) -> Link:
        engine = self.endpoint.engine
        try:
            peer = target if isinstance(target, aiote.Peer) else await engine.connect(target)
        except aiote.PeerError as error:
            raise CallLostError(method, str(error), "no") from error
        link = self.endpoint.link_to(peer)
        with anyio.move_on_after(engine.config.connect_timeout) as scope:
            await link.greet()
        if link.lost:
            raise CallLostError(method, link.lost, "no")
        if scope.cancelled_caught:
            raise NotServedError(
                method, f"{peer.address} did not answer within connect_timeout; does it run aiote.service.serve?"
            )
        return link

    # One call.

    async def call(self, method: Method, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method and return its result. Repeat a failed call if `_may_repeat` allows it, up to ATTEMPTS."""
        bound = _bind_arguments(method, arguments, named)
        avoid: list[aiote.Address] = []
        for attempt in itertools.count(1):
            link: Link | None = None
            try:
                link = await self.link(method, avoid)
                interceptors = self.endpoint.client_interceptors + self._interceptors
                if not interceptors:
                    return await self._call_once(link, method, bound)
                proceed = functools.partial(self._call_once, link, method, bound)
                return await run_interceptors(interceptors, CallInfo(method.name, link.peer), proceed)
            except CallError as error:
                if not self._may_repeat(method, error, attempt, link, avoid):
                    raise
        raise AssertionError

    def _may_repeat(
        self, method: Method, error: CallError, attempt: int, link: Link | None, avoid: list[aiote.Address]
    ) -> bool:
        """Tell whether to repeat a failed call: the method did not run or is idempotent, and a repetition may help.

        Also add the link's peer to `avoid`, and leave a member alone that takes no calls.
        """
        if link is not None:
            avoid.append(link.peer.address)
            if isinstance(self._target, Chooser):
                self._target.pause_member(link, error)
        if attempt >= ATTEMPTS or error.ran == "yes" or (error.ran == "perhaps" and not method.idempotent):
            return False
        return isinstance(error, CallLostError) or isinstance(self._target, Chooser)

    async def _call_once(self, link: Link, method: Method, bound: Any) -> Any:
        if not method.outs:
            return await self._exchange(link, method, bound)
        outs = [_checked_out(method, name, getattr(bound, name)) for name in method.outs]
        leases: list[tuple[SharedRegistration, aiote.Lease]] = []
        try:
            specs = [self._lend(link, array, leases) for array in outs]
            fields = {name: getattr(bound, name) for name in bound.__struct_fields__}
            lent = method.arguments(**{**fields, **dict(zip(method.outs, specs, strict=True))})
            result, filled = await self._exchange(link, method, lent)
        finally:
            # However the call ended: once the leases are revoked, the server cannot write into the arrays any more.
            if leases:
                await run_shielded(functools.partial(self._revoke, leases))
        small = [array for array in outs if array.nbytes < LEND_BYTES]
        if [(array.shape, array.dtype) for array in small] != [(array.shape, array.dtype) for array in filled]:
            raise RemoteError(
                method.name,
                "ValueError",
                "the server returned arrays of other shapes or types than it was given to fill",
            )
        for array, values in zip(small, filled, strict=True):
            array[...] = values
        return result

    def _lend(self, link: Link, array: NDArray[Any], leases: list[tuple[SharedRegistration, aiote.Lease]]) -> OutSpec:
        text, descriptor = describe_array(array), b""
        if array.nbytes >= LEND_BYTES:
            held = self.endpoint.hold(array, filled=True)
            try:
                leases.append((held, held.region.lease(slice(0, array.nbytes), link.peer)))
            except BaseException:
                self.endpoint.let_go(held)
                raise
            descriptor = leases[-1][1].descriptor
        return OutSpec(text, list(array.shape), descriptor)

    async def _revoke(self, leases: list[tuple[SharedRegistration, aiote.Lease]]) -> None:
        for _, lease in leases:
            lease.begin_revoking()
        while leases:
            held, lease = leases[-1]
            await lease.revoke()
            leases.pop()
            self.endpoint.let_go(held)

    async def _exchange(self, link: Link, method: Method, bound: Any) -> Any:
        """Send a call and return its result. If the wait is cancelled, cancel the call at the peer as well."""
        pending = PendingCall(link)
        await begin(pending, method, bound, wait=self.wait)
        try:
            await pending.waiter
        except BaseException:
            pending.abandon()
            raise
        if pending.end is not None and pending.end.status == CallStatus.CANCELLED and pending.deadline < math.inf:
            # The server's clock reached the deadline first. Give the caller's own scope, if it still exists, the time
            # to cancel this wait.
            await anyio.sleep_until(pending.deadline + LATE_S)
        return await long_result_of(pending, method) if pending.is_long else result_of(pending, method)

    def stream(self, method: Method, arguments: tuple[Any, ...], named: dict[str, Any]) -> Stream:
        """Return the items of a stream. The call begins when the first item is awaited."""
        bound = _bind_arguments(method, arguments, named)

        async def start(avoid: list[aiote.Address]) -> IncomingStream:
            link = await self.link(method, avoid)
            begun: list[IncomingStream] = []
            interceptors = self.endpoint.client_interceptors + self._interceptors

            async def proceed() -> None:
                if begun:
                    raise RuntimeError(f"{method.name}: an interceptor called proceed twice; call it once")
                begun.append(IncomingStream(link, method))
                await begin(begun[0], method, bound, wait=self.wait)

            try:
                if interceptors:
                    await run_interceptors(interceptors, CallInfo(method.name, link.peer), proceed)
                else:
                    await proceed()
            except BaseException:
                for incoming in begun:
                    incoming.abandon()
                raise
            if not begun:
                raise RuntimeError(
                    f"{method.name}: an interceptor did not call proceed; it must, because the items of a "
                    "stream come from the method"
                )
            return begun[0]

        return Stream(start, functools.partial(self._may_repeat, method))


def _bind_arguments(method: Method, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        return method.arguments(*arguments, **named)
    except TypeError as error:
        raise TypeError(f"{method.name}: {error}") from None


def _checked_out(method: Method, name: str, array: object) -> NDArray[Any]:
    if not isinstance(array, numpy.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise aiote.UsageError(
            f"{method.name}: {name} is filled by the method: expected a contiguous, writable numpy array"
        )
    try:
        check_dtype(method.outs[name], array.dtype)
        describe_array(array)
    except ValueError as error:
        raise aiote.UsageError(f"{method.name}: {name}: {error}") from error
    return array


Target: TypeAlias = aiote.Address | str | aiote.Peer | MemberSource


def client(
    engine: aiote.Engine,
    target: Target,
    service: type[S],
    *,
    wait: bool = True,
    interceptors: Sequence[Interceptor] = (),
    limits: Limits | None = None,
) -> S:
    """Return an object with the methods of a service that runs on another engine.

    `target` is that engine's address or Peer, or the members of a registry; each call then goes to the member with the
    fewest calls of this client. The client connects at the first call. If as many calls of this engine are in flight at
    the peer as the peer admits, a call waits for a slot, or raises BusyError if `wait` is False. `interceptors` run
    around each call; the first one is outermost. `limits` are those of this engine, as in `serve`.

    A call ends with its result, or with a CallError that says whether the method ran, or with an exception that the
    method declares. The call carries the time that is left in the caller's scope (`anyio.fail_after`). Cancelling a
    call cancels the method at the server, too. After the await has ended, the call writes no more bytes into the
    caller's arrays. Raises UsageError for a service whose annotations cannot be used.
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
