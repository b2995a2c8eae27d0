"""The embedded registry's server: one of the engines keeps the list of members for all.

It remembers nothing over its own end. Clients say what they have again and again, so a server that is started anew
knows everything after one lease; see `embedded`. A lease runs only while the server listens: a stop of its process
makes no member leave that had no chance to be heard.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

import anyio
import msgspec

import aiote

from .. import service
from ..service.background import Bell, beside
from .lease_table import LeaseTable
from .membership import Attribute, Member, RegistryError, Roster, Watch
from .wire import LeaseSeconds, MemberRecord, Number, RosterUpdate

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["MEMBERS_EACH", "Keeping", "RegistryServer", "Watching"]

MEMBERS = 4096
MEMBERS_EACH = 1024
"""Members of one engine, and of one client: it says all of them in one message, of `Limits.message_bytes` at most."""
WATCHES_EACH = 16
"""Clients of one engine that are told."""
TELL_S = 0.05
"""What changes within so long is told together: a change costs a client's turn, not one for each member."""
TOLD_AT_ONCE = 16
LATE_S = 0.2
"""A sweep that comes so much later than it was due means that the process was stopped, and heard nobody."""
GRACE_S = 1.0
"""How long whoever was not heard meanwhile has, to be heard."""
SHORTEST_SLEEP_S = 0.01
Records: TypeAlias = Annotated[list[MemberRecord], msgspec.Meta(max_length=MEMBERS_EACH)]


class Keeping(service.Service):
    """What clients say. A service of its own: watches run for long, and would take the places of these calls."""

    name = "aiote.Registry"

    def __init__(self, keep: Callable[[bytes, object, int, float, list[Member]], dict[str, str]]) -> None:
        self._keep = keep

    @service.method(idempotent=True)
    async def keep(self, session: Number, number: Number, lease_s: LeaseSeconds, records: Records) -> dict[str, str]:
        """Have these members and no others of this client, for so long; return who is refused, and why.

        `session` is the client's among those of its engine. `number` grows with each call of a session: what comes
        behind a later one is ignored.
        """
        address = service.current_call().peer.address
        key = (address.identity, address.incarnation, session)
        return self._keep(address.identity, key, number, lease_s, [record.member() for record in records])


class Watching(service.Service):
    """What clients are told."""

    name = "aiote.RegistryWatch"

    def __init__(self, tell: Callable[[bytes], AsyncIterator[RosterUpdate]]) -> None:
        self._tell = tell

    @service.method(raises=[RegistryError])
    def watch(self) -> AsyncIterator[RosterUpdate]:
        """Tell of the members there are, and of changes from then on; a slow reader is told the latest of each."""
        return self._tell(service.current_call().peer.address.identity)


class _LocalRegistration:
    """A registration by the server's own process."""

    def __init__(self, leases: LeaseTable, member: Member, owner: bytes) -> None:
        self.member, self._owner = member, owner
        self._leases = leases

    @property
    def lost(self) -> str:
        """Why another has the name."""
        return "" if self._leases.holds(self.member.name, self) else "another engine has taken the name over"

    def announce(self) -> None:
        """Register the member as it is. Raises RegistryError."""
        refusals = self._leases.keep(self, 0, math.inf, [self.member], anyio.current_time(), self._owner)
        if refusals:
            self._leases.forget(self)
            raise RegistryError(f"member {self.member.name}: {refusals[self.member.name]}")

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes. See `Registration.update`."""
        member = replace(self.member, attributes=attributes)
        if lost := self.lost:
            raise RegistryError(f"member {self.member.name}: {lost}")
        self.member = member
        self.announce()


class RegistryServer:
    """The list of members, kept by one engine for all; itself a `Registry`: `async with RegistryServer(engine):`.

    It serves calls of `aiote.service` on the engine, beside others. At most `limit` members and `limit` clients;
    `turned_away` counts clients beyond, `watchers` is how many there are. `admits` tells of a peer whether it may
    register members and watch; by default whoever has the cluster key may.
    """

    in_touch = True

    def __init__(
        self, engine: aiote.Engine, *, limit: int = MEMBERS, admits: Callable[[aiote.Peer], bool] = lambda _: True
    ) -> None:
        self.turned_away = 0
        self.watchers = 0
        self._engine = engine
        self._limit = limit
        self._callers = service.Callers(engine, admits, "registry's client")
        self._run = secrets.randbits(63)
        self._roster = Roster()
        self._leases = LeaseTable(self._roster, limit, MEMBERS_EACH, self._is_connected)
        self._watchers_of = Counter[bytes]()
        self._sooner = Bell()
        self._next_sweep = math.inf
        self._stack: AsyncExitStack | None = None

    @property
    def address(self) -> aiote.Address:
        """Where clients find it."""
        return self._engine.address

    async def ready(self) -> None:
        """Return at once: it is the registry."""
        self._require_open()

    def members(self) -> tuple[Member, ...]:
        """Return the members."""
        return self._roster.members()

    def watch(self) -> Watch:
        """Iterate over events, beginning with the present members. See `Registry.watch`."""
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
            raise aiote.UsageError("a registry's server is entered once")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(beside(self._sweep))
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
            raise aiote.ClosedError("the registry's server is not running: it is used within its `async with`")

    # What clients say, and are told.

    def _is_connected(self, owner: object) -> bool:
        """Whether an engine has a connection to this one, or is it."""
        own = owner == self._engine.address.identity
        return own or any(peer.address.identity == owner for peer in self._engine.peers)

    def _keep(self, owner: bytes, key: object, number: int, lease_s: float, members: list[Member]) -> dict[str, str]:
        """Have these members of a client; see `Keeping.keep`."""
        self._callers.require()
        now = anyio.current_time()
        if now + lease_s < self._next_sweep:
            self._sooner.ring()
        return self._leases.keep(key, number, lease_s, members, now, owner)

    async def _tell(self, owner: bytes) -> AsyncIterator[RosterUpdate]:
        """Tell one client. Raises RegistryError for one too many."""
        self._callers.require()
        if self.watchers >= self._limit or self._watchers_of[owner] >= WATCHES_EACH:
            self.turned_away += 1
            raise RegistryError(f"the registry has its {self._limit} clients, or {WATCHES_EACH} of this engine")
        self.watchers += 1
        self._watchers_of[owner] += 1
        try:
            # What a slow client has not taken is kept as states, in its watch.
            watch = self._roster.watch()
            yield self._update(watch)
            while not self._roster.closed:
                update = self._update(watch)
                told = len(update.gone) + len(update.present)
                if not told:
                    await watch.wait()
                    continue
                yield update
                if told < TOLD_AT_ONCE:
                    # Not at once for each change, of which there may be thousands a second.
                    await anyio.sleep(TELL_S)
        finally:
            self.watchers -= 1
            self._watchers_of[owner] -= 1
            if not self._watchers_of[owner]:
                del self._watchers_of[owner]

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
        """End leases when they run out; sleep while there are none."""
        while True:
            self._next_sweep = self._leases.next_deadline()
            pause = max(self._next_sweep - anyio.current_time(), SHORTEST_SLEEP_S)
            due = anyio.current_time() + pause
            with anyio.move_on_after(None if pause == math.inf else pause):
                await self._sooner.wait()
            late = anyio.current_time() - due
            if late > LATE_S:
                self._leases.postpone(late + GRACE_S)
            self._leases.expire(anyio.current_time())
