"""One control connection, from its first byte to its last: who is there, which rails are joined, is it still alive.

After authentication both sides send an `Offer`, open an endpoint for each pair of rails and tell it in a `Channel`. A
side that has joined all its channels says `Mapped`; a side that has heard that makes progress once more and says
`Ready`; one that has heard Ready may write. The step between is for shm, which must map both ways before anything
moves (see `greet` in the native peers). The initiator then writes nothing to the other's scratch, which brings up
connections that providers make lazily.
"""

from __future__ import annotations

import errno
import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import aiote.aio as aio

from .config import HEARTBEAT_MS, MESSAGE_BYTES, MESSAGE_POOL
from .core.address import name_of
from .core.control import Authenticated, ControlProtocol, Event, HelloReceived, MessageReceived, Refusal, Role
from .core.failover import FailoverError
from .core.frames import (
    Arrivals,
    Bye,
    Channel,
    ChannelMessage,
    Failed,
    Heartbeat,
    Joined,
    MailMoved,
    Mapped,
    Offer,
    RailDown,
    RailOffer,
    Ready,
    Revoke,
    Revoked,
    Settle,
)
from .core.pairing import pair_rails
from .errors import AioteError, PeerError, TransferError
from .failover import Failover
from .liveness import Liveness
from .peer import Peer
from .rails import POOL_BYTES, error_text, pools_fit

if TYPE_CHECKING:
    from .engine import Engine
    from .rails import PeerLink, PendingChannel

__all__ = ["Session"]

T = TypeVar("T")


class SessionOver(Exception):
    """The connection ended before the peer was connected; the text says why, `busy` that another connection serves."""

    def __init__(self, reason: str, *, busy: bool = False) -> None:
        super().__init__(reason)
        self.busy = busy


class Session:
    """The conversation on one stream. `run` is a task's whole life."""

    def __init__(
        self,
        engine: Engine,
        stream: aio.ByteStream,
        protocol: ControlProtocol,
        peer: Peer | None,
        name: str,
        timeout: float,
    ) -> None:
        self._engine = engine
        self._protocol = protocol
        self._timeout = timeout
        self._role = protocol.role
        self.peer = peer
        self._events: deque[Event] = deque()
        self._arrived = aio.Signal(engine.loop)
        self.stream = stream
        self._connection = aio.ControlConnection(engine.loop, stream, protocol, name)
        self._connection.on_event = self._on_event
        self._connection.on_end = self._on_end
        self._link: PeerLink | None = None
        self.failover: Failover | None = None
        self.admitted = False
        self.committed = False
        self.who: tuple[bytes, int] | None = None
        self._verdict: SessionOver | None = None
        self._probing = False
        self._told_void = False
        self._revoking: set[int] = set()
        self._given_back = aio.Signal(engine.loop)
        self._channels: list[PendingChannel] = []
        self._handovers: dict[PendingChannel, aio.Handover] = {}
        self._liveness = Liveness(engine, self._connection.send)

    def _on_event(self, event: Event) -> None:
        self._liveness.clock.heard(self._engine.loop.time())
        if isinstance(event, MessageReceived) and isinstance(event.message, Heartbeat):
            # Having been heard was all that it was for.
            return
        self._events.append(event)
        self._arrived.set()

    def _on_end(self, _reason: str) -> None:
        self._arrived.set()
        self._given_back.set()
        if self._probing and self._link is not None:
            self._link.close()
            self._engine.kick()

    async def run(self) -> None:
        """Establish the peer and serve it until one side is lost. Raises SessionOver where it was never established."""
        self._connection.start()
        self._connection.flush()
        try:
            if not await aio.within(self._timeout, self._establish):
                raise SessionOver(f"no connection was made within {self._engine.connect_timeout} s")
            await self._serve()
        except SessionOver as over:
            if not over.busy:
                self._connection.send(Failed(GAVE_UP, str(over)))
            raise
        except Exception as error:
            reason = self._reason_of(error)
            self._connection.send(Failed(GAVE_UP, reason))
            raise SessionOver(reason) from error
        finally:
            self.discard()
            await self._connection.aclose()

    def _reason_of(self, error: Exception) -> str:
        """Say what an exception means to the peer; one that nobody expected is reported, for it is our mistake."""
        if isinstance(error, PeerError):
            return error.reason
        if isinstance(error, AioteError | MemoryError):
            return str(error) or "out of memory"
        aio.report(error)
        return f"this engine failed: {type(error).__name__}: {error}"

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Lose the peer for whatever is raised within: nobody else could, and half a peer would stay."""
        try:
            yield
        except SessionOver as over:
            self._give_up(str(over))
        except Exception as error:
            self._give_up(self._reason_of(error))

    def _give_up(self, reason: str) -> None:
        if self.peer is not None and self.peer.link is self._link:
            self.peer.lose(reason)
        else:
            self._connection.end(reason)

    def end(self, reason: str) -> None:
        """End the conversation from outside: `run` then ends by itself."""
        self._verdict = self._verdict or SessionOver(reason)
        self._connection.end(reason)

    def supersede(self) -> None:
        """Give way to another connection between the two engines, and tell the other side that it is for that."""
        self._connection.send(Bye(BUSY))
        self._verdict = SessionOver(BUSY, busy=True)
        self._connection.end(BUSY)

    def discard(self) -> None:
        """Close what this conversation opened and nobody took over. Idempotent."""
        if self._link is not None and (
            self.peer is None or not self.peer.connected or self.peer.link is not self._link
        ):
            self._link.close()
        for handover in self._handovers.values():
            handover.close()
        for pending in self._channels:
            pending.close()
            self._engine.fabric.free_slot(pending.slot)
        self._channels.clear()
        self._given_back.set()

    async def _next(self, kind: type[T]) -> T:
        """Wait for the next event or message of a kind."""
        while True:
            if self._verdict is not None:
                raise self._verdict
            while self._events:
                event = self._events.popleft()
                item = event.message if isinstance(event, MessageReceived) else event
                if isinstance(item, kind):
                    return item
                self._meanwhile(item)
            if self._connection.ended:
                stranger = kind is HelloReceived or kind is Authenticated
                raise SessionOver(self._connection.reason + (HINT if stranger else ""))
            await self._arrived.wait()

    def _meanwhile(self, item: object) -> None:
        """Take what may come at any time."""
        match item:
            case Refusal():
                whose = "this engine refused it" if item.by_us else "it refused"
                raise SessionOver(f"{whose}: {item.text}")
            case Revoke(lease, low, high):
                if self.peer is not None:
                    answer = partial(self._connection.send, Revoked(lease))
                    self.peer.leases.revoke(low, high, lease, answer)
            case Settle() | RailDown() | Arrivals() | Channel() | Joined() | MailMoved():
                self._hear_channels(item)
            case Revoked(lease):
                self._revoking.discard(lease)
                self._given_back.set()
            case Bye():
                raise SessionOver(f"it said goodbye: {item.reason}", busy=item.reason == BUSY)
            case Failed():
                raise SessionOver(f"it gave up: {item.text}")
            case _:
                pass

    def _hear_channels(self, message: ChannelMessage) -> None:
        if self.failover is None:
            raise SessionOver("it spoke of channels that fail, where there is one that does not")
        try:
            self.failover.hear(message)
        except FailoverError as error:
            raise SessionOver(str(error)) from error

    def notice(self, link: PeerLink) -> None:
        """Look at the channels of a link that the native core has something to say about."""
        with self._answering():
            for number, errnum in link.notices():
                if self.failover is not None and self.peer is not None and not self.peer.lost:
                    self.failover.notice(number, errnum)
                elif errnum:
                    self.link_failed(f"the data connection failed: {error_text(errnum)}")

    def rail_failed(self, link: PeerLink, rail: int, reason: str, queue: int) -> None:
        """Give up what goes over one of our rails, or, where `queue` is the number of one, its channel alone."""
        if self.failover is None or self.peer is None or self.peer.lost:
            return
        with self._answering():
            for number in link.channels_on(rail) if queue < 0 else (link.channel_with(queue, rail),):
                if number >= 0:
                    self.failover.fail(number, reason)

    async def _establish(self) -> None:
        if self._role is Role.ACCEPTOR:
            await self._next(HelloReceived)
            self._protocol.accept()
            self._connection.flush()
        who = await self._next(Authenticated)
        self.who = who.identity, who.incarnation
        offer = await self._exchange_offers()
        peer = self._engine.admit(self, self.peer, offer.address, who.identity, who.incarnation, self._role)
        if peer is None:
            self._connection.send(Bye(BUSY))
            raise SessionOver("another connection to it serves", busy=True)
        self.peer = peer
        self.admitted = True
        peer.connection = self._connection
        link = await self._join_channels(peer, offer)
        if self._connection.ended:
            raise SessionOver(self._connection.reason)
        peer.link = link

    async def _exchange_offers(self) -> Offer:
        engine = self._engine
        rails = tuple(
            RailOffer(rail.index, rail.provider, rail.wire, rail.name, rail.info.speed_mbps)
            for rail in engine.fabric.rails
        )
        config = engine.config
        every = min(round(config.heartbeat_interval * 1000), HEARTBEAT_MS[1])
        self._connection.send(
            Offer(engine.host_id, config.message_bytes, config.message_pool, every, rails, engine.address)
        )
        offer = await self._next(Offer)
        for number, (least, most) in ((offer.message_bytes, MESSAGE_BYTES), (offer.pool, MESSAGE_POOL)):
            if not least <= number <= most:
                raise SessionOver(f"it offers a pool of {offer.pool} messages of {offer.message_bytes} bytes")
        if not pools_fit(config.message_pool, config.message_bytes, offer.pool, offer.message_bytes):
            raise SessionOver(
                f"it offers a pool of {offer.pool} messages of {offer.message_bytes} bytes, which takes over "
                f"{POOL_BYTES} bytes here; raise message_pool and message_bytes here, or lower them there"
            )
        if not HEARTBEAT_MS[0] <= offer.heartbeat_ms <= HEARTBEAT_MS[1]:
            raise SessionOver(f"it asks for a heartbeat every {offer.heartbeat_ms} ms")
        self._liveness.clock.told = offer.heartbeat_ms / 1000
        return offer

    def _pair(self, peer: Peer, offer: Offer) -> list[tuple[int, int]]:
        """Return the pairs of (our rail, its rail) that are joined; both sides find the same. Raises PeerError."""
        ours = {rail.index: rail.wire for rail in self._engine.fabric.rails}
        theirs = {number: rail.wire for number, rail in enumerate(offer.rails)}
        near = {rail.wire for rail in self._engine.fabric.rails if rail.traits.host_only} & set(theirs.values())
        if len(set(ours.values()) - near) > 0 and len(set(theirs.values()) - near) > 0:
            # Where there are others, too: shared memory alone is used on one host, and never between two.
            here = offer.host_id == self._engine.host_id
            ours, theirs = (
                {number: wire for number, wire in rails.items() if not near or (wire in near) is here}
                for rails in (ours, theirs)
            )
        mine, remote = list(ours), list(theirs)
        if self._role is Role.INITIATOR:
            found = pair_rails(list(ours.values()), list(theirs.values()))
        else:
            found = [pair[::-1] for pair in pair_rails(list(theirs.values()), list(ours.values()))]
        if not found:
            raise PeerError(
                str(peer.address),
                f"no rail in common: this engine speaks {', '.join(ours.values())}, it speaks "
                f"{', '.join(theirs.values())} (tcp of libfabric 1.17 and of 1.18 and later cannot talk to each other, "
                "shm only of one version)",
            )
        return [(mine[i], remote[j]) for i, j in found]

    async def _join_channels(self, peer: Peer, offer: Offer) -> PeerLink:
        """Open, tell, hear and join the channels, then let both sides know; return the link that may be written to."""
        engine = self._engine
        pairs = self._pair(peer, offer)
        # From here on a revocation has to be told by itself.
        self._told_void = True
        for low, high in engine.leases.void(peer.key):
            self._connection.send(Revoke(0, low, high))
        for mine, remote in pairs:
            self._offer_channel(mine, remote)
        link = self._link = engine.core.add_peer(self)
        # Of several the loss of one is not the peer's, nor where it takes no more than a request that failed. But what
        # is mapped is never made anew: shared memory fails with its process, or for a lie.
        traits = [engine.fabric.rails[mine].traits for mine, _ in pairs]
        survivable = (len(pairs) > 1 or traits[0].fragile) and not any(one.host_only for one in traits)
        link.expect(len(pairs), engine.config.schedule == "in-turn", survivable)
        for pending in list(self._channels):
            await self._join(peer, link, pending, await self._next(Channel))
        engine.fabric.open_mailbox(
            link, engine.config.message_pool, engine.config.message_bytes, offer.pool, offer.message_bytes
        )
        self._connection.send(Mapped())
        await self._next(Mapped)
        for _ in range(2):
            engine.core.progress()
        # The core may be left awake by that, and peers do not ring who is awake.
        engine.kick()
        self.committed = True
        self._connection.send(Ready())
        await self._next(Ready)
        link.greeted()
        if survivable:
            self.failover = Failover(engine, peer, link, self._role, pairs, self._connection.send)
        if self._role is Role.INITIATOR:
            await self._probe(peer, link, len(pairs))
        return link

    async def revoke(self, lease: int, low: int, high: int) -> None:
        """Return when the peer has nothing under way through a lease and starts nothing, or its channels are closed."""
        if not self._told_void:
            # It is told with all that is void before the first channel is opened.
            return
        limit = self._engine.drain_timeout
        self._revoking.add(lease)
        self._connection.send(Revoke(lease, low, high))
        if not await aio.within(limit, lambda: self._wait_given_back(lease)):
            reason = f"it did not give a lease back within {limit} s"
            if self.peer is not None and self.peer.connected:
                self.peer.lose(reason)
            else:
                self.end(reason)
                self.discard()

    async def _wait_given_back(self, lease: int) -> None:
        while lease in self._revoking and not (self._connection.ended and (self._link is None or self._link.closed)):
            await self._given_back.wait()

    async def _probe(self, peer: Peer, link: PeerLink, channels: int) -> None:
        """Write nothing, to bring up what providers connect lazily; a provider may never say that nobody is there."""
        self._probing = True
        try:
            for probe in [self._engine.probe(peer, link, number) for number in range(channels)]:
                await probe
        except TransferError:
            if self._connection.ended:
                raise SessionOver(self._connection.reason) from None
            raise
        finally:
            self._probing = False

    def data_failed(self, link: PeerLink) -> None:
        """Take note that a link has failed."""
        rail = self._engine.rail_name(link.failed_rail)
        where = f" on rail {rail}" if rail else ""
        if link.failed == errno.ENOTCONN and rail and self._engine.fabric.rails[link.failed_rail].traits.host_only:
            # Its gate, which is seen sooner than its last word is heard.
            self.link_failed(f"it has closed its end of the data connection{where}")
        else:
            self.link_failed(f"the data connection{where} failed: {error_text(link.failed)}")

    def link_failed(self, reason: str) -> None:
        """Take note that the data path is gone."""
        self._give_up(reason)

    def _offer_channel(self, mine: int, remote: int) -> None:
        engine = self._engine
        pending = engine.fabric.open_channel(mine, remote)
        self._channels.append(pending)
        doorbell = b""
        if not pending.rail.traits.waits:

            def on_arrival(descriptors: Sequence[int], bell: bytes, error: OSError | None) -> None:
                pending.take(descriptors, bell, error)
                self._arrived.set()

            handover = self._handovers[pending] = aio.Handover(engine.loop, on_arrival)
            doorbell = SLOT.pack(pending.slot, pending.generation) + handover.address
        key, base = engine.fabric.scratch.keys[mine]
        self._connection.send(Channel(mine, remote, 0, pending.address, key, base, doorbell))

    async def _join(self, peer: Peer, link: PeerLink, pending: PendingChannel, channel: Channel) -> None:
        engine = self._engine
        if (channel.rail_local, channel.rail_remote) != (pending.remote_rail, pending.rail.index):
            raise PeerError(
                str(peer.address),
                f"it told a channel of rails {channel.rail_local} and {channel.rail_remote} out of turn",
            )
        peer_slot = -1, 0
        if not pending.rail.traits.waits:
            if len(channel.doorbell) < SLOT.size:
                raise PeerError(str(peer.address), "it told no doorbell for a rail that needs one")
            peer_slot = SLOT.unpack_from(channel.doorbell)
            await self._hand_over(peer, pending, channel.doorbell[SLOT.size :])
        who = name_of(peer.key)
        engine.fabric.join(link, pending, channel.address, channel.imm_key, channel.imm_base, peer_slot, who=who)
        self._channels.remove(pending)

    async def _hand_over(self, peer: Peer, pending: PendingChannel, address: bytes) -> None:
        """Give the peer our doorbell and ring, and wait for its own."""
        doorbell = self._engine.core.doorbell
        assert doorbell is not None
        try:
            aio.hand_over(address, pending.shared(doorbell), doorbell.address)
        except ValueError as error:
            raise PeerError(str(peer.address), f"it told no doorbell: {error}") from None
        while pending.bell is None or pending.refused:
            if pending.refused:
                raise PeerError(str(peer.address), pending.refused)
            if self._connection.ended:
                raise SessionOver(self._connection.reason)
            await self._arrived.wait()

    async def _serve(self) -> None:
        """Be connected, and keep the connection alive until it ends; however that is, the peer is lost then."""
        peer = self.peer
        assert peer is not None
        try:
            with self._answering():
                self._engine.inbox.add(peer)
                peer.established()
                self._engine.events.emit("peer.connected", peer=str(peer.address))
                self._engine.heartbeats.add(self._beat)
                while not peer.lost:
                    await self._hear()
        finally:
            peer.lose("its connection was not served any longer")
            self._engine.heartbeats.remove(self._beat)
            if self.failover is not None:
                self.failover.close()
            self._given_back.set()

    def _beat(self, now: float) -> float:
        """Return when to look again."""
        assert self.peer is not None
        with self._answering():
            return self._liveness.look(now, self.peer, self._link, self.failover)
        return math.inf

    async def _hear(self) -> None:
        """Take the messages that came; wait for one if there is none."""
        if not self._events and not self._connection.ended:
            await self._arrived.wait()
        while self._events:
            event = self._events.popleft()
            self._meanwhile(event.message if isinstance(event, MessageReceived) else event)
        if self._connection.ended:
            raise SessionOver(self._connection.reason)


SLOT = struct.Struct("<iI")  # of a doorbell's page: its number and its generation
BUSY = "another connection between these two engines serves"
GAVE_UP = 2  # the code of a Failed that says why no connection was made
HINT = "; check that both sides are engines, with TLS on both or on neither"
