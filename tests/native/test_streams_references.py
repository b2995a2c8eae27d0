"""References to a GPU's memory from a peer that is not one of ours: what it may name, and what becomes of lies."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from support.gpu.standin_cuda import gpu_copy
from support.rails.rail_pair import STAGED, Memory, Rails, Side, opened
from support.rails.raw_ring import (
    DONE,
    EXPORT,
    FORGET,
    FORGOTTEN,
    HANDLE,
    LEND,
    LENT,
    OPENED,
    PULLED,
    READ,
    Frame,
    RawRing,
    exported,
    raw_ring,
    told,
)

SIZE = 1 << 16


@pytest.fixture
def rails() -> Iterator[Rails]:
    with opened(STAGED[0]) as rails:
        yield rails


def is_broken(side: Side, ring: RawRing, *said: Frame) -> bool:
    ring.say(b"".join(frame.encode() for frame in said))
    for _ in range(50):
        side.core.progress()
        side.failed += side.core.reap()
    return side.failed == [ring.link]


def lend(memory: Memory, number: int, *places: tuple[int, int], offsets: tuple[int, ...] = (0,), **more: int) -> Frame:
    """Return a write by reference, at places of (offset, length) from offsets of an allocation."""
    key, base = memory.local.keys[0]
    absolute = [(base + at, size) for at, size in places]
    data = struct.pack(f"<{1 + len(offsets)}Q", number, *offsets)
    return Frame(LEND, absolute, more.pop("key", key), data=data, **more)


def export(number: int, device: int = 0, token: bytes = b"", handle: bytes = b"") -> Frame:
    data = HANDLE.pack(SIZE, 0, token or os.urandom(16), handle or os.urandom(64))
    return Frame(EXPORT, key=number, imm=device, length=len(data), count=1, data=data)


def test_a_handle_that_nobody_gave_is_refused_with_the_drivers_code(side):
    side.register(SIZE)
    with raw_ring(side) as ring:
        opened_ = told(side, ring, OPENED, export(5))
        assert (opened_[6], opened_[4] > 0) == (5, True)


@pytest.mark.parametrize("device", [1, 62, 63, 1 << 31])
def test_a_device_without_memory_of_ours_opens_nothing(side, device):
    side.register(SIZE)
    with raw_ring(side) as ring:
        assert told(side, ring, OPENED, export(5, device))[4] == -errno.ENODEV


@pytest.mark.parametrize("number", [0, 1, (1 << 64) - 1])
def test_a_reference_to_what_was_not_given_moves_nothing_and_the_next_write_is_served(side, number):
    memory = side.register(SIZE)
    with raw_ring(side) as ring:
        assert told(side, ring, DONE, lend(memory, number, (0, 64)))[4] == -errno.EINVAL
        assert told(side, ring, DONE, lend(memory, number, (0, 64), key=3))[4] == -errno.EACCES
        assert not memory.array.any()


def test_a_token_that_a_peer_has_kept_names_nothing_once_the_memory_is_closed(side):
    source = side.register(gpu_copy(np.full(SIZE, 7, np.uint8)).seen)
    target = side.register(SIZE)
    with raw_ring(side) as kept:
        with raw_ring(side) as given:
            back = HANDLE.pack(*exported(side, given, source))
            opened_ = told(side, kept, OPENED, Frame(EXPORT, key=9, imm=0, length=len(back), count=1, data=back))
            assert opened_[4] == 0
            assert told(side, kept, DONE, lend(target, 9, (0, 64)))[4] == 0
            side.close_link(given.link)
        side.core.reap()
        source.local.close()
        assert told(side, kept, DONE, lend(target, 9, (64, 64)))[4] == -errno.EINVAL
        assert target.array[:64].all()
        assert not target.array[64:].any()


def test_a_reference_stays_within_its_allocation_whatever_a_peer_says_of_it(side):
    """A process opens what it has exported itself without the driver. The token alone says so, and its size is ours."""
    source = side.register(gpu_copy(np.full(SIZE, 7, np.uint8)).seen)
    target = side.register(SIZE)
    with raw_ring(side) as ring:
        size, _, token, handle = exported(side, ring, source)
        lie = HANDLE.pack(1 << 50, 0, token, handle)
        back = Frame(EXPORT, key=9, imm=0, length=len(lie), count=1, data=lie)
        assert told(side, ring, OPENED, back)[4] == 0
        for offset, length in [(size, 1), ((1 << 64) - 1, 64), (size - 63, 64), (1 << 63, 64)]:
            assert told(side, ring, DONE, lend(target, 9, (0, length), offsets=(offset,)))[4] == -errno.EINVAL
        assert told(side, ring, DONE, lend(target, 9, (SIZE - 32, 64)))[4] == -errno.EACCES
        assert not target.array.any()
        assert told(side, ring, DONE, lend(target, 9, (64, 64), offsets=(SIZE - 64,)))[4] == 0
        assert (target.array[64:128].tolist(), np.count_nonzero(target.array)) == ([7] * 64, 64)
        assert told(side, ring, FORGOTTEN, Frame(FORGET, key=9))[6] == 9
        assert told(side, ring, DONE, lend(target, 9, (0, 64)))[4] == -errno.EINVAL


@pytest.mark.parametrize(
    "frame",
    [
        Frame(OPENED, key=1),
        Frame(FORGOTTEN, key=1),
        Frame(FORGET, key=1),
        Frame(PULLED),
        Frame(LENT, [(0, 64)], data=bytes(16)),
        Frame(LEND, [], count=0),
        Frame(EXPORT, key=1, length=87, data=bytes(87)),
        Frame(EXPORT, key=1, length=1 << 40),
        Frame(14),
    ],
    ids=["opened", "forgotten", "forget", "pulled", "lent", "without places", "short", "long", "unknown"],
)
def test_what_nobody_asked_for_breaks_the_stream_alone(side, frame):
    side.register(SIZE)
    with raw_ring(side) as ring:
        assert is_broken(side, ring, frame)


def test_a_number_is_given_once(side):
    side.register(SIZE)
    with raw_ring(side) as ring:
        assert is_broken(side, ring, export(5), export(5))


def test_a_flood_of_allocations_is_bounded(side):
    side.register(SIZE)
    with raw_ring(side) as ring:
        data = b"".join(export(number).encode() for number in range(1, 60_000))
        for _ in range(20_000):
            data = data[ring.say(data) :]
            side.core.progress()
            side.failed += side.core.reap()
            if side.failed or not data:
                break
        assert side.failed == [ring.link]


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_of_sharing_harm_nobody(side, seed):
    draw = random.Random(seed)
    memory = side.register(SIZE)
    key, base = memory.local.keys[0]
    with raw_ring(side) as ring:
        for _ in range(60):
            kind = draw.choice([LEND, LENT, PULLED, EXPORT, OPENED, FORGET, FORGOTTEN, READ])
            number, count = draw.choice([0, 1, 2, draw.getrandbits(64)]), draw.randrange(1, 5)
            places = [(base + draw.randrange(SIZE), draw.randrange(64)) for _ in range(count)]
            data = draw.randbytes(8 * (1 + count))
            if kind == EXPORT:
                ring.say(export(number, draw.choice([0, 1, 77])).encode())
            elif kind in (LEND, LENT):
                ring.say(Frame(kind, places, key, data=data).encode())
            else:
                ring.say(Frame(kind, places, draw.choice([key, number]), imm=draw.randrange(3)).encode())
            side.core.progress()
            ring.heard()
        side.failed += side.core.reap()
    assert not memory.array.any()
