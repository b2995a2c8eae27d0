"""The life of a process that serves: what ends it, and what it says to whoever started it.

A server ends in one of two ways. SIGTERM drains it: it takes no more, finishes what it has, and ends with status 0.
SIGINT, or a second SIGTERM, ends it at once with status 130; the engine still sees to it that no NIC writes afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio

from aiote.demo.faults import DemoError, leaves
from aiote.errors import AioteError

__all__ = ["Orders", "explain", "first_of", "leave_with_parent", "live", "tell"]

Step = Callable[[], Awaitable[object]]

_AT_ONCE_S = 1.0
"""What a server that is to end at once may take for that."""
_GRACE_S = 5.0
"""What a server whose parent is gone may take to drain."""
_FORESEEN = (AioteError, DemoError, OSError)


class Orders:
    """What a server was told: to `drain`, and perhaps to end `at_once`, with which it is told to drain as well."""

    def __init__(self) -> None:
        self.drain = anyio.Event()
        self.at_once = anyio.Event()

    def hear(self, number: int) -> None:
        """Take a signal."""
        if number == signal.SIGINT or self.drain.is_set():
            self.at_once.set()
        self.drain.set()

    async def unhurried(self, *steps: Step) -> None:
        """Take steps, one after another, until all are taken or there is no time for it."""
        await first_of(self.at_once.wait, partial(_in_order, steps))

    async def while_wanted(self, *steps: Step) -> bool:
        """Take steps, one after another; False where it was told to drain before all were taken."""
        await first_of(self.drain.wait, partial(_in_order, steps))
        return not self.drain.is_set()


async def _in_order(steps: Sequence[Step]) -> None:
    for step in steps:
        await step()


async def first_of(*waits: Step) -> None:
    """Start all and return when one of them is over, with the others cancelled."""
    async with anyio.create_task_group() as group:

        async def run(wait: Step) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(run, wait)


def live(name: str, main: Callable[[Orders], Awaitable[None]]) -> int:
    """Run a server that ends as it is told, and return its exit status; an error is printed, with status 1."""
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
                    orders.hear(number)

            async def insist() -> None:
                # Not cancelled at first: so a registry still hears that this one leaves.
                await orders.at_once.wait()
                await anyio.sleep(_AT_ONCE_S)
                group.cancel_scope.cancel()

            group.start_soon(listen)
            group.start_soon(insist)
            await main(orders)
            group.cancel_scope.cancel()
    return 130 if orders.at_once.is_set() else 0


def explain(name: str, error: BaseException) -> int:
    """Write what ended this process to standard error: a line, after a traceback for what is not foreseen; return 1."""
    causes = list(leaves(error))
    foreseen = all(isinstance(cause, _FORESEEN) for cause in causes)
    if not foreseen:
        traceback.print_exception(error)
    # A parent shows the last line, and that of a group's traceback is a rule.
    says = [str(cause) if foreseen else f"{type(cause).__name__}: {cause}" for cause in causes]
    print(f"{name}: {'; '.join(dict.fromkeys(says))}", file=sys.stderr)
    return 1


def tell(**facts: Any) -> None:
    """Print a line of JSON for whoever started this process: `Child.facts` there."""
    try:
        print(json.dumps(facts), flush=True)
    except BrokenPipeError:
        # Nobody reads any more; the end of standard input says the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave_with_parent(pipe: int, heard: Callable[[bytes], object] = lambda line: None) -> None:
    """Make this process get SIGTERM at the end of a pipe, given as a descriptor, and end it where that does not help.

    A thread of its own reads the pipe, so that it works whatever the event loop is doing, and calls `heard` with each
    line. It reads the descriptor and not `sys.stdin`, whose lock a daemon thread must not hold when the interpreter
    ends.
    """

    def watch() -> None:
        rest = b""
        while part := os.read(pipe, 65536):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                # An event loop that has ended hears nothing any more, and this thread has still to see the end.
                with contextlib.suppress(RuntimeError):
                    heard(line)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
