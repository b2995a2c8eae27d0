"""Shared memory of targets on this host, which a source maps and copies into: one copy, and no ring between.

A target hands such memory to the sources of its host (`shadow`). A source keeps a mapping from update to update, as
long as the target describes the same memory. A wrong description leads to no other memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import anyio
import numpy as np

import aiote

from ..core.gpu_arrays import GpuArray
from .copies import Copy
from .protocol import Numbers, WriteTarget
from .rank_memory import Bytes, RankArrays, in_thread
from .remote import Names, Places
from .writes import Straight, move

__all__ = ["MappedBatch", "MappedTensors", "Mappings"]

BATCH_BYTES = 16 << 20
"""A batch is copied when it has this many bytes, which take a core some milliseconds; a thread costs half of one."""
BATCH_ROWS = 4096
"""A batch is also copied when it has this many rows, which take a thread some milliseconds besides their bytes."""
MAP_S = 1.0
"""How long a target may take to hand its memory over. One that takes longer is written to over rails."""


class MappedTensors:
    """The tensors of a target in its shared memory, at the places that the target itself describes."""

    def __init__(self, memory: Bytes, places: Numbers, names: Names) -> None:
        self._memory, self._places = memory, Places(places, names)

    def tensor(self, name: str) -> Bytes:
        """Return the memory from a tensor's first byte on. Raises UsageError for an invalid description."""
        number, offset = self._places.find(name)
        if number or offset > self._memory.nbytes:
            raise aiote.UsageError(
                f"{name} begins at byte {offset} of region {number}, outside of the {self._memory.nbytes} bytes of "
                "shared memory"
            )
        return self._memory[offset:]

    def carry_out(self, copy: Copy, itemsize: int, source: Bytes) -> None:
        """Carry out a copy of a plan; its offsets count from the beginning of `source` and of its target tensor.

        Raises UsageError for an invalid description.
        """
        try:
            move(copy, itemsize, source, self.tensor(copy.target))
        except (TypeError, ValueError) as error:
            raise aiote.UsageError(f"{copy.target} leaves the shared memory: {error}") from error


class MappedBatch:
    """Rows that wait to be copied to one target; `RowBatch` is the same for one that is written to over rails."""

    def __init__(self, mapped: MappedTensors) -> None:
        self._mapped = mapped
        self._rows: list[tuple[Bytes, Bytes]] = []
        self.nbytes = 0

    def add(self, row: Straight) -> bool:
        """Add a row; return whether to copy the batch now. Raises UsageError for a wrong description of the memory."""
        nbytes = row.source.nbytes
        there = self._mapped.tensor(row.tensor)[row.first : row.first + nbytes]
        if there.nbytes != nbytes:
            raise aiote.UsageError(f"{row.tensor} leaves the shared memory")
        self._rows.append((np.frombuffer(memoryview(row.source), np.uint8), there))
        self.nbytes += nbytes
        return self.nbytes >= BATCH_BYTES or len(self._rows) >= BATCH_ROWS

    async def write(self, _engine: aiote.Engine) -> int:
        """Copy the rows that wait now, and return their bytes. A cancellation takes effect after the copy."""
        rows, nbytes = self._rows, self.nbytes
        self._rows, self.nbytes = [], 0
        await in_thread(nbytes, functools.partial(_copy, rows))
        return nbytes


def _copy(rows: Sequence[tuple[Bytes, Bytes]]) -> None:
    for here, there in rows:
        there[:] = here


class Mappings:
    """The shared memory that a source has mapped, one for each target. `close` unmaps it."""

    def __init__(self, engine: aiote.Engine, weights: RankArrays) -> None:
        self._engine = engine
        # A GPU's memory is not copied by the host.
        self._usable = not any(isinstance(view, GpuArray) for view in weights.views)
        self._known: dict[str, aiote.SharedMemory] = {}

    async def find(self, to: WriteTarget, places: Numbers, names: Names) -> MappedTensors | None:
        """Return the tensors of a target that shares its memory with this rank, or None: then rails reach it."""
        for address, known in tuple(self._known.items()):
            replaced = address == to.address and known.descriptor != to.shared
            if replaced or self._engine.find_peer(known.owner) is None:
                # A copy that is still under way keeps it mapped until its end.
                self._known.pop(address).close()
        if not to.shared or not self._usable:
            return None
        if to.address not in self._known:
            made = await self._map(to)
            if made is None:
                return None
            if self._known.setdefault(to.address, made) is not made:
                made.close()
        return MappedTensors(np.frombuffer(self._known[to.address].view, np.uint8), places, names)

    async def _map(self, to: WriteTarget) -> aiote.SharedMemory | None:
        with anyio.move_on_after(MAP_S):
            try:
                return await self._engine.map_memory(to.shared, owner=aiote.Address.parse(to.address))
            except (aiote.UsageError, aiote.PeerError, aiote.FabricError):
                # It is on another host, did not name this rank, or may map no more here: the lease serves as well.
                return None
        return None

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        while self._known:
            self._known.popitem()[1].close()
