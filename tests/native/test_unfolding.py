"""What a text of MessagePack is said to take as objects, beside what it does take."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote_native.system.buffers import unfolded_bytes

scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=40)


def taken(value: Any) -> int:
    """Return the size of an object and of all within it, references not counted twice."""
    size = 0 if value is None or isinstance(value, bool) else sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(taken(key) + taken(one) for key, one in value.items())
    return size + sum(map(taken, value)) if isinstance(value, list) else size


@given(values)
def test_objects_take_no_more_than_is_said(value):
    data = msgspec.msgpack.encode(value)
    found = msgspec.msgpack.decode(data)
    assert taken(found) <= unfolded_bytes(data) <= 8 + 300 * len(data)


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (b"\x90" * 1000, 1000 * sys.getsizeof(set())),
        (b"\x80" * 1000, 1000 * sys.getsizeof({})),
        (b"\xa1a" * 1000, 1000 * sys.getsizeof("a")),
        (b"\xdc\0\1\xdd\0\0\0\1\xde\0\1\xdf\0\0\0\1", 2 * sys.getsizeof([]) + 2 * sys.getsizeof({1: 1})),
        (b"\xd4\0a\xd8\0" + bytes(16) + b"\xc7\2\0ab\xc8\0\1\0a\xc9\0\0\0\1\0a\xc3" * 9, 9 * 8 + 5 * 33),
    ],
)
def test_every_kind_of_text_counts(data, least):
    assert unfolded_bytes(data) >= least


@given(st.binary(max_size=100))
def test_any_bytes_have_a_bound(data):
    assert 0 <= unfolded_bytes(data) <= 300 * len(data) + 8


@pytest.mark.parametrize("head", [b"\xdb", b"\xc6", b"\xc9", b"\xdd", b"\xdf"])
def test_a_length_that_is_not_there_counts_for_nothing(head):
    assert unfolded_bytes(head + b"\xff\xff\xff\xff") < 300
    assert unfolded_bytes(head + b"\xff") < 300
