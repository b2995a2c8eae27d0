"""What a source rank needs of staging memory for one task, and whether a limit allows it.

A task's staging memory begins with what is put together, then comes what that is converted to, and the scales. Behind
them are counted a conversion's temporary arrays and the offsets of rows; at the end lands what is read of other ranks,
where there is room for it. Tasks that take more than a share of the limit are halved, down to single elements or
quantization blocks; what the largest of these take is the least limit there can be.
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

__all__ = ["LEAST", "Fetch", "Sizes", "check_limit", "most_rows", "small"]

LEAST = 4096
"""The smallest limit: what single elements take, with room to spare."""
SHARE = 4
"""A task takes no more than the limit / SHARE where it can be halved, so that several are under way."""
MOST_ROWS = 1 << 16
"""So many rows at a time keep a NIC busy; their offsets take 1 MiB."""
MOST_BETWEEN = 4
"""Of rows elsewhere all that lies between them is read, too, where it is no more than so many times as much."""


def most_rows(limit: int) -> int:
    """Return how many rows are written at a time: their offsets take a sixteenth of the limit at most."""
    return max(1, min(MOST_ROWS, limit // (16 * ROW_BYTES)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class Fetch:
    """Rows of another rank's part. Several that lie near each other may be read at once, with what is between them."""

    def __init__(self, read: Read, itemsize: int) -> None:
        self.rank, self.tensor, self.copy, self.itemsize = read.rank, read.copy.source, read.copy, itemsize
        last = sum((n - 1) * stride for n, stride in zip(read.copy.shape, read.copy.source_strides, strict=True))
        self.first = read.copy.source_offset * itemsize
        self.last = self.first + (last + 1) * itemsize
        self.nbytes = read.copy.elements * itemsize
        near = runs_of(read.copy) > 1 and self.last - self.first <= MOST_BETWEEN * self.nbytes
        self.landing = _aligned(self.last - self.first) if near else 0


class Sizes:
    """The parts of a task's staging memory, in bytes."""

    def __init__(self, task: Task, targets: Layout, rows: int) -> None:
        self.shape = tuple(map(int.__sub__, task.stop, task.start))
        self.elements = math.prod(self.shape)
        self.to = targets.tensors[task.target].dtype
        self.scale = targets.tensors[task.scale].dtype if task.scale else ""
        changed = task.block is not None or self.to != task.dtype
        self.staged = _aligned(self.elements * ITEMSIZE[task.dtype])
        self.converted = _aligned(self.elements * ITEMSIZE[self.to]) if changed else 0
        self.scales = 0
        if task.block:
            high, wide = (-(-size // block) for size, block in zip(self.shape[-2:], task.block, strict=True))
            self.scales = math.prod(self.shape[:-2]) * high * wide * ITEMSIZE[self.scale]
        temporary = temporary_bytes(self.shape, task.block) if changed else 0
        self.all = self.staged + self.converted + _aligned(self.scales + temporary + rows * ROW_BYTES)

    def land(self, fetches: Iterable[Fetch], limit: int) -> None:
        """Make room for what is read of other ranks; rows for which there is none are read one by one."""
        for fetch in fetches:
            if self.all + fetch.landing > limit:
                fetch.landing = 0
            self.all += fetch.landing


def _straight_bytes(task: Task, itemsize: int, most: int) -> int:
    """Return what a task takes that writes straight out of the weights: rows that are packed, and offsets."""
    needed = 0
    for write in task.writes:
        both = packed(write.copy, itemsize)
        rows = runs_of(both[1] if both else write.copy)
        offsets = _aligned(min(rows, most) * ROW_BYTES) if rows > 1 else 0
        needed = max(needed, offsets + (_aligned(write.copy.elements * itemsize) if both else 0))
    return needed


def small(task: Task, plan: UpdatePlan, limit: int) -> bool:
    """Tell whether a task takes no more than its share of a limit."""
    most = most_rows(limit)
    if task.kind == "direct":
        return _straight_bytes(task, ITEMSIZE[task.dtype], most) <= limit // SHARE
    return Sizes(task, plan.targets, most).all <= limit // SHARE


def check_limit(plan: UpdatePlan, rank: int, limit: int) -> None:
    """Raise UsageError, which names the tensor, where a rank's smallest tasks take more than a limit."""
    seen: set[object] = set()
    for number in plan.order(rank):
        entry = plan.entries[plan.units[number].entry]
        kind = (entry.dtype, plan.targets.tensors[entry.target].dtype, entry.size)
        if entry.block is None or kind in seen:
            continue
        seen.add(kind)
        none = tuple(0 for _ in entry.size)
        least = Task(entry.target, none, entry.size, "make", entry.dtype, entry.scale, entry.block, (), ())
        needed = Sizes(least, plan.targets, most_rows(limit)).all
        if needed > limit:
            raise aiote.UsageError(
                f"{entry.target}: a block of {entry.block} takes {needed} bytes of staging memory, "
                f"and source rank {rank} has staging_bytes={limit}"
            )
