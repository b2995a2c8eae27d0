"""Tensors from one or several senders to every receiver, by one-sided writes into the receivers' buckets.

A receiver requests an update from each sender by a call that lasts as long as the update and whose items describe
buckets. The call does not carry the bytes: the sender writes them into the receiver's memory, with one immediate for
each of the receiver's slots.

    sender                                   receiver
       | <---------- take(update, offer) ------ |    where its slots are, and their immediates
       | ----------- Begun(credits) ----------> |
       | =========== write, immediate ========> |    bucket b into slot b mod slots
       | ----------- Bucket(b, pieces) -------> |
       | <========== an immediate alone ======= |    the slot of bucket b is free: its tensors are no longer used
       | ----------- UpdateEnd(digest) -------> |
       | <========== an immediate alone ======= |    all senders have ended with the same digest

Receivers do not forward data. With n senders, sender b mod n sends bucket b, so each sender sends 1/n of the bytes to
each receiver. The busiest NIC carries the update (number of receivers / n) times; with as many senders as receivers
that is the least possible. A chain of receivers would achieve it with one sender, but the failure of a rank in the
chain would end the update for every later rank.

The end of the call is the end of the update. A sender or a receiver that dies, is cancelled or fails ends it on the
other side as well, and a sender that lost a receiver ends the calls of all others. The sender also ends the update if
receivers do not request it within `connect_timeout` of the sender's first tensor. A receiver that fails reports the
reason before it ends its calls. When `IncomingUpdate.aclose` has returned, no sender writes into its slots any more: at
each sender the call has ended, including its writes, or the connection has ended.
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
from ..aio import Condition, plain_errors, run_shielded
from .buckets import Bucket, Size, UpdateEnd

__all__ = ["Begun", "BroadcastError", "Exchange", "Feed", "IncomingUpdate", "Outgoing", "ReceiverSlots"]

T = TypeVar("T")
Immediate: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 28)]
Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
PROGRESS_S = 600.0
"""Seconds after which a receiver that lives, but frees no slot, ends the update."""
STAGED = 2
"""The number of buckets that a sender fills and writes in turn."""
DECLINED = "it ended the update before it had all of it"
MOST_TEXT = 2000
"""The most characters that a sender keeps of a receiver's reason."""


class BroadcastError(aiote.AioteError):
    """An update of weights ended before every receiver had all of it. The text names the rank that failed, and why."""


class ReceiverSlots(msgspec.Struct, frozen=True):
    """A receiver's slots: memory of `bucket_bytes` for each slot, and an immediate for each."""

    descriptor: Annotated[bytes, Meta(max_length=4096)]
    bucket_bytes: Size
    immediates: Annotated[list[Immediate], Meta(min_length=1, max_length=1 << 16)]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The first item of a call: the immediate with which the receiver reports a free slot to this sender."""

    credits: Immediate


class Feed(service.Service):
    """The service of senders."""

    name = "aiote.connectors.Feed"

    @service.method(raises=[BroadcastError])
    def take(self, update: Name, offer: ReceiverSlots) -> AsyncIterator[Begun | Bucket | UpdateEnd]:
        """Make this sender write its buckets of an update into slots; yield each bucket's description once written.

        Raises BroadcastError if the update fails, or is not in progress here for the caller.
        """
        raise NotImplementedError

    @service.method(idempotent=True)
    async def decline(self, update: Name, reason: str = DECLINED) -> None:
        """Tell this sender that the caller will not take an update, and why; the sender waits for all its receivers."""
        raise NotImplementedError


class Exchange(Feed):
    """A process's outgoing updates, by name; served on its engine."""

    name = Feed.name

    def __init__(self) -> None:
        self.outgoing: dict[str, Outgoing] = {}

    @service.method(raises=[BroadcastError])
    def take(self, update: Name, offer: ReceiverSlots) -> AsyncIterator[Begun | Bucket | UpdateEnd]:
        caller = service.current_call().peer
        if update not in self.outgoing or not self.outgoing[update].is_for(caller.address):
            raise BroadcastError(
                f"update {update} is not under way at this sender: it has ended, was never begun, or is "
                "not meant for you"
            )
        return self.outgoing[update].feed(offer, caller)

    @service.method(idempotent=True)
    async def decline(self, update: Name, reason: str = DECLINED) -> None:
        address = service.current_call().peer.address
        if update in self.outgoing and self.outgoing[update].is_for(address):
            self.outgoing[update].fail(f"receiver {address}: {reason[:MOST_TEXT]}")


class Outgoing:
    """One sender's part of an update. `run` lasts as long as the update; meanwhile the host fills buckets.

    For each bucket of this sender (`number % senders == index`), in order, the host awaits `room(number)`, fills the
    memory from `place(number)` on, and awaits `put(bucket)`. Then it awaits `finish(ended)`, and `run` returns when all
    `receivers` have everything. All of these raise BroadcastError as soon as a receiver is lost, or has not requested
    the update within `connect_timeout` of the host's first call, or after `fail`.
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
        """Announce the update.

        staging: two buckets of registered memory. addresses: if given, the only receivers that may take the update, or
        decline it; the sender watches them from the beginning. It watches other receivers from their request on.
        """
        self.engine, self.update, self.receivers = engine, update, receivers
        self.index, self.senders = index, senders
        self.bucket_bytes = staging.nbytes // STAGED
        self.error: str | None = None
        self._exchange, self._staging, self._addresses = exchange, staging, tuple(addresses)
        self._identities = {aiote.Address.parse(one).identity for one in addresses}
        self._buckets: dict[int, Bucket] = {}
        self._written: dict[int, int] = {}
        self._ended: UpdateEnd | None = None
        self._feeds = 0
        self._joined: list[str] = []
        self._begun = False
        self._complete: list[str] = []
        self._scopes: set[anyio.CancelScope] = set()
        self._changed = Condition()
        exchange.outgoing[update] = self

    def is_for(self, address: aiote.Address) -> bool:
        """Return whether an engine may be a receiver of this update: one of `addresses`, or any engine without them."""
        return not self._identities or address.identity in self._identities

    def place(self, number: int) -> int:
        """Return the offset of a bucket in the staging memory."""
        return number // self.senders % STAGED * self.bucket_bytes

    async def room(self, number: int) -> None:
        """Wait until the staging memory of a bucket is free, because every receiver has its previous content."""
        before = number // self.senders - STAGED
        await self._wait_until(lambda: before < 0 or self._written.get(before) == self.receivers)
        self._written.pop(before, None)
        self._buckets.pop(before, None)

    async def put(self, bucket: Bucket) -> None:
        """Queue a bucket for writing to every receiver; do not wait for the writes."""
        await self._wait_until(lambda: True)
        own_number = bucket.number // self.senders
        self._written[own_number] = 0
        self._buckets[own_number] = bucket
        self._changed.wake_all()

    async def finish(self, ended: UpdateEnd) -> None:
        """Announce that no sender has more buckets."""
        await self._wait_until(lambda: True)
        self._ended = ended
        self._changed.wake_all()

    def fail(self, reason: str) -> None:
        """End the update for all; receivers learn the reason once the writes in flight have drained."""
        if self.error is None and len(self._complete) < self.receivers:
            self.error = reason
            for scope in self._scopes:
                scope.cancel()
            self._changed.wake_all()

    async def run(self) -> None:
        """Return when every receiver has everything; raise BroadcastError if one failed.

        Once this has ended, no write reads the staging memory any more. Cancelling it ends the update for all.
        """
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._all_come)
                for address in self._addresses:
                    group.start_soon(self._watch, address)
                await self._changed.until(lambda: self.error is not None or len(self._complete) >= self.receivers)
                group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            self.fail(f"sender {self.index} was cancelled")
            raise
        finally:
            self._exchange.outgoing.pop(self.update, None)
            await run_shielded(self._feeds_ended)
        if self.error is not None:
            raise BroadcastError(self.error)

    async def _all_come(self) -> None:
        """End the update if receivers do not request it in time."""
        await self._changed.until(lambda: self._begun)
        timeout = self.engine.config.connect_timeout
        with anyio.move_on_after(timeout):
            await self._changed.until(lambda: len(self._joined) >= self.receivers)
        if len(self._joined) < self.receivers:
            who = f": {', '.join(self._joined)}" if self._joined else ""
            absent = [address for address in self._addresses if address not in self._joined]
            late = f"; not {', '.join(absent)}" if absent else ""
            self.fail(
                f"{len(self._joined)} of {self.receivers} receivers asked for update {self.update} within "
                f"connect_timeout, {timeout} s{who}{late}"
            )

    async def _feeds_ended(self) -> None:
        await self._changed.until(lambda: not self._feeds)

    async def _watch(self, address: str) -> None:
        """End the update if a receiver cannot be reached, or is lost."""
        try:
            peer = await self.engine.connect(address)
        except aiote.AioteError as error:
            self.fail(f"receiver {address}: {error}")
            return
        await peer.wait_closed()
        if address not in self._complete:
            self.fail(f"receiver {address} was lost: {peer.reason}")

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        if not self._begun:
            self._begun = True
            self._changed.wake_all()
        await self._changed.until(lambda: self.error is not None or condition())
        if self.error is not None:
            raise BroadcastError(self.error)

    # One receiver.

    async def feed(self, offer: ReceiverSlots, peer: aiote.Peer) -> AsyncIterator[Begun | Bucket | UpdateEnd]:
        """Write all buckets into a receiver's slots; yield the items of its call. Raises BroadcastError."""
        address = str(peer.address)
        if len(self._joined) == self.receivers:
            raise BroadcastError(
                f"update {self.update} has all of its {self.receivers} receivers: {', '.join(self._joined)}"
            )
        self._joined.append(address)
        self._feeds += 1
        self._changed.wake_all()
        complete, reason = False, DECLINED
        try:
            nbytes = len(offer.immediates) * offer.bucket_bytes
            remote = self.engine.attach(offer.descriptor, owner=peer, access="write", nbytes=nbytes)
            with self.engine.reserve_immediates(1, [peer]) as block, self.engine.counter(block.first) as credits:
                yield Begun(credits.imm)
                for own_number in itertools.count():
                    bucket = await self._unless_failed(partial(self._wait_for_bucket, own_number))
                    if bucket is None:
                        break
                    if bucket.number >= len(offer.immediates):
                        await self._in_time(credits.wait)
                    await self._in_time(partial(self._write, bucket, offer, remote))
                    self._written[own_number] += 1
                    self._changed.wake_all()
                    yield bucket
                assert self._ended is not None
                yield self._ended
                # Wait for one immediate for each slot that is still in use, and for one for the end.
                due = min(own_number, len(offer.immediates) // self.senders) + 1
                await self._in_time(partial(credits.wait, due))
                self._complete.append(address)
                complete = True
        except (aiote.AioteError, ValueError) as error:
            reason = str(error)
            raise BroadcastError(self.error or reason) from error
        finally:
            self._feeds -= 1
            if not complete:
                self.fail(f"receiver {address}: {reason}")
            self._changed.wake_all()

    async def _wait_for_bucket(self, own_number: int) -> Bucket | None:
        """Wait for this sender's next bucket; return None if there are no more."""
        await self._wait_until(lambda: own_number in self._buckets or self._ended is not None)
        return self._buckets.get(own_number)

    async def _write(self, bucket: Bucket, offer: ReceiverSlots, remote: aiote.RemoteRegion) -> None:
        if bucket.nbytes:
            slot, start = bucket.number % len(offer.immediates), self.place(bucket.number)
            target = remote[slot * offer.bucket_bytes : slot * offer.bucket_bytes + bucket.nbytes]
            await self.engine.write_imm(self._staging[start : start + bucket.nbytes], target, offer.immediates[slot])

    async def _in_time(self, step: Callable[[], Awaitable[object]]) -> None:
        """Run a step that depends on a receiver's progress. Raises BroadcastError after `PROGRESS_S` without any."""
        with anyio.move_on_after(PROGRESS_S) as late:
            await self._unless_failed(step)
        if late.cancelled_caught:
            raise BroadcastError(f"it made no progress for {PROGRESS_S:.0f} s")

    async def _unless_failed(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step that may wait for a peer. A failure of the update cancels the step and raises BroadcastError."""
        if self.error is None:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    return await step()
                finally:
                    self._scopes.discard(scope)
        raise BroadcastError(self.error or "cancelled")


class IncomingUpdate:
    """One receiver's part of an update.

    `await next()` returns the buckets in order, then None. A bucket's bytes begin at `place(bucket.number)`, and are
    valid until the next call. The receiver must always `await aclose()`: after it no sender writes into the slots any
    more. It ends a `next` in progress.
    """

    def __init__(
        self, engine: aiote.Engine, update: str, senders: Sequence[str], slots: aiote.Region, bucket_bytes: int
    ) -> None:
        """Prepare the requests. senders: their addresses, in the order of their numbers."""
        self.engine, self.update, self.senders = engine, update, tuple(senders)
        self.bucket_bytes = bucket_bytes
        count = slots.nbytes // bucket_bytes
        named = all(not aiote.Address.parse(address).is_anyone for address in self.senders)
        # An address with only a host and a port does not identify the sender's engine yet.
        self._block = engine.reserve_immediates(count, self.senders if named else None)
        self._counters = [engine.counter(self._block[number]) for number in range(count)]
        offer = ReceiverSlots(slots.descriptor, bucket_bytes, [counter.imm for counter in self._counters])
        self._feeds = [service.client(engine, address, Feed) for address in self.senders]
        self._streams = [cast("service.Stream", feed.take(update, offer)) for feed in self._feeds]
        self._credits: dict[int, int] = {}
        self._number = 0
        self._holds = self._closed = self._declined = self._over = False
        self._scope: anyio.CancelScope | None = None
        self._receiver_left = Condition()

    def place(self, number: int) -> int:
        """Return the offset of a bucket in the slots' memory."""
        return number % len(self._counters) * self.bucket_bytes

    async def next(self) -> Bucket | None:
        """Return the previous bucket's slot to its sender, and wait for the next bucket; return None after the last.

        After a cancellation or an error the update cannot continue. Raises BroadcastError.
        """
        if not self._closed:
            with anyio.CancelScope() as self._scope:
                try:
                    return await self._next()
                finally:
                    self._scope = None
                    self._receiver_left.wake_all()
        raise BroadcastError(f"update {self.update} was ended at this receiver")

    async def _next(self) -> Bucket | None:
        if len(self._credits) < len(self.senders):
            await self._begin()
        if self._holds:
            self._holds = False
            await self._credit((self._number - 1) % len(self.senders))
        number = self._number % len(self.senders)
        item = await self._item(number)
        if isinstance(item, UpdateEnd):
            await self._end(number, item)
            return None
        if not isinstance(item, Bucket) or item.number != self._number or item.nbytes > self.bucket_bytes:
            raise self._error(number, f"expected bucket {self._number}, got {item}")
        if item.nbytes:
            await self._counters[item.number % len(self._counters)].wait()
        self._number, self._holds = self._number + 1, True
        return item

    async def aclose(self, reason: str = "") -> None:
        """End the update, and return when no sender writes into the slots any more. Idempotent.

        reason: the failure of this receiver, if there is one; it is reported to senders unless the update has ended.
        Senders that this receiver's request has not reached are told in any case. For dead senders this takes up to
        `heartbeat_timeout`. Senders that do not end their calls within twice `drain_timeout` are disconnected.
        """
        self._closed = True
        if self._scope is not None:
            self._scope.cancel()
        await run_shielded(self._next_ended)
        if reason and not (self._declined or self._over):
            await run_shielded(partial(self._decline, reason))
        for stream in self._streams:
            stream.close()
        for number in range(len(self._streams)):
            await run_shielded(partial(self._end_stream, number))
        for counter in self._counters:
            counter.close()
        self._block.close()
        if not self._declined:
            await run_shielded(self._decline)

    async def _end_stream(self, number: int) -> None:
        """Wait until a sender's call has ended. An honest sender drains its write within `drain_timeout`."""
        with anyio.move_on_after(2 * self.engine.config.drain_timeout) as late:
            await self._streams[number].aclose()
        if late.cancelled_caught:
            if (peer := self.engine.find_peer(self.senders[number])) is not None:
                peer.disconnect("it did not end its part of an update")
            await self._streams[number].aclose()

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
        await self._receiver_left.until(lambda: self._scope is None)

    async def _begin(self) -> None:
        """Send the requests to all senders concurrently, because each sender waits for all its receivers."""

        async def ask(number: int) -> None:
            item = await self._item(number)
            if not isinstance(item, Begun):
                raise self._error(number, f"expected the begin of the update, got {item}")
            self._credits[number] = item.credits

        with plain_errors():
            async with anyio.create_task_group() as group:
                for number in range(len(self.senders)):
                    group.start_soon(ask, number)

    async def _credit(self, sender: int) -> None:
        """Report to a sender that one of its slots is free, or that the update succeeded."""
        try:
            await self.engine.write_imm(None, self.senders[sender], self._credits[sender])
        except aiote.AioteError as error:
            raise self._error(sender, str(error)) from error

    async def _item(self, sender: int) -> Begun | Bucket | UpdateEnd | None:
        """Return the next item of a sender's call, None at its end. Raises BroadcastError, which names the sender."""
        try:
            item: Begun | Bucket | UpdateEnd | None = await anext(self._streams[sender], None)
        except aiote.AioteError as error:
            raise self._error(sender, str(error)) from error
        return item

    async def _end(self, number: int, ended: UpdateEnd) -> None:
        """Check that all senders have ended with the same tensors, report success to them, and wait for their ends."""
        for other in range(len(self.senders)):
            item = ended if other == number else await self._item(other)
            if item != ended or ended.buckets != self._number:
                raise self._error(other, f"it ended with {item}, sender {number} with {ended}: other tensors or order")
        for other in range(len(self.senders)):
            await self._credit(other)
        self._over = True
        for other in range(len(self.senders)):
            await self._item(other)

    def _error(self, sender: int, reason: str) -> BroadcastError:
        return BroadcastError(f"update {self.update}: sender {sender}, {self.senders[sender]}: {reason}")
