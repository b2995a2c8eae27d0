"""What reaches a protocol cut, changed, repeated, early or from somebody else altogether."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core import control_frames as frames
from aiote.core.control import (
    Authenticated,
    ControlError,
    ControlProtocol,
    MessageReceived,
    Role,
    State,
)
from aiote.core.control_frames import (
    FAILED_PROTOCOL,
    SEALED_LIMIT,
    Bye,
    Failed,
    Refused,
    decode,
    encode,
    frame,
)
from aiote.core.handshake import VERSION, RefusalCode
from support.engines.control_peers import HANDSHAKE_KINDS, OFFER, TALK, Pair, at, config, messages, split, talked

KEY = b"the key of the cluster"
AFTER_AN_OFFER = (frames.Heartbeat, frames.Revoke, frames.Revoked)  # in any order, any number


def heard(protocol: ControlProtocol, data: bytes) -> tuple[list[Any], str | None]:
    """Feed `data` and the end of the stream; return the messages and the error's text."""
    found: list[Any] = []
    try:
        found += protocol.receive(data)
        protocol.receive_eof()
    except ControlError as error:
        found += error.events
        return [event.message for event in found], str(error)
    return [event.message for event in found], None


@given(st.data())
def test_a_stream_split_anywhere_gives_the_same_events(data: st.DataObject) -> None:
    both = Pair(config(1, key=KEY), config(2, key=KEY))

    def trickle(sender: ControlProtocol) -> None:
        stream, at = sender.data_to_send(), 0
        while at < len(stream):
            step = data.draw(st.sampled_from([1, 2, 3, 50, 1000]))
            both.events[both.other(sender)] += both.other(sender).receive(stream[at : at + step])
            at += step

    trickle(both.left)
    both.right.accept()
    for sender in (both.right, both.left, both.right):
        trickle(sender)
    for message in TALK:
        both.left.send(message)
    trickle(both.left)
    assert both.events[both.right][2:] == [MessageReceived(message) for message in TALK]


def test_byte_by_byte_and_all_at_once_are_the_same() -> None:
    (slow, data), (fast, same) = talked(), talked()
    assert data == same
    found = [event for octet in data for event in slow.right.receive(bytes((octet,)))]
    assert found == fast.right.receive(data) == [MessageReceived(message) for message in TALK]


def test_the_welcome_and_what_follows_may_come_together() -> None:
    both = Pair()
    both.carry(both.left)
    both.right.accept()
    both.carry(both.right)
    both.carry(both.left)
    both.right.send(OFFER)
    assert both.carry(both.right) == [Authenticated(b"\2" * 16, 7, VERSION), MessageReceived(OFFER)]


@given(st.data())
def test_a_flipped_bit_after_authentication_is_noticed(data: st.DataObject) -> None:
    both, stream = talked()
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    changed = bytearray(stream)
    changed[bit // 8] ^= 1 << bit % 8
    said, error = heard(both.right, bytes(changed))
    assert error is not None
    starts = [4 + len(body) for body in split(stream)]
    intact = next(number for number in range(len(starts)) if bit // 8 < sum(starts[: number + 1]))
    assert said == TALK[:intact]


@given(st.lists(messages(*AFTER_AN_OFFER), min_size=2, max_size=5), st.data())
def test_frames_that_are_dropped_repeated_moved_or_sent_back_are_noticed(sent: list[Any], data: st.DataObject) -> None:
    both = Pair().shake()
    for sender in (both.left, both.right):
        sender.send(OFFER)
        for message in sent:
            sender.send(message)
    stream, other = both.left.data_to_send(), both.right.data_to_send()
    bodies, foreign = split(stream), split(other)
    where = data.draw(st.integers(1, len(sent) - 1))
    match data.draw(st.sampled_from(["drop", "repeat", "swap", "reflect", "again"])):
        case "drop":
            changed = bodies[:where] + bodies[where + 1 :]
        case "repeat":
            changed = [*bodies[: where + 1], *bodies[where:]]
        case "swap":
            changed = [*bodies[:where], bodies[where + 1], bodies[where], *bodies[where + 2 :]]
        case "reflect":
            changed = bodies[:where] + foreign[where:]
        case _:
            changed = bodies + bodies[:1]
    said, error = heard(both.right, b"".join(frame(body) for body in changed))
    assert error is not None
    assert said == [OFFER, *sent][: len(said)]


def test_a_frame_of_another_session_is_noticed() -> None:
    _, data = talked(1)
    other = Pair(config(1, incarnation=8)).shake()
    with pytest.raises(ControlError, match="wrong tag"):
        other.right.receive(data)


@given(st.data())
def test_a_stream_that_ends_early_is_noticed(data: st.DataObject) -> None:
    both, stream = talked()
    stop = data.draw(st.integers(0, len(stream) - 1))
    said, error = heard(both.right, stream[:stop])
    whole = sum(4 + len(body) for body in split(stream)[: len(said)])
    assert said == TALK[: len(said)]
    assert error is not None
    assert (f"within a frame, after {stop - whole} bytes" if stop > whole else "without a last message") in error
    assert both.right.is_over
    with pytest.raises(ControlError, match="over"):
        both.right.receive(stream)


def test_the_end_before_authentication_is_noticed() -> None:
    both = Pair()
    with pytest.raises(ControlError, match="waiting for a Challenge"):
        both.left.receive_eof()
    with pytest.raises(ControlError, match="waiting for a Hello"):
        both.right.receive_eof()
    both.left.receive_eof()
    assert both.left.is_over


PLACES: dict[str, Callable[[], ControlProtocol]] = {
    "acceptor, new": lambda: Pair().right,
    "initiator, new": lambda: Pair().left,
    "acceptor, awaiting a proof": lambda: at(Role.ACCEPTOR, State.PROOF),
    "initiator, awaiting a welcome": lambda: at(Role.INITIATOR, State.WELCOME),
    "authenticated": lambda: Pair().shake().right,
}


@pytest.mark.parametrize("place", PLACES)
def test_garbage_raises_control_errors_only(place: str) -> None:
    @given(st.lists(st.binary(max_size=200), max_size=5), st.booleans(), st.integers(0, 255), st.binary(max_size=200))
    def run(chunks: list[bytes], framed: bool, number: int, payload: bytes) -> None:
        protocol = PLACES[place]()
        if framed:
            chunks = [frame(bytes((number,)) + payload), *chunks]
        try:
            for chunk in chunks:
                protocol.receive(chunk)
            protocol.receive_eof()
        except ControlError:
            assert protocol.is_over
        assert len(protocol.data_to_send()) < 2000

    run()


@pytest.mark.parametrize("place", PLACES)
def test_well_formed_messages_in_any_place_raise_control_errors_only(place: str) -> None:
    @given(st.lists(messages(*HANDSHAKE_KINDS, frames.Heartbeat, frames.Ready), max_size=4), st.booleans())
    def run(sent: list[Any], willing: bool) -> None:
        protocol = PLACES[place]()
        try:
            for message in sent:
                protocol.receive(frame(encode(message)))
                if willing and protocol.state is State.DECISION:
                    protocol.accept()
        except ControlError:
            assert protocol.is_over
        assert protocol.is_over or place != "authenticated" or not sent

    run()


@pytest.mark.parametrize(
    ("place", "limit"), [(place, 1024) for place in list(PLACES)[:4]] + [("authenticated", SEALED_LIMIT)]
)
def test_a_frame_over_the_limit_is_refused_at_once(place: str, limit: int) -> None:
    protocol = PLACES[place]()
    assert protocol.receive(limit.to_bytes(4, "big")) == []
    protocol = PLACES[place]()
    with pytest.raises(ControlError, match=f"announces a frame of {limit + 1} bytes"):
        protocol.receive((limit + 1).to_bytes(4, "big"))


def test_a_web_browser_gets_an_answer_that_tells() -> None:
    both = Pair()
    with pytest.raises(ControlError, match="announces a frame"):
        both.right.receive(b"GET / HTTP/1.1\r\n\r\n")
    answer = decode(both.right.data_to_send()[4:])
    assert isinstance(answer, Refused)
    assert answer.code == RefusalCode.MALFORMED
    assert "not the control protocol of aiote" in answer.text


def test_a_violation_is_told_to_the_peer_and_is_the_end() -> None:
    both, data = talked(2)
    with pytest.raises(ControlError, match="wrong tag") as caught:
        both.right.receive(data[:-1] + bytes((data[-1] ^ 1,)))
    assert caught.value.events == (MessageReceived(OFFER),)
    assert both.right.is_over
    told = both.carry(both.right)
    assert len(told) == 1
    assert isinstance(told[0], MessageReceived)
    assert isinstance(told[0].message, Failed)
    assert told[0].message.code == FAILED_PROTOCOL
    assert "wrong tag" in told[0].message.text
    for _ in range(2):
        with pytest.raises(ControlError, match="over"):
            both.right.receive(data)
    assert both.right.data_to_send() == b""


def test_nothing_is_sent_behind_a_last_message() -> None:
    both, _ = talked(0)
    both.right.send(Bye("first"))
    both.right.data_to_send()
    with pytest.raises(ControlError):
        both.right.receive(b"\xff" * 4)
    assert both.right.data_to_send() == b""
