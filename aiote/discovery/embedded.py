"""A client of the embedded registry.

It tells the server what it has, again and again: "I listen", and each of its members with its lease. So nothing has to
be remembered of what was said to a server that is gone; whoever serves next learns it within a third of a lease. What
it hears comes as a stream of numbered updates that begins with everything; a number that is missing makes it ask for
everything once more.

A server that is lost withdraws nothing. The members that it told of stay, marked as stale, until a server that is there
has had the time to hear of them and did not: one lease, and the longest pause between two attempts to reach it.
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

import aiote

from ..service import Mailroom
from ..service.background import Bell, Crew, beside
from ..service.reading import WireError
from .membership import Member, MemberEvent, RegistryError, Roster, check_lease
from .registrations import HeldRegistration, claim, give_up
from .wire import (
    FROM_REGISTRY,
    MESSAGE_BYTES,
    Announce,
    Entry,
    Leave,
    Subscribe,
    ToRegistry,
    Update,
    decode,
    encode,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EmbeddedRegistry"]

RETRY_LEAST_S = 0.1
RETRY_MOST_S = 5.0
LEAVE_S = 0.5
"""How long leaving waits at most for a server that takes no message: nobody who is cancelled waits for its lease."""
LOOK_S = 0.001
RENEWALS = 3
"""How often a lease is renewed in its own time."""


class _Stream:
    """What has come of one sequence of updates."""

    def __init__(self, update: Update) -> None:
        self.stream, self.run = update.stream, update.run
        self.expected = 0
        self.complete = False
        self.listed: set[str] = set()


class EmbeddedRegistry:
    """The registry that one of the engines serves: a `Registry`; `async with EmbeddedRegistry(mailroom, address):`.

    Entering does not wait for the server; `ready` does. Several addresses are tried in turn: of servers of which one at
    a time is running. `lease_s` is how long members stay known that were not heard of (0.1 to 600). `malformed` counts
    messages that were none, `gaps` updates that were missed, `failure` says why it was last out of touch.
    """

    def __init__(
        self,
        mailroom: Mailroom,
        addresses: aiote.Address | Iterable[aiote.Address],
        *,
        lease_s: float = 10.0,
    ) -> None:
        self.malformed = 0
        self.gaps = 0
        self.failure = ""
        self._mailroom = mailroom
        self._lease_s = check_lease(lease_s)
        self._addresses = _checked(addresses)
        self._session = secrets.randbits(64)
        self._subscription = 0
        self._roster = Roster()
        self._leases: dict[str, float] = {}
        self._doubtful: dict[str, float] = {}
        self._registrations: dict[str, HeldRegistration] = {}
        self._server: aiote.Peer | None = None
        self._stream: _Stream | None = None
        self._run: int | None = None
        self._heard = 0.0
        self._gap = False
        self._open = False
        self._poke = Bell()
        self._poked = False
        self._progress = Bell()
        self._redirected = Bell()
        self._numbers = itertools.count(1)
        self._running: AbstractAsyncContextManager[Crew] | None = None
        if mailroom.engine.config.message_bytes < MESSAGE_BYTES:
            raise aiote.UsageError(
                f"config.message_bytes={mailroom.engine.config.message_bytes}: the embedded registry needs "
                f"{MESSAGE_BYTES} at least"
            )

    # What a registry offers.

    @property
    def in_touch(self) -> bool:
        """Whether a server answers, and has told everything."""
        return self._stream is not None and self._stream.complete

    async def ready(self) -> None:
        """Wait until the members have been told once. Raises ClosedError."""
        while self._run is None:
            self._require_open()
            await self._progress.wait()

    def members(self) -> tuple[Member, ...]:
        """Return the members known here; stale ones are marked."""
        if not self.in_touch:
            return self._roster.members(stale=True)
        return tuple(
            replace(member, stale=True) if member.name in self._doubtful else member
            for member in self._roster.members()
        )

    def watch(self) -> AsyncIterator[MemberEvent]:
        """Iterate over events, beginning with the members known here. See `Registry.watch`."""
        return self._roster.watch()

    @asynccontextmanager
    async def join(self, member: Member) -> AsyncIterator[HeldRegistration]:
        """Register a member for the length of an `async with`. See `Registry.join`."""
        self._require_open()
        registration = HeldRegistration(member, self._numbers, self._announce_soon)
        await claim(self._registrations, registration)
        try:
            self._require_open()
            self._announce_soon()
            await registration.resolved()
            yield registration
        finally:
            registration.leaving = True
            try:
                if not registration.lost:
                    await self._leave(Leave(self._session, member.name, registration.number))
            finally:
                give_up(self._registrations, registration)

    def redirect(self, addresses: aiote.Address | Iterable[aiote.Address]) -> None:
        """Have these addresses from now on; the server that answers now is left only when it is lost."""
        self._addresses = _checked(addresses)
        self._redirected.ring()

    async def __aenter__(self) -> EmbeddedRegistry:
        if self._running is not None:
            raise aiote.UsageError("a registry is entered once")
        self._give_back = self._mailroom.handle(FROM_REGISTRY, self._take)
        self._running = beside(self._keep_in_touch)
        self._open = True
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._running is not None
        reason = "the registry's `async with` has ended"
        self._end(reason)
        try:
            await self._leave(Leave(self._session, "", next(self._numbers)))
        finally:
            self._close(reason)
            ended = await self._running.__aexit__(kind, error, traceback)
        return ended

    def _require_open(self) -> None:
        if not self._open:
            raise aiote.ClosedError("the registry is closed")

    def _end(self, reason: str) -> None:
        """Register nobody any more, and say nothing more of those who are registered."""
        self._open = False
        for registration in self._registrations.values():
            registration.lose(reason)

    def _close(self, reason: str) -> None:
        self._end(reason)
        self._give_back()
        self._out_of_touch(reason)
        self._roster.close()

    # What is said to the server.

    def _announce_soon(self) -> None:
        self._poked = True
        self._poke.ring()

    async def _leave(self, message: Leave) -> None:
        """Tell the server that a member has left, if there is a server; return when that is on its way to it.

        From here, for who leaves may be cancelled, and the task that keeps in touch with it.
        """
        transfer: aiote.Transfer | None = None
        pause = LOOK_S
        with anyio.move_on_after(LEAVE_S, shield=True):
            # Looked at, not awaited: what is cancelled while it is awaited has to leave the NIC first.
            while self._server is not None and (transfer is None or not transfer.done()):
                try:
                    transfer = transfer or self._mailroom.engine.submit_send(self._server, encode(message))
                except aiote.QueueFull:
                    pass
                except aiote.AioteError:
                    return
                await anyio.sleep(pause)
                pause *= 2

    async def _keep_in_touch(self) -> None:
        """Stay with one server after the other, with pauses that grow while none answers."""
        pause = RETRY_LEAST_S
        while not self._mailroom.engine.closed:
            for address in self._addresses:
                try:
                    await self._stay_with(address)
                except aiote.AioteError as error:
                    if self.in_touch:
                        pause = RETRY_LEAST_S
                    self._out_of_touch(str(error))
            with anyio.move_on_after(pause * random.uniform(0.5, 1.0)):
                await self._redirected.wait()
            pause = min(pause * 2, RETRY_MOST_S)
        self._close("the engine is closed")

    async def _stay_with(self, address: aiote.Address) -> None:
        """Say what there is to say, and listen, until the server is lost: PeerError, RegistryError or ClosedError."""
        peer = self._server = await self._mailroom.engine.connect(address)
        self._begin()
        while True:
            self._gap = False
            await self._announce_all(peer)
            until = anyio.current_time() + self._lease_s / RENEWALS
            while (left := until - anyio.current_time()) > 0:
                with anyio.move_on_after(left):
                    await self._poked_again()
                    await self._announce_changes(peer)
            self._forget_doubtful()
            if anyio.current_time() - self._heard > self._lease_s:
                raise RegistryError(f"nothing was heard of the registry at {address} for {self._lease_s} s")
            if self._gap:
                self._begin()

    def _begin(self) -> None:
        """Ask for everything; what is known stays."""
        self._subscription += 1
        self._stream = None
        self._heard = anyio.current_time()
        for registration in self._registrations.values():
            registration.sent = 0

    async def _poked_again(self) -> None:
        while not self._poked:
            await self._poke.wait()

    async def _announce_all(self, peer: aiote.Peer) -> None:
        await self._send(peer, Subscribe(self._session, self._subscription, self._lease_ms))
        for registration in self._registrations.values():
            registration.sent = 0
        await self._announce_changes(peer)

    async def _announce_changes(self, peer: aiote.Peer) -> None:
        self._poked = False
        for registration in tuple(self._registrations.values()):
            if registration.sent < registration.number and not (registration.lost or registration.leaving):
                number, registration.sent = registration.number, registration.number
                await self._send(peer, Announce(self._session, number, self._lease_ms, registration.member))

    async def _send(self, peer: aiote.Peer, message: ToRegistry) -> None:
        with anyio.move_on_after(self._lease_s) as patience:
            await self._mailroom.engine.send(peer, encode(message))
        if patience.cancelled_caught:
            raise RegistryError(f"the registry at {peer.address} has taken no message for {self._lease_s} s")

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_s * 1000)

    # What is heard of it.

    def _take(self, message: aiote.Message) -> None:
        try:
            update = decode(message.data)
        except WireError:
            self.malformed += 1
            return
        if not isinstance(update, Update) or update.session != self._session:
            return
        if update.subscription != self._subscription:
            return
        self._heard = anyio.current_time()
        stream = self._stream
        if stream is None or (stream.stream != update.stream and update.number == 0):
            stream = self._stream = _Stream(update)
        if stream.stream != update.stream or update.number > stream.expected:
            self.gaps += 1
            self._gap = True
        elif update.number == stream.expected:
            stream.expected += 1
            self._apply(stream, update)

    def _apply(self, stream: _Stream, update: Update) -> None:
        for entry in update.entries:
            self._enter(stream, entry)
        for answer in update.answers:
            registration = self._registrations.get(answer.name)
            if registration is None or answer.number not in range(registration.first, registration.number + 1):
                continue
            if answer.refusal:
                registration.lose(answer.refusal)
            else:
                registration.take(answer.number)
        if update.complete and not stream.complete:
            self._completed(stream)

    def _enter(self, stream: _Stream, entry: Entry) -> None:
        if not stream.complete:
            stream.listed.add(entry.name)
        self._doubtful.pop(entry.name, None)
        if entry.member is None:
            self._drop(entry.name)
        else:
            self._leases[entry.name] = entry.lease_ms / 1000
            self._roster.put(entry.member)

    def _completed(self, stream: _Stream) -> None:
        """Everything was told. What was not is gone if it is the same server, and in doubt if it is a new one."""
        now = anyio.current_time()
        for name in self._roster.known.keys() - stream.listed:
            if stream.run != self._run:
                self._doubtful.setdefault(name, now + self._leases[name] + RETRY_MOST_S)
            elif name not in self._doubtful:
                self._drop(name)
        stream.complete = True
        stream.listed.clear()
        self._run = stream.run
        self._progress.ring()

    def _forget_doubtful(self) -> None:
        """Drop those of whom a new server has not heard for long enough."""
        now = anyio.current_time()
        if self.in_touch:
            for name in [name for name, until in self._doubtful.items() if until <= now]:
                del self._doubtful[name]
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._leases.pop(name, None)
        self._roster.remove(name)

    def _out_of_touch(self, reason: str) -> None:
        self._stream = self._server = None
        self._subscription += 1
        self.failure = reason
        self._progress.ring()


def _checked(addresses: aiote.Address | Iterable[aiote.Address]) -> tuple[aiote.Address, ...]:
    chosen = (addresses,) if isinstance(addresses, aiote.Address) else tuple(addresses)
    if not chosen or not all(isinstance(address, aiote.Address) for address in chosen):
        raise aiote.UsageError("addresses: one aiote.Address at least expected")
    return chosen
