"""What a peer says of its queue pairs: taken as it was meant, or refused, whatever the bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote_native.verbs.queuepairs import PeerAddress

LAYOUT = struct.Struct("<BBBBH16sIIII")
NUMBER = st.integers(0, (1 << 24) - 1)


@given(
    mtu=st.integers(1, 5),
    reads=st.integers(0, 255),
    link=st.integers(0, 1),
    lid=st.integers(0, 65535),
    gid=st.binary(min_size=16, max_size=16),
    numbers=st.tuples(NUMBER, NUMBER, NUMBER, NUMBER),
)
def test_an_address_is_read_as_it_was_written(mtu, reads, link, lid, gid, numbers):
    peer = PeerAddress(LAYOUT.pack(1, mtu, reads, link, lid, gid, *numbers))
    assert (peer.mtu, peer.reads, peer.ethernet, peer.lid, peer.gid) == (mtu, reads, link == 1, lid, gid)
    assert (*peer.numbers, *peer.psns) == numbers


GOOD = (1, 3, 16, 1, 0, bytes(16), 17, 18, 5, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, 0), (0, 2), (1, 0), (1, 6), (3, 2), (6, 1 << 24), (7, 1 << 24), (8, 1 << 24), (9, (1 << 32) - 1)],
)
def test_an_address_that_no_endpoint_has_is_refused(field, value):
    fields = list(GOOD)
    fields[field] = value
    with pytest.raises(ValueError, match="not a verbs address"):
        PeerAddress(LAYOUT.pack(*fields))


@pytest.mark.parametrize("length", [0, 1, LAYOUT.size - 1, LAYOUT.size + 1, 4096])
def test_an_address_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=f"has {length} bytes, expected {LAYOUT.size}"):
        PeerAddress(bytes(length))


@given(st.binary(max_size=64))
def test_any_bytes_are_taken_or_refused(address):
    try:
        peer = PeerAddress(address)
    except ValueError:
        return
    assert 1 <= peer.mtu <= 5
    assert len(peer.gid) == 16
    assert max(*peer.numbers, *peer.psns) < 1 << 24
