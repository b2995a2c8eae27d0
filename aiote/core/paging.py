"""Paged writes as arithmetic: which bytes a list of page indices names, and which source page goes where.

A `PageList` describes pages of one size inside one region. With `offset`, `stride` and `page_bytes` in bytes, page
number i of the list is the half-open byte range

    start(i) = offset + indices[i] * stride
    page(i)  = [start(i), start(i) + page_bytes)

relative to the region's first byte. A KV cache of layers x pages is one region: `stride` is the distance between two
pages of the same layer, `offset` the start of the layer (or of a run of heads within each page), `indices` the numbers
that the allocator handed out.

The indices may be in any order and may repeat, and with a `stride` smaller than `page_bytes` (0 included) neighbouring
pages overlap. That is legal and useful in a *source*: windows over a sequence, one page sent to many places. In a
*target*, bytes that two pages share end up as either page wrote them, because writes have no promised order.

This module knows numbers only: no region, no memory, no peer. It is the reference for the native expansion, which works
in 64 bits. The native code must not compute `start(i) + page_bytes` before it knows that the sum is small; it can test
instead

    page_bytes <= length  and  offset <= length - page_bytes  and
    (stride == 0  or  indices[i] <= (length - page_bytes - offset) // stride)

which has no sum and no product, and is true exactly if `check(length)` raises no error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from aiote.errors import UsageError

__all__ = ["PageList", "integer", "pair_pages"]


class PageList:
    """A list of pages of one region.

    `indices` are page numbers (any iterable of integers, NumPy's included), `page_bytes`, `stride` and `offset` are in
    bytes. The constructor checks no page against a region; `check` does. An empty list is legal and names no byte.
    Raises UsageError for a negative index, stride or offset, and for pages of less than one byte.
    """

    __slots__ = ("indices", "offset", "page_bytes", "stride")

    def __init__(self, indices: Iterable[int], page_bytes: int, stride: int, offset: int) -> None:
        self.page_bytes = integer("page_bytes", page_bytes, 1)
        self.stride = integer("stride", stride, 0)
        self.offset = integer("offset", offset, 0)
        self.indices = tuple(
            integer(f"the index of page {position}", index, 0) for position, index in enumerate(indices)
        )

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"<PageList of {len(self)} x {self.page_bytes} bytes, stride {self.stride}, offset {self.offset}>"

    def start(self, position: int) -> int:
        """Return where the page at a position of the list begins, in bytes from the region's start."""
        return self.offset + self.indices[position] * self.stride

    def ranges(self) -> list[tuple[int, int]]:
        """Return (start, length) in bytes for every page, in the order of the list."""
        return [(self.start(position), self.page_bytes) for position in range(len(self))]

    def check(self, region_length: int) -> None:
        """Raise UsageError, which names the first page that does not lie within a region of `region_length` bytes."""
        for position, (start, length) in enumerate(self.ranges()):
            if start + length > region_length:
                raise UsageError(
                    f"page {position} (index {self.indices[position]}) covers bytes {start} to {start + length}, "
                    f"but the region has {region_length}: check the index, page_bytes {self.page_bytes}, "
                    f"stride {self.stride} and offset {self.offset}"
                )


def pair_pages(src: PageList, dst: PageList) -> list[tuple[int, int, int]]:
    """Return (source offset, target offset, length) in bytes for every page, first with first and so on.

    Raises UsageError if the two lists differ in the number or in the size of their pages; strides may differ.
    """
    if len(src) != len(dst):
        raise UsageError(
            f"{len(src)} source pages for {len(dst)} target pages: give one target page for each source page"
        )
    if src.page_bytes != dst.page_bytes:
        raise UsageError(
            f"source pages of {src.page_bytes} bytes for target pages of {dst.page_bytes}: "
            "page_bytes must be the same on both sides, only strides may differ"
        )
    return [(src.start(position), dst.start(position), src.page_bytes) for position in range(len(src))]


def integer(name: str, value: int, least: int) -> int:
    """Return a value as an int; raise UsageError, which names it, unless it is an integer of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected an integer") from None
    if number < least:
        raise UsageError(f"{name} is {number}, expected at least {least}")
    return number
