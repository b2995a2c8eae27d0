"""Carry out a plan's copies: as transfers of an engine, or within this process.

A transfer copies rows of bytes, by a list of offsets for each side. A copy of many short rows is carried out in parts,
so that the lists stay short. If an update's tensors are split along their first dimension, most copies are a single
row. These go out many at a time, in a `RowBatch` for each target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiote

from .copies import Copy, merged
from .placement import dense
from .rank_memory import Bytes
from .remote import RemoteTensors

__all__ = [
    "ROW_BYTES",
    "RowBatch",
    "Rows",
    "Straight",
    "move",
    "packed",
    "parts_of",
    "rows_of",
    "runs_of",
    "write_rows",
]

PACK_BYTES = 4096
"""Rows of fewer bytes than this are packed before they are written, if that makes them longer at the target."""
ROW_BYTES = 16
"""The bytes of one row's offsets."""
BATCH_BYTES = 4 << 20
"""A batch is written when it has this many bytes, which a core copies in a millisecond."""
BATCH_ROWS = 256
"""A batch is also written when it has this many rows, which take 0.1 ms to post."""

Offsets = NDArray[np.int64]


class Straight(NamedTuple):
    """A row of the weights that goes to the same place on several target ranks. No other step is cheaper to begin."""

    ranks: tuple[int, ...]
    tensor: str
    first: int
    source: aiote.Region


class RowBatch:
    """Rows that wait to be written to one target."""

    def __init__(self, remote: RemoteTensors) -> None:
        self._remote = remote
        self._rows: list[tuple[aiote.Region, aiote.RemoteRegion]] = []
        self._group: aiote.PeerGroup | None = None
        self.nbytes = 0

    def add(self, row: Straight) -> bool:
        """Add a row; return whether to write the batch now. Raises UsageError for a wrong description of the memory."""
        nbytes = row.source.nbytes
        self._rows.append((row.source, self._remote.part(row.tensor, row.first, nbytes)))
        self.nbytes += nbytes
        return self.nbytes >= BATCH_BYTES or len(self._rows) >= BATCH_ROWS

    async def write(self, engine: aiote.Engine) -> int:
        """Write the rows that wait now, and return their bytes. Raises PeerError, TransferError."""
        rows, nbytes = self._rows, self.nbytes
        self._rows, self.nbytes = [], 0
        if len(rows) == 1:
            await engine.write(*rows[0])
        elif rows:
            self._group = self._group or await engine.peer_group([self._remote.owner])
            await engine.scatter(self._group, itertools.starmap(aiote.ScatterTarget, rows))
        return nbytes


class Rows(NamedTuple):
    """Rows of `nbytes` bytes from each offset in `source` to the offset in `target` at the same place.

    Offsets are in bytes, from the beginning of either tensor's part.
    """

    nbytes: int
    source: Offsets
    target: Offsets

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return self.nbytes * len(self.source)


def runs_of(copy: Copy) -> int:
    """Return how many rows a copy consists of."""
    return copy.elements // copy.run


def rows_of(copy: Copy, itemsize: int) -> Rows:
    """Return the rows of a copy: the longest runs that are contiguous on both sides, in the order of the target."""
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
    source *= itemsize
    target *= itemsize
    return Rows(run * itemsize, source, target)


def parts_of(copy: Copy, most: int) -> Iterator[Copy]:
    """Yield a copy in parts of at most `most` rows each, in the order of the target."""
    runs = runs_of(copy)
    if runs <= most:
        yield copy
        return
    extent, here, there = copy.shape[0], copy.source_strides[0], copy.target_strides[0]
    step = max(1, most * extent // runs)
    for first in range(0, extent, step):
        count = min(step, extent - first)
        part = copy._replace(
            source_offset=copy.source_offset + first * here, target_offset=copy.target_offset + first * there
        )
        if count == 1 and len(copy.shape) > 1:
            part = part._replace(
                shape=copy.shape[1:], source_strides=copy.source_strides[1:], target_strides=copy.target_strides[1:]
            )
        else:
            part = part._replace(shape=(count, *copy.shape[1:]))
        yield from parts_of(part, most)


def packed(copy: Copy, itemsize: int) -> tuple[Copy, Copy] | None:
    """Return a copy as two: one into a dense array in the order of the target, and one out of the dense array.

    Returns None if the copy is a single row, if its rows are long enough, or if the second copy's rows would not be
    longer.
    """
    if copy.run * itemsize >= PACK_BYTES or runs_of(copy) == 1:
        return None
    strides = dense(copy.shape)
    offsets = 0, copy.target_offset
    out = merged(copy.source, copy.target, copy.shape, offsets, strides, copy.target_strides)
    return (copy._replace(target_offset=0, target_strides=strides), out) if out.run > copy.run else None


def move(copy: Copy, itemsize: int, source: Bytes, target: Bytes) -> None:
    """Carry out a copy within this process. `source` and `target` begin where the copy's offsets count from."""
    kind = np.dtype(f"u{itemsize}")
    sides = (
        (target, copy.target_offset, copy.target_strides),
        (source, copy.source_offset, copy.source_strides),
    )
    there, here = (
        np.ndarray(copy.shape, kind, memory.data, offset * itemsize, [stride * itemsize for stride in strides])
        for memory, offset, strides in sides
    )
    there[...] = here


async def write_rows(engine: aiote.Engine, rows: Rows, source: aiote.Region, target: aiote.RemoteRegion) -> None:
    """Write rows. `source` and `target` begin where the rows' offsets count from. Raises PeerError, TransferError."""
    if len(rows.source) == 1:
        here, there = int(rows.source[0]), int(rows.target[0])
        await engine.write(source[here : here + rows.nbytes], target[there : there + rows.nbytes])
    else:
        pages = aiote.Pages(source, rows.source, rows.nbytes, 1), aiote.Pages(target, rows.target, rows.nbytes, 1)
        await engine.write_pages(*pages)
