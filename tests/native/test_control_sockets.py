"""Heartbeats through a socket in C: the same frames as of `core.control_frames`, and only what is certainly next."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.control_frames import Heartbeat, Joined, Seal, encode, frame
from aiote.rails import BeatCounts, ControlSocket, Pulse, StatusError, check_pulses

BODY = encode(Heartbeat())
KEY = b"k" * 32
INFO_BYTES = 56  # of TCP_INFO, up to the time of the last bytes that came


class Side:
    """A control socket, and the other end of its connection, whose seals are made in Python."""

    def __init__(self, ours: socket.socket, theirs: socket.socket, key: bytes = KEY, first: int = 0) -> None:
        self.ours, self.theirs = ours, theirs
        self.out, self.heard = Seal(key, 0), Seal(key, 1)
        self.seal, self.opener = Seal(key, 1), Seal(key, 0)
        for one in (self.out, self.heard, self.seal, self.opener):
            one.sequence = first
        self.queued: list[bytes] = []
        self.socket = ControlSocket(ours, duplicate=False)
        self.socket.carry(BODY, self.out, self.heard, self.queued.append)
        self.socket.wake_after_read(within_frame=False)

    def say(self, data: bytes) -> None:
        self.theirs.sendall(data)

    def say_heartbeat(self) -> None:
        self.say(frame(BODY, self.seal))

    @property
    def readable(self) -> bool:
        return bool(select.select([self.ours], [], [], 0)[0])


@pytest.fixture
def side() -> Iterator[Side]:
    """TCP, because what wakes a sleeper is a matter of its kernel."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)  # a recv that waits would wait for as many bytes as wake the loop
    with ours, theirs:
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        side = Side(ours, theirs)
        yield side
        side.socket.close()


@given(st.binary(max_size=64), st.integers(0, 2**64 - 3))
def test_frames_are_those_of_the_codec(key, first):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        side = Side(ours, theirs, key, first)
        for _ in range(2):
            assert side.socket.send_heartbeat()
            assert theirs.recv(100) == frame(BODY, side.opener)
            side.say_heartbeat()
            assert side.socket.hear_heartbeat()
        assert (side.out.sequence, side.heard.sequence) == (first + 2, first + 2)


def test_a_heartbeat_wakes_nobody_and_all_else_does(side):
    assert not side.readable
    side.say_heartbeat()
    assert not side.readable
    assert side.socket.hear_heartbeat()
    assert not side.socket.hear_heartbeat()

    # The smallest other frame of a session whose channels are joined.
    side.say(frame(encode(Joined(0, 1)), side.seal))
    assert side.readable
    side.ours.recv(100)
    side.heard.sequence += 1
    side.say_heartbeat()
    assert side.socket.hear_heartbeat()

    side.theirs.shutdown(socket.SHUT_WR)
    assert side.readable
    assert not side.socket.hear_heartbeat()


def test_several_heartbeats_are_left_to_the_loop(side):
    """They came while nobody looked, and wake the loop; what it then processes is in order."""
    side.say_heartbeat()
    side.say_heartbeat()
    assert side.readable
    assert not side.socket.hear_heartbeat()
    assert len(side.ours.recv(100)) == 2 * len(frame(BODY, Seal(KEY, 1)))


@pytest.mark.parametrize("what", ["changed", "of a later number", "repeated", "a part", "another of its length"])
def test_what_is_not_the_next_heartbeat_is_left_and_wakes_the_loop(side, what):
    valid = frame(BODY, side.seal)
    if what == "of a later number":
        valid = frame(BODY, side.seal)
    elif what == "repeated":
        side.say(valid)
        assert side.socket.hear_heartbeat()
    said = {
        "changed": valid[:-1] + bytes([valid[-1] ^ 1]),
        "a part": valid[:-1],
        "another of its length": frame(b"\x12", side.seal),
    }.get(what, valid)
    before = side.heard.sequence
    side.say(said)
    assert not side.readable
    assert not side.socket.hear_heartbeat()
    assert side.heard.sequence == before
    assert side.readable
    assert side.ours.recv(100) == said
    # The loop that has read a part is woken by each further byte; one that has read whole frames is not.
    for within_frame in (True, False):
        side.socket.wake_after_read(within_frame)
        side.say(b"1")
        assert side.readable is within_frame
        side.ours.recv(100)


def test_nothing_is_sent_out_of_order(side):
    side.socket.busy = True
    assert not side.socket.send_heartbeat()
    assert side.out.sequence == 0
    side.socket.busy = False
    assert side.socket.send_heartbeat()


def test_a_full_socket_sends_later_and_loses_no_byte(side):
    """Whatever part of a frame the kernel takes, the other end reads whole frames, in order."""
    said = bytearray()
    while taken := side.socket.send(bytes(1 << 16)):
        said += bytes(taken)
    assert not side.socket.send_heartbeat()
    assert side.out.sequence == 0
    side.theirs.settimeout(10)
    read = bytearray()
    while len(read) < len(said):
        read += side.theirs.recv(1 << 20)
        if side.out.sequence < 20 and side.socket.send_heartbeat():
            said += frame(BODY, side.opener)
            rest = b"".join(side.queued)
            side.queued.clear()
            while rest:
                rest = rest[side.socket.send(rest) :]
                read += side.theirs.recv(1 << 20)
    assert read == said


def test_a_closed_socket_is_never_used(side):
    """The loop closes a broken socket by itself, and its number may be another's at once."""
    side.ours.close()
    assert side.socket.fileno() == -1
    assert not side.socket.send_heartbeat()
    assert not side.socket.hear_heartbeat()
    with pytest.raises(StatusError, match="send"):
        side.socket.send(b"x")


def test_a_duplicate_outlives_the_socket_and_is_closed_with_it(side):
    mine = ControlSocket(side.ours, duplicate=True)
    assert mine.fileno() not in (-1, side.ours.fileno())
    side.ours.close()
    assert mine.send(b"x") == 1
    mine.close()
    mine.close()
    assert mine.fileno() == -1


def test_after_the_end_no_heartbeat_is_carried(side):
    side.socket.carry_none()
    side.say_heartbeat()
    assert side.readable
    assert not side.socket.hear_heartbeat()
    assert not side.socket.send_heartbeat()


def test_a_body_that_does_not_fit_is_refused(side):
    with pytest.raises(ValueError, match="at most 64 bytes, got 65"):
        side.socket.carry(b"x" * 45, Seal(KEY, 0), Seal(KEY, 1), side.queued.append)


def test_a_pass_sends_and_hears_without_a_session(side):
    counts, pulse = BeatCounts(), Pulse(1.0, 3.0)
    pulse.record_heard(0.0)
    pulse.follow_socket(side.socket)
    for step in range(1, 20):
        side.say_heartbeat()
        wanted, due = check_pulses({max: pulse}, float(step), 0.25, counts)
        assert (wanted, counts.sent, counts.heard) == ([], step, step)
        assert due == step + 0.5
        assert side.theirs.recv(100) == frame(BODY, side.opener)


def test_the_kernel_says_how_long_a_silence_is(side):
    """A look takes a heartbeat for as old as it may be; before the peer is lost the kernel says when it came."""
    if len(side.ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)) < INFO_BYTES:
        pytest.skip("the kernel does not say when bytes came (TCP_INFO; qemu-user passes on four bytes of it)")
    counts, pulse = BeatCounts(), Pulse(1.0, 3.0)
    pulse.record_heard(0.0)
    pulse.follow_socket(side.socket)
    side.say_heartbeat()
    while side.socket.seconds_silent() == math.inf:  # the kernel's clock has not moved
        time.sleep(0.001)
    assert 0 < side.socket.seconds_silent() < 60
    for quarter in range(1, 40):
        # That is a moment ago in the time of the kernel, whatever the time of this test is.
        assert check_pulses({max: pulse}, quarter / 4, 0.25, counts)[0] == []
    assert counts.heard == 1


def test_a_silent_peer_expires_where_the_kernel_does_not_say():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        side, counts, pulse = Side(ours, theirs), BeatCounts(), Pulse(1.0, 3.0)
        assert side.socket.seconds_silent() == math.inf
        pulse.record_heard(0.0)
        pulse.follow_socket(side.socket)
        quarters = [quarter / 4 for quarter in range(1, 20)]
        found = [now for now in quarters if check_pulses({max: pulse}, now, 0.25, counts)[0]]
        assert found[0] == 3.0


def test_one_pass_uses_so_many_sockets_and_the_next_ones_the_rest(side):
    """So that the event loop does not stand still for a thousand; none is forgotten."""
    peers = 200
    pulses = {(lambda _now, number=number: number): Pulse(1.0, 3.0) for number in range(peers)}
    for pulse in pulses.values():
        pulse.follow_socket(side.socket)
    counts, sent = BeatCounts(), []
    while not sent or sent[-1] < peers:
        before = counts.sent
        wanted, due = check_pulses(pulses, 0.0, 0.25, counts)
        assert wanted == []
        assert (due == 0.0) is (counts.sent < peers)
        sent.append(counts.sent)
        assert 0 < counts.sent - before <= 64
    assert sent == [64, 128, 192, 200]
