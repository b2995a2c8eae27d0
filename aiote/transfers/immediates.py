"""Ownership of an engine's immediates: which values are granted, and to whom.

The lower half of the 2**28 values is the user's. The engine that counts immediates grants the upper half: single values
to `Engine.counter()`, consecutive values in blocks. No other part of the library takes a value there, so no two owners
share a value.

Grants proceed through the upper half and begin again at its end, so a freed value is granted again only after all
others. By then a write to its last owner has ended long ago. A block begins up to `GAP` values after the last grant, at
random, so a peer that was told one block cannot tell where the next begins. A block that has named its sources counts
only the writes of these sources.

This module must not know how immediates arrive.
"""

from __future__ import annotations

import bisect
import os
import secrets
from collections import deque
from typing import TYPE_CHECKING, Self

from ..errors import ClosedError, UsageError
from .peer import one_engine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ..core.address import Address
    from ..rails import SourceRange
    from ..runtime import Runtime
    from .peer import Peer

__all__ = ["ImmediateBlock", "ImmediateGrants"]

FIRST = 1 << 27
END = 1 << 28
MOST = 1 << 26
"""Values that all blocks may have together: half of the granted half, so that a returned value can rest."""
LONGEST = 1 << 16
"""Values of one block at most, because each of them is looked up before the block is granted."""
GAP_BYTES = 2
GAP = 1 << 8 * GAP_BYTES


class ImmediateBlock:
    """Consecutive immediates that belong to this block alone until it is closed. Made by `Engine.reserve_immediates`.

    A context manager that closes the block. The block itself counts nothing: open `engine.counter(block[i])`, or
    `engine.counters(block.first, needs)`, and close these before the block.
    """

    __slots__ = ("__weakref__", "_closed", "_grants", "_range", "count", "first")

    def __init__(self, grants: ImmediateGrants, first: int, count: int, source_range: SourceRange | None) -> None:
        self.first = first
        self.count = count
        self._grants = grants
        self._range = source_range
        self._closed = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        """Return the immediate at a position, from 0 on. Raises IndexError."""
        if not 0 <= number < self.count:
            raise IndexError(f"immediate {number} of a block of {self.count}")
        return self.first + number

    def allow(self, source: Peer | Address | str) -> None:
        """Count the writes of one engine from now on, connected or not; writes of other engines do not count.

        The bytes of writes that do not count arrive all the same. A restarted engine (another incarnation) is another
        engine. Raises UsageError if the block was reserved without sources or the address has no identity, ClosedError
        if the block is closed.
        """
        if self._range is None:
            raise UsageError(
                "allow: this block counts the writes of every engine; reserve it with sources=() to "
                "name the engines that count"
            )
        if self._closed:
            raise ClosedError("the block of immediates is closed")
        self._grants.allow(self._range, source)

    def close(self) -> None:
        """Give the values back; callable from any thread. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._range is not None:
                self._range.close()
            self._grants.give_back(self.first, self._range)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ImmediateBlock {self.first:#x} to {self.first + self.count - 1:#x}{', closed' * self._closed}>"


class ImmediateGrants:
    """The upper half of an engine's immediates, and the open blocks in it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._next = FIRST + secrets.randbelow(END - FIRST)
        # Where the blocks begin, in order; the length of each; and the number of values that all of them have.
        self._block_starts: list[int] = []
        self._counts: dict[int, int] = {}
        self._reserved = 0
        # A garbage collection may drop a block at any point of the code, so a block only leaves a record here.
        self._returned: deque[tuple[int, SourceRange | None]] = deque()

    def single(self) -> int:
        """Return an unused immediate; it is taken once its counter is open. Raises UsageError."""
        self._take_back()
        return self._find(self._next, 1)

    def block(self, count: int, sources: Iterable[Peer | Address | str] | None = None) -> ImmediateBlock:
        """Reserve immediates; see `Engine.reserve_immediates`."""
        if not isinstance(count, int) or not 1 <= count <= LONGEST:
            raise UsageError(
                f"reserve_immediates({count!r}): expected the number of immediates, an integer from 1 to 2**16"
            )
        self._take_back()
        if self._reserved + count > MOST:
            raise UsageError(
                f"reserve_immediates: {self._reserved} immediates are reserved, of 2**26 at most; close blocks first"
            )
        first = self._find(self._next + int.from_bytes(os.urandom(GAP_BYTES), "little"), count)
        bisect.insort(self._block_starts, first)
        self._counts[first] = count
        self._reserved += count
        if sources is None:
            return ImmediateBlock(self, first, count, None)
        block = ImmediateBlock(self, first, count, self._runtime.core.source_range(first, count))
        for source in sources:
            self._allow(block._range, source)
        return block

    def allow(self, source_range: SourceRange, source: Peer | Address | str) -> None:
        """Count the writes of one incarnation of an engine on the values of a block."""
        self._runtime.require_open()
        self._allow(source_range, source)

    def _allow(self, source_range: SourceRange | None, source: Peer | Address | str) -> None:
        assert source_range is not None
        address = one_engine(source, "allow")
        self._runtime.add_source(source_range, (address.identity, address.incarnation))

    def give_back(self, first: int, source_range: SourceRange | None) -> None:
        """Record that a block is closed; callable from any thread."""
        self._returned.append((first, source_range))

    def _take_back(self) -> None:
        while self._returned:
            first, source_range = self._returned.popleft()
            del self._block_starts[bisect.bisect_left(self._block_starts, first)]
            self._reserved -= self._counts.pop(first)
            if source_range is not None:
                self._runtime.sources.pop(source_range, None)

    def _find(self, first: int, count: int) -> int:
        """Return the first of `count` free consecutive values, at or after `first`; later searches continue there."""
        passed = 0
        while passed <= END - FIRST:
            if first + count > END:
                passed, first = passed + max(END - first, 1), FIRST
                continue
            after = self._after_owner(first, count)
            if after == first:
                self._next = first + count
                return first
            passed, first = passed + after - first, after
        raise UsageError(
            f"counter: {count} consecutive immediates are not free; close counters and blocks that you no longer need"
        )

    def _after_owner(self, first: int, count: int) -> int:
        """Return `first` if `count` values from there on are free, otherwise the value to continue the search from."""
        behind = bisect.bisect_left(self._block_starts, first + count)
        if behind:
            owner = self._block_starts[behind - 1]
            if owner + self._counts[owner] > first:
                return owner + self._counts[owner]
        return first + count if any(map(self._runtime.core.is_counted, range(first, first + count))) else first
