from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core import control_frames as frames
from aiote.core.address import Address
from aiote.core.control_frames import (
    PLAIN_LIMIT,
    SEALED_LIMIT,
    AckCounts,
    Arrivals,
    Bye,
    Channel,
    ControlError,
    EngineOffer,
    Failed,
    FrameReader,
    Heartbeat,
    Hello,
    ImmCount,
    Joined,
    MailboxMoved,
    Mapped,
    MemoryKey,
    RailDown,
    RailOffer,
    Range,
    Ready,
    Refused,
    Seal,
    ShareRefused,
    ShareRequest,
    decode,
    encode,
    frame,
)
from aiote.errors import UsageError
from support.engines.control_peers import HANDSHAKE_KINDS, SESSION_KINDS, address, messages, split

ALL = HANDSHAKE_KINDS + SESSION_KINDS
RAIL = RailOffer(0, "tcp", "tcp", "lo", 10)
HOME = address(1)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_comes_back(kind: type[Any]) -> None:
    @given(messages(kind))
    def round_trip(message: Any) -> None:
        body = encode(message)
        assert decode(body) == message
        assert encode(decode(body)) == body

    round_trip()


@given(messages(*ALL), st.data())
def test_a_truncated_or_longer_body_is_malformed(message: Any, data: st.DataObject) -> None:
    body = encode(message)
    with pytest.raises(ControlError, match="too many"):
        decode(body + data.draw(st.binary(min_size=1, max_size=4)))
    if len(body) > 1:
        with pytest.raises(ControlError, match=f"malformed {type(message).__name__}"):
            decode(body[: data.draw(st.integers(1, len(body) - 1))])


@given(st.one_of(st.sampled_from(range(36)), st.integers(0, 255)), st.binary(max_size=400))
def test_any_body_is_a_message_or_a_control_error(number: int, payload: bytes) -> None:
    body = bytes((number,)) + payload
    try:
        message = decode(body)
    except ControlError:
        return
    assert encode(message) == body


@pytest.mark.parametrize("number", [0, 6, 15, 33, 255])
def test_an_unknown_type_is_named(number: int) -> None:
    with pytest.raises(ControlError, match=f"unknown message type {number}$"):
        decode(bytes((number,)) + b"payload")


def test_a_body_without_a_type_is_refused() -> None:
    with pytest.raises(ControlError, match="without a type"):
        decode(b"")


def test_the_bytes_of_a_message_are_fixed() -> None:
    channel = Channel(1, 2, 3, b"ab", 4, 5, b"")
    assert encode(channel).hex() == "11" + "01" + "02" + "00000003" + "00026162" + f"{4:016x}" + f"{5:016x}" + "0000"
    assert encode(Ready()).hex() == "12"
    assert encode(Mapped()).hex() == "19"
    ack = AckCounts(1, 2, (ImmCount(3, 4),))
    assert encode(ack).hex() == "1a" + "01" + "00000002" + "0001" + f"{3:08x}" + f"{4:016x}"
    down = RailDown(1, 2, "r", (MemoryKey(3),))
    assert encode(down).hex() == "1b" + "01" + "00000002" + "000172" + "0001" + f"{3:016x}"
    came = Arrivals(1, 2, (), 5, (Range(7, 9),), (MemoryKey(3),))
    assert (
        encode(came).hex()
        == "1c0100000002" + "0000" + f"{5:016x}" + "0001" + f"{7:016x}{9:016x}" + "0001" + f"{3:016x}" + "00"
    )
    assert encode(Joined(1, 2)).hex() == "1d" + "01" + "00000002"
    assert encode(MailboxMoved(1, 2)).hex() == "1e" + "01" + "00000002"
    assert encode(ShareRequest(1, 2, b"ab")).hex() == "1f" + "00000001" + f"{2:016x}" + "00026162"
    assert encode(ShareRefused(1, "r")).hex() == "20" + "00000001" + "000172"
    rail = "03" + "0001" + "70" + "0001" + "77" + "0001" + "6e" + f"{10:08x}"
    home = b"aioA".hex() + "01" + "001d" + "0001" + "68" + f"{4000:04x}" + "61" * 16 + f"{7:016x}"
    offer = EngineOffer(b"h" * 32, 5, 6, 7, (RailOffer(3, "p", "w", "n", 10),), Address("h", 4000, b"a" * 16, 7))
    assert encode(offer).hex() == "10" + "68" * 32 + f"{5:08x}" + f"{6:04x}" + f"{7:08x}" + "01" + rail + "0024" + home
    hello = Hello(
        version_min=1,
        version_max=2,
        nonce=b"n" * 32,
        identity=b"i" * 16,
        incarnation=3,
        target_identity=b"t" * 16,
        target_incarnation=4,
        keyed=True,
    )
    head = "01" + b"aiote\x00\xaf\x01".hex() + "0001" + "0002"
    assert encode(hello).hex() == head + "6e" * 32 + "69" * 16 + f"{3:016x}" + "74" * 16 + f"{4:016x}" + "01"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Channel(256, 0, 0, b"", 0, 0, b""), "Channel.rail_local: 256 is outside 0 to 255"),
        (Channel(0, 0, -1, b"", 0, 0, b""), "Channel.generation"),
        (Channel(0, 0, 0, b"x" * 257, 0, 0, b""), "Channel.address: expected at most 256"),
        (Channel(0, 0, 0, b"", 0, 0, b"x" * 129), "Channel.wakeup"),
        (EngineOffer(b"h" * 31, 1, 1, 1, (), HOME), "EngineOffer.host_id"),
        (EngineOffer(b"h" * 32, 2**32, 1, 1, (), HOME), "EngineOffer.message_bytes"),
        (EngineOffer(b"h" * 32, 1, 1, 1, (RAIL,) * 17, HOME), "EngineOffer.rails: expected 0 to 16"),
        (EngineOffer(b"h" * 32, 1, 1, 1, (RailOffer(0, "a\nb", "", "", 0),), HOME), "RailOffer.provider: control"),
        (EngineOffer(b"h" * 32, 1, 1, 1, (RailOffer(0, "\ud800", "", "", 0),), HOME), "UTF-8"),
        (EngineOffer(b"h" * 32, 1, 1, 1, (RailOffer(0, "é" * 33, "", "", 0),), HOME), "at most 64 bytes"),
        (EngineOffer(b"h" * 32, 1, 1, 1, (), str(HOME)), "EngineOffer.address: Address expected, got str"),  # type: ignore[arg-type]
        (Bye(3), "Bye.reason: str expected"),  # type: ignore[arg-type]
        ("Bye", "a control message expected"),
    ],
)
def test_a_value_that_does_not_fit_is_the_callers_error(message: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        encode(message)


@given(st.text(max_size=3000))
def test_a_sentence_for_people_always_fits(text: str) -> None:
    for message in (Bye(text), Failed(9, text), Refused(9, text)):
        back = decode(encode(message))
        said = back.reason if isinstance(back, Bye) else back.text  # type: ignore[union-attr]
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in said)
        assert len(frame(encode(message))) < PLAIN_LIMIT + 100
        if said != text:
            assert said.endswith("...") or len(said) == len(text)


@pytest.mark.parametrize("letter", ["x", "é", "€", "😀"])
@pytest.mark.parametrize("lead", range(4))
def test_a_long_sentence_is_truncated_between_letters(letter: str, lead: int) -> None:
    message = decode(encode(Bye("-" * lead + letter * 600)))
    assert isinstance(message, Bye)
    assert 506 <= len(message.reason.encode()) <= 512
    assert message.reason.removesuffix("...").strip("-" + letter) == ""


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"\x17" + (513).to_bytes(2, "big") + b"x" * 513, "Bye.reason: expected at most 512"),
        (b"\x11" + bytes(6) + (257).to_bytes(2, "big") + bytes(257 + 18), "Channel.address: expected at most 256"),
        (b"\x10" + bytes(42) + b"\x11" + bytes(11) * 17, "EngineOffer.rails: expected 0 to 16 entries, got 17"),
        (b"\x10" + bytes(43) + (401).to_bytes(2, "big") + bytes(401), "EngineOffer.address: expected at most 400"),
    ],
)
def test_what_is_over_its_bound_is_malformed_though_it_is_whole(body: bytes, complaint: str) -> None:
    with pytest.raises(ControlError, match=complaint):
        decode(body)


@pytest.mark.parametrize(
    "octets",
    [b"", bytes(HOME)[:-1], bytes(HOME) + b"\0", bytes(HOME).replace(b"aioA", b"aioB"), str(HOME).encode()],
    ids=["none", "cut", "longer", "another magic", "text"],
)
def test_an_offer_from_nowhere_is_malformed(octets: bytes) -> None:
    assert decode(encode(EngineOffer(bytes(32), 0, 0, 0, (), HOME))) == EngineOffer(bytes(32), 0, 0, 0, (), HOME)
    with pytest.raises(ControlError, match=r"malformed EngineOffer: EngineOffer\.address: these bytes are not an"):
        decode(b"\x10" + bytes(43) + len(octets).to_bytes(2, "big") + octets)


def test_control_characters_of_a_peer_are_malformed() -> None:
    body = encode(Bye("a b")).replace(b"a b", b"a\x1bb")
    with pytest.raises(ControlError, match="control characters"):
        decode(body)
    with pytest.raises(ControlError, match="not UTF-8"):
        decode(encode(Bye("a b")).replace(b"a b", b"a\xffb"))


def test_a_flag_has_one_encoding() -> None:
    body = encode(frames.Challenge(version=1, nonce=b"n" * 32, identity=b"i" * 16, incarnation=0, keyed=True))
    with pytest.raises(ControlError, match="a flag is 2, expected 0 or 1"):
        decode(body[:-1] + b"\x02")


@given(st.lists(messages(*SESSION_KINDS), max_size=6), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_split(sent: list[Any], data: st.DataObject) -> None:
    stream = b"".join(frame(encode(message)) for message in sent if len(encode(message)) <= PLAIN_LIMIT)
    reader, found, at = FrameReader(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        reader.feed(memoryview(stream)[at : at + step])
        at += step
        while (body := reader.next(PLAIN_LIMIT)) is not None:
            found.append(body)
    assert found == split(stream)
    assert reader.pending == 0


@pytest.mark.parametrize("limit", [PLAIN_LIMIT, SEALED_LIMIT])
def test_a_length_over_the_limit_is_refused_before_anything_follows(limit: int) -> None:
    reader = FrameReader()
    reader.feed((limit + 1).to_bytes(4, "big")[:3])
    assert reader.next(limit) is None
    reader.feed((limit + 1).to_bytes(4, "big")[3:])
    with pytest.raises(ControlError, match=f"a frame of {limit + 1} bytes, expected 1 to {limit}"):
        reader.next(limit)
    allowed = FrameReader()
    allowed.feed(limit.to_bytes(4, "big") + b"x" * limit)
    assert allowed.next(limit) == b"x" * limit


def test_an_empty_frame_is_refused() -> None:
    reader = FrameReader()
    reader.feed(bytes(4))
    with pytest.raises(ControlError, match="announces a frame of 0 bytes"):
        reader.next(PLAIN_LIMIT)


def test_a_frame_over_the_limit_is_not_sent() -> None:
    assert len(frame(b"x" * PLAIN_LIMIT)) == 4 + PLAIN_LIMIT
    with pytest.raises(UsageError, match="over the limit"):
        frame(b"x" * (PLAIN_LIMIT + 1))
    assert len(frame(b"x" * (SEALED_LIMIT - 16), Seal(b"", 0))) == 4 + SEALED_LIMIT
    with pytest.raises(UsageError, match="over the limit"):
        frame(b"x" * (SEALED_LIMIT - 15), Seal(b"", 0))


def test_every_message_fits_its_limit() -> None:
    rail = RailOffer(255, "p" * 64, "w" * 64, "n" * 128, 2**32 - 1)
    longest = Address("n" * 253, 4000, b"i" * 16, 2**64 - 1)
    assert len(frame(encode(EngineOffer(b"h" * 32, 1, 1, 1, (rail,) * 16, longest)), Seal(b"k", 0))) < SEALED_LIMIT
    assert len(frame(encode(Refused(1, "x" * 1000)))) < PLAIN_LIMIT


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.binary(max_size=32))
def test_a_seal_opens_in_order_only(bodies: list[bytes], key: bytes) -> None:
    sealer, opener = Seal(key, 0), Seal(key, 0)
    sealed = split(b"".join(frame(body, sealer) for body in bodies))
    assert [opener.open(one) for one in sealed] == bodies
    with pytest.raises(ControlError, match="wrong tag"):
        opener.open(sealed[-1])
    for other in (Seal(key, 1), Seal(key + b"!", 0)):
        with pytest.raises(ControlError, match="wrong tag"):
            other.open(sealed[0])


def test_the_tag_covers_the_type() -> None:
    sealed = frame(encode(Heartbeat()), Seal(b"", 0))[4:]
    with pytest.raises(ControlError, match="wrong tag"):
        Seal(b"", 0).open(encode(Ready())[:1] + sealed[1:])


@pytest.mark.parametrize("length", [0, 1, 15, 16])
def test_a_frame_without_room_for_a_tag_and_a_type_is_refused(length: int) -> None:
    with pytest.raises(ControlError, match="wrong tag"):
        Seal(b"", 0).open(bytes(length))
