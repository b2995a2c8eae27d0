"""The staging memory that a source rank needs for one task, and whether it is within a limit.

A task's staging memory holds, in this order: the staged elements, the converted elements, the scales, room for the
temporary arrays of a conversion and for the offsets of rows, and, if there is room, the bytes read from other ranks.
Tasks that need more than a share of the limit are halved, down to single elements or quantization blocks; the limit
must allow the largest of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import aiote

from .convert import temporary_bytes
from .dtypes import ITEMSIZE
from .layout import Layout
from .plan import UpdatePlan
from .tasks import Read, Task
from .writes import ROW_BYTES, packed, runs_of

__all__ = ["LEAST", "StagedRead", "StagingSizes", "check_limit", "most_rows", "small"]

LEAST = 4096
"""The smallest limit, in bytes: more than a task of a single element takes."""
SHARE = 4
"""A task that can be halved takes at most limit / SHARE, so that several tasks run at the same time."""
MOST_ROWS = 1 << 16
"""The most rows in one write. This many keep a NIC busy, and their offsets take 1 MiB."""
MOST_BETWEEN = 4
"""Rows of another rank are read at once, together with the bytes between them, if this reads at most this many times
the rows' bytes."""


def most_rows(limit: int) -> int:
    """Return how many rows to write at a time, so that their offsets take at most a sixteenth of the limit."""
    return max(1, min(MOST_ROWS, limit // (16 * ROW_BYTES)))


def _align_up(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class StagedRead:
    """Rows of another rank's part. Rows that lie near each other may be read at once, with the bytes between them.

    `landing` is the number of staging bytes for this; if it is 0, the rows are read one by one.
    """

    def __init__(self, read: Read, itemsize: int) -> None:
        self.rank, self.tensor, self.copy, self.itemsize = read.rank, read.copy.source, read.copy, itemsize
        last = sum((n - 1) * stride for n, stride in zip(read.copy.shape, read.copy.source_strides, strict=True))
        self.first = read.copy.source_offset * itemsize
        self.last = self.first + (last + 1) * itemsize
        self.nbytes = read.copy.elements * itemsize
        near = runs_of(read.copy) > 1 and self.last - self.first <= MOST_BETWEEN * self.nbytes
        self.landing = _align_up(self.last - self.first) if near else 0


class StagingSizes:
    """The parts of a task's staging memory, in bytes."""

    def __init__(self, task: Task, targets: Layout, rows: int) -> None:
        self.shape = tuple(map(int.__sub__, task.stop, task.start))
        self.elements = math.prod(self.shape)
        self.to = targets.tensors[task.target].dtype
        self.scale = targets.tensors[task.scale].dtype if task.scale else ""
        changed = task.block is not None or self.to != task.dtype
        self.staged = _align_up(self.elements * ITEMSIZE[task.dtype])
        self.converted = _align_up(self.elements * ITEMSIZE[self.to]) if changed else 0
        self.scales = 0
        if task.block:
            high, wide = (-(-size // block) for size, block in zip(self.shape[-2:], task.block, strict=True))
            self.scales = math.prod(self.shape[:-2]) * high * wide * ITEMSIZE[self.scale]
        temporary = temporary_bytes(self.shape, task.block) if changed else 0
        self.all = self.staged + self.converted + _align_up(self.scales + temporary + rows * ROW_BYTES)

    def land(self, fetches: Iterable[StagedRead], limit: int) -> None:
        """Make room for the bytes that are read from other ranks. Rows without room are read one by one."""
        for fetch in fetches:
            if self.all + fetch.landing > limit:
                fetch.landing = 0
            self.all += fetch.landing


def _straight_bytes(task: Task, itemsize: int, most: int) -> int:
    """Return the staging bytes of a task that writes straight out of the weights: packed rows, and rows' offsets."""
    needed = 0
    for write in task.writes:
        both = packed(write.copy, itemsize)
        rows = runs_of(both[1] if both else write.copy)
        offsets = _align_up(min(rows, most) * ROW_BYTES) if rows > 1 else 0
        needed = max(needed, offsets + (_align_up(write.copy.elements * itemsize) if both else 0))
    return needed


def small(task: Task, plan: UpdatePlan, limit: int) -> bool:
    """Return whether a task takes at most its share of a limit."""
    most = most_rows(limit)
    if task.kind == "direct":
        return _straight_bytes(task, ITEMSIZE[task.dtype], most) <= limit // SHARE
    return StagingSizes(task, plan.targets, most).all <= limit // SHARE


def check_limit(plan: UpdatePlan, rank: int, limit: int) -> None:
    """Raise UsageError, which names the tensor, if one of a rank's smallest tasks takes more than a limit."""
    seen: set[object] = set()
    for number in plan.order(rank):
        entry = plan.entries[plan.units[number].entry]
        kind = (entry.dtype, plan.targets.tensors[entry.target].dtype, entry.size)
        if entry.block is None or kind in seen:
            continue
        seen.add(kind)
        none = tuple(0 for _ in entry.size)
        least = Task(entry.target, none, entry.size, "make", entry.dtype, entry.scale, entry.block, (), ())
        needed = StagingSizes(least, plan.targets, most_rows(limit)).all
        if needed > limit:
            raise aiote.UsageError(
                f"{entry.target}: a block of {entry.block} takes {needed} bytes of staging memory, "
                f"and source rank {rank} has staging_bytes={limit}"
            )
