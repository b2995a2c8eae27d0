"""The registry's bytes: what was written is read, everything else raises WireError."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiote.discovery import wire
from aiote.discovery.membership import ROLES, Member
from aiote.discovery.wire import Announce, Answer, Entry, Leave, Subscribe, Update
from aiote.service.reading import WireError

WORDS = st.integers(0, (1 << 64) - 1)
LEASES = st.integers(*wire.LEASE_MS)


def texts(limit: int, least: int = 0) -> st.SearchStrategy[str]:
    letters = st.characters(exclude_categories=("Cs", "Cc"))
    return st.text(letters, min_size=least, max_size=limit).filter(lambda text: len(text.encode()) <= limit)


VALUES = st.one_of(
    st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False, allow_infinity=False), texts(128)
)
MEMBERS = st.builds(
    Member,
    texts(128, least=1),
    st.sampled_from(ROLES),
    st.binary(max_size=512),
    WORDS,
    st.dictionaries(texts(32), VALUES, max_size=4),
)
ENTRIES = st.one_of(
    st.builds(lambda name: Entry(name, 0, None), texts(128)),
    st.builds(lambda member, lease: Entry(member.name, lease, member), MEMBERS, LEASES),
)
MESSAGES = st.one_of(
    st.builds(Announce, WORDS, WORDS, LEASES, MEMBERS),
    st.builds(Leave, WORDS, texts(128), WORDS),
    st.builds(Subscribe, WORDS, WORDS, LEASES),
    st.builds(
        Update,
        WORDS,
        WORDS,
        WORDS,
        WORDS,
        WORDS,
        st.booleans(),
        st.lists(st.builds(Answer, texts(128), WORDS, texts(256)), max_size=2).map(tuple),
        st.lists(ENTRIES, max_size=2).map(tuple),
    ),
)


@given(MESSAGES)
def test_a_message_comes_back(message):
    data = wire.encode(message)
    assert wire.decode(data) == message
    assert len(data) <= wire.MESSAGE_BYTES


@given(MESSAGES, st.data())
def test_a_cut_or_longer_one_is_refused(message, data):
    body = wire.encode(message)
    with pytest.raises(WireError, match="too many"):
        wire.decode(body + b"\0")
    with pytest.raises(WireError):
        wire.decode(body[: data.draw(st.integers(0, len(body) - 1))])


@given(st.sampled_from([wire.TO_REGISTRY, wire.FROM_REGISTRY, 0]), st.integers(0, 5), st.binary(max_size=400))
@example(wire.TO_REGISTRY, 3, bytes(20))
def test_any_bytes_are_a_message_or_a_wire_error(kind, number, body):
    data = bytes((kind, wire.VERSION, number)) + body
    try:
        message = wire.decode(data)
    except WireError:
        return
    assert wire.encode(message) == data


@given(MESSAGES, st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(message, data):
    body = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = wire.decode(bytes(body))
    except WireError:
        return
    assert wire.encode(read) == body


@given(MEMBERS, st.binary(max_size=300))
def test_a_member_by_itself(member, noise):
    assert wire.decode_member(wire.encode_member(member)) == member
    for data in (noise, wire.MEMBER_MAGIC + noise):
        try:
            assert wire.encode_member(wire.decode_member(data)) == data
        except WireError:
            pass


def test_the_largest_fits_and_the_bytes_are_fixed():
    attributes = {f"{number:032}": "x" * 128 for number in range(16)}
    largest = Member("n" * 128, "decode", bytes(512), 1, attributes)
    entry = Entry(largest.name, 1000, largest)
    update = Update(1, 2, 3, 4, 5, True, (), (entry,))
    assert len(wire.encode(update)) == wire.UPDATE_HEAD + wire.size_of(entry) <= wire.MESSAGE_BYTES
    assert len(wire.encode(Announce(1, 1, 1000, largest))) <= wire.MESSAGE_BYTES
    small = Member("n", "decode", b"ad", 7, {"a": True, "b": -1, "c": 1.0, "d": "x"})
    assert wire.encode(Announce(1, 2, 1000, small)).hex() == (
        "e00101" + f"{1:016x}{2:016x}{1000:08x}" + "00016e" + "01" + f"{7:016x}" + "00026164" + "04"
        "0001610001" + "00016201ffffffffffffffff" + "000163023ff0000000000000" + "00016403000178"
    )


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_named(version):
    with pytest.raises(WireError, match=f"version {version}"):
        wire.decode(bytes((wire.TO_REGISTRY, version, 1)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(WireError):
        wire.encode(Leave(-1, "a", 1))
    with pytest.raises(WireError):
        wire.encode(Subscribe(1, 1 << 64, 1000))
    with pytest.raises(WireError, match="at most"):
        wire.decode(bytes(wire.MESSAGE_BYTES + 1))
