from __future__ import annotations

from typing import Any

import pytest

from aiote.core.control import (
    HANDSHAKE,
    SESSION,
    Authenticated,
    ControlError,
    ControlProtocol,
    HelloReceived,
    MessageReceived,
    Refusal,
    Role,
    State,
)
from aiote.core.control_frames import (
    AckCounts,
    Arrivals,
    Bye,
    Challenge,
    Channel,
    EngineOffer,
    Failed,
    Heartbeat,
    Hello,
    Joined,
    MailboxMoved,
    Mapped,
    Proof,
    RailDown,
    Ready,
    Refused,
    Revoke,
    Revoked,
    ShareRefused,
    ShareRequest,
    Welcome,
    decode,
    encode,
    frame,
)
from aiote.core.handshake import OLDEST, VERSION, RefusalCode
from aiote.errors import ClosedError, UsageError
from support.engines.control_peers import HANDSHAKE_KINDS, OFFER, SESSION_KINDS, TALK, Pair, address, at, config, split

KEY = b"the key of the cluster"
SAMPLES: dict[type[Any], Any] = {type(message): message for message in [*TALK, Failed(2, "why")]} | {
    Hello: decode(ControlProtocol(Role.INITIATOR, config(1)).data_to_send()[4:]),
    Challenge: Challenge(version=VERSION, nonce=b"n" * 32, identity=b"\2" * 16, incarnation=7, keyed=False),
    Proof: Proof(b"p" * 32),
    Welcome: Welcome(b"w" * 32),
    Refused: Refused(10, "busy"),
}


@pytest.mark.parametrize("key", [None, KEY])
def test_two_peers_meet_and_talk(key: bytes | None) -> None:
    both = Pair(config(1, key=key), config(2, key=key), address(2)).shake()
    assert both.events[both.right] == [HelloReceived(b"\1" * 16, 7), Authenticated(b"\1" * 16, 7, VERSION)]
    assert both.events[both.left] == [Authenticated(b"\2" * 16, 7, VERSION)]
    for sender in (both.left, both.right):
        for message in TALK:
            sender.send(message)
        assert both.carry(sender) == [MessageReceived(message) for message in TALK]
    for protocol in (both.left, both.right):
        assert protocol.is_over
        protocol.receive_eof()


def test_sealed_frames_carry_a_tag_and_the_handshake_does_not() -> None:
    both = Pair().shake()
    assert [type(decode(body)) for body in split(both.sent[both.left])] == [Hello, Proof]
    assert [type(decode(body)) for body in split(both.sent[both.right])] == [Challenge, Welcome]
    both.left.send(Heartbeat())
    data = both.left.data_to_send()
    assert data[:4] == (1 + 16).to_bytes(4, "big")
    assert decode(data[4:-16]) == Heartbeat()


@pytest.mark.parametrize("left", [b"one key", None])
@pytest.mark.parametrize("right", [b"another key", None])
def test_keys_that_differ_are_refused_on_both_sides(left: bytes | None, right: bytes | None) -> None:
    both = Pair(config(1, key=left), config(2, key=right)).shake()
    if left is right is None:
        assert both.left.is_authenticated
        assert both.right.is_authenticated
        return
    expected = (
        RefusalCode.WRONG_KEY if left and right else RefusalCode.KEY_UNEXPECTED if left else RefusalCode.KEY_REQUIRED
    )
    assert both.events[both.left] == [Refusal(expected, expected.sentence, by_us=False)]
    assert both.events[both.right][-1] == Refusal(expected, expected.sentence, by_us=True)
    for protocol in (both.left, both.right):
        assert protocol.is_over
        assert not any(isinstance(event, Authenticated) for event in both.events[protocol])
        assert not any(isinstance(decode(body), Welcome) for body in split(both.sent[protocol]))
        with pytest.raises(ControlError, match="over"):
            protocol.receive(b"")
        with pytest.raises(ClosedError):
            protocol.send(Heartbeat())


def test_an_engine_that_was_restarted_says_so() -> None:
    both = Pair(target=address(2, 6)).shake()
    refusal = both.events[both.left][0]
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.WRONG_INCARNATION
    assert "this is a newer incarnation" in refusal.text
    assert not refusal.by_us
    assert both.events[both.right] == [Refusal(refusal.code, refusal.text, by_us=True)]


def test_an_initiator_refuses_an_acceptor_that_is_another() -> None:
    both = Pair(target=address(2, 6))
    both.left.data_to_send()
    both.right.receive(Pair(target=address(0)).left.data_to_send())
    both.right.accept()
    refusal = both.carry(both.right)[0]
    assert isinstance(refusal, Refusal)
    assert refusal.by_us
    assert both.carry(both.left) == [Refusal(RefusalCode.WRONG_INCARNATION, refusal.text, by_us=False)]
    assert both.right.is_over


def test_a_false_welcome_is_refused_and_answered_with_nothing() -> None:
    both = Pair(config(1, key=KEY), config(2, key=KEY))
    both.carry(both.left)
    both.right.accept()
    both.carry(both.right)
    both.left.data_to_send()
    assert both.left.receive(frame(encode(Welcome(bytes(32))))) == [
        Refusal(RefusalCode.WRONG_KEY, RefusalCode.WRONG_KEY.sentence, by_us=True)
    ]
    assert both.left.data_to_send() == b""
    assert both.left.is_over
    assert not both.left.is_authenticated


def test_a_refusal_by_the_shell_ends_both_sides() -> None:
    both = Pair()
    both.carry(both.left)
    both.right.refuse(RefusalCode.SIMULTANEOUS)
    assert both.right.is_over
    assert both.carry(both.right) == [Refusal(RefusalCode.SIMULTANEOUS, RefusalCode.SIMULTANEOUS.sentence, by_us=False)]
    assert both.left.is_over


def test_a_code_of_a_newer_peer_is_passed_on() -> None:
    left = Pair().left
    assert left.receive(frame(encode(Refused(4711, "later")))) == [Refusal(4711, "later", by_us=False)]


def test_what_comes_behind_a_refusal_does_not_hide_it() -> None:
    left = Pair().left
    assert left.receive(frame(encode(Refused(10, "busy"))) + b"\xff" * 8) == [
        Refusal(RefusalCode.BUSY, "busy", by_us=False)
    ]
    with pytest.raises(ControlError, match="over"):
        left.receive(b"\xff")
    left.receive_eof()


def test_messages_can_be_sent_from_the_proof_to_the_last_message() -> None:
    both = Pair().shake()
    assert both.left.is_authenticated
    both.left.send(Bye("done"))
    assert not both.left.is_authenticated
    both.carry(both.left)
    assert both.right.is_authenticated
    both.right.receive_eof()
    assert both.right.is_over
    assert not both.right.is_authenticated


def test_a_decision_before_the_hello_or_taken_twice_is_refused() -> None:
    both = Pair()
    for protocol in (both.left, both.right):
        with pytest.raises(UsageError, match="HelloReceived"):
            protocol.accept()
    both.carry(both.left)
    both.right.accept()
    for late in (both.right.accept, lambda: both.right.refuse(1)):
        with pytest.raises(UsageError, match="HelloReceived"):
            late()
    with pytest.raises(UsageError, match="target"):
        ControlProtocol(Role.ACCEPTOR, config(1), target=address(2))


@pytest.mark.parametrize("together", [True, False])
def test_nothing_may_come_before_the_decision(together: bool) -> None:
    both = Pair()
    hello = both.left.data_to_send()
    with pytest.raises(ControlError, match="our own decision") as caught:
        if together:
            both.right.receive(hello + b"\0")
        else:
            both.right.receive(hello)
            both.right.receive(b"\0")
    assert caught.value.events == ((HelloReceived(b"\1" * 16, 7),) if together else ())


def test_messages_wait_for_authentication() -> None:
    both = Pair()
    for protocol in (both.left, both.right):
        with pytest.raises(UsageError, match="wait for Authenticated"):
            protocol.send(OFFER)
        assert not protocol.is_authenticated


EXPECTED: dict[tuple[Role, State], set[type[Any]]] = {
    (Role.ACCEPTOR, State.HELLO): {Hello},
    (Role.ACCEPTOR, State.DECISION): set(),
    (Role.ACCEPTOR, State.PROOF): {Proof, Refused},
    (Role.INITIATOR, State.CHALLENGE): {Challenge, Refused},
    (Role.INITIATOR, State.WELCOME): {Welcome, Refused},
}


@pytest.mark.parametrize(("role", "state"), EXPECTED)
@pytest.mark.parametrize("kind", HANDSHAKE_KINDS + SESSION_KINDS, ids=lambda kind: kind.__name__)
def test_only_the_expected_message_is_taken_before_authentication(role: Role, state: State, kind: type[Any]) -> None:
    protocol = at(role, state)
    data = frame(encode(SAMPLES[kind]))
    if kind in EXPECTED[role, state]:
        protocol.receive(data)
        assert protocol.state not in (state, State.BROKEN)
    else:
        complaint = "our own decision" if state is State.DECISION else f"{kind.__name__} out of order"
        with pytest.raises(ControlError, match=complaint):
            protocol.receive(data)
        assert protocol.state is State.BROKEN


ANYTIME: set[type[Any]] = {Heartbeat, Bye, Failed}
ABOUT_CHANNELS: set[type[Any]] = {AckCounts, RailDown, Arrivals, Joined, MailboxMoved, ShareRequest, ShareRefused}
EXPECTED_AFTERWARDS: dict[State, set[type[Any]]] = {
    State.GREETED: ANYTIME | {EngineOffer},
    State.OFFERED: ANYTIME | {Channel, Revoke, Revoked, Mapped},
    State.MAPPED: ANYTIME | {Revoke, Revoked, Ready},
    State.READY: ANYTIME | {Channel, Revoke, Revoked} | ABOUT_CHANNELS,
    State.ENDED: set(),
}
WAY: dict[State, list[Any]] = {
    State.GREETED: [],
    State.OFFERED: [OFFER],
    State.MAPPED: [OFFER, Mapped()],
    State.READY: [OFFER, Mapped(), Ready()],
    State.ENDED: [Bye("done")],
}


@pytest.mark.parametrize("state", WAY)
@pytest.mark.parametrize("kind", SESSION_KINDS, ids=lambda kind: kind.__name__)
def test_only_the_expected_messages_are_sent_after_authentication(state: State, kind: type[Any]) -> None:
    both = Pair().shake()
    for message in WAY[state]:
        both.left.send(message)
    both.carry(both.left)
    assert both.right.state is state
    # The other direction stands where it stood: it has its own place in the conversation.
    both.right.send(OFFER)
    message = SAMPLES[kind]
    if kind in EXPECTED_AFTERWARDS[state]:
        both.left.send(message)
        assert both.carry(both.left) == [MessageReceived(message)]
        return
    with pytest.raises(ClosedError if state is State.ENDED else UsageError):
        both.left.send(message)
    assert both.left.data_to_send() == b""
    with pytest.raises(ControlError, match=state.value):
        both.right.receive(frame(encode(message), both.left._seal_out))
    assert both.right.state is State.BROKEN


def test_the_tables_name_every_state_and_message() -> None:
    assert set(HANDSHAKE) == set(EXPECTED)
    reachable = {following for row in SESSION.values() for following in row.values()}
    assert reachable | {State.GREETED} == set(SESSION)
    assert {kind for row in SESSION.values() for kind in row} == set(SESSION_KINDS)
    assert set(SESSION) == set(EXPECTED_AFTERWARDS)


def test_handshake_messages_are_not_the_callers_to_send() -> None:
    both = Pair().shake()
    for kind in HANDSHAKE_KINDS:
        with pytest.raises(UsageError, match="out of order"):
            both.left.send(SAMPLES[kind])
    with pytest.raises(UsageError, match="out of order"):
        both.left.send("EngineOffer")  # type: ignore[arg-type]


@pytest.mark.parametrize("message", [ShareRequest(1, 2, b"socket"), ShareRefused(1, "no")])
def test_a_message_that_the_version_lacks_is_neither_sent_nor_taken(message: Any) -> None:
    both = Pair(config(1, versions=(OLDEST, OLDEST)), config(2)).shake()
    for opening in WAY[State.READY]:
        both.left.send(opening)
    both.carry(both.left)
    with pytest.raises(UsageError, match=f"version {OLDEST} of"):
        both.left.send(message)
    assert both.left.data_to_send() == b""
    with pytest.raises(ControlError, match=f"version {OLDEST} of"):
        both.right.receive(frame(encode(message), both.left._seal_out))


def test_a_message_that_does_not_fit_changes_nothing() -> None:
    both = Pair().shake()
    with pytest.raises(UsageError, match="str expected"):
        both.left.send(Bye(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="host_id"):
        both.left.send(EngineOffer(b"", 0, 0, 0, (), address(1)))
    both.left.send(OFFER)
    assert both.carry(both.left) == [MessageReceived(OFFER)]
