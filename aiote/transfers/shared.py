"""Memory that engines of one host share: the handle of its owner, and those of the peers that have mapped it.

A store of one process is a load of another here: no transfer, no completion, and only the order that the two agree on.
A peer that has mapped the memory may change it at any time for as long as it lives, even after the owner has closed it.
So code that reads shared memory copies a value first and checks the copy, and memory that a lost peer had mapped is
closed and replaced. This module must not know how descriptors travel; `aiote.links.sharing` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from ..errors import ClosedError

if TYPE_CHECKING:
    from types import TracebackType

    from ..core.address import Address
    from ..core.descriptor import SharedDescriptor
    from ..rails import SharedPages

__all__ = ["MemoryTable", "SharedMemory"]


class MemoryTable(Protocol):
    """The engine's table of shared memory."""

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child."""

    def require_here(self) -> None: ...
    def remove(self, memory: SharedMemory) -> None: ...


class SharedMemory:
    """Memory that engines of one host share. Made by `Engine.share_memory`, and at its peers by `Engine.map_memory`.

    The owner and the engines that it named may change the bytes at any time. A context manager that closes it; the
    close of its engine closes it, too. After the owner's `close` no peer can map it any more. A peer that has mapped it
    keeps its mapping, and its stores then meet no memory that is used here again. When the owner is lost, the bytes
    stay as they are. The kernel frees the memory with its last mapping.
    """

    def __init__(self, table: MemoryTable, pages: SharedPages, described: SharedDescriptor) -> None:
        self._table, self._pages, self._described = table, pages, described

    @property
    def owner(self) -> Address:
        """The address of the engine that allocated it."""
        return self._described.owner

    @property
    def descriptor(self) -> bytes:
        """The portable description for `Engine.map_memory` of an engine that the owner named; others cannot use it."""
        return bytes(self._described)

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self._described.nbytes

    @property
    def closed(self) -> bool:
        """Whether it or its engine is closed."""
        return self._pages.closed

    @property
    def view(self) -> memoryview:
        """A writable view of its bytes, for NumPy or `Engine.register`. Raises ClosedError.

        The memory stays mapped until the view and all that is made of it are released, even after `close`.
        """
        if self._pages.closed:
            raise ClosedError("the shared memory is closed")
        return memoryview(self._pages)

    def close(self) -> None:
        """Unmap it, once no view of it is left. Idempotent. A forked child leaves it to the parent."""
        if not self._table.inherited:
            self._table.require_here()
            self._pages.close()
            self._table.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SharedMemory {self.nbytes} bytes of {self.owner}, {'closed' if self.closed else 'open'}>"
