"""One control connection, from its first byte to its last: authentication, joining of rails, liveness.

After authentication both sides send an `EngineOffer`, open an endpoint for each pair of rails and describe it in a
`Channel`. A side that has joined all its channels sends `Mapped`. A side that has received Mapped runs two rounds of
progress and sends `Ready`. A side that has received Ready may write. The rounds are for shm: both sides must map it
before any byte moves (see `greet` in `aiote_native.channels.peers`). The initiator then sends over each channel an
empty write to the acceptor's scratch memory. This brings up connections that providers make lazily.
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import aiote.aio as aio

from ..config import HEARTBEAT_MS, MESSAGE_BYTES, MESSAGE_POOL
from ..core.control import Authenticated, ControlProtocol, Event, HelloReceived, MessageReceived, Refusal, Role
from ..core.control_frames import (
    AckCounts,
    Arrivals,
    Bye,
    Channel,
    ChannelMessage,
    EngineOffer,
    Failed,
    Heartbeat,
    Joined,
    MailboxMoved,
    Mapped,
    RailDown,
    RailOffer,
    Ready,
    Revoke,
    Revoked,
    ShareRefused,
    ShareRequest,
)
from ..core.failover import FailoverError
from ..core.handshake import RefusalCode
from ..errors import (
    AioteError,
    AuthenticationError,
    ConnectTimeoutError,
    PeerError,
    PeerRefusedError,
    TransferError,
)
from ..rails import POOL_BYTES, error_text, pools_fit
from .channels import Channels
from .joining import FULL, Joining, pair
from .liveness import Liveness

if TYPE_CHECKING:
    from ..core.address import Address
    from ..rails import Operation, PeerLink
    from ..runtime import Runtime
    from ..transfers import Inbox
    from .connection import Connection
    from .heartbeat_timer import HeartbeatTimer
    from .sharing import Sharing

__all__ = ["ALIVE", "BUSY", "Session", "SessionOver"]

T = TypeVar("T")


class SessionOver(Exception):
    """The session has ended or has to end. The text says why; `busy` means that another connection serves the pair;
    `kind` is the error for a caller that still waits for the peer to be connected.
    """

    def __init__(self, reason: str, *, busy: bool = False, kind: type[PeerError] = PeerError) -> None:
        super().__init__(reason)
        self.busy = busy
        self.kind = kind


class SessionHost(Protocol):
    """The part of the table of connections that a session uses."""

    heartbeats: HeartbeatTimer
    inbox: Inbox
    sharing: Sharing

    def void_leases(self, holder: tuple[bytes, int]) -> Iterable[tuple[int, int]]:
        """Return the ranges of our leases that are void for a holder."""

    def admit(
        self,
        session: Session,
        connection: Connection | None,
        claimed: Address,
        identity: bytes,
        incarnation: int,
        role: Role,
    ) -> Connection:
        """Make an authenticated session the only one of its pair. Raises a busy SessionOver if another session is."""


class Session:
    """The conversation on one stream. `run` is the body of its task, from the first byte to the last."""

    def __init__(
        self,
        runtime: Runtime,
        host: SessionHost,
        stream: aio.ByteStream,
        protocol: ControlProtocol,
        *,
        connection: Connection | None,
        name: str,
        timeout: float,
    ) -> None:
        self._runtime = runtime
        self._host = host
        self._protocol = protocol
        self._timeout = timeout
        self._role = protocol.role
        self.connection = connection
        self._events: deque[Event] = deque()
        self._arrived = aio.Condition(runtime.loop)
        self.stream = stream
        self._control = aio.ControlConnection(runtime.loop, stream, protocol, name)
        self._control.on_event = self._on_event
        self._control.on_end = self._on_end
        self._link: PeerLink | None = None
        self.channels: Channels | None = None
        self.admitted = False
        self.committed = False
        self.peer_key: tuple[bytes, int] | None = None
        self._verdict: SessionOver | None = None
        self._probing = False
        self._void_leases_sent = False
        self._revoking: set[int] = set()
        self._given_back = aio.Condition(runtime.loop)
        self._joining = Joining(runtime, self._control, self._arrived)
        self._liveness = Liveness(runtime, self._control.send)

    def _on_event(self, event: Event) -> None:
        self._liveness.clock.record_heard(self._runtime.loop.time())
        if isinstance(event, MessageReceived) and isinstance(event.message, Heartbeat):
            # A heartbeat has served its purpose once it was heard.
            self._runtime.heartbeats.heard += 1
            return
        self._events.append(event)
        self._arrived.wake_all()

    def _on_end(self, _reason: str) -> None:
        self._arrived.wake_all()
        self._given_back.wake_all()
        if self._probing and self._link is not None:
            self._link.close()
            self._runtime.kick()

    async def run(self) -> None:
        """Establish the peer and serve it until one side is lost. Raises SessionOver if it was never established."""
        self._control.start()
        self._control.flush()
        try:
            if not await aio.run_within(self._timeout, self._establish):
                limit = self._runtime.config.connect_timeout
                raise SessionOver(f"no connection was made within {limit} s", kind=ConnectTimeoutError)
            await self._serve()
        except SessionOver as over:
            if not over.busy:
                self._control.send(Failed(GAVE_UP, str(over)))
            raise
        except Exception as error:
            reason = self._reason_of(error)
            self._control.send(Failed(GAVE_UP, reason))
            raise SessionOver(reason, kind=type(error) if isinstance(error, PeerError) else PeerError) from error
        finally:
            self.discard()
            await self._control.aclose()

    def _reason_of(self, error: Exception) -> str:
        """Return the reason that an exception gives the peer; report an unexpected one, because it is our mistake."""
        if isinstance(error, PeerError):
            return error.reason
        if isinstance(error, AioteError | MemoryError):
            return str(error) or "out of memory"
        aio.report(error)
        return f"this engine failed: {type(error).__name__}: {error}"

    @contextmanager
    def _losing_on_error(self) -> Iterator[None]:
        """Lose the peer if the block raises anything: no other code does that, and the peer would stay half working."""
        try:
            yield
        except SessionOver as over:
            self._give_up(str(over))
        except Exception as error:
            self._give_up(self._reason_of(error))

    def _give_up(self, reason: str) -> None:
        if self.connection is not None and self.connection.link is self._link:
            self.connection.lose(reason)
        else:
            self._control.end(reason)

    def end(self, reason: str) -> None:
        """End the conversation from outside; `run` ends soon afterwards."""
        self._verdict = self._verdict or SessionOver(reason)
        self._control.end(reason)

    def supersede(self) -> None:
        """End in favour of another connection between the two engines, and tell the peer so."""
        self._control.send(Bye(BUSY))
        self._verdict = SessionOver(BUSY, busy=True)
        self._control.end(BUSY)

    def discard(self) -> None:
        """Close the link and channels that this session opened and no connection took over. Idempotent."""
        if self._link is not None and (
            self.connection is None or not self.connection.connected or self.connection.link is not self._link
        ):
            self._link.close()
        self._joining.close()
        self._given_back.wake_all()

    async def _expect(self, kind: type[T]) -> T:
        """Wait for the next event or message of a kind. Raises SessionOver when the connection ends before."""
        while True:
            if self._verdict is not None:
                raise self._verdict
            while self._events:
                event = self._events.popleft()
                item = event.message if isinstance(event, MessageReceived) else event
                if isinstance(item, kind):
                    return item
                self._dispatch(item)
            if self._control.has_ended:
                unproven = kind is HelloReceived or kind is Authenticated
                raise SessionOver(self._control.reason + (HINT if unproven else ""))
            await self._arrived.wait()

    def _dispatch(self, item: object) -> None:
        """Handle an event or message that may come at any time."""
        match item:
            case Refusal():
                whose = "this engine refused it" if item.by_us else "it refused"
                kind = AuthenticationError if item.code in KEY_CODES else PeerRefusedError
                raise SessionOver(f"{whose}: {item.text}", kind=kind)
            case Revoke(lease, low, high):
                if self.connection is not None:
                    answer = partial(self._control.send, Revoked(lease))
                    self.connection.leases.revoke(low, high, lease, answer)
            case AckCounts() | RailDown() | Arrivals() | Channel() | Joined() | MailboxMoved():
                self._on_channel_message(item)
            case ShareRequest() | ShareRefused():
                if self.connection is not None:
                    self._host.sharing.receive(self.connection, item, self._control.send)
            case Revoked(lease):
                self._revoking.discard(lease)
                self._given_back.wake_all()
            case Bye():
                raise SessionOver(f"it closed the connection: {item.reason}", busy=item.reason in (BUSY, ALIVE))
            case Failed():
                raise SessionOver(f"it gave up: {item.text}", kind=PeerRefusedError)
            case _:
                pass

    def _on_channel_message(self, message: ChannelMessage) -> None:
        if self.channels is None:
            raise SessionOver("it sent a failover message, but no rail of this connection fails over")
        try:
            self.channels.receive(message)
        except FailoverError as error:
            raise SessionOver(str(error)) from error

    def release(self, transfer: Operation) -> bool:
        """Fail the rails that hold a cancelled transfer; return False if no rail was failed."""
        return self.channels is not None and self.channels.release(transfer)

    def notice(self, link: PeerLink) -> None:
        """Handle what the native core has reported about the channels of a link."""
        with self._losing_on_error():
            for number, errnum in link.notices():
                if self.channels is not None and self.connection is not None and not self.connection.lost:
                    self.channels.notice(number, errnum)
                elif errnum:
                    self.link_failed(f"the data connection failed: {error_text(errnum)}")

    def rail_failed(self, link: PeerLink, rail: int, reason: str, queue: int) -> None:
        """Fail the channels over one of our rails; if `queue` is not negative, only the channel that has this queue."""
        if self.channels is None or self.connection is None or self.connection.lost:
            return
        with self._losing_on_error():
            for number in link.channels_on(rail) if queue < 0 else (link.channel_with(queue, rail),):
                if number >= 0:
                    self.channels.fail(number, reason)

    async def _establish(self) -> None:
        if self._role is Role.ACCEPTOR:
            await self._expect(HelloReceived)
            self._protocol.accept()
            self._control.flush()
        who = await self._expect(Authenticated)
        self.peer_key = who.identity, who.incarnation
        offer = await self._exchange_offers()
        try:
            connection = self._host.admit(
                self, self.connection, offer.address, who.identity, who.incarnation, self._role
            )
        except SessionOver as over:
            self._control.send(Bye(str(over)))
            raise
        self.connection = connection
        connection.shares_memory = self._runtime.shares_memory(offer.host_id, who.version)
        self.admitted = True
        connection.control = self._control
        link = await self._join_channels(connection, offer)
        if self._control.has_ended:
            raise SessionOver(self._control.reason)
        connection.link = link

    async def _exchange_offers(self) -> EngineOffer:
        runtime, joining = self._runtime, self._joining
        joining.reserve()
        rails = tuple(
            RailOffer(
                rail.index,
                rail.provider,
                FULL if rail.index in joining.full else rail.wire,
                rail.name,
                rail.info.speed_mbps,
            )
            for rail in runtime.rail_set.rails
        )
        config = runtime.config
        every = min(round(config.heartbeat_interval * 1000), HEARTBEAT_MS[1])
        self._control.send(
            EngineOffer(runtime.host_id, config.message_bytes, config.message_pool, every, rails, runtime.address)
        )
        offer = await self._expect(EngineOffer)
        for number, (least, most) in ((offer.message_bytes, MESSAGE_BYTES), (offer.pool, MESSAGE_POOL)):
            if not least <= number <= most:
                raise SessionOver(
                    f"it offers {offer.pool} messages of {offer.message_bytes} bytes; expected "
                    f"{MESSAGE_POOL[0]} to {MESSAGE_POOL[1]} messages of {MESSAGE_BYTES[0]} to {MESSAGE_BYTES[1]} bytes"
                )
        if not pools_fit(config.message_pool, config.message_bytes, offer.pool, offer.message_bytes):
            raise SessionOver(
                f"it offers a pool of {offer.pool} messages of {offer.message_bytes} bytes, which takes over "
                f"{POOL_BYTES} bytes here; raise message_pool and message_bytes here, or lower them at the peer"
            )
        if not HEARTBEAT_MS[0] <= offer.heartbeat_ms <= HEARTBEAT_MS[1]:
            raise SessionOver(
                f"it asks for a heartbeat every {offer.heartbeat_ms} ms, expected {HEARTBEAT_MS[0]} "
                f"to {HEARTBEAT_MS[1]}"
            )
        self._liveness.clock.send_every = offer.heartbeat_ms / 1000
        return offer

    async def _join_channels(self, connection: Connection, offer: EngineOffer) -> PeerLink:
        """Open our channels, describe them to the peer, and join each to the peer's; return the usable link."""
        runtime = self._runtime
        pairs = pair(runtime, connection, offer, self._role, self._joining.full)
        self._joining.tell_full(connection, offer)
        # From here on `revoke` must send each revocation.
        self._void_leases_sent = True
        for low, high in self._host.void_leases(connection.key):
            self._control.send(Revoke(0, low, high))
        for mine, remote in pairs:
            self._joining.offer(mine, remote)
        self._joining.release_reserved()
        link = self._link = runtime.core.add_peer(self)
        runtime.admit_source(connection.key, link)
        # With several channels, losing one does not lose the peer; nor does it where a failed request breaks the only
        # one (`fragile`). Shared memory is never mapped again: it fails if the peer ends or writes invalid contents.
        traits = [runtime.rail_set.rails[mine].traits for mine, _ in pairs]
        survivable = (len(pairs) > 1 or traits[0].fragile) and not any(one.host_only for one in traits)
        link.expect(len(pairs), runtime.config.schedule == "round-robin", survivable)
        for pending in self._joining:
            await self._joining.join(connection, link, pending, await self._expect(Channel))
        runtime.rail_set.open_mailbox(
            link, runtime.config.message_pool, runtime.config.message_bytes, offer.pool, offer.message_bytes
        )
        self._control.send(Mapped())
        await self._expect(Mapped)
        for _ in range(2):
            runtime.core.progress()
        # That may leave the core awake, and peers send no wake-up to an engine that is awake.
        runtime.kick()
        self.committed = True
        self._control.send(Ready())
        await self._expect(Ready)
        link.record_greeting()
        if survivable:
            self.channels = Channels(
                runtime, connection, link, self._role, pairs, self._control.send, check=self._host.heartbeats.check_soon
            )
        if self._role is Role.INITIATOR:
            await self._probe(connection, link, len(pairs))
        return link

    async def revoke(self, lease: int, low: int, high: int) -> None:
        """Make a lease void for the peer: send a Revoke, and return when no request of the peer through the lease is in
        flight or can start, or its channels are closed. Loses the peer after `drain_timeout`.
        """
        if not self._void_leases_sent:
            # The peer is told of all void leases before the first channel is opened; this lease is among them.
            return
        limit = self._runtime.config.drain_timeout
        self._revoking.add(lease)
        self._control.send(Revoke(lease, low, high))
        if not await aio.run_within(limit, lambda: self._wait_given_back(lease)):
            reason = f"it did not confirm the revocation of a lease within {limit} s"
            if self.connection is not None and self.connection.connected:
                self.connection.lose(reason)
            else:
                self.end(reason)
                self.discard()

    async def _wait_given_back(self, lease: int) -> None:
        while lease in self._revoking and not (self._control.has_ended and (self._link is None or self._link.closed)):
            await self._given_back.wait()

    async def _probe(self, connection: Connection, link: PeerLink, channels: int) -> None:
        """Send empty writes that bring up lazy connections. `_on_end` ends them: providers may miss the peer's end."""
        self._probing = True
        try:
            for probe in [connection.probe(link, number) for number in range(channels)]:
                await probe
        except TransferError:
            if self._control.has_ended:
                raise SessionOver(self._control.reason) from None
            raise
        finally:
            self._probing = False

    def data_failed(self, link: PeerLink) -> None:
        """Lose the peer because its link has failed."""
        rail = self._runtime.rail_name(link.failed_rail)
        where = f" on rail {rail}" if rail else ""
        if link.failed == errno.ENOTCONN and rail and self._runtime.rail_set.rails[link.failed_rail].traits.host_only:
            # The peer has closed its gate in shared memory (engine/gates.pxd). That is visible before its Bye arrives.
            self.link_failed(f"it has closed its end of the data connection{where}")
        else:
            self.link_failed(f"the data connection{where} failed: {error_text(link.failed)}")

    def link_failed(self, reason: str) -> None:
        """Lose the peer because the data path is gone."""
        self._give_up(reason)

    async def _serve(self) -> None:
        """Mark the peer as connected, serve its connection until it ends, and then lose the peer in any case."""
        connection = self.connection
        assert connection is not None
        try:
            with self._losing_on_error():
                self._host.inbox.add(connection)
                connection.mark_established()
                self._runtime.events.emit("peer.connected", peer=connection.name)
                if self._link is not None:
                    self._liveness.clock.follow_link(self._link, every_check=self.channels is not None)
                if not self._liveness.clock.shared:
                    self._liveness.clock.follow_socket(self._control.carry_heartbeats())
                self._host.heartbeats.add(self._check_liveness, self._liveness.clock)
                while not connection.lost:
                    await self._receive()
        finally:
            connection.lose("its connection was not served any longer")
            self._host.heartbeats.remove(self._check_liveness)
            if self.channels is not None:
                self.channels.close()
            self._given_back.wake_all()

    def _check_liveness(self, now: float) -> float:
        """Check the liveness of the peer; return when to check again."""
        assert self.connection is not None
        with self._losing_on_error():
            return self._liveness.check(now, self.connection, self._link, self.channels)
        return math.inf

    async def _receive(self) -> None:
        """Handle the messages that have arrived; wait for one if there is none. Raises SessionOver at the end."""
        if not self._events and not self._control.has_ended:
            await self._arrived.wait()
        while self._events:
            event = self._events.popleft()
            self._dispatch(event.message if isinstance(event, MessageReceived) else event)
        if self._control.has_ended:
            raise SessionOver(self._control.reason)


KEY_CODES = {RefusalCode.KEY_REQUIRED, RefusalCode.KEY_UNEXPECTED, RefusalCode.WRONG_KEY}
# A Bye carries these two texts, and the receiver compares them: changing one breaks older peers.
BUSY = "another connection between these two engines serves"
ALIVE = "an earlier life of this engine is connected, and has not fallen silent"
GAVE_UP = 2  # the code of a Failed that tells why no connection was made
HINT = "; check that both sides are engines, with TLS on both or on neither"
