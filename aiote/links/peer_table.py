"""The connections of an engine, one for each pair of engines: dialling peers, accepting peers, and finding them.

`admission` chooses between two connections of one pair. This module must not know the messages of a session.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..aio import ByteStream, ControlListener, PendingConnection, dial, run_within, sleep
from ..core.address import ANYONE, Address
from ..core.control import ControlProtocol, Role
from ..core.handshake import HandshakeConfig
from ..errors import ConnectTimeoutError, FabricError, PeerError, UsageError
from ..transfers import Inbox, Peer
from .admission import Admission
from .connection import Connection, ServingSession
from .granted_leases import GrantedLeases
from .heartbeat_timer import HeartbeatTimer
from .session import Session, SessionOver
from .sharing import Sharing

if TYPE_CHECKING:
    from ..aio import Waiter
    from ..rails import PeerLink
    from ..runtime import Runtime

__all__ = ["ConnectionTable"]

TIDY_S = (0.05, 0.5, 2.0)


class ConnectionTable:
    """All connections of one engine, and the port on which others connect."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        config, address = runtime.config, runtime.address
        self._handshake = HandshakeConfig(address.identity, address.incarnation, config.cluster_key)
        self._connections: dict[tuple[bytes, int], Connection] = {}
        self._admission = Admission(address.identity, self._connections)
        self._dialling: dict[tuple[str, int], Connection] = {}
        self._pending: dict[Session, PendingConnection] = {}
        self._sessions: dict[Session, None] = {}
        self._ending = False
        self._tidying = False
        event = runtime.core.wakeup_event
        self.heartbeats = HeartbeatTimer(runtime.loop, runtime.heartbeats, None if event is None else event.beat)
        self.inbox = Inbox(runtime.loop, runtime.core)
        self.leases = GrantedLeases(runtime, self._session_of)
        self.sharing = Sharing(runtime, self.find_or_connect)
        self._listener = ControlListener(
            runtime.loop, config.ssl_server, self._on_connection, self._emit_refusal, config.connect_timeout
        )

    async def listen(self) -> None:
        """Open the control port. Raises FabricError."""
        own, port = self._runtime.address, self._runtime.config.port
        try:
            await self._listener.open(own.host, port or 0)
        except OSError as error:
            raise FabricError(
                error.errno or 0,
                f"cannot listen on {own.host} port {port}: {error.strerror or error}",
                operation="open control port",
            ) from error
        self._runtime.address = Address(own.host, self._listener.port, own.identity, own.incarnation)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The engines that are connected now."""
        return tuple(one.peer for one in tuple(self._connections.values()) if one.connected)

    @property
    def connected(self) -> int:
        """The number of engines that are connected now."""
        return sum(one.connected for one in tuple(self._connections.values()))

    def control_streams(self) -> tuple[ByteStream, ...]:
        """Return the present control connections; `aiote.testing` delays their traffic."""
        return tuple(session.stream for session in self._sessions)

    # Finding and making peers.

    def find_or_connect(self, target: Peer | Address | str, operation: str = "") -> Connection:
        """Return the connection to a peer; begin one if needed.

        Raises UsageError, and PeerError for a lost Peer, which names the operation.
        """
        if isinstance(target, Peer):
            connection = target._connection
            if not isinstance(connection, Connection) or not connection.belongs_to(self._runtime):
                raise UsageError("this Peer belongs to another engine; give its address")
            if connection.lost:
                raise connection.error(operation)
            return connection
        if isinstance(target, str):
            target = Address.parse(target)
        if not isinstance(target, Address):
            raise UsageError(f"expected a Peer, an Address or its text, got {type(target).__name__}")
        own = self._runtime.address
        here = target.is_anyone and (target.host, target.port) == (own.host, own.port)
        if here or target.identity == own.identity:
            raise UsageError("this is the engine's own address: an engine has no connection to itself")
        known = self.look_up(target)
        return known if known is not None else self._dial(target)

    def look_up(self, target: Address) -> Connection | None:
        """Return the connection to an address, or None."""
        if target.identity != ANYONE:
            known = self._connections.get((target.identity, target.incarnation))
            if known is not None:
                return known
        else:
            for connection in self._connections.values():
                # Compare the places where it was reached. The address that it claims might be another's.
                if (target.host, target.port) in connection.attempts.reached:
                    return connection
        dialled = self._dialling.get((target.host, target.port))
        if dialled is not None and target.identity in (ANYONE, dialled.address.identity):
            return dialled
        return None

    def _dial(self, address: Address) -> Connection:
        connection = Connection(self._runtime, self, address)
        if address.identity == ANYONE:
            self._dialling[address.host, address.port] = connection
        else:
            self._connections[connection.key] = connection
        self._spawn_dial(connection, address)
        return connection

    def _spawn_dial(self, connection: Connection, address: Address) -> None:
        connection.attempts.running += 1
        self._runtime.spawn(
            self._keep_dialling, connection, address, name=f"aiote connect {address.host}:{address.port}"
        )

    async def _keep_dialling(self, connection: Connection, address: Address) -> None:
        """Make the connection and serve it; try again while another connection of the two engines is in the way."""
        reason, busy, kind = "unknown", False, PeerError
        try:
            while not (connection.connected or connection.lost or connection.successor):
                try:
                    await self._dial_once(connection, address)
                    return
                except SessionOver as over:
                    kind = over.kind
                    if not (busy and kind is ConnectTimeoutError):
                        # Otherwise the last attempt only ran out of time, and the earlier attempts' reason says more.
                        reason, busy = str(over), over.busy
                    if not over.busy or self._runtime.loop.time() >= connection.attempts.deadline:
                        return
                await sleep(random.uniform(0.005, 0.02))
        except PeerError as error:
            kind = type(error)
            if not (busy and kind is ConnectTimeoutError):
                reason = error.reason
        except FabricError as error:
            reason = str(error)
        finally:
            if self._dialling.get((address.host, address.port)) is connection:
                del self._dialling[address.host, address.port]
            self._attempt_over(connection, reason, kind, busy=busy)

    def _attempt_over(self, connection: Connection, reason: str, kind: type[PeerError], *, busy: bool) -> None:
        """Lose a peer once no attempt to connect it is left; dial again if another connection was in the way."""
        connection.attempts.running -= 1
        if connection.attempts.running or connection.connected or connection.lost or connection.successor:
            return
        if busy and not self._ending and self._runtime.loop.time() < connection.attempts.deadline:
            self._spawn_dial(connection, connection.address)
        else:
            connection.lose(reason, kind)

    async def _dial_once(self, connection: Connection, address: Address) -> None:
        stream: list[ByteStream] = []

        async def attempt() -> None:
            stream.append(await dial(address, self._runtime.config.ssl_client))

        if not await run_within(connection.attempts.deadline - self._runtime.loop.time(), attempt):
            raise ConnectTimeoutError(
                str(address),
                "its control port did not answer within connect_timeout "
                f"({self._runtime.config.connect_timeout} s); is it "
                f"running, and does a firewall block the port?",
            )
        protocol = ControlProtocol(Role.INITIATOR, self._handshake, target=address)
        name, left = f"to {address.host}:{address.port}", connection.attempts.deadline - self._runtime.loop.time()
        session = Session(self._runtime, self, stream[0], protocol, connection=connection, name=name, timeout=left)
        try:
            await self._run_session(session)
        except SessionOver as over:
            known = self._connections.get(session.peer_key) if session.peer_key is not None else None
            if over.busy and known is not None and known is not connection and known.connected:
                known.attempts.reached.add((address.host, address.port))
                connection.give_way_to(known)
            raise

    async def _on_connection(self, stream: ByteStream, pending: PendingConnection) -> None:
        """Serve an engine that connects to this one."""
        if self._ending:
            await stream.aclose()
            return
        protocol = ControlProtocol(Role.ACCEPTOR, self._handshake)
        session = Session(
            self._runtime,
            self,
            stream,
            protocol,
            connection=None,
            name="from a peer",
            timeout=self._runtime.config.connect_timeout,
        )
        pending.end = session.end
        self._pending[session] = pending
        try:
            await self._run_session(session)
        except SessionOver as over:
            if not over.busy:
                self._emit_refusal(str(over))
        finally:
            self._pending.pop(session, None)

    async def _run_session(self, session: Session) -> None:
        self._sessions[session] = None
        reason, busy, kind = "its engine was closed", False, PeerError
        try:
            await session.run()
        except SessionOver as over:
            reason, busy, kind = str(over), over.busy, over.kind
            raise
        finally:
            self._sessions.pop(session, None)
            connection = session.connection
            if connection is not None and session.admitted:
                if connection.session is session:
                    connection.session = None
                    connection.attempts.initiator = b""
                self._attempt_over(connection, reason, kind, busy=busy)

    def _emit_refusal(self, reason: str) -> None:
        self._runtime.events.emit("connection.refused", reason=reason)

    # Requests of the sessions.

    def admit(
        self,
        session: Session,
        connection: Connection | None,
        claimed: Address,
        identity: bytes,
        incarnation: int,
        role: Role,
    ) -> Connection:
        """Make an authenticated connection the only one of its pair. Raises as `Admission.choose`."""
        pending = self._pending.pop(session, None)
        if pending is not None:
            self._listener.mark_authenticated(pending)
        address = Address(claimed.host, claimed.port, identity, incarnation)
        initiator = self._runtime.address.identity if role is Role.INITIATOR else identity
        existing = self._admission.choose(connection, address, initiator)
        chosen = existing or connection or Connection(self._runtime, self, address)
        if connection is not None:
            chosen.attempts.reached.add((connection.address.host, connection.address.port))
        if connection is not None and chosen is not connection:
            connection.give_way_to(chosen)
        chosen.address = address
        chosen.attempts.initiator = initiator
        chosen.session = session
        chosen.attempts.running += 1
        self._connections[identity, incarnation] = chosen
        self._admission.end_earlier_incarnations(address)
        return chosen

    def peer_lost(self, connection: Connection) -> None:
        """Remove a lost peer from the tables."""
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
        self.inbox.remove(connection)
        self.sharing.wake()
        if not self._ending:
            self._tidy_up()
        self._runtime.events.emit("peer.lost", peer=connection.name, reason=connection.reason)

    def void_leases(self, holder: tuple[bytes, int]) -> Iterable[tuple[int, int]]:
        """Return the ranges of our leases that are void for a holder."""
        return self.leases.void_ranges(holder)

    # Reports of the native core.

    def on_round(self, failed: list[PeerLink]) -> list[Waiter]:
        """Handle failed links, channels with notices, and arrived messages; return the waiters to wake."""
        core = self._runtime.core
        for link in failed:
            link.tag.data_failed(link)  # type: ignore[attr-defined]
        for link in core.noticed_peers():
            link.tag.notice(link)  # type: ignore[attr-defined]
        return self.inbox.receivers() if core.inbox else []

    def _tidy_up(self) -> None:
        """Remove objects that a lost peer may have left in shared memory, if it was killed."""
        if self._runtime.rail_set.tidy() and not self._tidying:
            self._tidying = True
            self._runtime.spawn(self._tidy_later, name="aiote tidy up")

    async def _tidy_later(self) -> None:
        try:
            # A killed process's sockets close before its number and its mappings are gone, so look again later.
            for pause in TIDY_S:
                await sleep(pause)
                self._runtime.rail_set.tidy()
        finally:
            self._tidying = False

    # The end.

    def _session_of(self, key: tuple[bytes, int]) -> ServingSession | None:
        """Return the session with an engine, however far it has got."""
        connection = self._connections.get(key)
        return None if connection is None else connection.session

    async def close(self, reason: str) -> None:
        """Say goodbye to all peers, and stop listening and dialling."""
        self.abandon(reason)
        await self._listener.close()
        await self._runtime.join_tasks()
        await self.heartbeats.close()

    def abandon(self, reason: str) -> None:
        """Lose every peer now, and stop listening and dialling without waiting for that."""
        self._ending = True
        for connection in (*self._connections.values(), *self._dialling.values()):
            connection.lose(reason)
        for session in tuple(self._sessions):
            session.end(reason)
            session.discard()
        self._listener.abandon()
        self.heartbeats.abandon()
        self._runtime.cancel_tasks()

    def close_links(self) -> None:
        """Close every link, and end the leases that this engine granted."""
        core = self._runtime.core
        if not core.closed:
            for link in tuple(core.peers):
                link.close()
            core.reap()
        self.leases.abandon()
        self.sharing.close()
