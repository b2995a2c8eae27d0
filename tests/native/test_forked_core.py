"""Use after a fork: the child gets errors and nothing else happens, to it or to its parent, even at its exit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import TESTS
from support.engines.opening import FORKS
from support.machine import SLOWER
from support.rails.rail_pair import KINDS, Kind

pytestmark = pytest.mark.libfabric

# Run as a script of its own: a child that leaves by the interpreter's exit must not be a copy of pytest.
PROGRAM = r"""
import gc, os, signal, sys, warnings
import numpy as np
from aiote.rails import CounterWait, ForkError, Operation, PageIndex, ValueWatch, acquire
from support.rails.rail_pair import KINDS, Pair, filled, opened

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is the very case


def started(pair, source, target, handle):
    "Everything that would begin something, or say something about it."
    core, link, numbers = pair.a.core, pair.ab, PageIndex([0])
    single = (link, Operation(), False, source.local, 0, target.remote, 0, 8, -1)
    pages = (link, Operation(), source.local, 0, numbers, 8, target.remote, 0, numbers, 8, 8, -1)
    return {
        "progress": core.progress,
        "wake": core.wake,
        "add_peer": lambda: core.add_peer(None),
        "counter": lambda: core.counter(5),
        "counted": lambda: core.is_counted(5),
        "watch": lambda: core.watch(ValueWatch(acquire(bytearray(8))), 0),
        "write": lambda: core.submit_single(*single),
        "pages": lambda: core.submit_pages(*pages),
        "send": lambda: core.submit_send(link, Operation(), b"x"),
        "wait": lambda: handle.wait(CounterWait(), 1),
        "register": lambda: pair.a.rail_set.register(acquire(bytearray(8))),
        "endpoint": lambda: pair.a.rail_set.open_channel(0, 0),
        "mailbox": lambda: pair.a.rail_set.open_mailbox(link, 1, 1, 1, 1),
    }


def child(pair, source, target, handle, waiting, watched, going):
    signal.alarm(20)
    wrong = []
    for name, call in started(pair, source, target, handle).items():
        try:
            call()
            wrong.append(f"{name}: no error")
        except ForkError as error:
            if "parent" not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
    # What ends something does nothing: it is the parent's to end.
    over = []
    going.on_over = waiting.on_over = watched.on_over = over.append
    for call in (lambda: pair.a.core.cancel(going), waiting.cancel, waiting.take, watched.cancel, handle.close,
                 pair.a.core.reap, pair.ab.take_message, lambda: pair.ab.fail(5), pair.ab.close, pair.ba.close,
                 lambda: pair.a.core.expect_messages(1), lambda: handle.value, pair.a.core.statistics,
                 pair.a.core.stop_thread):
        call()
    if over:
        wrong.append(f"over: {over}")
    del handle, waiting, watched, going
    gc.collect()
    print("child:", wrong or "only errors", flush=True)
    return 1 if wrong else 0


kind = next(kind for kind in KINDS if kind.provider == sys.argv[1])
threaded, leave, forks = sys.argv[2] == "thread", sys.argv[3], int(sys.argv[4])
with opened(kind, threaded) as rails:
    pair = Pair.of(rails)
    source, target = pair.a.register(filled(1 << 20)), pair.b.register(1 << 20)
    handle, value = pair.a.count(1), np.zeros(1, np.uint64)
    waiting, watched = pair.a.wait(handle, 1), ValueWatch(acquire(value))
    pair.a.core.watch(watched, 0)
    rails.finish(pair.a.write(pair.ab, source, target.remote))
    pair.a.core.expect_messages(1)
    for number in range(forks):
        going = [pair.a.write(pair.ab, source, target.remote, imm=2) for _ in range(20)]
        pid = os.fork()
        if pid == 0:
            if leave == "at once":
                os._exit(child(pair, source, target, handle, waiting, watched, going[0]))
            code = child(pair, source, target, handle, waiting, watched, going[0])
            rails.sides.clear()  # nor does it close what is not its own
            sys.exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"the child ended with {status}")
        rails.finish(*going)
    assert np.array_equal(source.array, target.array)
    pair.b.write(pair.ba, imm=1)
    rails.arrived(waiting)
    value[0] = 1
    rails.drive(lambda: watched.is_over)
    pair.b.send(pair.ba, b"still here")
    rails.drive(lambda: pair.ab.messages == 1)
    assert pair.a.take(pair.ab) == b"still here"
    pair.a.core.expect_messages(-1)
    if leave != "at once":
        third = rails.side()  # the child's exit took nothing away that a new peer needs
        link, _ = rails.join(pair.b, third)
        rails.finish(pair.b.write(link, imm=1))
print("parent: fine")
"""


@pytest.mark.parametrize("leave", ["at once", "in order"])
@pytest.mark.parametrize("mode", ["loop", "thread"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.provider)
def test_a_child_gets_errors_and_the_parent_goes_on(kind: Kind, mode, leave, tmp_path):
    """At many moments of what is under way; the child leaves at once, or by the interpreter's whole exit."""
    forks = 1 if leave == "in order" else 10 if SLOWER == 1 else 4
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join((str(TESTS), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", FORKS, program, kind.provider, mode, leave, str(forks)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == ["child: only errors"] * forks + ["parent: fine"]
