"""A client of the embedded registry.

The client repeatedly reports all its members to the server. Therefore it need not remember its reports to a server that
is gone; the next server gets them within a third of a lease. The client receives members as a stream that begins with
all of them. When the stream breaks, the next one begins with all of them again.

Losing the server withdraws no member. The members that it reported stay, marked as stale, until a new server has had
time to hear of them and has not: one lease plus the longest pause between two attempts to reach a server.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

import aiote

from .. import service
from ..aio import Backoff, Condition, TaskScope, run_background_tasks
from ..service.endpoint import CallEndpoint
from .member_registration import HeldRegistration, claim, give_up
from .membership import (
    DEFAULT_LEASE_S,
    RETRY_LEAST_S,
    RETRY_MOST_S,
    Member,
    RegistryError,
    Roster,
    Watch,
    check_lease,
)
from .registry_server import MEMBERS_EACH, Keeping, Watching
from .wire import MOST_KNOWN, MemberRecord, RosterUpdate

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EmbeddedRegistry"]

LEAVE_S = 0.5
"""The most seconds that leaving waits for an unresponsive server: a cancelled task must not wait for a whole lease."""
RENEWALS = 3
"""How often a lease is renewed within its duration."""


class EmbeddedRegistry:
    """A client of the registry that another engine serves, itself a `Registry`.

    Use it as `async with EmbeddedRegistry(engine, address):`. Entering does not wait for the server; `ready` does.
    Several addresses, which may be texts, are tried in turn; only one of their servers may run at a time. `lease_s` is
    how long this client's members stay known without a report (0.1 to 600). A client registers at most 1024 members.
    `failure` is the reason why it was last out of touch. Raises UsageError for anything but addresses.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        addresses: aiote.Address | str | Iterable[aiote.Address | str],
        *,
        lease_s: float = DEFAULT_LEASE_S,
    ) -> None:
        self.failure = ""
        self._engine = engine
        self._lease_s = check_lease(lease_s)
        self._addresses = _checked(addresses)
        self._session = secrets.randbits(63)
        self._roster = Roster()
        self._leases: dict[str, float] = {}
        self._doubtful: dict[str, float] = {}
        self._registrations: dict[str, HeldRegistration] = {}
        self._server: Keeping | None = None
        self._listed: set[str] | None = None
        self._run: int | None = None
        self._open = self._complete = self._is_report_due = False
        self._report_due = Condition()
        self._progress = Condition()
        self._redirected = Condition()
        self._numbers = itertools.count(1)
        self._running: AbstractAsyncContextManager[TaskScope] | None = None

    # The interface of a registry.

    @property
    def in_touch(self) -> bool:
        """Whether a server answers, and has reported all members."""
        return self._complete

    async def ready(self) -> None:
        """Wait until a server has reported all members for the first time. Raises ClosedError."""
        while self._run is None:
            self._require_open()
            await self._progress.wait()

    def members(self) -> tuple[Member, ...]:
        """Return the members known here; stale members are marked."""
        if not self.in_touch:
            return self._roster.members(stale=True)
        return tuple(
            replace(member, stale=True) if member.name in self._doubtful else member
            for member in self._roster.members()
        )

    def watch(self) -> Watch:
        """Return an iterator over events, beginning with the members known here. See `Registry.watch`."""
        return self._roster.watch()

    @asynccontextmanager
    async def join(self, member: Member) -> AsyncIterator[HeldRegistration]:
        """Register a member for the length of an `async with`. See `Registry.join`."""
        self._require_open()
        if len(self._registrations) >= MEMBERS_EACH:
            raise aiote.UsageError(
                f"join: this registry has {MEMBERS_EACH} members of this engine already, which is the "
                "limit; let one leave first"
            )
        registration = HeldRegistration(member, self._announce_soon)
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
                    await self._leave()
            finally:
                give_up(self._registrations, registration)

    def redirect(self, addresses: aiote.Address | str | Iterable[aiote.Address | str]) -> None:
        """Use these addresses from now on; the client leaves its present server only when it loses that.

        Raises UsageError for anything but addresses.
        """
        self._addresses = _checked(addresses)
        self._redirected.wake_all()

    async def __aenter__(self) -> EmbeddedRegistry:
        if self._running is not None:
            raise aiote.UsageError("this registry was entered before: make another one for another `async with`")
        CallEndpoint.of(self._engine)  # raises at once if the engine's messages are not available
        self._running = run_background_tasks(self._keep_in_touch)
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
            await self._leave()
        finally:
            self._close(reason)
            ended = await self._running.__aexit__(kind, error, traceback)
        return ended

    def _require_open(self) -> None:
        if not self._open:
            raise aiote.ClosedError("the registry is closed")

    def _end(self, reason: str) -> None:
        """Accept no more members, and mark all registrations as lost, so that they are no longer reported."""
        self._open = False
        for registration in self._registrations.values():
            registration.lose(reason)

    def _close(self, reason: str) -> None:
        self._end(reason)
        self._out_of_touch(reason)
        self._roster.close()

    # Reports to the server.

    def _announce_soon(self) -> None:
        self._is_report_due = True
        self._report_due.wake_all()

    async def _leave(self) -> None:
        """Report the remaining members to the server, if there is one.

        The leaving member's task calls it, because it must not wait for the next periodic report.
        """
        with anyio.move_on_after(LEAVE_S, shield=True):
            if self._server is not None:
                try:
                    await self._report(self._server)
                except aiote.AioteError:
                    pass

    async def _keep_in_touch(self) -> None:
        """Stay in touch with one server after another, with growing pauses while no server answers."""
        backoff = Backoff(RETRY_LEAST_S, RETRY_MOST_S)
        while not self._engine.closed:
            for address in self._addresses:
                try:
                    await self._stay_with(address)
                except aiote.AioteError as error:
                    if self.in_touch:
                        backoff.reset()
                    self._out_of_touch(str(error))
            with anyio.move_on_after(backoff.next()):
                await self._redirected.wait()
        self._close("the engine is closed")

    async def _stay_with(self, address: aiote.Address) -> None:
        """Report and listen until the server is lost. Raises the reason: PeerError, CallError, RegistryError..."""
        peer = await self._engine.connect(address)
        self._server = server = service.client(self._engine, peer, Keeping)
        async with run_background_tasks(functools.partial(self._listen, service.client(self._engine, peer, Watching))):
            while True:
                self._is_report_due = False
                await self._report(server)
                with anyio.move_on_after(self._lease_s / RENEWALS):
                    await self._report_due.until(lambda: self._is_report_due)
                self._forget_doubtful()

    async def _report(self, server: Keeping) -> None:
        """Report all members of this client. Raises CallError, RegistryError without an answer for a whole lease."""
        said = [(one, one.number) for one in self._registrations.values() if not (one.lost or one.leaving)]
        records = [MemberRecord.of(one.member) for one, _ in said]
        with anyio.move_on_after(self._lease_s):
            refusals = await server.keep(self._session, next(self._numbers), self._lease_s, records)
            for one, number in said:
                if one.member.name in refusals:
                    one.lose(refusals[one.member.name])
                else:
                    one.acknowledge(number)
            return
        raise RegistryError(f"the registry did not answer within {self._lease_s} s")

    # Updates from the server.

    async def _listen(self, server: Watching) -> None:
        """Apply the server's updates until they end. Raises CallError, RegistryError."""
        self._listed = set()
        updates = server.watch()
        while True:
            update = None
            with anyio.move_on_after(None if self._complete else self._lease_s):
                update = await anext(updates, None)
            if update is None:
                raise RegistryError("the registry sent no list of members in time, or ended it")
            self._apply(update)

    def _apply(self, update: RosterUpdate) -> None:
        for name in update.gone:
            self._doubtful.pop(name, None)
            self._drop(name)
            if self._listed is not None:
                self._listed.discard(name)
        for lease_s, record in update.present:
            if record.name not in self._roster.known and len(self._roster.known) >= MOST_KNOWN:
                raise RegistryError(f"the registry lists more than {MOST_KNOWN} members")
            self._hear_of(record.name)
            self._leases[record.name] = lease_s
            self._roster.put(record.member())
        if update.complete and self._listed is not None:
            self._completed(update.run, self._listed)

    def _hear_of(self, name: str) -> None:
        self._doubtful.pop(name, None)
        if self._listed is not None:
            self._listed.add(name)

    def _completed(self, run: int, listed: set[str]) -> None:
        """Complete the list of members. An unlisted member has left if the server is the same, else it is in doubt."""
        now = anyio.current_time()
        for name in self._roster.known.keys() - listed:
            if run != self._run:
                self._doubtful.setdefault(name, now + self._leases[name] + RETRY_MOST_S)
            elif name not in self._doubtful:
                self._drop(name)
        self._complete, self._listed, self._run = True, None, run
        self._progress.wake_all()

    def _forget_doubtful(self) -> None:
        """Drop members in doubt that a new server has not heard of in time."""
        now = anyio.current_time()
        if self.in_touch:
            for name in [name for name, until in self._doubtful.items() if until <= now]:
                del self._doubtful[name]
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._leases.pop(name, None)
        self._roster.remove(name)

    def _out_of_touch(self, reason: str) -> None:
        self._complete, self._server = False, None
        self.failure = reason
        self._progress.wake_all()


def _checked(addresses: aiote.Address | str | Iterable[aiote.Address | str]) -> tuple[aiote.Address, ...]:
    given: Iterable[aiote.Address | str] = ()
    if isinstance(addresses, aiote.Address | str):
        given = [addresses]
    elif isinstance(addresses, Iterable):
        given = addresses
    chosen = [aiote.Address.parse(place) if isinstance(place, str) else place for place in given]
    if not chosen or not all(isinstance(address, aiote.Address) for address in chosen):
        raise aiote.UsageError(f"addresses: expected an aiote.Address or its text, or several, got {addresses!r}")
    return tuple(chosen)
