"""Which part of a range of memory is whose: places of several lengths, taken and given back in any order."""

from __future__ import annotations

import bisect

__all__ = ["ALIGNMENT", "Allocator", "aligned"]

ALIGNMENT = 64
"""A cache line, which is also the widest vector."""


def aligned(nbytes: int) -> int:
    """Return how many bytes a place for `nbytes` bytes takes."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


class Allocator:
    """Allocates places in one contiguous range of memory, first fit; all places are aligned to ALIGNMENT bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._starts = [0]
        self._lengths = [nbytes]
        self._used = True

    def take(self, nbytes: int) -> int | None:
        """Take a place for `nbytes` bytes and return its offset; None if there is none."""
        need = aligned(nbytes)
        self._used = True
        for index, length in enumerate(self._lengths):
            if length >= need:
                start = self._starts[index]
                if length == need:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index], self._lengths[index] = start + need, length - need
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a taken place back."""
        index = bisect.bisect_left(self._starts, offset)
        self._starts.insert(index, offset)
        self._lengths.insert(index, aligned(nbytes))
        # Join the place with its free neighbours.
        for left in (index, index - 1):
            if 0 <= left < len(self._starts) - 1 and self._end(left) == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]

    def idle(self) -> bool:
        """Tell whether all memory is free now and was free at all times since the last call of this method."""
        used, self._used = self._used, False
        return not used and self.free

    @property
    def free(self) -> bool:
        """Whether no place is taken."""
        return self._lengths == [self.nbytes]

    def _end(self, index: int) -> int:
        return self._starts[index] + self._lengths[index]
