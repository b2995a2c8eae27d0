"""A training rank: it reads its part of a plan, makes what must be made, and writes it into the targets' memory.

Units run in the plan's order, several at a time: while one is written the next is converted. All that they hold
besides the weights is staging memory, of which there is a limit. What other ranks have is read from their memory,
one-sided; they run nothing for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np

import aiote

from .. import service
from ..service.background import to_the_end
from .convert import cast, quantize, temporary_bytes
from .dtypes import ITEMSIZE
from .layout import Layout
from .plan import UpdatePlan, plan_update
from .protocol import (
    PlanMismatchError,
    Sent,
    SourceService,
    SourceState,
    StaleUpdateError,
    TargetState,
    Update,
    Where,
    WriteTarget,
    layout_of,
    packed_layout,
    places_of,
)
from .rank_memory import Bytes, RankMemory, StagingMemory, plain_errors
from .recipe import Recipe
from .tasks import Read, Task, Write
from .writes import Rows, copy_rows, packed, rows_of, write_rows

__all__ = ["Source", "serve_source"]

UNITS = 8
"""How many units are under way at a time: what one waits for, the next ones do."""
MOST_BETWEEN = 4
"""Of rows elsewhere all that lies between them is read, too, where it is no more than so many times as much."""
LARGE = 1 << 20
"""From so many bytes on a conversion runs in a thread, for it would hold the event loop for milliseconds."""


class Source:
    """The weights of one training rank. Made by `serve_source`.

    They must not change while an update is sent: `await controller.update()` between two steps of the optimizer.
    """

    def __init__(
        self, engine: aiote.Engine, layout: Layout, rank: int, arrays: Mapping[str, Any], recipe: Recipe, limit: int
    ) -> None:
        self.engine, self.layout, self.rank, self.recipe = engine, layout, rank, recipe
        self.weights = RankMemory(layout, rank, arrays)
        self.staging = StagingMemory(engine, limit)
        self.plan: UpdatePlan | None = None
        self.digest = b""
        self._packed = packed_layout(layout.only(rank))
        self.latest: Update | None = None
        self.sources: dict[int, SourceState] = {}

    def described(self) -> SourceState:
        """Return what it tells its controller."""
        regions = [region.descriptor for region in self.weights.regions]
        places = places_of(self.weights)
        return SourceState(self.rank, self._packed, places, regions, str(self.engine.address))

    async def prepare(self, sources: Sequence[SourceState], targets: Sequence[TargetState], gather: str) -> bytes:
        """Plan with these ranks, and return the plan's digest."""
        self.plan = None
        make = functools.partial(planned, sources, targets, self.recipe, gather)
        plan = await in_thread(sum(target.layout.nbytes for target in targets), make)
        self.digest = plan.digest
        self.sources = {one.rank: one for one in sources}
        self.plan = plan
        return self.digest


def planned(sources: Sequence[SourceState], targets: Sequence[TargetState], recipe: Recipe, gather: Any) -> UpdatePlan:
    """Return the plan for ranks that have described themselves."""
    sides = [Layout.merge(layout_of(one.layout) for one in side) for side in (sources, targets)]
    return plan_update(sides[0], sides[1], recipe, gather=gather)


async def in_thread(nbytes: int, function: Any) -> Any:
    """Call a function that works on so many bytes, in a thread where that takes long."""
    return await anyio.to_thread.run_sync(function) if nbytes >= LARGE else function()


class _Sending:
    """One update on its way out of a source."""

    def __init__(self, source: Source, plan: UpdatePlan, destinations: Sequence[WriteTarget]) -> None:
        self.source, self.plan = source, plan
        self.engine = source.engine
        # As they were when this was planned with: another controller may have others prepared meanwhile.
        self.sources = source.sources
        self.failed: dict[int, str] = {}
        self.written = self.gathered = 0
        self._attach = functools.lru_cache(maxsize=None)(self.engine.attach)
        self._destinations = {one.rank: one for one in destinations}
        self._under_way = anyio.Semaphore(UNITS)

    async def run(self) -> Sent:
        """Write everything, then commit to every target that has all of it."""
        rank = self.source.rank
        async with anyio.create_task_group() as group:
            for task in self.plan.tasks(rank):
                await self._under_way.acquire()
                group.start_soon(self._unit, task)
        async with anyio.create_task_group() as group:
            for target, senders in self.plan.senders.items():
                if rank in senders and target in self._destinations:
                    group.start_soon(self._commit, self._destinations[target])
        return Sent(self.written, self.gathered, self.source.staging.peak, self.failed)

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
                await self._made(task)
        finally:
            self._under_way.release()

    async def _straight(self, write: Write) -> None:
        """Write out of the weights; rows that are short are packed first."""
        memory, name = self.source.weights, write.copy.source
        rows = rows_of(write.copy, ITEMSIZE[self.source.layout.tensors[name].dtype])
        shorter = packed(rows)
        if shorter is None:
            place = memory.places[name]
            region = memory.regions[place.region][place.offset : place.offset + place.nbytes]
            await self._write(write, rows, region)
            return
        async with self.source.staging.take(rows.total) as (staged, region):
            dense = np.arange(0, rows.total, rows.nbytes, dtype=np.int64)
            await in_thread(
                rows.total,
                functools.partial(copy_rows, Rows(rows.nbytes, rows.source, dense), memory.bytes_of(name), staged),
            )
            await self._write(write, shorter, region)

    async def _made(self, task: Task) -> None:
        """Gather, convert and write one unit."""
        fetches = [_Fetch(read, ITEMSIZE[task.dtype]) for read in task.reads if read.rank != self.source.rank]
        sizes = _Sizes(task, self.plan.targets, fetches)
        async with self.source.staging.take(sizes.all) as (memory, region):
            staged = memory[: sizes.staged]
            if sum(read.copy.elements for read in task.reads) < sizes.elements:
                staged[:] = 0
            await self._read_own(task, staged)
            if fetches:
                await self._read_others(fetches, sizes.all, region, memory)
            parts = {task.target: (0, sizes.staged)}
            if sizes.converted:
                out = memory[sizes.staged :]
                await in_thread(sizes.staged, functools.partial(_convert, task, sizes, staged, out))
                parts = {task.target: (sizes.staged, sizes.converted)}
                if task.scale:
                    parts[task.scale] = (sizes.staged + sizes.converted, sizes.scales)
            for write in task.writes:
                start, nbytes = parts[write.copy.target]
                rows = rows_of(write.copy, ITEMSIZE[self.plan.targets.tensors[write.copy.target].dtype])
                await self._write(write, rows, region[start : start + nbytes])

    async def _read_own(self, task: Task, staged: Bytes) -> None:
        own = [read.copy for read in task.reads if read.rank == self.source.rank]
        size = ITEMSIZE[task.dtype]

        def load() -> None:
            for copy in own:
                copy_rows(rows_of(copy, size), self.source.weights.bytes_of(copy.source), staged)

        await in_thread(sum(copy.elements for copy in own) * size, load)

    async def _read_others(self, fetches: list[_Fetch], end: int, region: aiote.Region, memory: Bytes) -> None:
        async with anyio.create_task_group() as group:
            for fetch in fetches:
                end -= fetch.landing
                group.start_soon(self._fetch, fetch, end, region, memory)

    async def _fetch(self, fetch: _Fetch, landing: int, region: aiote.Region, memory: Bytes) -> None:
        """Read rows of another source's part into the staging memory."""
        owner, rows = self.sources[fetch.rank], fetch.rows
        remote = self._remote(owner.regions, owner.places[fetch.tensor])
        if fetch.landing:
            span = fetch.last - fetch.first
            await self.engine.read(remote[fetch.first : fetch.last], region[landing : landing + span])
            moved = Rows(rows.nbytes, rows.source - fetch.first, rows.target)
            await in_thread(rows.total, functools.partial(copy_rows, moved, memory[landing:], memory))
        else:
            for there, here in zip(rows.source.tolist(), rows.target.tolist(), strict=True):
                await self.engine.read(remote[there : there + rows.nbytes], region[here : here + rows.nbytes])
        self.gathered += rows.total

    async def _write(self, write: Write, rows: Rows, region: aiote.Region) -> None:
        if len(write.ranks) == 1:
            await self._write_to(write.ranks[0], write, rows, region)
            return
        async with anyio.create_task_group() as group:
            for rank in write.ranks:
                group.start_soon(self._write_to, rank, write, rows, region)

    async def _write_to(self, rank: int, write: Write, rows: Rows, region: aiote.Region) -> None:
        """Write to one target, unless it has failed; a target that fails stops no other."""
        to = self._destinations.get(rank)
        if to is None or rank in self.failed:
            return
        try:
            await write_rows(self.engine, rows, region, self._remote(to.regions, to.places[write.copy.target]))
            self.written += rows.total
        except (aiote.AioteError, IndexError, KeyError) as error:
            # What a target says of its memory may be wrong, too: that is its failure, and nobody else's.
            self.failed[rank] = str(error)

    def _remote(self, regions: Sequence[bytes], place: Where) -> aiote.RemoteRegion:
        remote: aiote.RemoteRegion = self._attach(regions[place.region])
        return remote[place.offset :]


class _Fetch:
    """Rows of another rank's part. Several that lie near each other are read at once, with what is between them."""

    def __init__(self, read: Read, itemsize: int) -> None:
        self.rank, self.tensor = read.rank, read.copy.source
        self.rows = rows_of(read.copy, itemsize)
        self.first, self.last = int(self.rows.source.min()), int(self.rows.source.max()) + self.rows.nbytes
        near = len(self.rows.source) > 1 and self.last - self.first <= MOST_BETWEEN * self.rows.total
        self.landing = -(-(self.last - self.first) // 64) * 64 if near else 0


class _Sizes:
    """What a unit needs of staging memory.

    From its beginning: what is put together, what that is converted to, and the scales. Behind them a conversion's
    temporary arrays are counted, and at the end lands what is read of other ranks.
    """

    def __init__(self, task: Task, targets: Layout, fetches: Sequence[_Fetch]) -> None:
        self.shape = tuple(map(int.__sub__, task.stop, task.start))
        self.elements = math.prod(self.shape)
        self.to = targets.tensors[task.target].dtype
        self.scale = targets.tensors[task.scale].dtype if task.scale else ""
        self.staged = -(-self.elements * ITEMSIZE[task.dtype] // 64) * 64
        changed = task.block is not None or self.to != task.dtype
        self.converted = -(-self.elements * ITEMSIZE[self.to] // 64) * 64 if changed else 0
        self.scales = 0
        if task.block:
            high, wide = (-(-size // block) for size, block in zip(self.shape[-2:], task.block, strict=True))
            self.scales = math.prod(self.shape[:-2]) * high * wide * ITEMSIZE[self.scale]
        temporary = temporary_bytes(self.elements) if changed else 0
        landing = sum(fetch.landing for fetch in fetches)
        self.all = -(-(self.staged + self.converted + self.scales + temporary + landing) // 64) * 64


def _convert(task: Task, sizes: _Sizes, staged: Bytes, out: Bytes) -> None:
    source = staged[: sizes.elements * ITEMSIZE[task.dtype]]
    target = out[: sizes.elements * ITEMSIZE[sizes.to]]
    if task.block:
        scales = out[sizes.converted : sizes.converted + sizes.scales]
        quantize(source, task.dtype, sizes.shape, task.block, (target, sizes.to), (scales, sizes.scale))
    else:
        cast(source, task.dtype, target, sizes.to)


class _ServedSource(SourceService):
    name = SourceService.name

    def __init__(self, source: Source) -> None:
        self._source = source

    @service.method(idempotent=True)
    async def describe(self) -> SourceState:
        return self._source.described()

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def prepare(self, sources: list[SourceState], targets: list[TargetState], gather: str) -> bytes:
        return await self._source.prepare(sources, targets, gather)

    @service.method(raises=[StaleUpdateError, PlanMismatchError])
    async def send(self, update: Update, digest: bytes, destinations: list[WriteTarget]) -> Sent:
        source = self._source
        if source.latest is not None and update <= source.latest:
            raise StaleUpdateError(f"{update} is no later than what rank {source.rank} has sent, {source.latest}")
        if source.plan is None or source.digest != digest:
            raise PlanMismatchError(f"rank {source.rank} has not the plan {digest.hex()[:16]}: prepare it once more")
        source.latest = update
        with plain_errors():
            return await _Sending(source, source.plan, destinations).run()


@asynccontextmanager
async def serve_source(
    engine: aiote.Engine,
    layout: Layout,
    rank: int,
    arrays: Mapping[str, Any],
    recipe: Recipe | None = None,
    *,
    staging_bytes: int = 256 << 20,
) -> AsyncIterator[Source]:
    """Send a training rank's weights when a controller asks, for the length of an `async with`.

    `arrays` are the rank's parts by name, as `layout` describes them for `rank`: numpy arrays, or torch tensors on the
    CPU; they stay in place meanwhile, and do not change while an update is sent. All ranks and the controller have the
    same `recipe`. `staging_bytes` bounds what an update holds besides; a unit that needs more runs alone.

    Raises UsageError, which names the tensor, for an array that is not as the layout says.
    """
    source = Source(engine, layout, rank, arrays, recipe or Recipe(), staging_bytes)
    await source.weights.register(engine, "read")
    try:
        async with service.serve(engine, _ServedSource(source)):
            yield source
    finally:
        await to_the_end(source.staging.close)
        await to_the_end(source.weights.close)
