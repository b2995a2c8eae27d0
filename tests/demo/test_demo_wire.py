"""The messages: what is sent arrives, whatever the order of its frames; what is no message is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiote.cli.demo import wire
from aiote.cli.demo.settings import Job, Settings

ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=30)
words = st.lists(st.integers(0, 2**32 - 1), max_size=50).map(tuple)
blobs = st.binary(max_size=60)
MESSAGES = st.one_of(
    st.builds(wire.Hello, texts, ints, texts, texts),
    st.builds(wire.Introduce, texts),
    st.builds(wire.Generate, ints, words),
    st.builds(wire.Fill, ints, ints, words, words, blobs, ints, blobs, ints),
    st.builds(wire.Refused, ints, texts),
    st.builds(wire.Progress, ints, ints),
    st.builds(wire.Token, ints, ints, ints),
    st.builds(wire.Done, ints, ints, ints),
    st.builds(wire.Failed, ints, texts),
    st.builds(wire.Stop),
    st.builds(wire.Report, texts, ints, ints, ints, ints, ints, ints, ints),
)


@given(MESSAGES)
def test_messages_round_trip(message):
    assert wire.decode(wire.encode(message)) == message


@given(MESSAGES, st.data())
def test_a_cut_or_lengthened_message_is_refused(message, data):
    encoded = wire.encode(message)
    with pytest.raises(wire.WireError):
        wire.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(wire.WireError, match="too many"):
        wire.decode(encoded + b"\0")


@given(st.binary(max_size=80))
def test_arbitrary_bytes_give_a_message_or_a_wire_error(data):
    try:
        message = wire.decode(data)
    except wire.WireError:
        return
    assert wire.encode(message) == data


def test_a_length_beyond_the_end_is_no_allocation():
    with pytest.raises(wire.WireError, match="too early"):
        wire.decode(wire.encode(wire.Generate(1, ()))[:-4] + struct.pack("<I", 2**32 - 1))


@pytest.mark.parametrize(
    "message",
    [
        wire.Done(2**63, 0, 0),
        wire.Generate(0, (-1,)),
        wire.Generate(0, (2**32,)),
        wire.Generate(0, (0,) * (wire.MESSAGE_LIMIT // 4)),
        wire.Refused(0, "\ud800"),
    ],
)
def test_what_does_not_fit_is_not_sent(message):
    with pytest.raises(wire.WireError, match=type(message).__name__):
        wire.encode(message)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_frames_join_in_any_order(sizes, random):
    """Messages of two sources under way at once, every frame of all of them shuffled, with the same numbers."""
    sent = {(source, number): random.randbytes(size) for source in ("a", "b") for number, size in enumerate(sizes)}
    frames = [(source, frame) for (source, n), data in sent.items() for frame in wire.split(data, n)]
    assert all(len(frame) <= wire.FRAME_BYTES for _, frame in frames)
    random.shuffle(frames)
    assembler, got = wire.Assembler(), []
    for source, frame in frames:
        data = assembler.feed(source, frame)
        if data is not None:
            got.append((source, data))
    assert sorted(got) == sorted((source, data) for (source, _), data in sent.items())


def first_frames() -> list[bytes]:
    return list(wire.split(bytes(20_000), 4))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "at least"),
        (b"kvd1" + bytes(11), "at least"),
        (b"evil" + first_frames()[0][4:], "begins with"),
        (first_frames()[0][:-1], "does not fit"),
        (first_frames()[0] + b"x", "does not fit"),
        (struct.pack("<4sIII", b"kvd1", 1, wire.MESSAGE_LIMIT + 1, 0) + bytes(8176), "does not fit"),
        (struct.pack("<4sIII", b"kvd1", 1, 8, 4) + bytes(4), "does not fit"),
        (struct.pack("<4sIII", b"kvd1", 1, 8, 8176), "does not fit"),
    ],
)
def test_a_malformed_frame_is_refused(frame, says):
    with pytest.raises(wire.WireError, match=says):
        wire.Assembler().feed("a", frame)


def test_contradicting_frames_are_refused():
    frames = first_frames()
    assembler = wire.Assembler()
    assert assembler.feed("a", frames[0]) is None
    with pytest.raises(wire.WireError, match="contradict"):
        assembler.feed("a", frames[0])
    with pytest.raises(wire.WireError, match="contradict"):
        assembler.feed("a", next(wire.split(bytes(30_000), 4)))
    assert assembler.feed("b", frames[0]) is None


def test_a_source_cannot_fill_the_memory():
    assembler = wire.Assembler()
    with pytest.raises(wire.WireError, match="unfinished"):
        for number in range(100_000):
            assembler.feed("a", next(wire.split(bytes(10_000), number)))
    assert assembler.feed("b", first_frames()[0]) is None


@given(st.lists(st.binary(max_size=50), max_size=4))
def test_jobs_round_trip(prompts):
    job = Job(Settings("shm", 2, 7, None, 4, 8, 9, 1, 30), "engine://x", tuple(prompts))
    assert "\n" not in job.to_json()
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"settings": {}, "router": "", "prompts": []}'])
def test_a_bad_job_is_refused(line):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Job.from_json(line)
