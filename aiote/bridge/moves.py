"""Read and write from any thread, mostly without the bridge's event loop.

The calling thread posts the transfer and makes progress while it waits (`aiote_native.requests.threaded`). The loop is
needed only in rare cases: to connect, to wait for room, for leases and GPU memory, to cancel and drain a transfer, and
to raise the error of a failed one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import AioteError
from ..rails import Direct
from ..transfers import Transfer
from .calls import Call
from .promise import LOOK_S
from .thread import make_closed_error

if TYPE_CHECKING:
    from .bridge import Bridge
    from .thread import EngineThread

__all__ = ["ThreadTransfer"]

CHECK_S = 0.001
"""Seconds between the loop's checks whether a thread has returned from `ThreadTransfer.run`."""


class ThreadTransfer:
    """One transfer of a thread. `on_loop` returns a coroutine that does the same transfer on the loop."""

    def __init__(self, bridge: Bridge, thread: EngineThread, on_loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.owner = bridge
        self._thread, self._on_loop = thread, on_loop
        self._direct = Direct(thread.core, thread.eventfds)
        self._cancelled = False

    def run(self, local: Any, remote: Any, *, reads: bool, imm: int | None, timeout: float | None) -> None:
        """Run the transfer and wait until it is over.

        Raises the transfer's error, TimeoutError, ClosedError, and the exception of a signal handler; all of them only
        after the transfer is over.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self._thread.transfers.add(self)
            # In this order, so that closing the bridge misses no transfer: it either finds this one in `transfers` and
            # cancels it, or it began earlier, and `require_open` raises.
            self.owner.require_open()
            if not self._direct.post(Transfer, local, remote, reads, imm) or self._direct.unposted:
                self.owner.call(self._on_loop(), timeout)
                return
            if self._cancelled:
                raise make_closed_error()
            while not self._direct.wait(min(LOOK_S, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError(f"the transfer did not end within {timeout} s and was cancelled")
        except BaseException:
            self._drain()
            raise
        finally:
            self._thread.transfers.discard(self)
        if not self._direct.went_well:
            self._raise_error()

    def _drain(self) -> None:
        """Cancel the transfer, and wait until no NIC uses its memory; raise an interruption only after that."""
        transfer = self._direct.request
        over, interruption = transfer is None or self._direct.over, None
        while not over:
            try:
                # If the engine is stopping, it refuses this call and ends the transfer itself.
                Call(self._thread, None, drain_transfer(transfer), uncancellable=True).wait_ended()
                over = self._direct.wait(LOOK_S)
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def _raise_error(self) -> None:
        """Raise the transfer's error, or ClosedError if the bridge was closed meanwhile."""
        transfer = self._direct.request
        assert isinstance(transfer, Transfer)
        try:
            Call(self._thread, None, await_transfer(transfer), uncancellable=True).wait()
        except AioteError:
            self.owner.require_open()
            raise

    def cancel(self) -> None:
        """Cancel the transfer because its bridge is being closed. Runs on the loop and does not wait."""
        self._cancelled = True
        if self._direct.posted and isinstance(self._direct.request, Transfer):
            self._direct.request.give_up()

    async def end(self) -> None:
        """Cancel the transfer, and wait until its thread has returned from `run`. Runs on the loop."""
        while self in self._thread.transfers:
            if self._direct.posted:
                await drain_transfer(self._direct.request)
            await asyncio.sleep(CHECK_S)


async def drain_transfer(transfer: Any) -> None:
    """Cancel a transfer and wait until it is over."""
    transfer.give_up()
    if not transfer.done():
        await transfer.peer.drain(transfer)


async def await_transfer(transfer: Transfer) -> None:
    """Await a transfer on the loop; raises its error."""
    await transfer
