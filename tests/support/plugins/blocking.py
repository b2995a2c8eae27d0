"""A pytest plugin: a test that blocks its event loop fails.

It owns two nets. The first catches calls that sleep by their nature, at the moment they are made on a thread whose loop
is running: `time.sleep`, name resolution, and socket methods of a socket that is not non-blocking. The second catches
whatever else held a loop up, by the clock: asyncio and uvloop report slow callbacks in debug mode, trio through
`TaskSteps`. What counts is what is left when the time is taken off in which the machine ran somebody else instead: CPU
time and sleep. It is that of every thread of the process: one that has the GIL and waits for a core keeps ours waiting.
A machine that is slow without telling so (`machine.slowness`) gives a step as many times longer. Not every machine
tells all this, so a test that the clock alone finds guilty is run once more, and what it says then counts.

What is found also fails a test that swallows exceptions. `blocking_allowed(reason)` switches both nets off for one
test.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from support.machine import SLOWER, slowness

STEP_S = 0.25
LIMIT_S = STEP_S * SLOWER**1.5
RESOLVERS = ("getaddrinfo", "gethostbyname", "gethostbyaddr", "gethostbyname_ex")
NUMERIC_ONLY = socket.AI_NUMERICHOST
RECEIVERS = ("accept", "recv", "recv_into", "recvfrom", "recvmsg")
SENDERS = ("connect", "send", "sendall", "sendmsg", "sendto")


class LoopBlockedError(AssertionError):
    """A call that can sleep was made on the thread of a running event loop."""


class Watch:
    """What was found during one test, and since when the machine owes us time."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.late_phases = 0  # how many phases of the test the clock alone speaks against
        self._by_clock = 0
        self._owed = stolen_s()

    def blocked(self, what: str) -> LoopBlockedError:
        """Note a blocking call and return the exception for it."""
        self.found.append(what)
        return LoopBlockedError(f"{what} blocks the event loop")

    def take(self) -> list[str]:
        """Take what was found in this phase, which is over."""
        found = self.found
        self.late_phases += 0 < self._by_clock == len(found)
        self.found, self._by_clock = [], 0
        return found

    def slow(self, what: str, wall_s: float) -> None:
        """Judge a step that took `wall_s`; time stolen from the process since the last judgement is taken off."""
        if wall_s <= LIMIT_S:
            return
        owed = stolen_s()
        # A thread that has ended takes its time with it.
        ours = wall_s - sum(max(0.0, seconds - self._owed.get(who, 0.0)) for who, seconds in owed.items())
        self._owed = owed
        if ours > LIMIT_S and ours > (limit_s := max(LIMIT_S, STEP_S * slowness())):
            self._by_clock += 1
            self.found.append(f"{what} held the event loop for {ours * 1e3:.0f} ms (allowed: {limit_s * 1e3:.0f} ms)")


_watch: Watch | None = None
_key = pytest.StashKey[Watch | None]()


def stolen_s() -> dict[str, float]:
    """Return how long each thread was ready but not run, in seconds, and what a hypervisor took from all cores."""
    stolen: dict[str, float] = {}
    # A kernel without these counters lets the wall clock alone decide; a thread may end meanwhile.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat") as file:
            stolen[thread] = int(file.read().split()[1]) / 1e9  # time run, time waited for a core (both ns), slices
    with contextlib.suppress(OSError, IndexError), open("/proc/stat") as file:
        # First line: cpu user nice system idle iowait irq softirq steal ...
        stolen["hypervisor"] = int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    return stolen


def on_loop_thread() -> bool:
    """Tell whether this thread is inside a running asyncio, uvloop or trio loop."""
    if asyncio._get_running_loop() is not None:
        return True
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_run()


def _numeric(host: str | bytes | None) -> bool:
    """Tell whether resolving `host` asks nobody."""
    try:
        ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host or "::")
    except ValueError:
        return False
    return True


def _guard(owner: Any, name: str, sleeps: Callable[..., bool]) -> None:
    """Replace a function: on a running loop's thread, with arguments that let it sleep, it raises."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _watch is not None and on_loop_thread() and sleeps(*args, **kwargs):
            raise _watch.blocked(f"{owner.__name__}.{name}{args!r}")
        return original(*args, **kwargs)

    setattr(owner, name, call)


class TaskSteps:
    """A trio instrument that times every step of every task."""

    def __init__(self) -> None:
        self._started = 0.0

    def before_task_step(self, task: Any) -> None:
        self._started = time.perf_counter()

    def after_task_step(self, task: Any) -> None:
        if _watch is not None:
            _watch.slow(f"a step of {task.name}", time.perf_counter() - self._started)


class _SlowCallbacks(logging.Handler):
    """Reads "Executing <handle> took <seconds> seconds", which asyncio and uvloop log in debug mode."""

    def emit(self, record: logging.LogRecord) -> None:
        match record.args:
            case (handle, float(seconds)) if _watch is not None and "took" in str(record.msg):
                _watch.slow(str(handle), seconds)


def pytest_configure(config: pytest.Config) -> None:
    logging.getLogger("asyncio").addHandler(_SlowCallbacks())
    _guard(time, "sleep", lambda seconds: seconds > 0)
    for name in RESOLVERS:
        _guard(socket, name, lambda host, *more, **_: not (_numeric(host) or (more[4:] and more[4] & NUMERIC_ONLY)))
    for name in RECEIVERS + SENDERS:
        _guard(socket.socket, name, lambda self, *_, **__: self.gettimeout() != 0)


def _watched(item: pytest.Item) -> Generator[None]:
    """Watch one phase of a test and fail it by what was found; what comes beside another error fails the next phase."""
    global _watch
    watch = _watch = item.stash[_key]
    try:
        yield
    except LoopBlockedError:
        if watch:
            watch.take()
        raise
    finally:
        _watch = None
    if watch and watch.found:
        pytest.fail("the event loop was blocked:\n  " + "\n  ".join(watch.take()), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test; run it once more if all that speaks against it is the clock, and report that run."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    watch = item.stash.get(_key, None)
    if watch is not None and 0 < watch.late_phases == sum(report.failed for report in reports):
        item._initrequest()  # type: ignore[attr-defined] # fixtures are made anew, as in every plugin that runs again
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[_key] = None if item.get_closest_marker("blocking_allowed") else Watch()
    yield from _watched(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield from _watched(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield from _watched(item)
