"""The control connection of two engines as a state machine over bytes.

`ControlProtocol` owns the order of messages, their framing and sealing, and the handshake. It takes the bytes of the
stream, and returns events and the bytes to send. It must not know sockets, clocks, rails or the meaning of a message to
the engine: it does not answer a `Heartbeat` or obey a `Revoke`.

Each direction has its own state, and the two tables below are complete: they say which messages may come in which
state, and which state follows. `SESSION` holds for sent and for received messages. A message that the tables do not
allow, a malformed message, a wrong tag and an over-long frame each raise `ControlError` once. The protocol is over
then, and its last bytes tell the peer why. Call `data_to_send` after every call of another method, also after one that
raised, write the bytes that it returns, and close when `is_over` is true.

On `HelloReceived` the acceptor's caller decides whether the handshake goes on: it calls `accept` or `refuse`. (The
caller also breaks the tie when two engines connect to each other at once.) Bytes that arrive before this call violate
the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ..errors import ClosedError, UsageError
from .address import Address
from .control_frames import (
    FAILED_PROTOCOL,
    PLAIN_LIMIT,
    SEALED_LIMIT,
    AckCounts,
    Arrivals,
    Bye,
    Challenge,
    Channel,
    ControlError,
    EngineOffer,
    Failed,
    FrameReader,
    Heartbeat,
    Hello,
    Joined,
    MailboxMoved,
    Mapped,
    Message,
    Proof,
    RailDown,
    Ready,
    Refused,
    Revoke,
    Revoked,
    Seal,
    SessionMessage,
    ShareRefused,
    ShareRequest,
    Welcome,
    decode,
    encode,
    frame,
    type_of,
)
from .handshake import DEFAULT_NONCE, Acceptor, Established, HandshakeConfig, Initiator, RefusalCode, make_refusal

__all__ = [
    "HANDSHAKE",
    "SESSION",
    "SINCE",
    "Authenticated",
    "ControlError",
    "ControlProtocol",
    "Event",
    "HelloReceived",
    "MessageReceived",
    "Refusal",
    "Role",
    "State",
]


class Role(Enum):
    """Which side of the connection this is; the value is the number of its sending direction."""

    INITIATOR = 0
    ACCEPTOR = 1


class State(Enum):
    """The message that one direction of the connection waits for."""

    HELLO = "a Hello"
    DECISION = "our own decision on the Hello"
    CHALLENGE = "a Challenge"
    PROOF = "a Proof"
    WELCOME = "a Welcome"
    GREETED = "an EngineOffer"
    OFFERED = "Channels and Mapped"
    MAPPED = "Ready"
    READY = "the engines' work"
    ENDED = "nothing, after the last message"
    REFUSED = "nothing, after a refusal"
    BROKEN = "nothing, after a violation or the end of the stream"


HANDSHAKE: Mapping[tuple[Role, State], Mapping[type[Message], State]] = {
    (Role.ACCEPTOR, State.HELLO): {Hello: State.DECISION},
    (Role.ACCEPTOR, State.DECISION): {},
    (Role.ACCEPTOR, State.PROOF): {Proof: State.GREETED, Refused: State.REFUSED},
    (Role.INITIATOR, State.CHALLENGE): {Challenge: State.WELCOME, Refused: State.REFUSED},
    (Role.INITIATOR, State.WELCOME): {Welcome: State.GREETED, Refused: State.REFUSED},
}
"""The messages that our side may receive before authentication, by role and state, and the state that follows."""

SESSION: Mapping[State, Mapping[type[Message], State]] = {
    State.GREETED: {
        EngineOffer: State.OFFERED,
        Heartbeat: State.GREETED,
        Bye: State.ENDED,
        Failed: State.ENDED,
    },
    State.OFFERED: {
        Channel: State.OFFERED,
        Revoke: State.OFFERED,
        Revoked: State.OFFERED,
        Mapped: State.MAPPED,
        Heartbeat: State.OFFERED,
        Bye: State.ENDED,
        Failed: State.ENDED,
    },
    State.MAPPED: {
        Ready: State.READY,
        Revoke: State.MAPPED,
        Revoked: State.MAPPED,
        Heartbeat: State.MAPPED,
        Bye: State.ENDED,
        Failed: State.ENDED,
    },
    State.READY: {
        Channel: State.READY,
        AckCounts: State.READY,
        RailDown: State.READY,
        Arrivals: State.READY,
        Joined: State.READY,
        MailboxMoved: State.READY,
        ShareRequest: State.READY,
        ShareRefused: State.READY,
        Revoke: State.READY,
        Revoked: State.READY,
        Heartbeat: State.READY,
        Bye: State.ENDED,
        Failed: State.ENDED,
    },
    State.ENDED: {},
}
"""The messages that may follow after authentication, in either direction, and the state that follows."""

SINCE: Mapping[type[Message], int] = {ShareRequest: 6, ShareRefused: 6}
"""The version of the protocol that brought a message, where `OLDEST` does not have it."""


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """An initiator asks to be accepted; its name is a claim, not yet proven."""

    identity: bytes
    incarnation: int


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Both sides have proven themselves; messages may be sent and will be received."""

    identity: bytes
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The peer sent this message, verified and in order."""

    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Refusal:
    """The handshake ended; `code` is a `RefusalCode` or a newer peer's number, `by_us` says which side refused."""

    code: int
    text: str
    by_us: bool


Event: TypeAlias = HelloReceived | Authenticated | MessageReceived | Refusal


class ControlProtocol:
    """One side of one control connection.

    `target` is the engine that an initiator wants (None or an address without identity: any engine that answers);
    `nonce` returns the number of random bytes that it is asked for. An initiator's first bytes are ready to be sent at
    once.
    """

    def __init__(
        self,
        role: Role,
        config: HandshakeConfig,
        *,
        target: Address | None = None,
        nonce: Callable[[int], bytes] = DEFAULT_NONCE,
    ) -> None:
        self.role = role
        self._reader = FrameReader()
        self._out = bytearray()
        self._seal_in: Seal | None = None
        self._seal_out: Seal | None = None
        self._local_state = State.GREETED
        self._version = 0
        self._handshake: Initiator | Acceptor | None
        if role is Role.INITIATOR:
            initiator = self._handshake = Initiator(config, target, nonce)
            self._state = State.CHALLENGE
            self._queue(initiator.hello)
        elif target is not None:
            raise UsageError("target: an acceptor accepts any engine; only an initiator has a target")
        else:
            self._handshake = Acceptor(config, nonce)
            self._state = State.HELLO

    @property
    def state(self) -> State:
        """The message that is awaited from the peer."""
        return self._state

    @property
    def is_authenticated(self) -> bool:
        """Whether messages can be sent now."""
        return self._seal_out is not None and self._local_state is not State.ENDED and not self._terminal

    @property
    def seals(self) -> tuple[Seal, Seal] | None:
        """The seals of sent and of received frames, once both sides are authenticated."""
        return None if self._seal_out is None or self._seal_in is None else (self._seal_out, self._seal_in)

    @property
    def is_within_frame(self) -> bool:
        """Whether a part of a frame has been received."""
        return self._reader.pending > 0

    @property
    def is_over(self) -> bool:
        """Whether the connection is finished: the caller closes it once it has sent the remaining bytes."""
        return self._terminal or (self._state is State.ENDED and self._local_state is State.ENDED)

    @property
    def _terminal(self) -> bool:
        return self._state in (State.REFUSED, State.BROKEN)

    def data_to_send(self) -> bytes:
        """Return the bytes to write to the stream and forget them."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def send(self, message: SessionMessage) -> None:
        """Queue a message; raises UsageError if out of order or malformed, ClosedError if the connection is over."""
        if self._terminal or self._local_state is State.ENDED:
            raise ClosedError(f"the control connection is over, {type(message).__name__} cannot be sent any more")
        if self._seal_out is None:
            raise UsageError(f"{type(message).__name__} before both sides are authenticated; wait for Authenticated")
        following = SESSION[self._local_state].get(type(message))
        if self._version < SINCE.get(type(message), 0):
            raise UsageError(f"{type(message).__name__} to a peer that speaks version {self._version} of the protocol")
        if following is None:
            raise UsageError(f"{type(message).__name__} out of order: {self._local_state.value} comes next")
        self._queue(message)
        self._local_state = following

    def accept(self) -> None:
        """Continue the handshake after HelloReceived."""
        acceptor = self._deciding()
        self._queue(acceptor.challenge())
        self._state = State.PROOF

    def refuse(self, code: int, text: str = "") -> None:
        """End the handshake after HelloReceived; an empty text stands for the code's own sentence."""
        self._deciding()
        self._refuse(make_refusal(code, text))

    def receive(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Return the events that `data` from the stream causes; empty data causes none.

        Raises ControlError if the peer broke the protocol; its `events` are the events before the violation. After a
        refusal, a violation or the end of the stream, every call raises ControlError.
        """
        if self._terminal:
            raise ControlError(f"the control connection is over and expects {self._state.value}")
        events: list[Event] = []
        self._reader.feed(data)
        try:
            while (body := self._next()) is not None:
                event = self._take(body)
                if event is not None:
                    events.append(event)
        except ControlError as error:
            error.events = tuple(events)
            self._break(str(error))
            raise
        return events

    def receive_eof(self) -> None:
        """Process the end of the stream; raises ControlError if it came within a frame or before the last message."""
        if self._terminal:
            return
        awaited, pending = self._state, self._reader.pending
        self._state = State.BROKEN
        self._reader.clear()
        if pending:
            raise ControlError(f"the connection ended within a frame, after {pending} bytes of it")
        if awaited is not State.ENDED:
            raise ControlError(f"the connection ended without a last message while it was waiting for {awaited.value}")

    def _next(self) -> bytes | None:
        """Return the next frame, verified if the session is sealed, or None."""
        if self._terminal:
            return None
        if self._reader.pending and self._state in (State.DECISION, State.ENDED):
            raise ControlError(f"the peer sent bytes while the connection was waiting for {self._state.value}")
        if self._seal_in is None:
            return self._reader.next(PLAIN_LIMIT)
        sealed = self._reader.next(SEALED_LIMIT)
        return None if sealed is None else self._seal_in.open(sealed)

    def _take(self, body: bytes) -> Event | None:
        """Process the message of one frame and return its event, or None."""
        kind = type_of(body)
        table = HANDSHAKE[self.role, self._state] if self._seal_in is None else SESSION[self._state]
        if kind not in table:
            raise ControlError(f"{kind.__name__} out of order: the connection is waiting for {self._state.value}")
        if self._version < SINCE.get(kind, 0):
            raise ControlError(f"{kind.__name__} from a peer that speaks version {self._version} of the protocol")
        message = decode(body)
        self._state = table[kind]
        match message, self._handshake:
            case Hello(), Acceptor() as acceptor:
                refusal = acceptor.receive_hello(message)
                return self._refuse(refusal) if refusal else HelloReceived(message.identity, message.incarnation)
            case Challenge(), Initiator() as initiator:
                answer = initiator.receive_challenge(message)
                if isinstance(answer, Refused):
                    return self._refuse(answer)
                self._queue(answer)
                return None
            case Proof(), Acceptor() as acceptor:
                return self._proven(acceptor.receive_proof(message))
            case Welcome(), Initiator() as initiator:
                session = initiator.receive_welcome(message)
                # An acceptor whose Welcome is wrong is an impostor, so it gets no answer.
                return self._refuse(session, reply=False) if isinstance(session, Refused) else self._open(session)
            case Refused(), _:
                self._handshake = None
                return Refusal(_known(message.code), message.text, by_us=False)
            case ((Hello() | Challenge() | Proof() | Welcome()), _):
                raise ControlError(f"{kind.__name__} after the handshake")
            case _:
                return MessageReceived(message)

    def _proven(self, outcome: tuple[Welcome, Established] | Refused) -> Event:
        if isinstance(outcome, Refused):
            return self._refuse(outcome)
        welcome, session = outcome
        self._queue(welcome)
        return self._open(session)

    def _open(self, session: Established) -> Authenticated:
        """Seal everything from here on, and drop the cluster key."""
        self._handshake = None
        self._version = session.version
        self._seal_out = Seal(session.key, self.role.value)
        self._seal_in = Seal(session.key, 1 - self.role.value)
        return Authenticated(session.identity, session.incarnation, session.version)

    def _refuse(self, refusal: Refused, *, reply: bool = True) -> Refusal:
        if reply:
            self._queue(refusal)
        self._handshake = None
        self._state = State.REFUSED
        return Refusal(_known(refusal.code), refusal.text, by_us=True)

    def _deciding(self) -> Acceptor:
        if self._state is not State.DECISION or not isinstance(self._handshake, Acceptor):
            raise UsageError("accept or refuse once, after HelloReceived and before the connection ends")
        return self._handshake

    def _break(self, text: str) -> None:
        """Enter the final state after a violation, and queue a last message if the peer can read one."""
        if self._seal_out is not None:
            if self._local_state is not State.ENDED:
                self._queue(Failed(FAILED_PROTOCOL, f"it received a message that violates the protocol: {text}"))
        elif self.role is Role.ACCEPTOR:
            self._queue(make_refusal(RefusalCode.MALFORMED, f"{text}; {RefusalCode.MALFORMED.sentence}"))
        self._local_state = State.ENDED
        self._handshake = None
        self._state = State.BROKEN
        self._reader.clear()

    def _queue(self, message: Message) -> None:
        self._out += frame(encode(message), self._seal_out)


def _known(code: int) -> int:
    """Return the `RefusalCode` of that number, or the number itself if only a newer peer knows it."""
    try:
        return RefusalCode(code)
    except ValueError:
        return code
