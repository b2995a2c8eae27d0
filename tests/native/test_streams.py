"""Rails of our own: what a side does with the frames of a peer that is not one of ours, and with one that goes away."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiote_native.streams.endpoints import RingEndpoint, parse
from support.engines.opening import run_script
from support.rails.rail_pair import Kind, Memory, Pair, Side, filled, opened
from support.rails.raw_ring import (
    ANSWER,
    ANSWERED,
    DATA,
    DONE,
    HEADER,
    NUMBER,
    READ,
    RING_BYTES,
    SCHEME,
    SEND,
    WRITE,
    Frame,
    RawRing,
    frames,
    raw_ring,
    ring_memory,
    write,
)

IMM = 0x123
SIZE = 4096
ACCESS = -errno.EACCES
CACHED = 8 << 20
"""What is registered with more is written past the processor's caches (streams/receiving.pyx)."""


@pytest.fixture(params=["local", "socket"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened(Kind(request.param)) as rails:
        yield Pair.of(rails)


def said(side: Side, ring: RawRing, data: bytes, pieces: int = 1) -> None:
    """Say bytes, in several pieces with a turn of the side's after each."""
    step = max(len(data) // pieces, 1)
    while data:
        gone = ring.say(data[:step])
        data = data[gone:]
        side.core.progress()


class Model:
    """What becomes of frames: the memory, the count, and how many requests are over, with those that are refused."""

    def __init__(self, length: int) -> None:
        self.bytes = np.zeros(length, np.uint8)
        self.count = self.over = 0
        self.refused: list[int] = []

    def write(self, places: list[tuple[int, int]], data: bytes, times: int, allowed: bool) -> None:
        self.over += 1
        if not allowed:
            self.refused.append(self.over)
            return
        self.count += times
        for at, size in places:
            self.bytes[at : at + size] = np.frombuffer(data[:size], np.uint8)
            data = data[size:]


good = st.tuples(st.integers(0, SIZE), st.integers(0, 600)).filter(lambda place: sum(place) <= SIZE)
bad = st.sampled_from([(SIZE, 1), (SIZE - 1, 2), (-1, 2), (-(1 << 40), 8), (1, SIZE), (1 << 63, 16)])
writes = st.lists(
    st.tuples(st.lists(good | bad, min_size=1, max_size=4), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)


@given(writes, st.integers(1, 40), st.integers(0, 1 << 32))
@example([([(0, 8), (SIZE - 1, 2)], 1, True), ([(0, 8)], 1, True)], 1, 0)
def test_writes_go_where_the_key_opens_memory_and_nowhere_else(given, pieces, seed):
    """However they come in pieces; what is refused is told, and what follows it is served."""
    draw = random.Random(seed)
    with opened(Kind("local")) as rails:
        side = rails.side()
        target, handle, model = side.register(SIZE + 64), side.count(IMM), Model(SIZE + 64)
        whole = side.register(np.frombuffer(target.array, np.uint8)[:SIZE])
        data = b""
        for places, times, right_key in given:
            content = draw.randbytes(sum(size for _, size in places))
            inside = all(at >= 0 and at + size <= SIZE for at, size in places)
            empty = not content
            model.write(places if inside else [], content, times, (inside and right_key) or empty)
            key = None if right_key else whole.local.keys[0][0] ^ 1
            data += write(whole, *places, data=content, key=key, imm=IMM, times=times).encode()
        with raw_ring(side) as ring:
            said(side, ring, data, pieces)
            rails.drive(lambda: True)
            told = [head for head in frames(ring.heard()) if head[0] == DONE]
            assert ring.link.failed == 0
        assert np.array_equal(target.array, model.bytes)
        assert handle.value == model.count
        assert [head[5] for head in told if head[4] == ACCESS] == model.refused
        assert max((head[5] for head in told), default=0) == model.over


@pytest.mark.parametrize("length", [CACHED, CACHED + 1], ids=["in the caches", "past them"])
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 9000)), min_size=1, max_size=4), st.integers(1, 9))
@example([(0, 4096), (4096, 4096), (8192, 8192)], 1)
@example([(1, 4097), (8191, 4095), (16384, 8255)], 3)
def test_pages_arrive_whole_in_memory_of_any_length(length, places, pieces):
    """At any alignment, where they are stored past the caches and where they are not; beside them nothing changes."""
    content = random.Random(length).randbytes(sum(size for _, size in places))
    with opened(Kind("local")) as rails:
        side = rails.side()
        target, handle, model = side.register(length), side.count(IMM), Model(length)
        model.write(places, content, 1, allowed=True)
        with raw_ring(side) as ring:
            said(side, ring, write(target, *places, data=content, imm=IMM, times=1).encode(), pieces)
            rails.drive(lambda: handle.value == 1)
        assert np.array_equal(target.array, model.bytes)


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8))
@example([bytes(HEADER.size)])
@example([Frame(WRITE, count=5).encode()])
@example([Frame(WRITE, [(0, 8)], length=9).encode()])
@example([Frame(WRITE, [(0, (1 << 64) - 1), (0, 2)], length=1).encode()])
@example([Frame(READ, [(0, 1 << 63)]).encode()])
@example([Frame(ANSWER, length=8, data=bytes(8)).encode()])
@example([Frame(ANSWERED).encode()])
@example([Frame(DONE, done=7).encode()])
@example([Frame(DONE, status=-5).encode()])
@example([Frame(SEND, [(0, 1 << 40)]).encode()])
def test_what_is_no_frame_harms_nobody(pieces):
    """The link fails, or waits for more; memory without the key stays as it was, and other peers are served."""
    with opened(Kind("local")) as rails:
        side, other = rails.side(), rails.side()
        memory = side.register(filled(SIZE))
        before = memory.array.copy()
        _, back = rails.join(side, other)
        with raw_ring(side) as ring:
            for piece in pieces:
                ring.say(piece)
                side.core.progress()
            rails.drive(lambda: True)
            assert ring.link.failed in (0, errno.EPROTO)
            rails.finish(other.write(back, imm=IMM))
        assert np.array_equal(memory.array, before)


@pytest.mark.parametrize("head", [RING_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_ring_that_holds_more_than_it_can_is_a_broken_one(rails, side, head):
    """Nothing of it is taken, though it be full of frames."""
    handle = side.count(IMM)
    with raw_ring(side) as ring:
        ring.put(Frame(WRITE, imm=IMM, times=1).encode() * (RING_BYTES // HEADER.size))
        ring.claim(head)
        rails.drive(lambda: side.failed == [ring.link])
        assert ring.link.failed == errno.EPROTO
    assert handle.value == 0


@pytest.mark.parametrize("tail", [1 << 63, (1 << 64) - 1])
def test_a_peer_that_took_what_was_not_there_is_a_broken_one(rails, side, tail):
    source = side.register(filled(2 * RING_BYTES))
    with raw_ring(side) as ring:
        done = side.write(ring.link, source, source.remote)
        side.core.progress()
        ring.take_back(tail)
        rails.drive(lambda: side.failed == [ring.link])
        assert ring.link.failed == errno.EPROTO
    rails.drive(lambda: done.is_over)
    assert done.errno


def test_reads_are_answered_where_they_are_allowed(rails, side):
    memory = side.register(filled(SIZE))
    key, base = memory.local.keys[0]
    asked = [
        Frame(READ, [(base + 8, 100), (base, 4)], key),
        Frame(READ, [(base, 8)], key + 1),
        Frame(READ, [(base + SIZE, 1)], key),
        Frame(READ, [(base, 0)], key),
    ]
    with raw_ring(side) as ring:
        ring.heard()  # the greeting
        said(side, ring, b"".join(frame.encode() for frame in asked))
        rails.drive(lambda: True)
        data = ring.heard()
        kinds = [(head[0], head[4]) for head in frames(data)]
    assert kinds == [(ANSWER, 0), (ANSWERED, 0), (ANSWERED, ACCESS), (ANSWERED, ACCESS), (ANSWERED, 0)]
    assert data[HEADER.size :][:104] == memory.array[8:108].tobytes() + memory.array[:4].tobytes()


def test_a_flood_of_reads_is_bounded(rails, side):
    """A peer that asks and never takes the answers is not worked for without end."""
    memory = side.register(filled(RING_BYTES))
    key, base = memory.local.keys[0]
    ask = Frame(READ, [(base, RING_BYTES)], key).encode()
    with raw_ring(side) as ring:
        for _ in range(3000):
            ring.say(ask)
            side.core.progress()
        rails.drive(lambda: side.failed == [ring.link])
        assert ring.link.failed == errno.EPROTO


def write_halfway(pair: Pair, source: Memory, target: Memory, reads: bool = False) -> object:
    """Start a transfer that is larger than any wire holds, and stop when some of it has come."""
    done = pair.a.write(pair.ab, source, target.remote, imm=-1 if reads else IMM, reads=reads)
    array = source.array if reads else target.array
    limit = time.monotonic() + 60
    while not array.any() and time.monotonic() < limit:
        pair.rails.drive(lambda: True)
    assert array.any()
    assert not array.all()
    return done


def test_memory_that_is_taken_back_is_written_no_further(pair: Pair):
    """Not one byte once the registration has ended, though the rest of the write is on its way; and nothing counts."""
    source, target, handle = pair.a.register(filled(1 << 26)), pair.b.register(1 << 26), pair.b.count(IMM)
    done = write_halfway(pair, source, target)
    pair.b.memories.remove(target)
    target.local.close()
    before = target.array.copy()
    pair.rails.drive(lambda: done.is_over)
    pair.rails.rest()
    assert np.array_equal(target.array, before)
    assert (done.errno, handle.value) == (errno.EACCES, 0)
    pair.rails.finish(pair.a.write(pair.ab, imm=IMM))
    assert handle.value == 1


def test_memory_that_is_taken_back_is_read_no_further(pair: Pair):
    """What comes after it is nobody's bytes, and the read says so."""
    target, source = pair.b.register(filled(1 << 26)), pair.a.register(1 << 26)
    before = target.array.copy()
    done = write_halfway(pair, source, target, reads=True)
    pair.b.memories.remove(target)
    target.local.close()
    target.array[:] = 77
    pair.rails.drive(lambda: done.is_over)
    assert done.errno == errno.EACCES
    assert ((source.array == 0) | (source.array == before)).all()
    pair.rails.finish(pair.a.write(pair.ab, imm=IMM))


def listening(side: Side) -> tuple[object, tuple[str, int]]:
    """Open a channel and return it with where it listens."""
    pending = side.rail_set.open_channel(0, 0)
    host, port, _ = parse(pending.address)
    return pending, (host, port)


def test_strangers_are_not_let_in():
    """Neither one who says nothing, nor many, nor one with another's token; the peer comes all the same."""
    with opened(Kind("socket")) as rails:
        a, b = rails.side(), rails.side()
        ends = {side: listening(side) for side in (a, b)}
        # Of the two the one with the smaller address waits to be connected to.
        waits = min((a, b), key=lambda side: ends[side][0].address)
        strangers = [socket.create_connection(ends[waits][1]) for _ in range(3)]
        strangers[0].sendall(b"x" * 16)
        strangers[1].sendall(b"y" * 7)
        links = {}
        for side, other in ((a, b), (b, a)):
            link = links[side] = side.core.add_peer(side)
            side.rail_set.join(link, ends[side][0], ends[other][0].address, *other.rail_set.scratch.keys[0])
            side.rail_set.open_mailbox(link, 16, 4096, 16, 4096)
            side.awake = True
        rails.drive(lambda: True)
        late = socket.socket()
        late.settimeout(60)
        handle = b.count(IMM)
        rails.finish(a.write(links[a], imm=IMM))
        assert handle.value == 1
        with pytest.raises(OSError, match="refused"):
            late.connect(ends[waits][1])
        for stranger in (*strangers, late):
            stranger.close()


def server_below(address: bytes) -> socket.socket:
    """Listen at an address that is smaller than an endpoint's own, so that this one connects."""
    for port in range(10_000, 11_000):
        if f"aiote-tcp://127.0.0.1:{port}".encode() < address:
            try:
                return socket.create_server(("127.0.0.1", port))
            except OSError:
                continue
    raise AssertionError("no port is free")


@pytest.mark.parametrize("answer", ["nothing", "part", "another's", "the right one"])
def test_nothing_is_sent_before_the_listener_answers(answer):
    """A port may be another's by now: it gets the token of one connection, which nobody takes any more, and no key."""
    with opened(Kind("socket")) as rails:
        side = rails.side()
        pending, link = side.rail_set.open_channel(0, 0), side.core.add_peer(side)
        _, _, own = parse(pending.address)
        token = bytes(range(16))
        said = {"nothing": b"", "part": own[:15], "another's": bytes(16), "the right one": own}[answer]
        with server_below(pending.address) as server:
            host, port = server.getsockname()
            address = f"aiote-tcp://{host}:{port}/{token.hex()}".encode()
            side.rail_set.join(link, pending, address, *side.rail_set.scratch.keys[0])
            side.awake = True
            side.write(link, imm=IMM)
            peer, _ = server.accept()
            with peer:
                peer.settimeout(60)
                rails.rest()
                assert peer.recv(1 << 16) == token
                peer.sendall(said)
                rails.rest()
                if answer == "the right one":
                    ((kind, *_rest),) = frames(peer.recv(HEADER.size, socket.MSG_WAITALL))
                    assert kind == WRITE
                elif answer == "another's":
                    assert link.failed == errno.EPROTO
                else:
                    assert not link.failed
                    peer.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        peer.recv(1)
        side.close_link(link)


SURVIVOR = """
    import asyncio, signal
    import aiote

    async def main():
        async with aiote.open_engine("socket") as left:
            async with aiote.open_engine("socket") as right:
                target = left.attach(right.register(bytearray(1 << 26)).descriptor)
                await left.connect(right.address)
                transfers = [left.submit_write(left.register(bytes(1 << 26)), target) for _ in range(8)]
                for _ in range(20):
                    await asyncio.sleep(0)
            print(sorted({type(transfer.exception()).__name__ for transfer in transfers if await over(transfer)}))

    async def over(transfer):
        try:
            await transfer
        except aiote.AioteError:
            return True

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    asyncio.run(main())
    print("alive")
"""


def test_a_connection_that_breaks_kills_nobody():
    """Also where the signal for that was given its deadly meaning back."""
    done = run_script(SURVIVOR)
    assert done.stdout.splitlines()[-1:] == ["alive"], done.stderr
    assert "Error" in done.stdout


@given(st.binary(max_size=80) | st.text(max_size=60).map(lambda text: b"aiote-tcp://" + text.encode()))
@example(b"aiote-tcp://127.0.0.1:80/" + b"0" * 32)
@example(b"aiote-tcp://127.0.0.1:65536/" + b"0" * 32)
@example(b"aiote-tcp://127.0.0.1:8\0/" + b"0" * 32)
@example(b"aiote-tcp://127.0.0.1:80/" + b"g" * 32)
@example(b"aiote-tcp://localhost:80/" + b"0" * 32)
def test_addresses_are_parsed_or_refused(address):
    try:
        host, port, token = parse(address)
    except ValueError as error:
        assert "not the address of a TCP endpoint" in str(error)
        return
    assert socket.inet_aton(host)
    assert 0 < port < 65536
    assert len(token) == 16


@pytest.fixture
def ends(side: Side) -> Iterator[tuple[Any, Any]]:
    """Two endpoints with rings."""
    ends = side.rail_set.rails[0].open_endpoint(), side.rail_set.rails[0].open_endpoint()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("address", [b"", b"fi_shm://x", b"aiote-ring://", b"aiote-ring://0000000000001235"])
def test_a_ring_of_another_address_is_refused(ends, address):
    ends[0].take(ring_memory())
    with pytest.raises(ValueError, match="not the address of the ring"):
        ends[0].connect(address)


def test_a_ring_of_another_layout_is_refused(ends):
    ring = ring_memory()
    os.pwrite(ring, b"x", 0)
    ends[0].take(ring)
    with pytest.raises(OSError, match="another layout"):
        ends[0].connect(SCHEME + b"%016x" % NUMBER)


@pytest.mark.parametrize("length", [0, 4096, DATA + RING_BYTES - 1, DATA + RING_BYTES + 1, 2 << 20])
def test_a_ring_of_another_size_is_refused(ends, length):
    with pytest.raises(ValueError, match=f"has {length} bytes, expected {DATA + RING_BYTES}"):
        ends[0].take(ring_memory(length))


@pytest.mark.parametrize("nbytes", [0, 1 << 16, 3 << 18, 8 << 20])
def test_no_ring_of_a_size_that_rings_have_not_is_made(side, nbytes):
    with pytest.raises(ValueError, match=f"a ring of {nbytes} bytes"):
        RingEndpoint(side.rail_set.rails[0].device, nbytes)


def test_a_ring_that_could_shrink_is_refused(ends):
    """A peer that truncates the file under who has mapped it would kill it with a SIGBUS."""
    with pytest.raises(ValueError, match="not sealed against shrinking"):
        ends[0].take(ring_memory(seals=fcntl.F_SEAL_GROW))


def test_nobody_can_truncate_a_ring(ends):
    for length in (0, DATA, DATA + RING_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(ends[0].memory_fd, length)


def test_a_ring_is_taken_once_and_connecting_needs_it(ends):
    with pytest.raises(RuntimeError, match="no ring of its peer"):
        ends[0].connect(ends[1].address)
    ends[0].take(os.dup(ends[1].memory_fd))
    taken = os.dup(ends[1].memory_fd)
    with pytest.raises(RuntimeError, match="has its peer's ring"):
        ends[0].take(taken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(taken)
    ends[0].connect(ends[1].address)
    assert ends[0].memory_fd == -1


def test_a_child_of_a_fork_leaves_the_ring_to_its_parent(ends):
    """Its descriptors may have other numbers: it closes none."""
    child = os.fork()
    if child == 0:
        try:
            number = ends[0].memory_fd
            ends[0].close()
            os.fstat(number)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_frame_under_way_is_waited_for_awake_and_one_that_has_stopped_is_not():
    with opened(Kind("local")) as rails:
        side = rails.side()
        memory = side.register(64)
        whole = write(memory, (0, 64), data=bytes(range(64)), imm=IMM, times=1).encode()
        handle = side.count(IMM)
        with raw_ring(side) as ring:
            while side.core.progress():
                pass
            ring.say(whole[:-10])
            assert side.core.progress(), "its next bytes come sooner than a wake-up would"
            # The peer has stopped: some time after its last byte it is safe to sleep.
            rails.drive(lambda: not side.core.progress())
            assert handle.value == 0
            ring.say(whole[-10:])
            rails.drive(lambda: handle.value == 1)
            assert bytes(memory.array) == bytes(range(64))
