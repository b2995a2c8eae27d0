"""The connections of an engine: who is connected, who connects to us, and that it is one connection a pair."""

from __future__ import annotations

import random
import secrets
import time
from typing import TYPE_CHECKING

from .aio import ByteStream, ControlListener, Stranger, Task, dial, sleep, within
from .core.address import ANYONE, Address
from .core.control import ControlProtocol, Role
from .core.handshake import HandshakeConfig
from .errors import FabricError, PeerError, UsageError
from .heartbeats import Heartbeats
from .peer import Peer
from .session import Session, SessionOver

if TYPE_CHECKING:
    from .aio import EventLoop
    from .config import EngineConfig
    from .inbox import Inbox
    from .observe import Events

__all__ = ["Connections"]


_last_incarnation = 0


def next_incarnation() -> int:
    """Return the number of a new life: higher than those before, for it is the time in nanoseconds since 1970."""
    global _last_incarnation
    _last_incarnation = max(_last_incarnation + 1, time.time_ns())
    return _last_incarnation


class Connections:
    """The part of an engine that knows peers. A base class: it has no life of its own."""

    config: EngineConfig
    loop: EventLoop
    events: Events
    inbox: Inbox

    def __init__(self, host: str) -> None:
        identity = self.config.identity or secrets.token_bytes(16)
        incarnation = next_incarnation()
        self._handshake = HandshakeConfig(identity, incarnation, self.config.cluster_key)
        self._host = host
        self._address = Address(host, self.config.port or 1, identity, incarnation)
        self._peers: dict[tuple[bytes, int], Peer] = {}
        self._dialling: dict[tuple[str, int], Peer] = {}
        self._tasks: dict[Task, None] = {}
        self._strangers: dict[Session, Stranger] = {}
        self._sessions: dict[Session, None] = {}
        self._ending = False
        self.heartbeats = Heartbeats(self.loop)
        self._listener = ControlListener(
            self.loop, self.config.ssl_server, self._on_connection, self._refused, self.connect_timeout
        )

    @property
    def drain_timeout(self) -> float:
        return self.config.drain_timeout

    @property
    def connect_timeout(self) -> float:
        return self.config.connect_timeout

    @property
    def max_transfers(self) -> int:
        return self.config.max_transfers

    @property
    def patience(self) -> float:
        return self.config.heartbeat_limit

    async def listen(self) -> None:
        """Open the control port. Raises FabricError."""
        try:
            await self._listener.open(self._host, self.config.port or 0)
        except OSError as error:
            raise FabricError(
                error.errno or 0,
                f"cannot listen on {self._host} port {self.config.port}: {error.strerror or error}",
                operation="open control port",
            ) from error
        self._address = Address(self._host, self._listener.port, self._address.identity, self._address.incarnation)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The engines that are connected now."""
        return tuple(peer for peer in self._peers.values() if peer.connected)

    def control_streams(self) -> tuple[ByteStream, ...]:
        """Return the control connections as they are now; `aiote.testing` holds up what they carry."""
        return tuple(session.stream for session in self._sessions)

    # Finding and making peers.

    def require_open(self) -> None:
        """Raise ClosedError when the engine is closed."""
        raise NotImplementedError

    def tidy_up(self) -> None:
        """Remove what a lost peer may have left on this host, if it was killed."""
        raise NotImplementedError

    def peer_of(self, target: Peer | Address, operation: str = "") -> Peer:
        """Return the peer of an address, connecting if it is not connected. Raises UsageError, PeerError for a lost
        Peer, which names the operation.
        """
        if isinstance(target, Peer):
            if not target.of(self):
                raise UsageError("this Peer belongs to another engine; give its address")
            if target.lost:
                raise target.error(operation)
            return target
        if not isinstance(target, Address):
            raise UsageError(f"a Peer or an Address is expected, got {type(target).__name__}; Address.parse reads text")
        own = self._address
        here = target.is_anyone and (target.host, target.port) == (own.host, own.port)
        if here or target.identity == own.identity:
            raise UsageError("this is the engine's own address: an engine has no connection to itself")
        known = self._known(target)
        return known if known is not None else self._dial(target)

    def _known(self, target: Address) -> Peer | None:
        if target.identity != ANYONE:
            known = self._peers.get((target.identity, target.incarnation))
            if known is not None:
                return known
        else:
            for peer in self._peers.values():
                # Not where it says that it is: that might be anybody's place.
                if (target.host, target.port) in peer.reached:
                    return peer
        dialled = self._dialling.get((target.host, target.port))
        if dialled is not None and target.identity in (ANYONE, dialled.address.identity):
            return dialled
        return None

    async def connect(self, address: Address | str) -> Peer:
        """Connect to an engine and return its Peer; optional, for the first use connects.

        Text is parsed; `host:port` without an identity reaches whoever listens there. Raises UsageError,
        PeerError with the reason, within `connect_timeout`. Cancelling the wait leaves the attempt to end
        by itself.
        """
        self.require_open()
        peer = self.peer_of(Address.parse(address) if isinstance(address, str) else address)
        return await peer.ready()

    def _dial(self, address: Address) -> Peer:
        peer = Peer(self, address)  # type: ignore[arg-type]
        if address.identity == ANYONE:
            self._dialling[address.host, address.port] = peer
        else:
            self._peers[peer.key] = peer
        self._spawn_dial(peer, address)
        return peer

    def _spawn_dial(self, peer: Peer, address: Address) -> None:
        peer.attempts += 1
        self.spawn(self._keep_dialling, peer, address, name=f"aiote connect {address.host}:{address.port}")

    async def _keep_dialling(self, peer: Peer, address: Address) -> None:
        """Make the connection and serve it; where another one between the two is in the way, try again."""
        reason, busy = "unknown", False
        try:
            while not (peer.connected or peer.lost or peer.successor):
                try:
                    await self._dial_once(peer, address)
                    return
                except SessionOver as over:
                    reason, busy = str(over), over.busy
                    if not busy or self.loop.time() >= peer.deadline:
                        return
                await sleep(random.uniform(0.005, 0.02))
        except PeerError as error:
            reason = error.reason
        except FabricError as error:
            reason = str(error)
        finally:
            if self._dialling.get((address.host, address.port)) is peer:
                del self._dialling[address.host, address.port]
            self._attempt_over(peer, reason, busy=busy)

    def _attempt_over(self, peer: Peer, reason: str, *, busy: bool) -> None:
        """Lose a peer that nothing tries to connect any more; dial again where another connection was in the way."""
        peer.attempts -= 1
        if peer.attempts or peer.connected or peer.lost or peer.successor:
            return
        if busy and not self._ending and self.loop.time() < peer.deadline:
            self._spawn_dial(peer, peer.address)
        else:
            peer.lose(reason)

    async def _dial_once(self, peer: Peer, address: Address) -> None:
        stream: list[ByteStream] = []

        async def attempt() -> None:
            stream.append(await dial(address, self.config.ssl_client))

        if not await within(peer.deadline - self.loop.time(), attempt):
            raise PeerError(str(address), f"its control port did not answer within {self.connect_timeout} s")
        protocol = ControlProtocol(Role.INITIATOR, self._handshake, target=address)
        name, left = f"to {address.host}:{address.port}", peer.deadline - self.loop.time()
        session = Session(self, stream[0], protocol, peer, name, left)  # type: ignore[arg-type]
        try:
            await self._hear_out(session)
        except SessionOver as over:
            known = self._peers.get(session.who) if session.who is not None else None
            if over.busy and known is not None and known is not peer and known.connected:
                known.reached.add((address.host, address.port))
                peer.follow(known)
            raise

    async def _on_connection(self, stream: ByteStream, stranger: Stranger) -> None:
        """Hear out whoever connects to us."""
        if self._ending:
            await stream.aclose()
            return
        protocol = ControlProtocol(Role.ACCEPTOR, self._handshake)
        session = Session(self, stream, protocol, None, "from a peer", self.connect_timeout)  # type: ignore[arg-type]
        stranger.end = session.end
        self._strangers[session] = stranger
        try:
            await self._hear_out(session)
        except SessionOver as over:
            if not over.busy:
                self._refused(str(over))
        finally:
            self._strangers.pop(session, None)

    async def _hear_out(self, session: Session) -> None:
        self._sessions[session] = None
        reason, busy = "its engine was closed", False
        try:
            await session.run()
        except SessionOver as over:
            reason, busy = str(over), over.busy
            raise
        finally:
            self._sessions.pop(session, None)
            peer = session.peer
            if peer is not None and session.admitted:
                if peer.session is session:
                    peer.session = None
                    peer.initiator = b""
                self._attempt_over(peer, reason, busy=busy)

    def _refused(self, reason: str) -> None:
        self.events.emit("connection.refused", reason=reason)

    # What sessions ask for.

    def admit(
        self, session: Session, peer: Peer | None, told: Address, identity: bytes, incarnation: int, role: Role
    ) -> Peer | None:
        """Let an authenticated connection be the one of its pair; None when another is.

        Of two that are being made at once, the one that the engine with the lower identity made wins, on both sides.
        """
        stranger = self._strangers.pop(session, None)
        if stranger is not None:
            self._listener.proven(stranger)
        address = Address(told.host, told.port, identity, incarnation)
        initiator = self._address.identity if role is Role.INITIATOR else identity
        if any(other.connected and other.newer_than(identity, incarnation) for other in self._peers.values()):
            raise PeerError(str(address), "it was restarted: a newer incarnation of it is connected")
        existing = self._peers.get((identity, incarnation))
        if existing is not None and (existing is not peer or existing.session is not None):
            if existing.connected or not self._wins(existing, initiator):
                return None
            if existing.session is not None:
                existing.session.supersede()
        chosen = existing or peer or Peer(self, address)  # type: ignore[arg-type]
        if peer is not None:
            chosen.reached.add((peer.address.host, peer.address.port))
        if peer is not None and chosen is not peer:
            peer.follow(chosen)
        chosen.address = address
        chosen.initiator = initiator
        chosen.session = session
        chosen.attempts += 1
        self._peers[identity, incarnation] = chosen
        self._forget_incarnations(chosen)
        return chosen

    def _wins(self, existing: Peer, initiator: bytes) -> bool:
        """Whether a new connection of `initiator` takes the place of the one that `existing` is being made by.

        Never once we have said Ready there, for the other side may use it then.
        """
        if existing.session is not None and existing.session.committed:
            return False
        rival = existing.initiator or self._address.identity
        return (existing.session is None and rival == initiator) or initiator < rival

    def _forget_incarnations(self, peer: Peer) -> None:
        """What was addressed to an earlier life of this engine fails, at once."""
        for other in tuple(self._peers.values()):
            if peer.newer_than(*other.key):
                other.lose("it was restarted: a new incarnation of it has connected")

    def peer_lost(self, peer: Peer) -> None:
        """Take a lost peer out of the tables."""
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        self.inbox.remove(peer)
        if not self._ending:
            self.tidy_up()
        self.events.emit("peer.lost", peer=str(peer.address), reason=peer.reason)

    # The end.

    def session_of(self, key: tuple[bytes, int]) -> Session | None:
        """Return the conversation with an engine, however far it has got."""
        peer = self._peers.get(key)
        return None if peer is None else peer.session

    def spawn(self, function: object, *args: object, name: str) -> None:
        self._tasks = {task: None for task in self._tasks if not task.ended}
        self._tasks[self.loop.spawn(function, *args, name=name)] = None  # type: ignore[arg-type]

    async def disconnect(self, reason: str) -> None:
        """Say goodbye to everyone, and stop to listen and to dial."""
        self.abandon_connections(reason)
        await self._listener.close()
        for task in tuple(self._tasks):
            await task.join()
        self._tasks.clear()
        await self.heartbeats.close()

    def abandon_connections(self, reason: str) -> None:
        """Lose every peer now, and stop to listen and to dial without waiting for that."""
        self._ending = True
        for peer in (*self._peers.values(), *self._dialling.values()):
            peer.lose(reason)
        for session in tuple(self._sessions):
            session.end(reason)
            session.discard()
        self._listener.abandon()
        self.heartbeats.abandon()
        for task in self._tasks:
            task.cancel()
