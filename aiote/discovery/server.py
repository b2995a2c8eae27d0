"""The embedded registry's server: one of the engines keeps the list of members for all.

It remembers nothing over its own end. Clients say what they have again and again, so a server that is started anew
knows everything after one lease; see `embedded`. A lease runs only while the server listens: neither a full queue of
its mailroom nor a stop of its process makes members leave that had no chance to be heard.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

import aiote

from ..service import Mailroom
from ..service.background import Bell, Crew, beside
from ..service.reading import WireError
from .lease_table import LeaseTable
from .membership import Attribute, Member, MemberEvent, RegistryError, Roster
from .wire import (
    MESSAGE_BYTES,
    TO_REGISTRY,
    UPDATE_HEAD,
    Announce,
    Answer,
    Entry,
    Leave,
    Subscribe,
    Update,
    decode,
    encode,
    size_of,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["RegistryServer"]

MEMBERS = 4096
ANSWERS = 256
SILENT_LEASES = 3
LATE_S = 0.2
"""A sweep that comes so much later than it was due means that the process was stopped, and heard nobody."""
GRACE_S = 1.0
"""How long whoever was not heard meanwhile has, to be heard."""
SHORTEST_SLEEP_S = 0.01


class _Client:
    """One that listens: a stream of updates to a session, numbered from 0."""

    def __init__(self, message: Subscribe, peer: aiote.Peer, roster: Roster, now: float) -> None:
        self.session, self.subscription = message.session, message.subscription
        self.lease_s = message.lease_ms / 1000
        self.peer = peer
        self.last_heard = now
        self.asked = True
        self.bell = Bell()
        self.watch = roster.watch(self.bell)
        self.scope = anyio.CancelScope()
        self._answers: dict[str, Answer] = {}
        self._stream = secrets.randbits(64)
        self._number = 0
        self._complete = False
        self._held_back: Entry | None = None

    def answer(self, answer: Answer) -> None:
        """Answer an announcement; where too many wait, not at all: it will be repeated."""
        if answer.name in self._answers or len(self._answers) < ANSWERS:
            self._answers[answer.name] = answer
            self.bell.ring()

    def next_update(self, run: int, leases: LeaseTable) -> Update | None:
        """Return the next update, as full as it may be, or None where there is nothing to say."""
        room = MESSAGE_BYTES - UPDATE_HEAD
        answers: list[Answer] = []
        while self._answers and room > MESSAGE_BYTES // 2:
            answers.append(self._answers.pop(next(iter(self._answers))))
            room -= size_of(answers[-1])
        entries = self._entries(room, leases)
        completes = self._held_back is None and not self._complete
        if not (answers or entries or self.asked or completes):
            return None
        self.asked = False
        self._complete = self._complete or completes
        number, self._number = self._number, self._number + 1
        return Update(
            run, self._stream, self.session, self.subscription, number, self._complete, tuple(answers), tuple(entries)
        )

    def _entries(self, room: int, leases: LeaseTable) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            entry, self._held_back = self._held_back or self._next_entry(leases), None
            if entry is None:
                return entries
            room -= size_of(entry)
            if room < 0 or len(entries) == 255:
                self._held_back = entry
                return entries
            entries.append(entry)

    def _next_entry(self, leases: LeaseTable) -> Entry | None:
        event = self.watch.take()
        if event is None:
            return None
        name = event.member.name
        return Entry(name, leases.lease_ms(name), None if event.kind == "left" else event.member)


class _LocalRegistration:
    """A registration by the server's own process."""

    def __init__(self, server: RegistryServer, leases: LeaseTable, member: Member) -> None:
        self.member = member
        self.session = secrets.randbits(64)
        self.number = 0
        self._server = server
        self._leases = leases

    @property
    def lost(self) -> str:
        """Why another has the name."""
        if self._leases.holds(self.member.name, self.session):
            return ""
        return "another engine has taken the name over"

    def announce(self) -> None:
        """Register the member as it is. Raises RegistryError."""
        self.number += 1
        refusal = self._leases.keep(self.member, self.session, self.number, self._server.now())
        if refusal:
            raise RegistryError(f"member {self.member.name}: {refusal}")

    async def update(self, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes. See `Seat.update`."""
        member = replace(self.member, attributes=attributes)
        if lost := self.lost:
            raise RegistryError(f"member {self.member.name}: {lost}")
        self.member = member
        self.announce()


class RegistryServer:
    """The registry of whoever reaches this engine; itself a `Registry` for this process.

    `async with RegistryServer(mailroom) as server:` in one task, within the mailroom's own. At most `limit` members and
    as many clients. `malformed` counts messages that were none, `turned_away` clients beyond the limit.
    """

    def __init__(self, mailroom: Mailroom, *, limit: int = MEMBERS) -> None:
        if not isinstance(limit, int) or not 1 <= limit <= 1 << 20:
            raise aiote.UsageError(f"limit={limit!r}: expected an integer from 1 to {1 << 20}")
        self.malformed = 0
        self.turned_away = 0
        self._mailroom = mailroom
        self._limit = limit
        self._run = secrets.randbits(64)
        self._roster = Roster()
        self._leases = LeaseTable(self._roster, limit)
        self._clients: dict[int, _Client] = {}
        self._sooner = Bell()
        self._next_sweep = math.inf
        self._running: AbstractAsyncContextManager[Crew] | None = None
        self._crew: Crew | None = None

    @property
    def address(self) -> aiote.Address:
        """Where clients reach it."""
        return self._mailroom.engine.address

    @property
    def in_touch(self) -> bool:
        """Whether it is being served."""
        return self._crew is not None

    def now(self) -> float:
        """Return the time that leases run in: it stands still while the mailroom is held up."""
        return anyio.current_time() - self._mailroom.held_up_s

    async def ready(self) -> None:
        """Return at once: this is where members are known. Raises ClosedError."""
        self._require_open()

    def members(self) -> tuple[Member, ...]:
        """Return the members that are registered."""
        return self._roster.members()

    def watch(self) -> AsyncIterator[MemberEvent]:
        """Iterate over events, beginning with the present members. See `Registry.watch`."""
        return self._roster.watch()

    @asynccontextmanager
    async def join(self, member: Member) -> AsyncIterator[_LocalRegistration]:
        """Register a member of this process, which needs no lease. See `Registry.join`."""
        self._require_open()
        registration = _LocalRegistration(self, self._leases, member)
        registration.announce()
        try:
            yield registration
        finally:
            self._leases.leave(Leave(registration.session, member.name, registration.number))

    async def __aenter__(self) -> RegistryServer:
        if self._running is not None:
            raise aiote.UsageError("a registry's server is entered once")
        self._give_back = self._mailroom.handle(TO_REGISTRY, self._take)
        self._running = beside(self._sweep)
        self._crew = await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._running is not None
        self._give_back()
        self._crew = None
        self._roster.close()
        return await self._running.__aexit__(kind, error, traceback)

    def _require_open(self) -> None:
        if self._crew is None:
            raise aiote.ClosedError("the registry's server is not running: it is used within its `async with`")

    # What clients say.

    def _take(self, message: aiote.Message) -> None:
        try:
            said = decode(message.data)
        except WireError:
            self.malformed += 1
            return
        match said:
            case Announce():
                self._announced(said)
            case Leave():
                self._left(said)
            case Subscribe():
                self._subscribed(said, message.source)

    def _announced(self, message: Announce) -> None:
        now = self.now()
        refusal = self._leases.announce(message, now)
        if now + message.lease_ms / 1000 < self._next_sweep:
            self._sooner.ring()
        client = self._clients.get(message.session)
        if client is not None and refusal is not None:
            client.answer(Answer(message.member.name, message.number, refusal))

    def _left(self, message: Leave) -> None:
        self._leases.leave(message)
        if not message.name and (client := self._clients.pop(message.session, None)) is not None:
            client.scope.cancel()

    def _subscribed(self, message: Subscribe, peer: aiote.Peer) -> None:
        client = self._clients.get(message.session)
        if client is not None and message.subscription == client.subscription:
            client.last_heard = self.now()
            client.asked = True
            client.bell.ring()
            return
        if client is not None and message.subscription < client.subscription:
            return
        if client is None and len(self._clients) >= self._limit:
            self.turned_away += 1
            return
        if client is not None:
            client.scope.cancel()
        self._clients[message.session] = client = _Client(message, peer, self._roster, self.now())
        if self._crew is not None:
            self._crew.start(self._tell, client)

    # What clients are told.

    async def _tell(self, client: _Client) -> None:
        """Tell one client what changes until it is gone; one that is slow keeps nobody else waiting."""
        try:
            with client.scope:
                await self._tell_on(client)
        except aiote.AioteError:
            # The peer is lost, or takes no messages of this length: it comes again, or does not.
            pass
        finally:
            if self._clients.get(client.session) is client:
                del self._clients[client.session]

    async def _tell_on(self, client: _Client) -> None:
        while True:
            # What a slow client has not taken is kept as states, in its watch.
            update = client.next_update(self._run, self._leases)
            with anyio.move_on_after(client.lease_s * SILENT_LEASES) as patience:
                if update is None:
                    await client.bell.wait()
                else:
                    await self._mailroom.engine.send(client.peer, encode(update))
            silent = self.now() - client.last_heard >= client.lease_s * SILENT_LEASES
            if silent or (patience.cancelled_caught and update is not None):
                return

    async def _sweep(self) -> None:
        """End leases when they run out; sleep while there are none."""
        while True:
            self._next_sweep = self._leases.next_deadline()
            pause = max(self._next_sweep - self.now(), SHORTEST_SLEEP_S)
            due = anyio.current_time() + pause
            with anyio.move_on_after(None if pause == math.inf else pause):
                await self._sooner.wait()
            late = anyio.current_time() - due
            if late > LATE_S:
                self._leases.postpone(late + GRACE_S)
            self._leases.expire(self.now())
