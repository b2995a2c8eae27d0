"""How slow the machine is that the tests run on, and how long they may take."""

import os
import time

SLOWER = 8 if "RDMA_VM" in os.environ else 1
"""The guest with RDMA devices has one processor, and system calls of microseconds."""
LONG = "AIOTE_TEST_LONG" in os.environ
"""`make test-all` asks for soaks and measurements at their full length; else they are as short as still tests."""

COMPUTED, COMPUTED_S = 100_000, 0.002
"""Numbers that are added up, and how long that takes in CPython 3.11 on an undisturbed core."""
TOUCHED, TOUCHED_S = 4 << 20, 0.0015
"""Bytes of new memory that are zeroed, 4 KiB at a fault, and how long that takes there."""


def slowness() -> float:
    """Return how many times longer work takes now than on an undisturbed core, 1 at least.

    It takes a few milliseconds. Virtual machines were seen that computed 7 times slower for hours, and touched new
    memory 15 times slower, of which neither /proc/stat (steal) nor the load tells: only work that is timed does.
    """
    started = time.thread_time()
    sum(range(COMPUTED))
    computed = time.thread_time()
    bytearray(TOUCHED)
    touched = time.thread_time()
    return max(1.0, (computed - started) / COMPUTED_S, (touched - computed) / TOUCHED_S)
