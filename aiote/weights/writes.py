"""A plan's copies as transfers of an engine: rows of bytes from here to there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiote

from .copies import Copy
from .rank_memory import Bytes

__all__ = ["Rows", "copy_rows", "packed", "rows_of", "write_rows"]

PACK_BYTES = 4096
"""Rows shorter than this are packed before they go out where that makes them longer at the target."""

Offsets = NDArray[np.int64]


class Rows(NamedTuple):
    """`nbytes` from each of `source` to each of `target`, byte offsets from the beginning of either tensor's part."""

    nbytes: int
    source: Offsets
    target: Offsets

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return self.nbytes * len(self.source)


def rows_of(copy: Copy, itemsize: int) -> Rows:
    """Return the rows of a copy: the longest runs that lie together on both sides, in the order of the target."""
    shape, here, there = copy.shape, copy.source_strides, copy.target_strides
    run = copy.run
    if run > 1:
        shape, here, there = shape[:-1], here[:-1], there[:-1]
    source = np.array([copy.source_offset], np.int64)
    target = np.array([copy.target_offset], np.int64)
    for extent, ours, theirs in zip(shape, here, there, strict=True):
        steps = np.arange(extent, dtype=np.int64)
        source = (source[:, None] + steps * ours).reshape(-1)
        target = (target[:, None] + steps * theirs).reshape(-1)
    return Rows(run * itemsize, source * itemsize, target * itemsize)


def packed(rows: Rows) -> Rows | None:
    """Return the rows as they are once packed in the order of the target; None where that makes none of them longer."""
    if rows.nbytes >= PACK_BYTES or len(rows.source) < 2:
        return None
    starts = np.flatnonzero(np.diff(rows.target) != rows.nbytes) + 1
    if len(starts) + 1 == len(rows.target):
        return None
    lengths = np.diff(np.concatenate(([0], starts, [len(rows.target)])))
    size = int(np.gcd.reduce(lengths)) * rows.nbytes
    first = np.arange(0, rows.total, size, dtype=np.int64)
    return Rows(size, first, rows.target[first // rows.nbytes])


def copy_rows(rows: Rows, source: Bytes, target: Bytes) -> None:
    """Copy rows within this process."""
    if len(rows.source) == 1:
        start, end = int(rows.source[0]), int(rows.target[0])
        target[end : end + rows.nbytes] = source[start : start + rows.nbytes]
        return
    for width in (8, 4, 2, 1):
        if rows.nbytes % width == 0 and not (rows.source % width).any() and not (rows.target % width).any():
            break
    # Of numbers as wide as can be; a row's are next to each other.
    wide = np.dtype(f"u{width}")
    usable = [view[: view.nbytes // width * width].view(wide) for view in (source, target)]
    step = np.arange(rows.nbytes // width, dtype=np.int64)
    many = max(1, (1 << 20) // rows.nbytes)
    for first in range(0, len(rows.source), many):
        here, there = (offsets[first : first + many, None] // width + step for offsets in (rows.source, rows.target))
        usable[1][there] = usable[0][here]


async def write_rows(engine: aiote.Engine, rows: Rows, source: aiote.Region, target: aiote.RemoteRegion) -> None:
    """Write rows; `source` and `target` begin where their offsets count from. Raises PeerError, TransferError."""
    if len(rows.source) == 1:
        here, there = int(rows.source[0]), int(rows.target[0])
        await engine.write(source[here : here + rows.nbytes], target[there : there + rows.nbytes])
    else:
        pages = aiote.Pages(source, rows.source, rows.nbytes, 1), aiote.Pages(target, rows.target, rows.nbytes, 1)
        await engine.write_pages(*pages)
