"""The wake-up page, as its owner has it: writable, which nobody else's view of it is."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from aiote_native.system.wakeups import WakeupEvent

SLOTS = 1000
GATES, BUSY = 64 + 4 * SLOTS, 64 + 8 * SLOTS
PAGE = 64 + 12 * SLOTS
"""The epoch with its padding, then what is waited for, the gate and who is busy, for each slot."""


def own_page(wakeup: WakeupEvent) -> memoryview:
    """Return the owner's bytes; the event has to stay open while they are used."""
    inode = str(os.fstat(wakeup.memory_fd).st_ino)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, _offset, _device, number, *_name = line.split()
        if number == inode and rights == "rw-s":
            address = int(where.partition("-")[0], 16)
            return memoryview((ctypes.c_uint8 * PAGE).from_address(address)).cast("B")
    raise AssertionError("the wake-up page is not mapped")
