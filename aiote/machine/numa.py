"""The NUMA node that host memory is on, as the kernel reports it."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections import Counter
from collections.abc import Callable

__all__ = ["memory_node"]

# move_pages(2) and get_mempolicy(2). The C library has no functions for them; their numbers depend on the machine.
NUMBERS = {"x86_64": (279, 239), "aarch64": (239, 236)}
NODE_OF_ADDRESS = 0x1 | 0x2  # MPOL_F_NODE | MPOL_F_ADDR
SAMPLES = 16
TOP = 1 << 64


def memory_node(address: int, length: int = 1) -> int:
    """Return the NUMA node that most of a sample of the pages of `length` bytes at `address` are on, or -1 if unknown.

    It is unknown for pages that were never touched, and if the kernel or a sandbox refuses the call. At most 16 pages
    are queried, spread over the length. This neither reads nor touches the memory, so any numbers may be given.
    """
    numbers = NUMBERS.get(platform.machine())
    if numbers is None or length < 1 or address <= 0 or address + length > TOP:
        return -1
    count = min(SAMPLES, length)
    nodes = _nodes([address + (length - 1) * i // max(count - 1, 1) for i in range(count)], *numbers)
    seen = Counter(node for node in nodes if node >= 0)
    return seen.most_common(1)[0][0] if seen else -1


def _nodes(addresses: list[int], move_pages: int, get_mempolicy: int) -> list[int]:
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)(*[-1] * count)
    # Without target nodes move_pages only reports. It comes first, because get_mempolicy touches the page: for an
    # untouched page it then reports the node of the zero page, which all processes share.
    if _call(move_pages, 0, count, pages, None, status, 0) == 0:
        return list(status)
    node = ctypes.c_int(-1)
    if _call(get_mempolicy, ctypes.byref(node), None, 0, ctypes.c_void_p(addresses[0]), NODE_OF_ADDRESS) == 0:
        return [node.value]
    return [-1]


def _call(number: int, *arguments: object) -> int:
    """Make a system call and return its result, which is not 0 on failure."""
    try:
        # Integers are passed as long, because syscall(2) takes them so.
        return int(_syscall()(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments))))
    except (OSError, AttributeError):
        return -1


@functools.cache
def _syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return function
