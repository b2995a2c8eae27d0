"""Reads and writes that a thread waits for without the bridge's event loop.

The thread that calls posts them, and makes progress while it waits (`aiote_native.direct`). The loop does what is rare:
it connects, waits for room, uses leases and memory of GPUs; it cancels, drains, and explains failures.
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
from .thread import closed

if TYPE_CHECKING:
    from .bridge import Bridge
    from .thread import EngineThread

__all__ = ["Move"]

LEFT_S = 0.001
"""How often the loop looks whether a thread has left its transfer."""


class Move:
    """One transfer of a thread. `otherwise` makes the coroutine that does the same on the loop."""

    def __init__(
        self, bridge: Bridge, thread: EngineThread, otherwise: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self.owner = bridge
        self._thread, self._otherwise = thread, otherwise
        self._direct = Direct(thread.core, thread.bells)
        self._cancelled = False

    def run(self, local: Any, remote: Any, *, reads: bool, imm: int | None, timeout: float | None) -> None:
        """Transfer. Raises the transfer's error, TimeoutError, ClosedError, and an interruption once it is over."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self._thread.moves.add(self)
            # Whoever closes the bridge has seen this in `moves`, or is seen here.
            self.owner.require_open()
            if not self._direct.post(Transfer, local, remote, reads, imm) or self._direct.unposted:
                self.owner.call(self._otherwise(), timeout)
                return
            if self._cancelled:
                raise closed()
            while not self._direct.wait(min(LOOK_S, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TimeoutError(f"it was not over within {timeout} s, and was cancelled")
        except BaseException:
            self._drain()
            raise
        finally:
            self._thread.moves.discard(self)
        if not self._direct.went_well:
            self._explain()

    def _drain(self) -> None:
        """Cancel it, and return when no NIC uses its memory any more, however often that is interrupted."""
        transfer = self._direct.request
        over, interruption = transfer is None or self._direct.over, None
        while not over:
            try:
                # A bridge that stops refuses calls, and ends the transfer itself.
                Call(self._thread, None, drained(transfer), firm=True).wait_ended()
                over = self._direct.wait(LOOK_S)
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def _explain(self) -> None:
        """Raise what it failed with, or that the bridge was closed meanwhile."""
        transfer = self._direct.request
        assert isinstance(transfer, Transfer)
        try:
            Call(self._thread, None, outcome(transfer), firm=True).wait()
        except AioteError:
            self.owner.require_open()
            raise

    def cancel(self) -> None:
        """Cancel it because its bridge is being closed; on the loop. Waits for nothing."""
        self._cancelled = True
        if self._direct.posted and isinstance(self._direct.request, Transfer):
            self._direct.request.give_up()

    async def end(self) -> None:
        """Cancel it, and return when its thread has done with it; on the loop."""
        while self in self._thread.moves:
            if self._direct.posted:
                await drained(self._direct.request)
            await asyncio.sleep(LEFT_S)


async def drained(transfer: Any) -> None:
    """Cancel a transfer and return when it is over."""
    transfer.give_up()
    if not transfer.done():
        await transfer.peer.drain(transfer)


async def outcome(transfer: Transfer) -> None:
    """Raise what a transfer failed with."""
    await transfer
