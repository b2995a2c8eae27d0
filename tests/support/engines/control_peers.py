"""Control-plane messages of every kind as hypothesis strategies, and two protocols that talk in memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, get_type_hints

from hypothesis import strategies as st

from aiote.core import control_frames as frames
from aiote.core import fields
from aiote.core.address import ANYONE, Address
from aiote.core.control import ControlProtocol, Event, Role, State
from aiote.core.handshake import HandshakeConfig

# From the registry: a message that is added is tested like all others.
HANDSHAKE_KINDS = tuple(kind for kind, number in frames._NUMBERS.items() if number < 16)
SESSION_KINDS = tuple(kind for kind, number in frames._NUMBERS.items() if number >= 16)
U64S = st.integers(0, 2**64 - 1)


def texts(limit: int) -> st.SearchStrategy[str]:
    """Texts of at most `limit` bytes of UTF-8 that a field takes as they are."""
    alphabet = st.characters(exclude_categories=["Cc", "Cs"])
    return st.text(alphabet, max_size=limit).filter(lambda text: len(text.encode()) <= limit)


def values(field: fields.Field[Any]) -> st.SearchStrategy[Any]:
    """The values that a field takes and gives back unchanged."""
    match field:
        case fields.Constant():
            return st.just(field.value)
        case fields.Fixed():
            return st.binary(min_size=field.size, max_size=field.size)
        case fields.Blob():
            return st.binary(max_size=field.limit)
        case fields.Unsigned():
            return st.integers(0, field.maximum)
        case fields.Signed():
            return st.integers(-(1 << 63), (1 << 63) - 1)
        case fields.Flag():
            return st.booleans()
        case fields.Text():
            return texts(field.limit)
        case fields.Many():
            return st.lists(messages(field._record.kind), min_size=field._least, max_size=field._most).map(tuple)
        case fields.Converted() if field._kind is Address:
            return addresses()
    raise AssertionError(f"no strategy for {field}")


def addresses() -> st.SearchStrategy[Address]:
    """Addresses of anyone and of somebody, by name, IPv4 and IPv6, short and as long as they get."""
    hosts = st.sampled_from(["h", "n" * 253, "::1", "fe80::1%eth0"]) | st.ip_addresses().map(str)
    ports = st.integers(1, 2**16 - 1)
    somebody = st.builds(Address, hosts, ports, st.binary(min_size=16, max_size=16).filter(any), U64S)
    return st.builds(Address, hosts, ports) | somebody


def messages(*kinds: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of the given kinds with any values."""
    return st.one_of([_one(kind) for kind in kinds])


def _one(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{item.name: values(hints[item.name].__metadata__[0]) for item in dataclasses.fields(kind)})


def config(name: int, *, key: bytes | None = None, incarnation: int = 7, **more: Any) -> HandshakeConfig:
    """What the engine with this number brings to a handshake."""
    return HandshakeConfig(bytes((name,)) * 16, incarnation, key, **more)


def address(name: int, incarnation: int = 7) -> Address:
    """The address of the engine with this number; 0 is anyone."""
    return Address("localhost", 4000, bytes((name,)) * 16, incarnation) if name else Address("localhost", 4000, ANYONE)


def nonces(start: int) -> Callable[[int], bytes]:
    """A source of nonces that gives the same ones every time."""
    numbers = itertools.count(start)
    return lambda count: next(numbers).to_bytes(2, "big") * (count // 2)


OFFER = frames.EngineOffer(b"h" * 32, 8192, 64, 1000, (frames.RailOffer(0, "tcp", "tcp", "lo", 10_000),), address(1))
CHANNEL = frames.Channel(0, 0, 1, b"address", 2, 3, b"bell")
TALK: list[frames.SessionMessage] = [
    OFFER,
    CHANNEL,
    frames.Mapped(),
    frames.Ready(),
    frames.Heartbeat(),
    frames.Revoke(0, 0, 1),
    frames.Revoked(1),
    CHANNEL,
    frames.AckCounts(0, 1, (frames.ImmCount(7, 2),)),
    frames.RailDown(0, 1, "pulled", (frames.MemoryKey(5),)),
    frames.Arrivals(0, 1, (frames.Arrived(7, -2),), 3, (frames.Range(5, 6),), (frames.MemoryKey(5),)),
    frames.Joined(0, 2),
    frames.MailboxMoved(1, 0),
    frames.ShareRequest(1, 2, b"socket"),
    frames.ShareRefused(1, "unknown"),
    frames.Heartbeat(),
    frames.Bye("done"),
]


class Pair:
    """An initiator and an acceptor with a wire between them that keeps all that passed."""

    def __init__(
        self,
        left: HandshakeConfig | None = None,
        right: HandshakeConfig | None = None,
        target: Address | None = None,
    ) -> None:
        self.left = ControlProtocol(Role.INITIATOR, left or config(1), target=target, nonce=nonces(100))
        self.right = ControlProtocol(Role.ACCEPTOR, right or config(2), nonce=nonces(200))
        self.events: dict[ControlProtocol, list[Event]] = {self.left: [], self.right: []}
        self.sent: dict[ControlProtocol, bytes] = {self.left: b"", self.right: b""}

    def other(self, protocol: ControlProtocol) -> ControlProtocol:
        """The peer of one of the two."""
        return self.right if protocol is self.left else self.left

    def carry(self, sender: ControlProtocol, change: Callable[[bytes], bytes] = bytes) -> list[Event]:
        """Take what `sender` has to send to its peer, changed on the way, and return the peer's events."""
        data = sender.data_to_send()
        self.sent[sender] += data
        receiver = self.other(sender)
        found = receiver.receive(change(data)) if data and not receiver.is_over else []
        self.events[receiver] += found
        return found

    def shake(self) -> Pair:
        """Carry out the handshake, the acceptor being willing, as far as it goes."""
        self.carry(self.left)
        if not self.right.is_over:
            self.right.accept()
        for sender in (self.right, self.left, self.right, self.left):
            self.carry(sender)
        return self


def split(data: bytes) -> list[bytes]:
    """The frames of a complete stream, without their lengths."""
    bodies = []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        assert len(data) >= end, "an incomplete frame"
        bodies.append(data[4:end])
        data = data[end:]
    return bodies


def talked(count: int = len(TALK)) -> tuple[Pair, bytes]:
    """A pair after the handshake, and the first messages of the initiator as bytes, not yet delivered."""
    both = Pair().shake()
    for message in TALK[:count]:
        both.left.send(message)
    return both, both.left.data_to_send()


def at(role: Role, state: State) -> ControlProtocol:
    """A protocol in a state of the handshake."""
    both = Pair()
    protocol = both.left if role is Role.INITIATOR else both.right
    if state in (State.DECISION, State.PROOF, State.WELCOME):
        both.carry(both.left)
    if state in (State.PROOF, State.WELCOME):
        both.right.accept()
        both.carry(both.right)
    protocol.data_to_send()
    assert protocol.state is state
    return protocol
