"""Wait without losing a wake-up, and without returning before the NIC has released a buffer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import anyio

from ..rails import WaiterQueue, run, wake
from .loops import EventLoop, Waiter, current_loop

__all__ = [
    "Backoff",
    "Condition",
    "Over",
    "TurnQueue",
    "finish",
    "poll_until",
    "run",
    "run_within",
    "sleep",
    "wait_shielded",
    "wake",
]


POLL_S = 0.001
T = TypeVar("T")


class Over(Protocol):
    """A native operation that ends at some time."""

    @property
    def is_over(self) -> bool: ...

    on_over: Callable[[Any], object] | None


async def finish(loop: EventLoop, item: Over, seconds: float) -> bool:
    """Wait until a cancelled operation is over, even if the wait is cancelled; return False after `seconds`.

    The NIC owns the buffer until the operation is over, so the wait must not be interrupted: `wait_shielded` shields it
    from cancel scopes, and continues it after a plain `Task.cancel`. The caller re-raises the cancellation that led
    here.
    """
    before = item.on_over
    current: list[Waiter] = []

    def wake_waiters(item: Any) -> None:
        if before is not None:
            before(item)
        for waiter in current:
            wake(waiter)

    item.on_over = wake_waiters

    async def wait() -> None:
        current[:] = [loop.waiter()]
        await current[0]

    return await wait_shielded(loop, lambda: item.is_over, wait, seconds)


async def poll_until(loop: EventLoop, condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until a condition holds, even if the wait is cancelled; return False after `seconds`.

    Use this for a condition without a wake-up.
    """
    return await wait_shielded(loop, condition, lambda: anyio.sleep(POLL_S), seconds)


async def wait_shielded(
    loop: EventLoop, condition: Callable[[], bool], wait: Callable[[], Awaitable[None]], seconds: float
) -> bool:
    """Wait until a condition holds, even if the wait is interrupted; return False after `seconds`.

    `wait` must return whenever the condition may have become true. Ctrl-C is raised once the condition holds; it is
    dropped if the time runs out first.
    """
    # It often holds at once. A scope would cost more than the rest of closing a region.
    if condition():
        return True
    scope = anyio.CancelScope(deadline=anyio.current_time() + seconds, shield=True)
    interruption: BaseException | None = None
    try:
        with scope:
            while not condition():
                try:
                    await wait()
                except anyio.get_cancelled_exc_class():
                    if scope.cancel_called:
                        raise
                except (KeyboardInterrupt, SystemExit) as error:
                    # trio raises Ctrl-C in its main task, even if that is shielded.
                    interruption = error
    except anyio.get_cancelled_exc_class():
        # After a plain Task.cancel, anyio also lets the cancellation out that this scope's deadline caused.
        if not scope.cancel_called or loop.name != "asyncio":
            raise
    if interruption is not None and condition():
        raise interruption
    return condition()


async def run_within(seconds: float, function: Callable[[], Awaitable[None]]) -> bool:
    """Run a function for at most `seconds`; return False if the time ran out."""
    with anyio.move_on_after(seconds) as scope:
        await function()
    return not scope.cancelled_caught


sleep = anyio.sleep


class Backoff:
    """The pauses between attempts that fail: from `least` to `most` seconds, twice the last one each time.

    A pause is shortened by chance, by up to a half, so that those who failed together do not try again together.
    """

    __slots__ = ("_least", "_most", "_next")

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most
        self._next = least

    def reset(self) -> None:
        """Begin with the shortest pause again, because an attempt has succeeded."""
        self._next = self._least

    def next(self) -> float:
        """Return how many seconds to pause now."""
        pause, self._next = self._next, min(2 * self._next, self._most)
        return pause * random.uniform(0.5, 1.0)


class Condition(WaiterQueue):
    """A condition that tasks wait for: `wake_all` wakes all tasks that wait now, `wake_one` the first in the queue.

    Without a loop it belongs to the one of its first wait, so it can be made where no loop runs.
    """

    __slots__ = ()

    async def until(self, predicate: Callable[[], object]) -> None:
        """Wait until a predicate holds: it is called now, and after each wake-up. Cancelling loses no wake-up."""
        while not predicate():
            await self.wait()

    async def wait(self) -> None:
        """Sleep until woken. If a woken task is cancelled before it runs, the next task in the queue is woken."""
        if self.loop is None:
            self.loop = current_loop()
        waiter = self.enter()
        try:
            await waiter
        except BaseException:
            if not self.leave(waiter) and waiter.done():
                self.wake_one()
            raise


class _Turn:
    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: Waiter | None = None


class TurnQueue:
    """Tasks that wait for what only one of them can have, such as room in memory: first come, first served.

    Call `wake` when the first task may succeed. A task that leaves the queue wakes the next one.
    """

    __slots__ = ("_loop", "_turns")

    def __init__(self, loop: EventLoop | None = None) -> None:
        self._loop = loop
        self._turns: deque[_Turn] = deque()

    def __len__(self) -> int:
        return len(self._turns)

    async def take(self, attempt: Callable[[], T | None]) -> T:
        """Wait in turn until `attempt` returns another value than None, and return that value.

        `attempt` is called when the task is the first in the queue, and again after each `wake`. An error that it
        raises ends the wait.
        """
        turn = _Turn()
        self._turns.append(turn)
        try:
            while True:
                if self._turns[0] is turn:
                    found = attempt()
                    if found is not None:
                        return found
                turn.waiter = (self._loop or current_loop()).waiter()
                await turn.waiter
        finally:
            self._turns.remove(turn)
            self.wake()

    def wake(self) -> None:
        """Let the first task try again."""
        if self._turns and self._turns[0].waiter is not None:
            wake(self._turns[0].waiter)
