"""Rails of our own against a peer that floods, lies or dies: nothing grows, nobody is kept, nothing wakes for good."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiote_native.counters.table import ImmCounters
from aiote_native.streams.endpoints import parse
from support import TESTS
from support.checkout.compiled import preloaded, shared
from support.engines.opening import run_script
from support.rails.rail_pair import Kind, Pair, filled, opened
from support.rails.raw_ring import HEADER, RING_BYTES, WRITE, Frame, raw_ring, write

IMM = 0x123
MAX_PARTS = 32
PUSH_BUDGET = 2 << 20


def test_a_flood_of_refused_writes_is_bounded(rails, side):
    """A peer that writes with a bad key and takes no answer is not answered without end."""
    memory = side.register(8)
    bad = write(memory, (0, 1), data=b"x", key=memory.local.keys[0][0] ^ 1).encode()
    with raw_ring(side) as ring:
        # More than the ring has room for answers to.
        for _ in range(100):
            ring.say(bad * (RING_BYTES // HEADER.size // 50))
            for _ in range(8):
                side.core.progress()
        assert ring.link.failed == errno.EPROTO


@pytest.mark.parametrize(("times", "counted"), [(MAX_PARTS, MAX_PARTS), (MAX_PARTS + 1, 0), ((1 << 32) - 1, 0)])
def test_an_immediate_counts_for_no_more_than_a_request_has_parts(rails, side, times, counted):
    handle = side.count(IMM)
    with raw_ring(side) as ring:
        ring.say(Frame(WRITE, imm=IMM, times=times).encode())
        rails.drive(lambda: True)
        side.core.progress()
        assert ring.link.failed == (0 if counted else errno.EPROTO)
    assert handle.value == counted


def test_a_count_never_begins_anew():
    """More than can be counted is refused, and what was counted stays."""
    counters = ImmCounters()
    with pytest.raises(MemoryError, match="the immediate's count is full"):
        for _ in range(6000):
            before = counters.value(IMM)
            counters.arrive(IMM, (1 << 32) - 1)
            assert counters.value(IMM) > before
    assert counters.value(IMM) == before


def test_a_peer_that_ends_after_a_fork_wakes_nobody_for_good():
    """A child holds copies of all descriptors: closing ours takes none of them out of a set, and ends no connection."""
    with opened(Kind("socket")) as rails:
        pair = Pair.of(rails)
        source, target = pair.a.register(filled(1 << 24)), pair.b.register(1 << 24)
        rails.rest()
        left, right = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(right)
            os.read(left, 1)
            os._exit(0)
        try:
            done = pair.a.write(pair.ab, source, target.remote)
            pair.a.core.progress()
            pair.b.close_link(pair.ba)
            rails.drive(lambda: pair.ab.failed)
            rails.rest()
            pair.a.close_link(pair.ab)
            rails.drive(lambda: done.is_over)
            rails.rest()
        finally:
            os.close(right)
            os.waitpid(child, 0)
            os.close(left)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Have no descriptor be opened here for a while, nor one of an earlier test's garbage be closed."""
    gc.collect()
    gc.disable()
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        gc.enable()


def test_who_lacks_descriptors_for_a_connection_says_so_and_is_not_woken_for_good():
    with opened(Kind("socket")) as rails:
        side = rails.side()
        pending, link = side.rail_set.open_channel(0, 0), side.core.add_peer(side)
        host, port, _ = parse(pending.address)
        # Of the greater address: it connects.
        peer = f"aiote-tcp://{host}:{port}/{'ff' * 16}".encode()
        side.rail_set.join(link, pending, peer, *side.rail_set.scratch.keys[0])
        side.awake = True
        side.write(link, imm=IMM)
        rails.rest()
        assert not link.failed
        with socket.socket() as one:
            one.setblocking(False)
            with no_descriptors():
                one.connect_ex((host, port))
                rails.drive(lambda: link.failed)
                rails.rest()
        assert link.failed == errno.EMFILE
        side.close_link(link)


FAILING = r"""
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
static int countdown, swallows;
static long taken;
/* Of so many calls the last one fails, and those before it find no room. */
void fail_at(int number) { countdown = number; }
int left(void) { return countdown; }
/* Take whatever is sent, at once; return how many bytes that were. */
long swallow(int on) { swallows = on; return taken; }
ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
    if (countdown) {
        errno = --countdown ? EAGAIN : EPIPE;
        return -1;
    }
    if (swallows) {
        long length = 0;
        for (size_t i = 0; i < message->msg_iovlen; i++) length += (long)message->msg_iov[i].iov_len;
        taken += length;
        return length;
    }
    return ((ssize_t (*)(int, const struct msghdr*, int))dlsym(RTLD_NEXT, "sendmsg"))(fd, message, flags);
}
"""

BROKEN_SENDS = """
    import ctypes, sys
    sys.path.append(sys.argv[1])
    from support.rails.rail_pair import Kind, Pair, filled, opened

    shim = ctypes.CDLL(sys.argv[2])
    failed = 0
    for number in range(1, 12):
        with opened(Kind("socket")) as rails:
            pair = Pair.of(rails)
            source, target = pair.a.register(filled(1 << 24)), pair.b.register(1 << 24)
            rails.rest()
            shim.fail_at(number)
            done = pair.a.write(pair.ab, source, target.remote)
            for _turn in range(1000):
                pair.a.awake = pair.a.core.progress()
                if not pair.a.awake:
                    break
            reached = shim.left() == 0
            shim.fail_at(0)
            rails.drive(lambda: done.is_over or pair.ab.failed)
            assert bool(pair.ab.failed) == reached, (number, pair.ab.failed)
            failed += reached
    print("done", failed)
"""


READS = """
    import ctypes, mmap, socket, sys
    sys.path.append(sys.argv[1])
    from aiote_native.streams.endpoints import parse
    from support.rails.rail_pair import Kind, opened
    from support.rails.raw_ring import READ, Frame

    shim = ctypes.CDLL(sys.argv[2])
    shim.swallow.restype = ctypes.c_long
    length = 256 << 20
    with opened(Kind("socket")) as rails:
        side = rails.side()
        memory = side.register(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        key, base = memory.local.keys[0]
        pending, link = side.rail_set.open_channel(0, 0), side.core.add_peer(side)
        host, port, token = parse(pending.address)
        # Of two addresses the greater one connects.
        greater = f"aiote-tcp://{host}:65535/{'f' * 32}".encode()
        side.rail_set.join(link, pending, greater, *side.rail_set.scratch.keys[0])
        with socket.create_connection((host, port)) as peer:
            peer.sendall(token + Frame(READ, [(base, length)], key).encode() * 4)
            rails.rest()
            shim.swallow(1)
            side.core.progress()
            print("done", shim.swallow(0), link.failed)
        link.close()
"""


@pytest.fixture
def shim(tmp_path: Path) -> str:
    """A library that has sending fail."""
    source = tmp_path / "failing.c"
    source.write_text(FAILING)
    return str(shared(source, tmp_path))


def test_a_send_that_fails_at_any_time_ends_what_it_was_for(shim):
    """Also the one that is tried just before the loop sleeps: nobody else would tell of it."""
    done = run_script(BROKEN_SENDS, str(TESTS), shim, LD_PRELOAD=preloaded(shim))
    assert done.stdout.startswith("done"), done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 1


def test_a_peer_that_reads_much_leaves_the_event_loop_its_turns(shim):
    """However fast it takes what it asked for, one call sends a bounded number of bytes: it polls a few times."""
    done = run_script(READS, str(TESTS), shim, LD_PRELOAD=preloaded(shim))
    assert done.stdout.startswith("done"), done.stdout + done.stderr
    sent, failed = (int(word) for word in done.stdout.split()[1:])
    assert 0 < sent <= 4 * PUSH_BUDGET
    assert failed == 0
