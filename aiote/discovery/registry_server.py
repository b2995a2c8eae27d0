"""The embedded registry's server: one of the engines keeps the list of members for all.

The server stores nothing that outlives it. Clients repeatedly report their members, so a restarted server knows all of
them after one lease; see `embedded`. A lease runs only while the server listens: if its process was stopped, no member
leaves before its client has had a chance to report.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

import anyio
import anyio.lowlevel
import msgspec

import aiote

from .. import service
from ..aio import Condition, run_background_tasks
from .lease_table import LeaseTable
from .membership import Attribute, Member, RegistryError, Roster, Watch
from .wire import MOST_KNOWN, LeaseSeconds, MemberRecord, Number, RosterUpdate

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["MEMBERS_EACH", "Keeping", "RegistryServer", "Watching"]

MEMBERS = 4096
MEMBERS_EACH = 1024
"""The most members of one engine, and of one client, which reports all of them in one message; it must fit into
`Limits.message_bytes`."""
WATCHES_EACH = 16
"""The most clients of one engine that watch."""
TELL_S = 0.05
"""Changes within this many seconds are reported together, so they cost a client one update, not one for each member."""
TOLD_AT_ONCE = 16
LATE_S = 0.2
"""A sweep that is this many seconds late means that the process was stopped, and received no reports."""
GRACE_S = 1.0
"""The additional seconds that clients get to report after such a stop."""
SHORTEST_SLEEP_S = 0.01
AT_ONCE = 16
"""After this many members of a report or of an expired lease, other tasks run: a member may take a look at every peer,
every client and every watch.
"""
Keep: TypeAlias = Callable[[bytes, object, int, float, Sequence[MemberRecord]], Awaitable[dict[str, str]]]
Refusals: TypeAlias = Annotated[dict[str, str], msgspec.Meta(max_length=MEMBERS_EACH)]
Records: TypeAlias = Annotated[list[MemberRecord], msgspec.Meta(max_length=MEMBERS_EACH)]


class Keeping(service.Service):
    """The service for clients' reports. It is separate because long watches would occupy the places of these calls."""

    name = "aiote.Registry"

    def __init__(self, keep: Keep) -> None:
        self._keep = keep

    @service.method(idempotent=True)
    async def keep(self, session: Number, number: Number, lease_s: LeaseSeconds, records: Records) -> Refusals:
        """Record that this client has these members, and no others, for `lease_s`; return the refused ones, and why.

        `session` distinguishes the clients of one engine. `number` grows with each call of a session; a call that
        arrives after a later one is ignored.
        """
        address = service.current_call().peer.address
        key = (address.identity, address.incarnation, session)
        return await self._keep(address.identity, key, number, lease_s, records)


class Watching(service.Service):
    """The service that reports members to clients."""

    name = "aiote.RegistryWatch"

    def __init__(self, tell: Callable[[bytes], AsyncIterator[RosterUpdate]]) -> None:
        self._tell = tell

    @service.method(raises=[RegistryError])
    def watch(self) -> AsyncIterator[RosterUpdate]:
        """Report the present members, then their changes; a slow client gets only the latest state of each member.

        Raises RegistryError if there are too many clients, also later if this engine then has the most of them.
        """
        return self._tell(service.current_call().peer.address.identity)


class _LocalRegistration:
    """A registration by the server's own process."""

    def __init__(self, leases: LeaseTable, member: Member, owner: bytes) -> None:
        self.member, self._owner = member, owner
        self._leases = leases

    @property
    def lost(self) -> str:
        """Why another engine has the name, or an empty text."""
        return "" if self._leases.holds(self.member.name, self) else "another engine has taken over the name"

    def announce(self) -> None:
        """Register the member with its present attributes. Raises RegistryError if it is refused."""
        refusals = self._leases.keep(self, 0, math.inf, [self.member], anyio.current_time(), self._owner)
        if refusals:
            self._leases.forget(self)
            raise RegistryError(f"member {self.member.name}: {refusals[self.member.name]}")

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes. Raises as `MemberRegistration.update`."""
        member = replace(self.member, attributes=attributes)
        if lost := self.lost:
            raise RegistryError(f"member {self.member.name}: {lost}")
        self.member = member
        self.announce()


class RegistryServer:
    """The list of members, which one engine keeps for all; itself a `Registry`: `async with RegistryServer(engine):`.

    It serves calls of `aiote.service` on the engine, beside other services. It takes at most `limit` members and
    `limit` clients, up to 16,384. When it is full, a client of another engine takes the place of one of the engine that
    has the most clients. `turned_away` counts the clients that get no place, `watchers` is the present number of
    clients that watch. `admits` returns whether a peer may register members and watch; by default every peer with the
    cluster key may.
    """

    in_touch = True

    def __init__(
        self, engine: aiote.Engine, *, limit: int = MEMBERS, admits: Callable[[aiote.Peer], bool] = lambda _: True
    ) -> None:
        if not 1 <= limit <= MOST_KNOWN:
            raise aiote.UsageError(f"limit={limit!r}: expected 1 to {MOST_KNOWN} members, which clients take at most")
        self.turned_away = 0
        self._engine = engine
        self._limit = limit
        self._callers = service.Callers(engine, admits, "registry's client")
        self._run = secrets.randbits(63)
        self._roster = Roster()
        self._leases = LeaseTable(self._roster, limit, MEMBERS_EACH, self._is_connected)
        self._watches: dict[bytes, list[Watch]] = {}
        self._earlier_deadline = Condition()
        self._next_sweep = math.inf
        self._stack: AsyncExitStack | None = None

    @property
    def watchers(self) -> int:
        """The number of clients that watch now."""
        return sum(map(len, self._watches.values()))

    @property
    def address(self) -> aiote.Address:
        """The address that clients need."""
        return self._engine.address

    async def ready(self) -> None:
        """Return at once, because the server itself has the list. Raises ClosedError if it is not running."""
        self._require_open()

    def members(self) -> tuple[Member, ...]:
        """Return the present members."""
        return self._roster.members()

    def watch(self) -> Watch:
        """Return an iterator over events, beginning with the present members. See `Registry.watch`."""
        return self._roster.watch()

    @asynccontextmanager
    async def join(self, member: Member) -> AsyncIterator[_LocalRegistration]:
        """Register a member of this process, which needs no lease. See `Registry.join`."""
        self._require_open()
        registration = _LocalRegistration(self._leases, member, self._engine.address.identity)
        registration.announce()
        try:
            yield registration
        finally:
            self._leases.forget(registration)

    async def __aenter__(self) -> RegistryServer:
        if self._roster.closed or self._stack is not None:
            raise aiote.UsageError("this registry server was entered before: make another one for another `async with`")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(run_background_tasks(self._sweep))
            await stack.enter_async_context(service.serve(self._engine, Watching(self._tell)))
            await stack.enter_async_context(service.serve(self._engine, Keeping(self._keep)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        self._roster.close()
        return await stack.__aexit__(kind, error, traceback)

    def _require_open(self) -> None:
        if self._stack is None:
            raise aiote.ClosedError("the registry server is not running: use it within its `async with`")

    # Reports of clients, and updates to them.

    def _is_connected(self, owner: object) -> bool:
        """Return whether an engine has a connection to this one, or is this one."""
        own = owner == self._engine.address.identity
        return own or any(peer.address.identity == owner for peer in self._engine.peers)

    async def _keep(
        self, owner: bytes, key: object, number: int, lease_s: float, records: Sequence[MemberRecord]
    ) -> dict[str, str]:
        """Record the members of a client; see `Keeping.keep`."""
        self._callers.require()
        now = anyio.current_time()
        if now + lease_s < self._next_sweep:
            self._earlier_deadline.wake_all()
        names, members = {record.name for record in records}, map(MemberRecord.member, records)
        refusals: dict[str, str] = {}
        report = self._leases.report(key, number, lease_s, names, members, now, owner=owner)
        for count, (name, reason) in enumerate(report, 1):
            if reason:
                refusals[name] = reason
            if count % AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        return refusals

    async def _tell(self, owner: bytes) -> AsyncIterator[RosterUpdate]:
        """Report members to one client. Raises RegistryError if there are too many clients."""
        self._callers.require()
        watch = self._begin_watch(owner)
        try:
            # While a client is slow, its watch keeps members' states, not events.
            yield self._update(watch)
            while not watch.closed:
                update = self._update(watch)
                told = len(update.gone) + len(update.present)
                if not told:
                    await watch.wait()
                    continue
                yield update
                if told < TOLD_AT_ONCE:
                    # Do not send an update for each change, because there may be thousands of changes in a second.
                    await anyio.sleep(TELL_S)
        finally:
            self._end_watch(owner, watch)
        if not self._roster.closed:
            raise RegistryError("the registry has too many clients, and this engine the most of them")

    def _begin_watch(self, owner: bytes) -> Watch:
        """Return a new watch for a client of this engine. Raises RegistryError if there are too many."""
        own = len(self._watches.get(owner, ()))
        if own >= WATCHES_EACH or (self.watchers >= self._limit and not self._end_greediest(own)):
            self.turned_away += 1
            raise RegistryError(
                f"the registry has {self._limit} clients, or {WATCHES_EACH} of this engine, and accepts no more"
            )
        watch = self._roster.watch()
        self._watches.setdefault(owner, []).append(watch)
        return watch

    def _end_watch(self, owner: bytes, watch: Watch) -> None:
        """Close a watch, and free its place. Idempotent."""
        watch.close()
        rest = [other for other in self._watches.pop(owner, ()) if other is not watch]
        if rest:
            self._watches[owner] = rest

    def _end_greediest(self, own: int) -> bool:
        """End the last watch of the engine with the most watches; False if an engine with `own` has about as many."""
        owner = max(self._watches, key=lambda owner: len(self._watches[owner]), default=b"")
        watches = self._watches.get(owner, [])
        if len(watches) <= own + 1:
            return False
        self._end_watch(owner, watches[-1])
        return True

    def _update(self, watch: Watch) -> RosterUpdate:
        gone: list[str] = []
        present: list[tuple[float, MemberRecord]] = []
        for event in itertools.islice(iter(watch.take, None), TOLD_AT_ONCE):
            if event.kind == "left":
                gone.append(event.member.name)
            else:
                present.append((self._leases.lease_s(event.member.name), MemberRecord.of(event.member)))
        return RosterUpdate(self._run, not watch.pending, gone, present)

    async def _sweep(self) -> None:
        """End leases when they expire; sleep while there are none."""
        while True:
            self._next_sweep = self._leases.next_deadline()
            pause = max(self._next_sweep - anyio.current_time(), SHORTEST_SLEEP_S)
            due = anyio.current_time() + pause
            with anyio.move_on_after(None if pause == math.inf else pause):
                await self._earlier_deadline.wait()
            late = anyio.current_time() - due
            if late > LATE_S:
                self._leases.postpone(late + GRACE_S)
            for count, _ in enumerate(self._leases.expiring(anyio.current_time()), 1):
                if count % AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()
