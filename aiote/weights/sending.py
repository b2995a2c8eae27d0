"""One update that a source sends: its steps, several at a time, and a commit to each target that has all of them.

A step that fails at one target does not stop the others. Targets of this host that share their memory are copied into,
all others are written to over rails.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

import aiote

from ..aio import plain_errors
from .convert import cast, quantize
from .copies import Copy
from .dtypes import ITEMSIZE
from .mapped import MappedBatch, MappedTensors
from .plan import UpdatePlan
from .protocol import Numbers, PlanMismatchError, Sent, WriteTarget
from .rank_memory import Bytes, in_thread
from .remote import RemoteTensors
from .sizes import StagedRead, StagingSizes, most_rows
from .tasks import Task, Write
from .writes import ROW_BYTES, RowBatch, Rows, Straight, move, packed, parts_of, rows_of, runs_of, write_rows

if TYPE_CHECKING:
    from .source import Source

__all__ = ["UpdateSender"]

UNITS = 8
"""How many units run at a time: while one waits, the others go on."""
READS = 16
"""How many rows of another source are read at a time: one read takes as long as beginning the others."""
CONVERTED = 5
"""Converting bytes takes this many times as long as copying them."""
AT_ONCE = 32
"""After this many steps, other tasks of the event loop get a turn: computing them takes some milliseconds."""
UNTRUE = (aiote.AioteError, ValueError, IndexError, KeyError)
"""The errors that make only one target fail. A wrong description of its memory causes some of them."""


class UpdateSender:
    """One update that a source sends."""

    def __init__(self, source: Source, plan: UpdatePlan, destinations: Sequence[WriteTarget]) -> None:
        self.source, self.plan, self.engine = source, plan, source.engine
        # Keep the sources of this plan, because another controller may prepare with other sources in the meantime.
        self.sources = source.sources
        self._most = most_rows(source.staging.limit)
        self.failed: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.written = self.gathered = 0
        self._destinations = {one.rank: (one, self._remote(one)) for one in destinations if one.rank in source.names}
        self._batches: dict[int, RowBatch | MappedBatch] = {}
        self._mapped: dict[int, MappedTensors] = {}
        self._under_way = anyio.Semaphore(UNITS)

    def _places(self, to: WriteTarget) -> Numbers:
        places = self.source.places.get(to.known) if to.places is None else to.places
        if places is None:
            raise PlanMismatchError(f"rank {self.source.rank} no longer knows where the tensors lie: prepare it again")
        return places

    def _remote(self, to: WriteTarget) -> RemoteTensors:
        names = self.source.names[to.rank]
        return RemoteTensors(self.engine, to.address, to.regions, self._places(to), names, "write")

    async def _map(self) -> None:
        """Map the memory of the targets of this host that share it; rows for all others go over rails."""
        async with anyio.create_task_group() as group:
            for to, _ in self._destinations.values():
                group.start_soon(self._map_one, to)
        for rank, (_, remote) in self._destinations.items():
            self._batches[rank] = MappedBatch(self._mapped[rank]) if rank in self._mapped else RowBatch(remote)

    async def _map_one(self, to: WriteTarget) -> None:
        try:
            found = await self.source.mappings.find(to, self._places(to), self.source.names[to.rank])
        except UNTRUE as error:
            self.failed[to.rank] = str(error)
            return
        if found is not None:
            self._mapped[to.rank] = found

    async def run(self) -> Sent:
        """Write everything, then commit to every target that has all of this source's part."""
        rank = self.source.rank
        await self._map()
        try:
            with plain_errors():
                async with anyio.create_task_group() as group:
                    await self._begin_all(group)
        except aiote.AioteError:
            if not self.lost:
                raise
            return self._make_report()
        async with anyio.create_task_group() as group:
            for target, senders in self.plan.senders.items():
                if rank in senders and target in self._destinations:
                    group.start_soon(self._commit, self._destinations[target][0])
        return self._make_report()

    async def _begin_all(self, group: TaskGroup) -> None:
        """Begin all steps, several at a time."""
        for number, step in enumerate(self.source.steps(self.plan)):
            if number % AT_ONCE == 0:
                await checkpoint()
            if isinstance(step, Task):
                await self._under_way.acquire()
                group.start_soon(self._unit, step)
                continue
            for rank in step.ranks:
                if self._add_to_batch(rank, step):
                    await self._under_way.acquire()
                    group.start_soon(self._write_batch, rank)
        for rank, batch in self._batches.items():
            if batch.nbytes:
                await self._under_way.acquire()
                group.start_soon(self._write_batch, rank)

    def _add_to_batch(self, rank: int, row: Straight) -> bool:
        """Add a row to its target's batch; return whether the batch must be written now."""
        if rank in self.failed or rank not in self._batches:
            return False
        try:
            return self._batches[rank].add(row)
        except UNTRUE as error:
            self.failed[rank] = str(error)
            return False

    async def _write_batch(self, rank: int) -> None:
        """Write the batch of one target. A target that fails does not stop the others."""
        try:
            nbytes = await self._batches[rank].write(self.engine)
            self.written += nbytes
        except UNTRUE as error:
            self.failed[rank] = str(error)
        finally:
            self._under_way.release()

    def _make_report(self) -> Sent:
        return Sent(self.written, self.gathered, self.source.staging.peak, self.failed, self.lost)

    async def _commit(self, to: WriteTarget) -> None:
        if to.rank not in self.failed:
            try:
                await self.engine.write_imm(None, to.address, to.imm)
            except aiote.AioteError as error:
                self.failed[to.rank] = str(error)

    async def _unit(self, task: Task) -> None:
        try:
            if task.kind == "direct":
                for write in task.writes:
                    await self._straight(write)
            else:
                await self._make_unit(task)
        finally:
            self._under_way.release()

    async def _straight(self, write: Write) -> None:
        """Write straight out of the weights. Short rows are packed into staging memory first."""
        memory, name = self.source.weights, write.copy.source
        size = ITEMSIZE[self.source.layout.tensors[name].dtype]
        if self._mapped:
            write = await self._copy_to_mapped(write, size, memory.bytes_of(name))
        if not write.ranks:
            return
        both = packed(write.copy, size)
        if both is None:
            place = memory.places[name]
            region = memory.regions[place.region][place.offset : place.offset + place.nbytes]
            async with self._reserve_offsets(write.copy):
                await self._write(write.ranks, write.copy, size, region)
            return
        into, out = both
        offsets = min(runs_of(out), self._most) * ROW_BYTES
        nbytes = into.elements * size
        async with self.source.staging.reserve(nbytes + offsets) as (staged, region):
            await in_thread(nbytes, lambda: move(into, size, memory.bytes_of(name), staged[:nbytes]))
            await self._write(write.ranks, out, size, region[:nbytes])

    @asynccontextmanager
    async def _reserve_offsets(self, copy: Copy) -> AsyncIterator[None]:
        """Count the offsets of a copy's rows as staging memory, if there are several rows."""
        rows = min(runs_of(copy), self._most)
        if rows == 1:
            yield
        else:
            async with self.source.staging.reserve_elsewhere(rows * ROW_BYTES):
                yield

    async def _make_unit(self, task: Task) -> None:
        """Gather, convert and write one unit."""
        fetches = [StagedRead(read, ITEMSIZE[task.dtype]) for read in task.reads if read.rank != self.source.rank]
        sizes = StagingSizes(task, self.plan.targets, self._most)
        sizes.land(fetches, self.source.staging.limit)
        async with self.source.staging.reserve(sizes.all) as (memory, region):
            staged = memory[: sizes.staged]
            if sum(read.copy.elements for read in task.reads) < sizes.elements:
                staged[:] = 0
            await self._read_own(task, staged)
            if fetches:
                await self._read_others(fetches, sizes.all, region, memory)
            parts = {task.target: (0, sizes.staged)}
            if sizes.converted:
                out = memory[sizes.staged :]
                await in_thread(sizes.staged * CONVERTED, functools.partial(_convert, task, sizes, staged, out))
                parts = {task.target: (sizes.staged, sizes.converted)}
                if task.scale:
                    parts[task.scale] = (sizes.staged + sizes.converted, sizes.scales)
            for write in task.writes:
                start, nbytes = parts[write.copy.target]
                size = ITEMSIZE[self.plan.targets.tensors[write.copy.target].dtype]
                rest = await self._copy_to_mapped(write, size, memory[start : start + nbytes])
                if rest.ranks:
                    await self._write(rest.ranks, rest.copy, size, region[start : start + nbytes])

    async def _read_own(self, task: Task, staged: Bytes) -> None:
        own = [read.copy for read in task.reads if read.rank == self.source.rank]
        size = ITEMSIZE[task.dtype]

        def load() -> None:
            for copy in own:
                move(copy, size, self.source.weights.bytes_of(copy.source), staged)

        await in_thread(sum(copy.elements for copy in own) * size, load)

    async def _read_others(self, fetches: list[StagedRead], end: int, region: aiote.Region, memory: Bytes) -> None:
        async with anyio.create_task_group() as group:
            for fetch in fetches:
                end -= fetch.landing
                group.start_soon(self._fetch_or_say, fetch, end, region, memory)

    async def _fetch_or_say(self, fetch: StagedRead, landing: int, region: aiote.Region, memory: Bytes) -> None:
        try:
            await self._fetch_rows(fetch, landing, region, memory)
        except aiote.AioteError as error:
            if not self.engine.closed:
                # The other source has failed, and not this rank.
                self.lost[fetch.rank] = str(error)
            raise

    async def _fetch_rows(self, fetch: StagedRead, landing: int, region: aiote.Region, memory: Bytes) -> None:
        """Read rows of another source's part into the staging memory."""
        remote, size = self.sources[fetch.rank].tensor(fetch.tensor), fetch.itemsize
        if fetch.landing:
            span = fetch.last - fetch.first
            await self.engine.read(remote[fetch.first : fetch.last], region[landing : landing + span])
            moved = fetch.copy._replace(source_offset=0)
            await in_thread(
                fetch.nbytes, functools.partial(move, moved, size, memory[landing : landing + span], memory)
            )
        else:
            for part in parts_of(fetch.copy, self._most):
                rows = await in_thread(runs_of(part) * ROW_BYTES, functools.partial(rows_of, part, size))
                await self._read_rows(rows, remote, region)
        self.gathered += fetch.nbytes

    async def _read_rows(self, rows: Rows, remote: aiote.RemoteRegion, region: aiote.Region) -> None:
        """Read each row by a read of its own, several at a time."""
        left = zip(rows.source.tolist(), rows.target.tolist(), strict=True)

        async def read_some() -> None:
            for there, here in left:
                await self.engine.read(remote[there : there + rows.nbytes], region[here : here + rows.nbytes])

        with plain_errors():
            async with anyio.create_task_group() as group:
                for _ in range(min(READS, len(rows.source))):
                    group.start_soon(read_some)

    async def _copy_to_mapped(self, write: Write, size: int, source: Bytes) -> Write:
        """Copy to the targets whose memory is mapped; return the write to the others."""
        nbytes = write.copy.elements * size
        for rank in write.ranks:
            if rank not in self._mapped or rank in self.failed:
                continue
            try:
                await in_thread(nbytes, functools.partial(self._mapped[rank].carry_out, write.copy, size, source))
                self.written += nbytes
            except UNTRUE as error:
                self.failed[rank] = str(error)
        return write._replace(ranks=tuple(rank for rank in write.ranks if rank not in self._mapped))

    async def _write(self, ranks: Sequence[int], copy: Copy, size: int, region: aiote.Region) -> None:
        for part in parts_of(copy, self._most):
            rows = await in_thread(runs_of(part) * ROW_BYTES, functools.partial(rows_of, part, size))
            if len(ranks) == 1:
                await self._write_to(ranks[0], copy.target, rows, region)
                continue
            async with anyio.create_task_group() as group:
                for rank in ranks:
                    group.start_soon(self._write_to, rank, copy.target, rows, region)

    async def _write_to(self, rank: int, tensor: str, rows: Rows, region: aiote.Region) -> None:
        """Write to one target, unless it has failed. A target that fails does not stop the others."""
        to = self._destinations.get(rank)
        if to is None or rank in self.failed:
            return
        try:
            await write_rows(self.engine, rows, region, to[1].tensor(tensor))
            self.written += rows.total
        except UNTRUE as error:
            self.failed[rank] = str(error)


def _convert(task: Task, sizes: StagingSizes, staged: Bytes, out: Bytes) -> None:
    source = staged[: sizes.elements * ITEMSIZE[task.dtype]]
    target = out[: sizes.elements * ITEMSIZE[sizes.to]]
    if task.block:
        scales = out[sizes.converted : sizes.converted + sizes.scales]
        quantize(source, task.dtype, sizes.shape, task.block, (target, sizes.to), (scales, sizes.scale))
    else:
        cast(source, task.dtype, target, sizes.to)
