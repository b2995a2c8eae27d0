"""Waiting that neither loses a wake-up nor lets go too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio

from ..rails import run, wake
from .loops import EventLoop, Waiter

__all__ = ["Over", "Signal", "finish", "insist", "poll_until", "run", "sleep", "wake", "within"]


POLL_S = 0.001


class Over(Protocol):
    """Something native that is over some day."""

    @property
    def is_over(self) -> bool: ...

    on_over: Callable[[Any], object] | None


async def finish(loop: EventLoop, item: Over, patience: float) -> bool:
    """Wait until a cancelled thing is over, whatever cancels us meanwhile; False when `patience` seconds did not
    suffice.

    The NIC owns the buffer until then, so this is not to be interrupted: the scope shields from cancel scopes,
    the loop from bare `Task.cancel` calls (the cancellation that brought us here is raised again by the caller).
    """
    before = item.on_over
    current: list[Waiter] = []

    def over(item: Any) -> None:
        if before is not None:
            before(item)
        for waiter in current:
            wake(waiter)

    item.on_over = over

    async def wait() -> None:
        current[:] = [loop.waiter()]
        await current[0]

    return await insist(loop, lambda: item.is_over, wait, patience)


async def poll_until(loop: EventLoop, condition: Callable[[], bool], patience: float) -> bool:
    """Wait until something holds that nothing announces, whatever cancels us meanwhile; False after so many seconds."""
    return await insist(loop, condition, lambda: anyio.sleep(POLL_S), patience)


async def insist(
    loop: EventLoop, condition: Callable[[], bool], wait: Callable[[], Awaitable[None]], patience: float
) -> bool:
    """Wait until something holds, whatever interrupts us meanwhile; False after so many seconds. `wait` returns
    whenever it may have come true. Ctrl-C is raised when it holds.
    """
    scope = anyio.CancelScope(deadline=anyio.current_time() + patience, shield=True)
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
                    # trio raises Ctrl-C in its main task, shielded or not.
                    interruption = error
    except anyio.get_cancelled_exc_class():
        # Where a bare Task.cancel came meanwhile, anyio lets the scope's own cancellation through.
        if not scope.cancel_called or loop.name != "asyncio":
            raise
    if interruption is not None and condition():
        raise interruption
    return condition()


async def within(seconds: float, function: Callable[[], Awaitable[None]]) -> bool:
    """Run a function for at most so many seconds; False when time ran out."""
    with anyio.move_on_after(seconds) as scope:
        await function()
    return not scope.cancelled_caught


sleep = anyio.sleep


class Signal:
    """A condition that tasks wait for: `set` wakes everyone that waits now, `wake_one` the first in the queue."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._waiters: deque[Waiter] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self) -> None:
        """Sleep until woken; a wake-up that meets a cancellation goes on to the next in the queue."""
        waiter = self._loop.waiter()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done():
                self.wake_one()
            raise

    def wake_one(self, wake: Callable[[Waiter], object] = wake) -> None:
        """Wake the one that has waited longest, if any."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                wake(waiter)
                return

    def set(self, wake: Callable[[Waiter], object] = wake) -> None:
        """Wake all."""
        for _ in range(len(self._waiters)):
            self.wake_one(wake)
