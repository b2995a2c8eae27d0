"""Tensors from one or several senders to every receiver, by one-sided writes into the receivers' buckets.

A receiver asks each sender for an update by a call that lasts as long as the update and whose items describe buckets.
The bytes do not go by it: the sender writes them into the receiver's memory, with an immediate for each of its slots.

    sender                                   receiver
       | <---------- take(update, offer) ------ |    where its slots are, and their immediates
       | ----------- Begun(credits) ----------> |
       | =========== write, immediate ========> |    bucket b into slot b mod slots
       | ----------- Bucket(b, pieces) -------> |
       | <========== an immediate alone ======= |    the slot of bucket b is free: nobody uses its tensors any more
       | ----------- Ended(digest) -----------> |
       | <========== an immediate alone ======= |    all senders have ended with the same digest

No receiver passes anything on. With n senders bucket b is sender b mod n's, so each sends 1/n of the bytes to each
receiver: a NIC carries the receivers' number / n times the update, at worst, which with as many senders as receivers is
the least that is possible. A chain would do that with one sender; but there each rank's end is every later rank's end.

The call's end is the update's: a sender or a receiver that dies, is cancelled or fails ends it on the other side, too,
and a sender that lost a receiver ends all others' calls. Receivers that do not ask within `connect_timeout` of the
sender's first tensor end it, too. A receiver that fails says why before it ends its calls. When `Incoming.aclose` has
returned, no sender writes into its slots any more: each call has ended at its sender, writes included, or the
connection has.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeAlias, TypeVar, cast

import anyio
import msgspec
from msgspec import Meta

import aiote

from .. import service
from ..service.background import Bell, to_the_end
from .buckets import Bucket, Ended, Size

__all__ = ["Begun", "Exchange", "Feed", "Incoming", "Offer", "Outgoing", "UpdateError"]

T = TypeVar("T")
Immediate: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 28)]
Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
PROGRESS_S = 600.0
"""A receiver that lives, and frees no slot for so long, is given up, and the update with it."""
STAGED = 2
"""Buckets that a sender fills and writes by turns."""
DECLINED = "it ended the update before it had all of it"
MOST_TEXT = 2000
"""Characters of what a receiver says."""


class UpdateError(aiote.AioteError):
    """An update of weights ended before every receiver had all of it; the text says which rank failed, and why."""


class Offer(msgspec.Struct, frozen=True):
    """A receiver's slots: memory of as many times `bucket_bytes` as there are immediates."""

    descriptor: Annotated[bytes, Meta(max_length=4096)]
    bucket_bytes: Size
    immediates: Annotated[list[Immediate], Meta(min_length=1, max_length=1 << 16)]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The immediate by which the receiver tells that a slot is free."""

    credits: Immediate


class Feed(service.Service):
    """What senders serve."""

    name = "aiote.connectors.Feed"

    @service.method(raises=[UpdateError])
    def take(self, update: Name, offer: Offer) -> AsyncIterator[Begun | Bucket | Ended]:
        """Have this sender's buckets of an update written into slots, each described when it has been written."""
        raise NotImplementedError

    @service.method(idempotent=True)
    async def decline(self, update: Name, reason: str = DECLINED) -> None:
        """Tell this sender, which waits for all its receivers, that the caller will not take an update, and why."""
        raise NotImplementedError


class Exchange(Feed):
    """A process's updates on their way out, by name; served on its engine."""

    name = Feed.name

    def __init__(self) -> None:
        self.outgoing: dict[str, Outgoing] = {}

    @service.method(raises=[UpdateError])
    def take(self, update: Name, offer: Offer) -> AsyncIterator[Begun | Bucket | Ended]:
        caller = service.current_call().peer
        if update not in self.outgoing or not self.outgoing[update].is_for(caller.address):
            raise UpdateError(f"no update {update} is under way here: it has ended, was never begun, or is for others")
        return self.outgoing[update].feed(offer, caller)

    @service.method(idempotent=True)
    async def decline(self, update: Name, reason: str = DECLINED) -> None:
        address = service.current_call().peer.address
        if update in self.outgoing and self.outgoing[update].is_for(address):
            self.outgoing[update].fail(f"receiver {address}: {reason[:MOST_TEXT]}")


class Outgoing:
    """One sender's part of an update. `run` lives as long as the update; meanwhile the host fills buckets.

    For each bucket that is this sender's (`number % senders == index`), in order: `await room(number)`, fill the memory
    from `place(number)` on, `await put(bucket)`. Then `await finish(ended)`, and `run` returns when each of so many
    `receivers` has everything. All of them raise UpdateError as soon as a receiver is lost, or has not asked for the
    update `connect_timeout` after the first of these calls; `fail` makes them.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        exchange: Exchange,
        update: str,
        staging: aiote.Region,
        receivers: int,
        *,
        index: int = 0,
        senders: int = 1,
        addresses: Sequence[str] = (),
    ) -> None:
        """Announce it.

        staging: two buckets of registered memory. addresses: the only receivers that can take the update, or end it.
        They are watched from the beginning on; others from when they ask for it.
        """
        self.engine, self.update, self.receivers = engine, update, receivers
        self.index, self.senders = index, senders
        self.bucket_bytes = staging.nbytes // STAGED
        self.error: str | None = None
        self._exchange, self._staging, self._addresses = exchange, staging, tuple(addresses)
        self._identities = {aiote.Address.parse(one).identity for one in addresses}
        self._buckets: dict[int, Bucket] = {}
        self._written: dict[int, int] = {}
        self._ended: Ended | None = None
        self._feeds = 0
        self._came: list[str] = []
        self._begun = False
        self._complete: list[str] = []
        self._scopes: set[anyio.CancelScope] = set()
        self._changed = Bell()
        exchange.outgoing[update] = self

    def is_for(self, address: aiote.Address) -> bool:
        """Whether an engine is one of its receivers, as far as they are known."""
        return not self._identities or address.identity in self._identities

    def place(self, number: int) -> int:
        """Return the byte of the staging memory at which a bucket begins."""
        return number // self.senders % STAGED * self.bucket_bytes

    async def room(self, number: int) -> None:
        """Wait until the staging memory of a bucket is free: every receiver has what it held before."""
        before = number // self.senders - STAGED
        await self._until(lambda: before < 0 or self._written.get(before) == self.receivers)
        self._written.pop(before, None)
        self._buckets.pop(before, None)

    async def put(self, bucket: Bucket) -> None:
        """Have a bucket written to every receiver; does not wait for that."""
        await self._until(lambda: True)
        turn = bucket.number // self.senders
        self._written[turn] = 0
        self._buckets[turn] = bucket
        self._changed.ring()

    async def finish(self, ended: Ended) -> None:
        """Say that there are no more buckets, of any sender."""
        await self._until(lambda: True)
        self._ended = ended
        self._changed.ring()

    def fail(self, reason: str) -> None:
        """End the update for all: receivers are told the reason, once what is being written has drained."""
        if self.error is None and len(self._complete) < self.receivers:
            self.error = reason
            for scope in self._scopes:
                scope.cancel()
            self._changed.ring()

    async def run(self) -> None:
        """Return when every receiver has everything; raise UpdateError for what kept one from it.

        Nothing is read from the staging memory any more when this has ended. Cancelled, it fails for all receivers.
        """
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._all_come)
                for address in self._addresses:
                    group.start_soon(self._watch, address)
                while self.error is None and len(self._complete) < self.receivers:
                    await self._changed.wait()
                group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            self.fail(f"sender {self.index} was cancelled")
            raise
        finally:
            self._exchange.outgoing.pop(self.update, None)
            await to_the_end(self._feeds_ended)
        if self.error is not None:
            raise UpdateError(self.error)

    async def _all_come(self) -> None:
        """Fail when receivers do not ask for the update in time."""
        while not self._begun:
            await self._changed.wait()
        timeout = self.engine.config.connect_timeout
        with anyio.move_on_after(timeout):
            while len(self._came) < self.receivers:
                await self._changed.wait()
        if len(self._came) < self.receivers:
            who = f": {', '.join(self._came)}" if self._came else ""
            absent = [address for address in self._addresses if address not in self._came]
            late = f"; not {', '.join(absent)}" if absent else ""
            self.fail(
                f"{len(self._came)} of {self.receivers} receivers have asked for update {self.update} within "
                f"connect_timeout, {timeout} s{who}{late}"
            )

    async def _feeds_ended(self) -> None:
        while self._feeds:
            await self._changed.wait()

    async def _watch(self, address: str) -> None:
        """Fail when a receiver cannot be reached, or is lost."""
        try:
            peer = await self.engine.connect(address)
        except aiote.AioteError as error:
            self.fail(f"receiver {address}: {error}")
            return
        await peer.wait_closed()
        if address not in self._complete:
            self.fail(f"receiver {address} was lost: {peer.reason}")

    async def _until(self, condition: Callable[[], bool]) -> None:
        if not self._begun:
            self._begun = True
            self._changed.ring()
        while self.error is None and not condition():
            await self._changed.wait()
        if self.error is not None:
            raise UpdateError(self.error)

    # One receiver.

    async def feed(self, offer: Offer, peer: aiote.Peer) -> AsyncIterator[Begun | Bucket | Ended]:
        """Write all buckets into a receiver's slots; the items are its call's."""
        address = str(peer.address)
        if len(self._came) == self.receivers:
            raise UpdateError(
                f"update {self.update} has its {self.receivers} receivers already: {', '.join(self._came)}"
            )
        self._came.append(address)
        self._feeds += 1
        self._changed.ring()
        complete, reason = False, DECLINED
        try:
            nbytes = len(offer.immediates) * offer.bucket_bytes
            remote = self.engine.attach(offer.descriptor, owner=peer, access="write", nbytes=nbytes)
            with self.engine.reserve_immediates(1, [peer]) as block, self.engine.counter(block.first) as credits:
                yield Begun(credits.imm)
                for turn in itertools.count():
                    bucket = await self._unless_failed(partial(self._due, turn))
                    if bucket is None:
                        break
                    if bucket.number >= len(offer.immediates):
                        await self._in_time(credits.wait)
                    await self._in_time(partial(self._write, bucket, offer, remote))
                    self._written[turn] += 1
                    self._changed.ring()
                    yield bucket
                assert self._ended is not None
                yield self._ended
                # One for each slot that is still to be freed, and one for the end.
                due = min(turn, len(offer.immediates) // self.senders) + 1
                await self._in_time(partial(credits.wait, due))
                self._complete.append(address)
                complete = True
        except (aiote.AioteError, ValueError) as error:
            reason = str(error)
            raise UpdateError(self.error or reason) from error
        finally:
            self._feeds -= 1
            if not complete:
                self.fail(f"receiver {address}: {reason}")
            self._changed.ring()

    async def _due(self, turn: int) -> Bucket | None:
        """Wait for this sender's next bucket; None when there are no more."""
        await self._until(lambda: turn in self._buckets or self._ended is not None)
        return self._buckets.get(turn)

    async def _write(self, bucket: Bucket, offer: Offer, remote: aiote.RemoteRegion) -> None:
        if bucket.nbytes:
            slot, start = bucket.number % len(offer.immediates), self.place(bucket.number)
            target = remote[slot * offer.bucket_bytes : slot * offer.bucket_bytes + bucket.nbytes]
            await self.engine.write_imm(self._staging[start : start + bucket.nbytes], target, offer.immediates[slot])

    async def _in_time(self, step: Callable[[], Awaitable[object]]) -> None:
        """Do what waits for a receiver's progress. Raises UpdateError where there is none for `PROGRESS_S`."""
        with anyio.move_on_after(PROGRESS_S) as late:
            await self._unless_failed(step)
        if late.cancelled_caught:
            raise UpdateError(f"it has made no progress for {PROGRESS_S:.0f} s")

    async def _unless_failed(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do what may take as long as a peer; a failure interrupts it."""
        if self.error is None:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    return await step()
                finally:
                    self._scopes.discard(scope)
        raise UpdateError(self.error or "cancelled")


class Incoming:
    """An update on its way into one receiver's slots.

    `await next()` returns bucket after bucket, whose bytes lie from `place(bucket.number)` on until the next call, then
    None. `await aclose()`, in every case: then no sender writes into the slots any more. It ends a `next` under way.
    """

    def __init__(
        self, engine: aiote.Engine, update: str, senders: Sequence[str], slots: aiote.Region, bucket_bytes: int
    ) -> None:
        """Prepare it. senders: their addresses, in the order of their numbers."""
        self.engine, self.update, self.senders = engine, update, tuple(senders)
        self.bucket_bytes = bucket_bytes
        count = slots.nbytes // bucket_bytes
        named = all(not aiote.Address.parse(address).is_anyone for address in self.senders)
        # A host and a port do not say yet which engine the sender is.
        self._block = engine.reserve_immediates(count, self.senders if named else None)
        self._counters = [engine.counter(self._block[number]) for number in range(count)]
        offer = Offer(slots.descriptor, bucket_bytes, [counter.imm for counter in self._counters])
        self._feeds = [service.client(engine, address, Feed) for address in self.senders]
        self._streams = [cast("service.Stream", feed.take(update, offer)) for feed in self._feeds]
        self._credits: dict[int, int] = {}
        self._number = 0
        self._holds = self._closed = self._declined = self._over = False
        self._scope: anyio.CancelScope | None = None
        self._left = Bell()

    def place(self, number: int) -> int:
        """Return the byte of the slots' memory at which a bucket begins."""
        return number % len(self._counters) * self.bucket_bytes

    async def next(self) -> Bucket | None:
        """Give the bucket before this back to its sender, and wait for the next; None when there are no more.

        Cancelled, or when this has raised, the update cannot go on. Raises UpdateError.
        """
        if not self._closed:
            with anyio.CancelScope() as self._scope:
                try:
                    return await self._next()
                finally:
                    self._scope = None
                    self._left.ring()
        raise UpdateError(f"update {self.update} was ended at this receiver")

    async def _next(self) -> Bucket | None:
        if len(self._credits) < len(self.senders):
            await self._begin()
        if self._holds:
            self._holds = False
            await self._credit((self._number - 1) % len(self.senders))
        number = self._number % len(self.senders)
        item = await self._item(number)
        if isinstance(item, Ended):
            await self._end(number, item)
            return None
        if not isinstance(item, Bucket) or item.number != self._number or item.nbytes > self.bucket_bytes:
            raise self._error(number, f"bucket {self._number} was due, not {item}")
        if item.nbytes:
            await self._counters[item.number % len(self._counters)].wait()
        self._number, self._holds = self._number + 1, True
        return item

    async def aclose(self, reason: str = "") -> None:
        """End it, and return when no sender writes into the slots any more. Idempotent.

        reason: the failure of this receiver, if there is one; senders whose update is not over are told it.
        Senders that have not heard of this receiver are told in any case. That takes up to `heartbeat_timeout` for dead
        ones.
        """
        self._closed = True
        if self._scope is not None:
            self._scope.cancel()
        await to_the_end(self._next_ended)
        if reason and not (self._declined or self._over):
            await to_the_end(partial(self._decline, reason))
        for stream in self._streams:
            stream.close()
        for stream in self._streams:
            await to_the_end(stream.aclose)
        for counter in self._counters:
            counter.close()
        self._block.close()
        if not self._declined:
            await to_the_end(self._decline)

    async def _decline(self, reason: str = "") -> None:
        async def decline(number: int) -> None:
            with suppress(aiote.AioteError):
                await self._feeds[number].decline(self.update, (reason or DECLINED)[:MOST_TEXT])

        self._declined = True
        told = set() if reason else set(self._credits)
        with anyio.move_on_after(self.engine.config.heartbeat_timeout):
            async with anyio.create_task_group() as group:
                for number in set(range(len(self.senders))) - told:
                    group.start_soon(decline, number)

    async def _next_ended(self) -> None:
        while self._scope is not None:
            await self._left.wait()

    async def _begin(self) -> None:
        """Ask all senders at once: each waits for its receivers."""

        async def ask(number: int) -> None:
            item = await self._item(number)
            if not isinstance(item, Begun):
                raise self._error(number, f"it begins with {item}")
            self._credits[number] = item.credits

        try:
            async with anyio.create_task_group() as group:
                for number in range(len(self.senders)):
                    group.start_soon(ask, number)
        except BaseExceptionGroup as errors:
            raise next((one for one in errors.exceptions if isinstance(one, UpdateError)), errors) from None

    async def _credit(self, sender: int) -> None:
        """Tell a sender that a slot of its is free, or that all went well."""
        try:
            await self.engine.write_imm(None, self.senders[sender], self._credits[sender])
        except aiote.AioteError as error:
            raise self._error(sender, str(error)) from error

    async def _item(self, sender: int) -> Begun | Bucket | Ended | None:
        """Return the next item of a sender's call, None at its end."""
        try:
            item: Begun | Bucket | Ended | None = await anext(self._streams[sender], None)
        except aiote.AioteError as error:
            raise self._error(sender, str(error)) from error
        return item

    async def _end(self, number: int, ended: Ended) -> None:
        """Check that all senders have ended with the same tensors, and let them end."""
        for other in range(len(self.senders)):
            item = ended if other == number else await self._item(other)
            if item != ended or ended.buckets != self._number:
                raise self._error(other, f"it ended with {item}, sender {number} with {ended}: other tensors or order")
        for other in range(len(self.senders)):
            await self._credit(other)
        self._over = True
        for other in range(len(self.senders)):
            await self._item(other)

    def _error(self, sender: int, reason: str) -> UpdateError:
        return UpdateError(f"update {self.update}: sender {sender}, {self.senders[sender]}: {reason}")
