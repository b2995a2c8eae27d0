"""Pages of a region: their indices are copied and checked once, then used by any number of requests.

This module must not know how pages are posted.
"""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from ..rails import PageIndex, PageSet
from .regions import Region, RemoteRegion, as_integer

__all__ = ["Pages"]


class Pages(PageSet):
    """Pages of a region: page i is the `page_bytes` bytes from `offset + indices[i] * stride`.

    `region` is a Region or a RemoteRegion; offsets into a slice count from the start of the slice. `stride` defaults to
    `page_bytes`. The constructor copies and checks the indices, so one Pages object may serve many requests. Raises
    UsageError, which names the first bad page.
    """

    __slots__ = ()

    def __init__(
        self, region: Region | RemoteRegion, indices: Any, page_bytes: int, stride: int | None = None, offset: int = 0
    ) -> None:
        if not isinstance(region, (Region, RemoteRegion)):
            raise UsageError(f"Pages: region must be a Region or a RemoteRegion, got {type(region).__name__}")
        try:
            index = indices if type(indices) is PageIndex else PageIndex(indices)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(
                f"page indices must be integers that fit in 64 bits, got {type(indices).__name__}: {error}"
            ) from error
        self._resolve(region, index, page_bytes, page_bytes if stride is None else stride, offset)

    def _resolve(
        self, region: Region | RemoteRegion, index: PageIndex, page_bytes: Any, stride: Any, offset: Any
    ) -> None:
        length, step, first = (
            as_integer("page_bytes", page_bytes),
            as_integer("stride", stride),
            as_integer("offset", offset),
        )
        given = f"page_bytes={page_bytes}, stride={stride}, offset={offset}"
        if length <= 0 or step < 0 or first < 0:
            raise UsageError(f"{given}: page_bytes must be positive, the others not negative")
        if max(length, step, first) >= 1 << 63:
            raise UsageError(f"{given}: they must fit in 63 bits")
        bad = self.resolve(region, index, length, step, first)
        if bad >= 0:
            begin = first + index[bad] * step
            raise UsageError(
                f"page {bad} (index {index[bad]}) covers bytes {begin} to {begin + length}, "
                f"outside of the region's {region.nbytes}"
            )

    def at(self, offset: int) -> Pages:
        """Return the same pages at another offset, for example in another layer, without copying the indices again.

        Raises UsageError as the constructor does.
        """
        moved = self.moved(offset)
        if moved is None:
            moved = Pages.__new__(Pages)
            moved._resolve(self.region, self.index, self.page_bytes, self.stride, offset)
        return moved

    def __len__(self) -> int:
        return len(self.index)
