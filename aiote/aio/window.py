"""The transfers that one owner has in flight: room for one more, the failures, cancellation and draining."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import anyio

from ..errors import AioteError
from ..rails import Flight
from .waiting import Condition

__all__ = ["TransferWindow"]


class _Followed(Awaitable[Any], Protocol):
    """A transfer, as `aiote.transfers` implements it."""

    def join(self, flight: Flight) -> None: ...
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def raise_failure(self) -> None: ...
    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...


T = TypeVar("T", bound=_Followed)


class TransferWindow(Generic[T]):
    """The transfers of one owner in flight, of which `limit` are allowed at a time.

    A native `Flight` follows them, so a transfer that succeeds costs neither a task nor a call into Python. `changed`
    is woken when a transfer has failed, and when none is in flight any more.
    """

    def __init__(self, changed: Condition, limit: int = sys.maxsize) -> None:
        self.changed = changed
        self._limit = limit
        self._flight = Flight(self._record_change)
        self._failed: deque[T] = deque()

    def _record_change(self, failed: T | None) -> None:
        if failed is not None:
            self._failed.append(failed)
        self.changed.wake_all()

    def __len__(self) -> int:
        return len(self._flight)

    def add(self, transfer: T) -> None:
        """Follow a transfer that was submitted. It may be over already."""
        transfer.join(self._flight)

    def raise_failure(self) -> None:
        """Raise the error of the first failed transfer that was not reported yet."""
        while self._failed:
            self._failed.popleft().raise_failure()

    async def next_failure(self) -> T | None:
        """Wait for the next transfer that fails, and return it; None once no transfer is in flight."""
        await self.changed.until(lambda: self._failed or not self._flight)
        return self._failed.popleft() if self._failed else None

    @property
    def has_room(self) -> bool:
        """Whether one more transfer is within the limit."""
        return len(self._flight) < self._limit

    async def room(self) -> None:
        """Wait until one more transfer is within the limit. Cancelling the wait cancels no transfer."""
        while not self.has_room:
            await _wait_over([next(iter(self._flight))])

    async def wait_over(self) -> None:
        """Wait until the transfers in flight now are over, successful or not. Cancelling it cancels no transfer."""
        await _wait_over(list(self._flight))

    def cancel(self) -> None:
        """Cancel the transfers in flight. This returns before they are over."""
        for transfer in self._flight:
            transfer.cancel()

    async def drain(self) -> None:
        """Cancel the transfers in flight, wait until all are over, and forget their failures.

        A transfer that does not leave the NIC within `drain_timeout` costs the connection. Cancelling the wait loses
        nothing.
        """
        self.cancel()
        for transfer in self._flight:
            # An interrupted await drains within the engine's drain_timeout; a plain one has no limit.
            with anyio.CancelScope() as draining:
                draining.cancel()
                try:
                    await transfer
                except AioteError:
                    continue  # the owner has ended already; the reason does not matter here
        self._failed.clear()


async def _wait_over(transfers: Sequence[_Followed]) -> None:
    changed = Condition()
    for transfer in transfers:
        transfer.add_done_callback(lambda _: changed.wake_all())
    await changed.until(lambda: all(transfer.done() for transfer in transfers))
