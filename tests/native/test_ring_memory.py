"""A ring has memory for what goes through it, and what cannot be had ends its stream alone."""

from __future__ import annotations

import numpy as np

from support import TESTS
from support.checkout.compiled import preloaded, shared
from support.engines.opening import run_script
from support.rails.rail_pair import Kind, Pair, filled, opened
from support.rails.raw_ring import DATA, RING_BYTES


def resident_rings() -> list[int]:
    """Return the bytes in memory of each ring that this process has mapped, in the order of their addresses."""
    found, named = [], False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                named = "/memfd:aiote-ring" in line
            elif named and line.startswith("Rss:"):
                found.append(int(line.split()[1]) * 1024)
    return found


def test_a_ring_has_memory_for_what_went_through_it():
    """A page until it is used, then little more than was sent, and never more than the ring."""
    with opened(Kind("local")) as rails:
        pair = Pair.of(rails)
        source, target = pair.a.register(filled(4 * RING_BYTES)), pair.b.register(4 * RING_BYTES)
        rails.rest()
        # Two rings, each mapped twice.
        idle = resident_rings()
        assert len(idle) == 4
        assert max(idle) <= DATA + (64 << 10)
        rails.finish(pair.a.write(pair.ab, source, target.remote))
        assert np.array_equal(source.array, target.array)
        assert sorted(resident_rings())[-2:] == [DATA + RING_BYTES] * 2


REFUSE = """
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
int refuse;
int madvise(void* at, size_t length, int advice) {
    if (refuse && advice == 23 /* MADV_POPULATE_WRITE */) { errno = EFAULT; return -1; }
    return ((int (*)(void*, size_t, int))dlsym(RTLD_NEXT, "madvise"))(at, length, advice);
}
"""
WITHOUT_MEMORY = """
import ctypes, errno, sys
from support.rails.rail_pair import Kind, Pair, filled, opened
with opened(Kind("local")) as rails:
    pair, other = Pair.of(rails), Pair.of(rails)
    source, target = pair.a.register(filled(1 << 20)), pair.b.register(1 << 20)
    ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "refuse").value = 1
    done = pair.a.write(pair.ab, source, target.remote)
    rails.drive(lambda: pair.a.failed == [pair.ab])
    assert pair.ab.failed == errno.ENOMEM, pair.ab.failed
    pair.a.close_link(pair.ab)
    rails.drive(lambda: done.is_over)
    assert done.errno
    ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "refuse").value = 0
    source, target = other.a.register(filled(1 << 20)), other.b.register(1 << 20)
    rails.finish(other.a.write(other.ab, source, target.remote))
    assert bytes(source.array) == bytes(target.array)
"""


def test_memory_that_a_ring_cannot_have_ends_the_stream_alone(tmp_path):
    """The kernel says that there is none: an error, where a store would have been a SIGBUS."""
    source = tmp_path / "refuse.c"
    source.write_text(REFUSE)
    library = str(shared(source, tmp_path))
    done = run_script(WITHOUT_MEMORY, library, LD_PRELOAD=preloaded(library), PYTHONPATH=str(TESTS))
    assert done.returncode == 0, done.stderr
