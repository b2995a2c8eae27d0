"""The life of a serving process: how signals end it, and how it reports to the process that started it.

A server ends in one of two ways. SIGTERM drains it: it accepts no new work, finishes its current work, and ends with
status 0. SIGINT, or a second SIGTERM, ends it at once with status 130; the engine still ensures that no NIC writes
afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import anyio

from aiote.demo.faults import DemoError, leaves
from aiote.errors import AioteError

__all__ = ["Orders", "ParentRequests", "explain", "first_of", "leave_with_parent", "live", "tell"]

Step = Callable[[], Awaitable[object]]

_AT_ONCE_S = 1.0
"""Seconds that a server may take to end after an order to end at once."""
_GRACE_S = 5.0
"""Seconds that a server whose parent is gone may take to drain."""
_FORESEEN = (AioteError, DemoError, OSError)


class Orders:
    """The orders to a server: to `drain`, and perhaps to end `at_once`, which implies `drain`."""

    def __init__(self) -> None:
        self.drain = anyio.Event()
        self.at_once = anyio.Event()

    def record_signal(self, number: int) -> None:
        """Record a signal."""
        if number == signal.SIGINT or self.drain.is_set():
            self.at_once.set()
        self.drain.set()

    async def unhurried(self, *steps: Step) -> None:
        """Run the steps one after another, until all are done or the server is ordered to end at once."""
        await first_of(self.at_once.wait, partial(_in_order, steps))

    async def while_wanted(self, *steps: Step) -> bool:
        """Run the steps one after another; return False if the server was ordered to drain meanwhile."""
        await first_of(self.drain.wait, partial(_in_order, steps))
        return not self.drain.is_set()


async def _in_order(steps: Sequence[Step]) -> None:
    for step in steps:
        await step()


async def first_of(*waits: Step) -> None:
    """Start all awaitables, return when the first one ends, and cancel the others."""
    async with anyio.create_task_group() as group:

        async def run(wait: Step) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(run, wait)


def live(name: str, main: Callable[[Orders], Awaitable[None]]) -> int:
    """Run a server until it ends by its orders, and return its exit status; an error is printed, with status 1."""
    try:
        return anyio.run(_live, main)
    except (Exception, BaseExceptionGroup) as error:
        return explain(name, error)


async def _live(main: Callable[[Orders], Awaitable[None]]) -> int:
    orders = Orders()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:

            async def listen() -> None:
                async for number in signals:
                    orders.record_signal(number)

            async def insist() -> None:
                # It waits before it cancels, so that the server can still tell a registry that it leaves.
                await orders.at_once.wait()
                await anyio.sleep(_AT_ONCE_S)
                group.cancel_scope.cancel()

            group.start_soon(listen)
            group.start_soon(insist)
            await main(orders)
            group.cancel_scope.cancel()
    return 130 if orders.at_once.is_set() else 0


def explain(name: str, error: BaseException) -> int:
    """Print the error that ended this process to standard error: a line, after a traceback if unexpected; return 1."""
    causes = list(leaves(error))
    foreseen = all(isinstance(cause, _FORESEEN) for cause in causes)
    if not foreseen:
        traceback.print_exception(error)
    # A parent shows the last line, which in the traceback of a group is only a rule.
    says = [str(cause) if foreseen else f"{type(cause).__name__}: {cause}" for cause in causes]
    print(f"{name}: {'; '.join(dict.fromkeys(says))}", file=sys.stderr)
    return 1


def tell(**facts: Any) -> None:
    """Print a line of JSON for the process that started this one, which reads it by `Child.facts`."""
    try:
        print(json.dumps(facts), flush=True)
    except BrokenPipeError:
        # The parent reads no more. The end of standard input will end this process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ParentRequests:
    """The requests of the parent, one JSON object a line. This process ends with its parent once this is made.

    Iterate over it once, in a `with`; leaving the `with` drops the requests that were not taken.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._sending, self._lines = anyio.create_memory_object_stream[bytes](math.inf)
        sent = self._sending.send_nowait
        leave_with_parent(sys.stdin.fileno(), lambda line: loop.call_soon_threadsafe(sent, line))

    def end(self) -> None:
        """Let the iteration end after the requests that have come."""
        self._sending.close()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async for line in self._lines:
            yield json.loads(line)

    def __enter__(self) -> ParentRequests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sending.close()
        self._lines.close()


def leave_with_parent(pipe: int, heard: Callable[[bytes], object] = lambda line: None) -> None:
    """Make this process receive SIGTERM at the end of a pipe, given as a descriptor, and end it if that does not help.

    A thread reads the pipe, so that this works whatever the event loop is doing, and calls `heard` with each line. The
    thread reads the descriptor and not `sys.stdin`, because a daemon thread must not hold the lock of `sys.stdin` when
    the interpreter ends.
    """

    def watch() -> None:
        rest = b""
        while part := os.read(pipe, 65536):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                # An event loop that has ended takes no more lines, but this thread still has to detect the end of the
                # pipe.
                with contextlib.suppress(RuntimeError):
                    heard(line)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
