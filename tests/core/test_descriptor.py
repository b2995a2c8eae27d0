from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiote.core.address import Address
from aiote.core.descriptor import RailKey, RegionDescriptor
from aiote.errors import UsageError

OWNER = Address("::1", 4000, b"o" * 16, 5)
PLAIN = RegionDescriptor(OWNER, 9, 0x1000, 64, True, (RailKey(1, 0), RailKey(2, 0x1000)))
U64S = st.integers(0, 2**64 - 1)


@st.composite
def descriptors(draw: st.DrawFn) -> RegionDescriptor:
    length = draw(st.one_of(st.integers(0, 4096), U64S))
    starts = st.integers(0, 2**64 - 1 - length)
    keys = draw(st.lists(st.builds(RailKey, U64S, starts), min_size=1, max_size=16))
    return RegionDescriptor(OWNER, draw(U64S), draw(starts), length, draw(st.booleans()), tuple(keys))


@given(descriptors())
def test_bytes_give_the_descriptor_back(descriptor: RegionDescriptor) -> None:
    assert RegionDescriptor.from_bytes(bytes(descriptor)) == descriptor
    assert RegionDescriptor.from_bytes(bytearray(bytes(descriptor))) == descriptor


@given(descriptors(), st.data())
def test_a_slice_denotes_the_same_bytes_on_every_rail(descriptor: RegionDescriptor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, descriptor.length))
    stop = data.draw(st.integers(start, descriptor.length))
    part = descriptor.slice(start, stop)
    assert part.length == stop - start
    assert part.address == descriptor.address + start
    assert [key.base for key in part.keys] == [key.base + start for key in descriptor.keys]
    assert [key.key for key in part.keys] == [key.key for key in descriptor.keys]
    assert (part.owner, part.region, part.writable) == (descriptor.owner, descriptor.region, descriptor.writable)
    assert RegionDescriptor.from_bytes(bytes(part)) == part


@given(descriptors(), st.data())
def test_a_slice_of_a_slice_is_a_slice(descriptor: RegionDescriptor, data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, descriptor.length)] * 2)))
    c, d = sorted(data.draw(st.tuples(*[st.integers(0, b - a)] * 2)))
    assert descriptor.slice(a, b).slice(c, d) == descriptor.slice(a + c, a + d)


@given(st.integers(-100, 200), st.integers(-100, 200))
def test_a_slice_outside_is_refused(start: int, stop: int) -> None:
    assume(not 0 <= start <= stop <= PLAIN.length)
    with pytest.raises(UsageError, match=f"slice {start} to {stop} is not within the 64 bytes"):
        PLAIN.slice(start, stop)


def test_bounds_are_integers_of_any_kind() -> None:
    assert PLAIN.slice(numpy.int64(8), numpy.uint8(16)) == PLAIN.slice(8, 16)
    with pytest.raises(UsageError, match="integers"):
        PLAIN.slice(0.0, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"keys": ()}, "1 to 16 entries"),
        ({"keys": (RailKey(0, 0),) * 17}, "1 to 16 entries"),
        ({"keys": [RailKey(0, 0)]}, "tuple expected"),
        ({"keys": (RailKey(-1, 0),)}, "RailKey.key"),
        ({"keys": (RailKey(0, 2**64 - 64),)}, "64-bit space"),
        ({"address": 2**64 - 64}, "64-bit space"),
        ({"length": -1}, "length"),
        ({"writable": 1}, "writable"),
        ({"region": 2**64}, "region"),
        ({"owner": Address("::1", 4000)}, "belongs to one engine"),
        ({"owner": "::1"}, "Address expected"),
    ],
)
def test_malformed_parts_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        replace(PLAIN, **change)


def test_every_truncation_and_extension_is_refused() -> None:
    whole = bytes(PLAIN)
    for stop in range(len(whole)):
        with pytest.raises(UsageError, match="not a region descriptor"):
            RegionDescriptor.from_bytes(whole[:stop])
    with pytest.raises(UsageError, match="too many"):
        RegionDescriptor.from_bytes(whole + b"\0")
    with pytest.raises(UsageError, match="1 bytes too many"):
        RegionDescriptor.from_bytes(whole[:6] + bytes((whole[6] + 1,)) + whole[7:] + b"\0")
    with pytest.raises(UsageError, match="does not begin with"):
        RegionDescriptor.from_bytes(bytes(OWNER))


@given(st.integers(0, len(bytes(PLAIN)) * 8 - 1))
def test_a_flipped_bit_is_another_descriptor_or_an_error(bit: int) -> None:
    data = bytearray(bytes(PLAIN))
    data[bit // 8] ^= 1 << bit % 8
    try:
        descriptor = RegionDescriptor.from_bytes(data)
    except UsageError:
        return
    assert descriptor != PLAIN
    assert bytes(descriptor) == data


@given(st.binary(max_size=300), st.integers(0, 150))
def test_any_bytes_are_a_descriptor_or_a_usage_error(noise: bytes, keep: int) -> None:
    data = bytes(PLAIN)[:keep] + noise
    try:
        descriptor = RegionDescriptor.from_bytes(data)
    except UsageError:
        return
    assert bytes(descriptor) == data
