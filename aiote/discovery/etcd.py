"""A registry that outlives every engine: etcd.

A member is a key under a prefix, tied to a lease that its own process keeps alive; etcd drops the key with the lease.
Only transactions write the key. They compare it with the state read before, so that the greater of two incarnations has
the name, whatever the order. The registry reads all members at one revision, and watches from the next revision on. It
reads them again if etcd has compacted the missed changes, or sends more at once than is held here. While etcd cannot be
reached, the registry keeps its members and tries again. A permanent refusal is raised to the waiting caller, with
etcd's text; a registered member stays registered as long as etcd keeps it.

An incarnation is a time, and the clock of a host may be behind. So a member that finds a greater or equal incarnation
under its name waits: the holder may be dead. When the holder's lease ends, the member takes the name. If the holder
writes its key or renews its lease, it lives, and the member is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

import aiote

from ..aio import Backoff, Condition, run_background_tasks
from .etcd_gateway import (
    OUT_OF_RANGE,
    TOO_LONG,
    TOO_MANY,
    EtcdError,
    Gateway,
    number,
    packed,
    prefix_end,
    printable,
    records,
    unpacked,
)
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
from .wire import decode_member, encode_member

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EtcdRegistry"]

PREFIX = "aiote/members/"
PAGE = 256
MEMBERS = 1 << 16
WATCH_S = 10.0
"""Seconds after which a watch is made anew, because a watch whose endpoint has silently gone would stay silent."""
LEAVE_S = 2.0
LOOK_S = 1.0
"""Seconds after which a member that waits for a name looks at the holder's lease again."""
LEASE_ERROR_S = 1.25
"""A lease whose end is later than before by more than this has been renewed: etcd leaves fractions of seconds out."""
TRIES = 16


class _EtcdRegistration(HeldRegistration):
    """A registration with the number of the last written change (`sent`), the lease that holds it (0: none), the signal
    that wakes its task, and how often its key was missing.

    `claimed`: this registration has written its key, or is writing it. Until then another member may hold the name;
    `holder` has the key's revision and the end of that member's lease, as first seen. `revision`: the key's revision
    after the last written change.
    """

    def __init__(self, member: Member, wakeup: Condition) -> None:
        super().__init__(member, wakeup.wake_all)
        self.wakeup = wakeup
        self.sent = self.lease = 0
        self.ttl_s = 0.0
        self.missing = 0
        self.claimed = False
        self.holder: tuple[int, float] | None = None
        self.revision = 0

    def put_again(self) -> None:
        """Make the task write the key again, which is missing although the lease lives, such as after a deletion."""
        self.sent = 0
        self.missing += 1
        self.wakeup.wake_all()

    def lose_to(self, member: Member, revision: int) -> None:
        """Lose the name to a member that has written the key at a revision, if its incarnation is greater.

        This registration's own key has replaced a key of an earlier revision, such as a predecessor's.
        """
        if self.claimed and revision > self.revision and member.incarnation > self.member.incarnation:
            self.lose(f"incarnation {member.incarnation} has taken the name over")

    async def rest(self) -> None:
        """Sleep until there is a change to write, the lease is to be renewed, or a holder to be looked at again."""
        with anyio.move_on_after(self.ttl_s / 3 if self.claimed else min(LOOK_S, self.ttl_s / 3)):
            if not self.claimed:
                await self.wakeup.wait()
            await self.wakeup.until(lambda: self.sent != self.number or self.lost)


class EtcdRegistry:
    """The members that etcd has under a prefix: a `Registry`; `async with EtcdRegistry("http://etcd:2379"):`.

    Entering does not wait for etcd; `ready` does. `endpoints` are those of one cluster. `lease_s` is rounded up to
    whole seconds; etcd has a minimum of its own (about 2). `options` are passed to `httpx.AsyncClient`. `malformed`
    counts keys whose values are no members; `failure` is the reason why it was last out of touch. There may be at most
    65536 keys under the prefix. Entering raises UsageError without httpx.
    """

    def __init__(
        self,
        endpoints: str | Iterable[str],
        *,
        prefix: str = PREFIX,
        lease_s: float = DEFAULT_LEASE_S,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.malformed = 0
        self.failure = ""
        self.in_touch = False
        self._gateway = Gateway(endpoints, options)
        self._prefix = prefix.encode()
        self._ttl_s = math.ceil(check_lease(lease_s))
        self._roster = Roster()
        self._revision: int | None = None
        self._known = False
        self._refusal = ""
        self._open = False
        self._registrations: dict[str, _EtcdRegistration] = {}
        self._progress = Condition()
        self._stack = AsyncExitStack()

    # The interface of a registry.

    async def ready(self) -> None:
        """Wait until the members have been read once. Raises ClosedError, RegistryError if etcd refuses permanently."""
        while not self._known:
            self._require_open()
            if self._refusal:
                raise RegistryError(self._refusal)
            await self._progress.wait()

    def members(self) -> tuple[Member, ...]:
        """Return the members known here; all are marked as stale while etcd is out of touch."""
        return self._roster.members(stale=not self.in_touch)

    def watch(self) -> Watch:
        """Return an iterator over events, beginning with the members known here. See `Registry.watch`."""
        return self._roster.watch()

    @asynccontextmanager
    async def join(self, member: Member) -> AsyncIterator[_EtcdRegistration]:
        """Register a member for the length of an `async with`. See `Registry.join`."""
        self._require_open()
        registration = _EtcdRegistration(member, Condition())
        await claim(self._registrations, registration)
        try:
            self._require_open()
            async with run_background_tasks(functools.partial(self._keep, registration)):
                try:
                    await registration.resolved()
                    yield registration
                finally:
                    registration.leaving = True
        finally:
            try:
                await self._leave(registration)
            finally:
                give_up(self._registrations, registration)

    async def __aenter__(self) -> EtcdRegistry:
        if self._open or self._known:
            raise aiote.UsageError("this registry was entered before: make another one for another `async with`")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gateway.opened())
            await stack.enter_async_context(run_background_tasks(self._follow))
            self._stack = stack.pop_all()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._open = False
        for registration in self._registrations.values():
            registration.lose("the registry's `async with` has ended")
        self._out_of_touch("closed")
        self._roster.close()
        return await self._stack.__aexit__(kind, error, traceback)

    def _require_open(self) -> None:
        if not self._open:
            raise aiote.ClosedError("the registry is closed")

    # Watching.

    async def _follow(self) -> None:
        """Read and watch until cancelled, with growing pauses while no endpoint answers."""
        backoff = Backoff(RETRY_LEAST_S, RETRY_MOST_S)
        while True:
            try:
                revision = self._revision
                if revision is None:
                    revision = await self._read_all()
                await self._listen(revision)
                backoff.reset()
                continue
            except EtcdError as error:
                if error.code in (OUT_OF_RANGE, TOO_LONG, TOO_MANY):
                    self._revision = None
                self._refusal = str(error) if error.permanent else ""
                if self.in_touch:
                    backoff.reset()
                self._out_of_touch(str(error))
                self._gateway.turn()
            await anyio.sleep(backoff.next())

    async def _read_all(self) -> int:
        """Read all members as of one revision, and return that revision."""
        key: bytes | None = self._prefix
        found: dict[str, Member] = {}
        revision, count, limit = 0, 0, PAGE
        while key is not None:
            asked = {"key": packed(key), "range_end": packed(prefix_end(self._prefix))}
            asked |= {"limit": str(limit), "revision": str(revision)}
            try:
                answer = await self._gateway.call("/v3/kv/range", asked)
            except EtcdError as error:
                if error.code != TOO_LONG or limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            revision = revision or number(answer, "header", "revision")
            count, key = self._take_page(answer, found, count)
        self._replace(found)
        self._revision, self._known, self._refusal = revision, True, ""
        self._progress.wake_all()
        return revision

    def _take_page(self, answer: Mapping[str, Any], found: dict[str, Member], count: int) -> tuple[int, bytes | None]:
        """Add a page to `found`; return the number of keys so far, and where the next page begins, if there is one."""
        entries = records(answer, "kvs")
        count += len(entries)
        if count > MEMBERS:
            raise self._too_many()
        for entry in entries:
            name, member = self._member(entry)
            if member is not None:
                found[name] = member
            self._lose_to(entry, member)
        more = entries and answer.get("more")
        return count, unpacked(entries[-1].get("key", "")) + b"\0" if more else None

    def _too_many(self) -> EtcdError:
        return EtcdError(f"etcd has more than {MEMBERS} keys under {self._prefix.decode()!r}", TOO_MANY)

    def _replace(self, found: Mapping[str, Member]) -> None:
        for name in self._roster.known.keys() - found.keys():
            self._roster.remove(name)
        for name in self._registrations.keys() - found.keys():
            self._registrations[name].put_again()
        for member in found.values():
            self._roster.put(member)

    async def _listen(self, revision: int) -> None:
        """Watch the changes after a revision for WATCH_S. Raises EtcdError; OUT_OF_RANGE if etcd no longer has them."""
        create = {
            "key": packed(self._prefix),
            "range_end": packed(prefix_end(self._prefix)),
            "start_revision": str(revision + 1),
        }
        with anyio.move_on_after(WATCH_S):
            async with aclosing(self._gateway.stream("/v3/watch", {"create_request": create})) as answers:
                async for answer in answers:
                    self._apply_watch(answer, revision)
            raise EtcdError(f"{self._gateway.endpoint} ended the watch")
        if not self.in_touch:
            raise EtcdError(f"{self._gateway.endpoint} did not begin the watch within {WATCH_S} s")

    def _apply_watch(self, answer: Mapping[str, Any], begun_after: int) -> None:
        revision = number(answer, "header", "revision")
        if answer.get("canceled"):
            compacted = number(answer, "compact_revision")
            raise EtcdError(
                f"etcd cancelled the watch: {printable(answer.get('cancel_reason'))}", OUT_OF_RANGE if compacted else 14
            )
        if answer.get("created"):
            if revision < begun_after:
                for registration in self._registrations.values():
                    registration.revision = 0
                raise EtcdError("etcd's revision is lower than before, as after a restore from a backup", OUT_OF_RANGE)
            self.in_touch = True
            self._progress.wake_all()
            return
        for event in records(answer, "events"):
            # The header's revision may be later than these events, if more are to follow.
            self._revision = max(self._revision or 0, number(event, "kv", "mod_revision"))
            entry = kv if isinstance(kv := event.get("kv"), Mapping) else {}
            name, member = self._member(entry)
            if event.get("type") == "DELETE" or member is None:
                self._roster.remove(name)
                if name in self._registrations:
                    self._registrations[name].put_again()
            elif name not in self._roster.known and len(self._roster.known) >= MEMBERS:
                raise self._too_many()
            else:
                self._roster.put(member)
                self._lose_to(entry, member)

    def _member(self, entry: Mapping[str, Any]) -> tuple[str, Member | None]:
        """Return a key's name, and its member if the value is one."""
        name = unpacked(entry.get("key", ""))[len(self._prefix) :].decode(errors="replace")
        value = unpacked(entry.get("value", ""))
        if not value:
            return name, None
        try:
            member = decode_member(value)
        except ValueError:
            self.malformed += 1
            return name, None
        if member.name != name:
            self.malformed += 1
            return name, None
        return name, member

    def _lose_to(self, entry: Mapping[str, Any], member: Member | None) -> None:
        if member is not None and (registration := self._registrations.get(member.name)) is not None:
            registration.lose_to(member, number(entry, "mod_revision"))

    def _out_of_touch(self, reason: str) -> None:
        self.in_touch = False
        self.failure = reason
        self._progress.wake_all()

    # Registrations.

    async def _keep(self, registration: _EtcdRegistration) -> None:
        """Maintain a registration until it is lost: keep its lease alive, and its key written."""
        backoff = Backoff(RETRY_LEAST_S, RETRY_MOST_S)
        while not registration.lost:
            try:
                await self._renew(registration)
                await self._write(registration)
                backoff.reset()
                await registration.rest()
            except EtcdError as error:
                if error.permanent and not registration.acknowledged:
                    registration.lose(str(error))
                    return
                await anyio.sleep(min(backoff.next(), max(registration.ttl_s, 1.0) / 3))

    async def _renew(self, registration: _EtcdRegistration) -> None:
        """Keep the lease alive; if it has expired, take a new one, so that the key has to be written again."""
        if registration.lease:
            answer = await self._gateway.call(
                "/v3/lease/keepalive", {"ID": str(registration.lease)}, registration.ttl_s
            )
            if number(answer, "TTL") > 0:
                return
            registration.lease = 0
        answer = await self._gateway.call("/v3/lease/grant", {"TTL": str(self._ttl_s)}, self._ttl_s)
        registration.lease, registration.ttl_s, registration.sent = (
            number(answer, "ID"),
            float(number(answer, "TTL")),
            0,
        )

    async def _write(self, registration: _EtcdRegistration) -> None:
        """Write the latest change, unless another member has the name. Raises EtcdError if the key keeps changing."""
        key = packed(self._prefix + registration.member.name.encode())
        for _ in range(TRIES):
            if registration.sent == registration.number:
                return
            answer = await self._gateway.call("/v3/kv/range", {"key": key}, registration.ttl_s)
            present = next(iter(records(answer, "kvs")), {})
            if await self._is_held(registration, present):
                return
            registration.claimed = True
            change, member, missing = registration.number, registration.member, registration.missing
            compare = {
                "key": key,
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": str(number(present, "mod_revision")),
            }
            put = {"key": key, "value": packed(encode_member(member)), "lease": str(registration.lease)}
            question = {"compare": [compare], "success": [{"request_put": put}]}
            done = await self._gateway.call("/v3/kv/txn", question, registration.ttl_s)
            if done.get("succeeded"):
                registration.revision = number(done, "header", "revision")
                registration.acknowledge(change)
                if (
                    registration.missing == missing
                ):  # otherwise it may be missing again: the watch may be faster than this answer
                    registration.sent = change
                    return
        raise EtcdError(
            f"{registration.member.name}: its key changed during each of {TRIES} attempts to write it; is "
            "another process writing it?"
        )

    async def _is_held(self, registration: _EtcdRegistration, present: Mapping[str, Any]) -> bool:
        """Return whether a key belongs to another member of an equal or greater incarnation.

        If that member lives, or the registration had the name before, the registration is lost.
        """
        _, holder = self._member(present) if present else ("", None)
        if holder is None or number(present, "lease") == registration.lease:
            return False
        if holder.incarnation < registration.member.incarnation:
            return False
        if registration.acknowledged or await self._is_alive(registration, present):
            registration.lose(f"incarnation {holder.incarnation} of another engine holds the name")
        registration.claimed = False
        return True

    async def _is_alive(self, registration: _EtcdRegistration, present: Mapping[str, Any]) -> bool:
        """Return whether the holder of a name has written its key or renewed its lease since the first look at it."""
        lease, revision = number(present, "lease"), number(present, "mod_revision")
        if not lease:  # somebody has written the key by hand, and it does not end
            return True
        asked = anyio.current_time()
        answer = await self._gateway.call("/v3/lease/timetolive", {"ID": str(lease)}, registration.ttl_s)
        left_s = number(answer, "TTL")  # none or less: the lease has ended, and etcd is about to delete the key
        if registration.holder is None:
            registration.holder = revision, anyio.current_time() + max(left_s, 0)
        first, end = registration.holder
        return revision != first or (left_s > 0 and asked + left_s > end + LEASE_ERROR_S)

    async def _leave(self, registration: _EtcdRegistration) -> None:
        """Revoke the lease, and the key with it, within two seconds; if etcd cannot be reached, it expires in time."""
        if registration.lease:
            with anyio.move_on_after(LEAVE_S, shield=True):
                try:
                    await self._gateway.call("/v3/lease/revoke", {"ID": str(registration.lease)})
                except aiote.AioteError:
                    pass
