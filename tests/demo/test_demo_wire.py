"""The messages: what is sent arrives; what is no message is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.demo import prompts, wire
from aiote.demo.settings import Job, Settings

ints = st.integers(0, 2**64 - 1)
texts = st.text(max_size=30)
blobs = st.binary(max_size=60)
MESSAGES = st.one_of(
    st.builds(wire.Hello, texts, ints, texts, texts),
    st.builds(wire.Generate, ints, blobs, texts),
    st.builds(wire.Progress, ints, ints),
    st.builds(wire.Token, ints, ints, ints),
    st.builds(wire.Done, ints, ints, ints),
    st.builds(wire.Failed, ints, texts),
    st.builds(wire.Stop),
    st.builds(wire.Report, texts, ints, ints, ints, ints, ints),
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
    with pytest.raises(wire.WireError, match="truncated"):
        wire.decode(wire.encode(wire.Generate(1, b"", ""))[:-6] + struct.pack(">I", 2**32 - 1))


def test_the_longest_prompt_fits_a_message():
    text = prompts.vary(bytes(prompts.MOST_BYTES), 1000)[-1]
    address = str(aiote.Address("localhost.invalid", 65535, bytes([255] * 16), 2**64 - 1))
    assert len(wire.encode(wire.Generate(999, text, address))) <= wire.MESSAGE_BYTES


@given(ints)
def test_requests_are_known_by_their_names(number):
    assert wire.request_of(wire.identity(number)) == number
    with pytest.raises(wire.WireError):
        wire.request_of(wire.identity(number)[1:])


@pytest.mark.parametrize(
    "message",
    [
        wire.Done(2**64, 0, 0),
        wire.Done(0, -1, 0),
        wire.Failed(0, "x" * 2**16),
        wire.Failed(0, "\ud800"),
    ],
)
def test_what_does_not_fit_is_not_sent(message):
    with pytest.raises(wire.WireError, match=type(message).__name__):
        wire.encode(message)


@given(st.lists(st.binary(max_size=50), max_size=4))
def test_jobs_round_trip(prompts):
    job = Job(Settings("shm", 2, 7, None, 4, 8, 9, 1, 30), "engine://x", tuple(prompts))
    assert "\n" not in job.to_json()
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"settings": {}, "router": "", "prompts": []}'])
def test_a_bad_job_is_refused(line):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Job.from_json(line)
