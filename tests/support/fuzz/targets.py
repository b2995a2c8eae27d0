"""What is fuzzed: all that interprets bytes from outside, in the pure core and in `discovery`, `kvcache` and `service`,
with what must hold.

A target takes bytes and raises where an invariant is broken: only the module's own errors come out, what was decoded
encodes to the same bytes again, nothing is held in proportion to a length field. `tools/fuzz.py` runs the targets
under atheris, `tests/malformed_bytes` runs them over the corpus.

The target `control` is the whole state machine of a control connection, in either role, against a peer that holds
the cluster key. Its input is a program of that peer: a byte that chooses role and key, then steps of an opcode, a
16-bit length and that many bytes. `Step.PROVE` makes the right proof for whatever was said, and sealed steps are
sealed rightly, so a fuzzer that cannot guess a tag gets behind it nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from aiote.core import control_frames as frames
from aiote.core.address import Address
from aiote.core.control import Authenticated, ControlError, ControlProtocol, Event, MessageReceived, Role, State
from aiote.core.control_frames import Challenge, Hello, Proof, Seal, Welcome, decode, encode, frame
from aiote.core.descriptor import RegionDescriptor, SharedDescriptor
from aiote.core.handshake import VERSION, HandshakeConfig, _Proofs
from aiote.errors import ClosedError, UsageError
from support.fuzz.discovery import DISCOVERY
from support.fuzz.kvcache import KVCACHE
from support.fuzz.service import service

KEY = b"a cluster key that the fuzzer has"
TESTED = HandshakeConfig(b"t" * 16, 7)
OTHER = HandshakeConfig(b"o" * 16, 8)
HERE = Address("localhost", 4000, OTHER.identity, OTHER.incarnation)
MOST_TO_SAY = 4096
"""More bytes than a protocol has to say in answer to anything."""


class Step(IntEnum):
    """What the peer does next; a number beyond these is taken modulo their count."""

    SEALED = 0  # a body, framed and, once there is a session, sealed
    RAW = 1  # bytes as they are
    PLAIN = 2  # a body, framed without a tag
    GREET = 3  # a well-formed Hello or Challenge
    PROVE = 4  # the right Proof or Welcome for what was said
    DECIDE = 5  # the tested side accepts, or with an odd first byte refuses
    SEND = 6  # the tested side sends the message with this body
    SLOWLY = 7  # as SEALED, byte by byte
    AGAIN = 8  # the last frame once more
    END = 9  # the end of the stream


def program(role: Role, keyed: bool, *steps: tuple[Step, bytes]) -> bytes:
    """Return the input of `control` that does these steps."""
    head = bytes((role.value | keyed << 1,))
    return head + b"".join(bytes((step,)) + len(data).to_bytes(2, "big") + data for step, data in steps)


class Talk:
    """A protocol under test, and the peer that a program is."""

    def __init__(self, role: Role, keyed: bool) -> None:
        self.key = KEY if keyed else None
        config = HandshakeConfig(TESTED.identity, TESTED.incarnation, self.key, (1, VERSION))
        target = HERE if role is Role.INITIATOR else None
        self.protocol = ControlProtocol(role, config, target=target, nonce=lambda count: b"t" * count)
        self.hello: Hello | None = None
        self.challenge: Challenge | None = None
        self.proofs: _Proofs | None = None
        self.out: Seal | None = None
        self.heard: Seal | None = None
        self.last = b""
        self.listen()

    @property
    def tested_first(self) -> bool:
        return self.protocol.role is Role.INITIATOR

    def listen(self) -> None:
        """Take what the tested side has to say: well-formed frames, few, and sealed once both sides are proven."""
        data = self.protocol.data_to_send()
        assert len(data) <= MOST_TO_SAY, f"{len(data)} bytes to say"
        reader = frames.FrameReader()
        reader.feed(data)
        while (body := reader.next(frames.SEALED_LIMIT)) is not None:
            message = decode(self.heard.open(body) if self.heard else body)
            match message:
                case Hello():
                    self.hello = message
                case Challenge():
                    self.challenge = message
                case Welcome():
                    self._begin()
        assert reader.pending == 0

    def _begin(self) -> None:
        assert self.proofs is not None, "a Welcome for a proof that nobody gave"
        self.out = Seal(self.proofs.session, 1 - self.protocol.role.value)
        self.heard = Seal(self.proofs.session, self.protocol.role.value)

    def say(self, data: bytes, body: bytes | None = None) -> list[Event]:
        """Feed the tested side; `body` is what `data` frames."""
        over = self.protocol.is_over
        try:
            events = self.protocol.receive(data)
        except ControlError as error:
            events = list(error.events)
            assert self.protocol.is_over
        else:
            assert not over or self.protocol.state is State.ENDED, "a protocol that is over took bytes"
        limit = frames.PLAIN_LIMIT if self.out is None else frames.SEALED_LIMIT
        assert self.protocol._reader.pending < limit + 4
        for event in events:
            if isinstance(event, Authenticated):
                assert self.proofs is not None, "somebody got in without a proof"
                if self.tested_first:
                    self._begin()
            if isinstance(event, MessageReceived):
                assert self.out is not None
                assert body is None or encode(event.message) == body, "decoded bytes do not encode to themselves"
        self.listen()
        return events

    def frame(self, body: bytes, seal: Seal | None) -> bytes:
        self.last = frame(body[: frames.SEALED_LIMIT if seal else frames.PLAIN_LIMIT] or b"\0", seal)
        return self.last

    def greet(self) -> bytes:
        """Return an honest first word."""
        name = {"nonce": b"o" * 32, "identity": OTHER.identity, "incarnation": OTHER.incarnation}
        keyed = self.key is not None
        if self.tested_first:
            return encode(Challenge(version=VERSION, keyed=keyed, **name))
        whom = {"target_identity": TESTED.identity, "target_incarnation": TESTED.incarnation}
        return encode(Hello(version_min=1, version_max=VERSION, keyed=keyed, **name, **whom))

    def introduce(self, body: bytes) -> None:
        """Remember the last Hello or Challenge that could be proven."""
        try:
            said = decode(body)
        except ControlError:
            return
        if isinstance(said, Challenge) and self.tested_first:
            self.challenge = said
        if isinstance(said, Hello) and not self.tested_first and self.protocol.state is State.HELLO:
            self.hello = said

    def prove(self) -> None:
        if self.hello is None or self.challenge is None or self.out is not None:
            return
        self.proofs = _Proofs(self.key, self.hello, self.challenge)
        proof = Welcome(self.proofs.acceptor) if self.tested_first else Proof(self.proofs.initiator)
        self.say(self.frame(encode(proof), None))

    def decide(self, data: bytes) -> None:
        try:
            if data[:1] and data[0] & 1:
                self.protocol.refuse(int.from_bytes(data[1:3], "big"), data[3:].decode(errors="replace"))
            else:
                self.protocol.accept()
        except UsageError:
            pass
        self.listen()

    def send(self, body: bytes) -> None:
        try:
            self.protocol.send(decode(body))  # type: ignore[arg-type]
        except (ControlError, UsageError, ClosedError):
            return
        said = self.protocol.data_to_send()
        assert self.heard is not None
        assert self.heard.open(said[4:]) == body

    def end(self) -> None:
        try:
            self.protocol.receive_eof()
        except ControlError:
            pass
        assert self.protocol.is_over or self.protocol.state is State.ENDED
        self.listen()

    def do(self, step: Step, data: bytes) -> None:
        match step:
            case Step.RAW:
                self.say(data)
            case Step.GREET | Step.PLAIN | Step.SEALED:
                body = self.greet() if step is Step.GREET else data
                if self.out is None:
                    self.introduce(body)
                seal = self.out if step is Step.SEALED else None
                self.say(self.frame(body, seal), body)
            case Step.PROVE:
                self.prove()
            case Step.DECIDE:
                self.decide(data)
            case Step.SEND:
                self.send(data)
            case Step.SLOWLY:
                for octet in self.frame(data, self.out):
                    self.say(bytes((octet,)))
            case Step.AGAIN:
                self.say(self.last)
            case Step.END:
                self.end()


def control(data: bytes) -> None:
    """Run one program against a control connection."""
    if not data:
        return
    talk = Talk(Role(data[0] & 1), bool(data[0] & 2))
    at = 1
    while at < len(data):
        step = Step(data[at] % len(Step))
        stop = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        talk.do(step, data[at + 3 : stop])
        at = stop


def message(data: bytes) -> None:
    """Decode one body."""
    try:
        found = decode(data)
    except ControlError:
        return
    assert encode(found) == data


def stream(data: bytes) -> None:
    """Cut a stream into frames, in chunks as long as its first byte says: the chunks do not matter."""
    size, rest = (data[0] or 256, data[1:]) if data else (1, b"")
    cuts = [_cut([rest[at : at + size] for at in range(0, len(rest), size)]), _cut([rest])]
    assert cuts[0] == cuts[1]


def _cut(chunks: list[bytes]) -> tuple[list[bytes], str]:
    reader, found = frames.FrameReader(), []
    for chunk in chunks:
        reader.feed(chunk)
        try:
            while (body := reader.next(frames.PLAIN_LIMIT)) is not None:
                found.append(body)
        except ControlError as error:
            return found, str(error)
        assert reader.pending < frames.PLAIN_LIMIT + 4
    return found, ""


def descriptor(data: bytes) -> None:
    """Read a region descriptor, and cut it."""
    try:
        found = RegionDescriptor.from_bytes(data)
    except UsageError:
        return
    assert bytes(found) == data
    assert found.slice(0, found.length) == found
    assert RegionDescriptor.from_bytes(bytes(found.slice(found.length, found.length))).length == 0


def shared(data: bytes) -> None:
    """Read a descriptor of shared memory."""
    try:
        found = SharedDescriptor.from_bytes(data)
    except UsageError:
        return
    assert bytes(found) == data
    assert found.nbytes > 0
    assert not found.owner.is_anyone


def address(data: bytes) -> None:
    """Read an address, as bytes and as text."""
    found = []
    try:
        found.append(Address.from_bytes(data))
        assert bytes(found[0]) == data
    except UsageError:
        pass
    try:
        found.append(Address.parse(data.decode(errors="surrogateescape")))
    except UsageError:
        pass
    for one in found:
        assert Address.parse(str(one)) == one
        assert Address.from_bytes(bytes(one)) == one


TARGETS: dict[str, Callable[[bytes], None]] = (
    {function.__name__: function for function in (control, message, stream, descriptor, shared, address)}
    | DISCOVERY
    | KVCACHE
    | {"service": service}
)
SHARES = {name: 4 if name in ("control", "service") else 1 for name in TARGETS}
"""How the time of a run is divided."""
