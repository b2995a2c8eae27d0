"""The bytes between decoders and prefillers: frames in any order make the message, and nothing else does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.kvcache import CacheLayout
from aiote.kvcache.transferwire import (
    FRAME_BYTES,
    OPEN_MESSAGES,
    Accepted,
    Assembler,
    Cancel,
    Ended,
    Fill,
    Message,
    Queued,
    Ranks,
    WireError,
    decode,
    encode,
    fingerprint,
    frames,
)


class Sender:
    """Whose frames they are."""


SOMEBODY, ALICE, BOB = Sender(), Sender(), Sender()
u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
numbers = st.lists(u32, max_size=3000).map(lambda values: np.array(values, np.uint32))
groups = st.tuples(st.integers(1, 65535), st.integers(1, 65535)).flatmap(
    lambda of: st.tuples(st.integers(0, of[0] - 1), st.just(of[0]), st.integers(0, of[1] - 1), st.just(of[1]))
)
fills = st.builds(
    Fill,
    serial=u64,
    round=st.integers(0, 65535),
    ranks=groups.map(lambda four: Ranks(*four)),
    imm=u32,
    pool_pages=u64,
    tail_offset=u64,
    tail_bytes=u32,
    request=st.binary(max_size=64),
    print=st.binary(min_size=16, max_size=16),
    pool=st.binary(max_size=500),
    tails=st.binary(max_size=500),
    tokens=numbers,
    pages=numbers,
)
messages = st.one_of(
    fills,
    st.builds(Cancel, u64),
    st.builds(Accepted, u64),
    st.builds(Queued, u64),
    st.builds(Ended, u64, st.text(max_size=40)),
)


@given(messages, st.randoms(use_true_random=False))
def test_a_message_comes_back_whatever_the_order_of_its_frames(message: Message, draw: random.Random):
    data = encode(message)
    cut = list(frames(data, 7))
    assert all(len(frame) <= FRAME_BYTES for frame in cut)
    draw.shuffle(cut)
    assembler = Assembler()
    others = list(frames(encode(fill()), 8))[:1]
    whole = [assembler.feed(SOMEBODY, frame) for frame in [*others, *cut]][len(others) :]
    assert whole[:-1] == [None] * (len(cut) - 1)
    assert whole[-1] is not None
    assert encode(whole[-1]) == data
    assert type(whole[-1]) is type(message)


@given(messages, st.data())
def test_bytes_that_are_none_raise_wire_errors_alone(message: Message, data: st.DataObject):
    whole = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole), 200) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(1, len(whole))) :]
    try:
        found = decode(bytes(whole))
    except WireError:
        return
    assert encode(found) == bytes(whole)


@given(st.binary(max_size=100))
def test_noise_is_no_frame(noise: bytes):
    assembler = Assembler()
    for frame in (noise, b"\xe2\x01" + noise, b"\xe3\x01" + noise):
        try:
            assembler.feed(SOMEBODY, frame)
        except WireError:
            continue


def fill(count: int = 5000) -> Fill:
    many = np.arange(count, dtype=np.uint32)
    return Fill(1, 1, Ranks(0, 1, 0, 1), 0, 9, 0, 0, b"r", bytes(16), b"p", b"", many, many)


def test_frames_that_contradict_each_other_are_refused():
    cut = list(frames(encode(fill()), 3))
    assembler = Assembler()
    assert assembler.feed(ALICE, cut[0]) is None
    with pytest.raises(WireError, match="contradict"):
        assembler.feed(ALICE, cut[0])
    with pytest.raises(WireError, match="contradict"):
        assembler.feed(ALICE, list(frames(encode(fill(4000)), 3))[1])
    with pytest.raises(WireError, match="version"):
        assembler.feed(ALICE, cut[1][:1] + b"\x09" + cut[1][2:])
    with pytest.raises(WireError, match="does not travel"):
        assembler.feed(ALICE, b"\xe3" + cut[0][1:])
    with pytest.raises(WireError, match="contradict"):
        assembler.feed(ALICE, b"\xe3" + cut[1][1:])
    assert [assembler.feed(BOB, frame) for frame in cut[:-1]] == [None] * (len(cut) - 1)
    assert assembler.feed(BOB, cut[-1]) is not None, "each sender for itself"


def test_unfinished_messages_give_way():
    assembler, sender = Assembler(), Sender()
    for number in range(OPEN_MESSAGES + 10):
        assembler.feed(sender, next(iter(frames(encode(fill()), number))))
    assert len(assembler._open[sender]) == OPEN_MESSAGES
    assembler.forget(sender)
    assert not assembler._open


def test_a_reason_is_made_printable_and_cut():
    ended = decode(encode(Ended(1, "no\nroom\x1b[31m " + "ä" * 2000)))
    assert isinstance(ended, Ended)
    assert ended.reason.startswith("no room [31m ä")
    assert len(ended.reason.encode()) <= 1024


def test_what_does_not_fit_its_field_is_named():
    with pytest.raises(WireError, match="Cancel"):
        encode(Cancel(-1))
    with pytest.raises(WireError, match="at most"):
        encode(fill(1 << 23))


def test_layouts_are_told_apart():
    base = {"layers": 2, "kv_heads": 2, "head_size": 4, "page_tokens": 4, "dtype": "uint8"}
    changed = [{}, {"layers": 3}, {"kv_heads": 4}, {"head_size": 8}, {"page_tokens": 8}, {"dtype": "int8"}]
    changed += [{"order": "NHD"}, {"kv_heads": 1, "mla": True}]
    prints = {fingerprint(CacheLayout(**{**base, **change})) for change in changed}  # type: ignore[arg-type]
    assert len(prints) == len(changed)
    assert fingerprint(CacheLayout(**base, order="HND")) in prints  # type: ignore[arg-type]
