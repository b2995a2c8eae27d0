"""The engine's lock: nothing that a peer says, nor the garbage collector, nor a busy interpreter keeps it taken."""

from __future__ import annotations

import pytest

from support import TESTS
from support.engines.opening import run_script

START = """
    import sys
    sys.path.append(sys.argv[1])
    from support.rails.rail_pair import Kind, Pair, opened
"""

ACKNOWLEDGED = (
    START
    + """
    with opened(Kind("local")) as rails:
        pair = Pair.of(rails)
        handle = pair.b.count(7)
        for count in (1 << 63, (1 << 64) - 1, -1):
            assert not pair.ba.ack_counts(0, [(7, 1), (7, count)]), count
        assert pair.ba.ack_counts(0, [(7, 3)])
        rails.finish(pair.a.write(pair.ab, imm=7))
        assert handle.value == 1
        assert pair.ba.arrivals(0)[0] == [(7, -3)]
    print("done")
"""
)

COLLECTED = (
    START
    + """
    import gc

    def litter(core):
        "A handle whose end takes the lock, for the collector alone to find."
        ring = [core.counter(7)]
        ring.append(ring)

    def with_garbage(core, call, *arguments):
        "Have the collector run at the first thing that is made in a call, at the second, and so on."
        for at in range(1, 8):
            gc.collect()
            gc.disable()
            gc.set_threshold(at)
            litter(core)
            gc.enable()
            call(*arguments)
            gc.disable()

    with opened(Kind("local")) as rails:
        pair = Pair.of(rails)
        core, link = pair.b.core, pair.ba
        calls = {
            "arrivals": (link.arrivals, 0),
            "lost_keys": (link.lost_keys, 0),
            "notices": (link.notices,),
            "counts_to_ack": (link.counts_to_ack, 0),
            "acknowledge": (link.ack_counts, 0, [(7, 1)]),
            "reconcile": (link.reconcile, 0, [], 0, [], []),
            "under_way": (link.under_way,),
            "holding": (link.holding, pair.b.operation()),
            "failed_peers": (core.failed_peers,),
            "noticed": (core.noticed_peers,),
            "reap": (core.reap,),
            "progress": (core.progress,),
        }
        for name, (call, *arguments) in calls.items():
            print(name, flush=True)
            with_garbage(core, call, *arguments)
        for number in range(9):
            pair.a.send(pair.ab, bytes([number]))
        rails.drive(lambda: link.messages == 9)
        print("take_message", flush=True)
        with_garbage(core, link.take_message)
        print("close", flush=True)
        gc.set_threshold(1)
        litter(core)
        gc.enable()
        link.close()
        gc.disable()
        assert link.leftover == [bytes([7]), bytes([8])]
    print("done")
"""
)

COMPUTES = (
    START
    + """
    import ctypes, operator, threading
    from functools import partial
    from aiote.rails import Operation

    held = ctypes.PyDLL(None)  # its functions keep the GIL

    class Poll(ctypes.Structure):
        _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]

    with opened(Kind("socket"), threaded=True) as rails:
        pair = Pair.of(rails)
        rails.rest()
        core, link, turn, seen = pair.a.core, pair.ab, threading.Lock(), []
        fd = Poll(core.fd, 1, 0)

        def compute():
            "Have the GIL until the write of the other thread is over, whose submission let go of it."
            turn.acquire()
            seen.append(held.poll(ctypes.byref(fd), 1, 10_000))

        turn.acquire()
        other = threading.Thread(target=compute)
        other.start()
        write = (link, Operation(), False, None, 0, None, 0, 0, 5)
        # Nothing of the interpreter's comes between: the other thread has asked for the GIL when the write is begun.
        steps = [turn.release, partial(held.usleep, 200_000), partial(core.submit_single, *write)]
        list(map(operator.call, steps))
        other.join()
        rails.drive(lambda: write[1].is_over)
    print("done" if seen == [1] else f"the native thread stood still: {seen}")
"""
)


@pytest.mark.parametrize("script", [ACKNOWLEDGED, COLLECTED], ids=["acknowledged", "collected"])
def test_the_lock_is_given_back_whatever_is_acknowledged_or_collected(script):
    """Whatever number a peer acknowledges, and wherever the collector runs."""
    done = run_script(script, str(TESTS))
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr


def test_the_native_thread_goes_on_while_python_computes():
    """Who submits lets go of the GIL, and of the lock before it waits to have that back."""
    done = run_script(COMPUTES, str(TESTS))
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr
