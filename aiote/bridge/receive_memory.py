"""Lend memory to receive into; keep returned memory mapped and registered for the next receiver.

A fresh mapping costs a registration, and a page fault for every page when a NIC or a copy first touches it. So a block
that its borrower has dropped is lent again. It is lent as an array, and returned when Python frees that array. Tensors
and views that share its memory keep the array alive, so their bytes do not change while they exist.

Unused blocks are bounded. If together they exceed the limit, the blocks that were returned first are unmapped; so is
every block that was unused for IDLE_S. The finalizer of a lent array may run in any thread, even in one that holds a
lock of this module. So it takes no lock: it appends to a deque and wakes the bridge's loop.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import aiote

    from .bridge import Bridge

__all__ = ["IDLE_S", "MAX_BLOCKS", "MIN_BYTES", "ReceiveBlock", "ReceiveMemory"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

IDLE_S = 30.0
"""Seconds after which an unused block is unmapped."""
MIN_BYTES = 64 << 10
"""Smaller tensors are not worth a mapping of their own: they have at most 15 pages."""
MAX_BLOCKS = 1024
"""The most unused blocks. Each is a mapping, and Linux allows 65,530 mappings a process by default."""
HUGE_PAGE = 2 << 20


class ReceiveBlock:
    """A mapping of its own, and its registration once a receiver has used it."""

    def __init__(self, nbytes: int) -> None:
        unit = HUGE_PAGE if nbytes >= HUGE_PAGE else mmap.PAGESIZE
        self.nbytes = -(-nbytes // unit) * unit
        mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.nbytes >= HUGE_PAGE:
            # Some kernels refuse, and small pages work as well.
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.memory: Bytes = np.frombuffer(mapping, np.uint8)
        self.registered: aiote.Region | None = None
        self.loans = 0
        self.returned = 0.0

    async def region(self, bridge: Bridge, nbytes: int) -> aiote.Region:
        """Return the first bytes as a region to receive into, on the bridge's loop; the first call registers all."""
        if self.registered is None:
            # Not by the bridge, which keeps what was registered as "local" for itself.
            self.registered = await bridge.engine.register_async(self.memory, "local")
        return self.registered[:nbytes]


class ReceiveMemory:
    """The receive memory of a bridge's user. `limit`: how many unused bytes stay mapped.

    `borrow` may be called in any thread. Lent arrays stay valid after the bridge is closed.
    """

    def __init__(self, bridge: Bridge, limit: int) -> None:
        self.bridge, self._loop, self._limit = bridge, bridge._thread.loop, limit
        self._lock = threading.Lock()
        self._free: OrderedDict[ReceiveBlock, None] = OrderedDict()
        self._returned: deque[tuple[ReceiveBlock, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def kept_bytes(self) -> int:
        """How many unused bytes are mapped."""
        with self._lock:
            self._take_back()
            return sum(block.nbytes for block in self._free)

    def borrow(self, nbytes: int) -> tuple[Bytes, ReceiveBlock]:
        """Return an array of `nbytes`, whose content is undefined, and its block. The array's life is the loan's.

        Raises OSError if the system has no memory.
        """
        with self._lock:
            self._take_back()
            fitting = [block for block in self._free if nbytes <= block.nbytes <= 2 * nbytes]
            block = min(fitting, key=lambda one: one.nbytes) if fitting else ReceiveBlock(nbytes)
            block.loans += 1
            lent = block.memory[:nbytes]
            loan = weakref.finalize(lent, self._give_back, block, block.loans)
            loan.atexit = False
            # Last, because a call that is interrupted earlier leaves the block unused.
            self._free.pop(block, None)
        return lent, block

    def _give_back(self, block: ReceiveBlock, loan: int) -> None:
        self._returned.append((block, loan))
        # The loop may be closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._trim)

    def _take_back(self) -> None:
        """Enter the returned blocks. Runs under the lock."""
        while self._returned:
            block, loan = self._returned.popleft()
            # An interrupted call may return a block late, when another caller has borrowed it.
            if block.loans == loan:
                block.returned = time.monotonic()
                self._free[block] = None
                self._free.move_to_end(block)

    def _trim(self) -> None:
        """End the blocks that are too many or unused for too long; set the timer for the next one. Runs on the loop."""
        now = time.monotonic()
        with self._lock:
            self._take_back()
            # First the blocks that exceed the limit alone, so that they displace no others.
            ended = [block for block in self._free if block.nbytes > self._limit]
            for block in ended:
                del self._free[block]
            kept = sum(block.nbytes for block in self._free)
            while self._free:
                block = next(iter(self._free))
                if kept <= self._limit and len(self._free) <= MAX_BLOCKS and block.returned + IDLE_S > now:
                    break
                del self._free[block]
                kept -= block.nbytes
                ended.append(block)
            first = next(iter(self._free), None)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if first is None else self._loop.call_later(first.returned + IDLE_S - now, self._trim)
        for block in ended:
            if block.registered is not None:
                task = self._loop.create_task(block.registered.aclose())
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
