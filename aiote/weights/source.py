"""A training rank as a source of updates: it gathers, converts and writes its part of a plan to the targets' memory.

Units run in the plan's order, several at a time, so that one is converted while another is written. Besides the weights
they use only staging memory, which has a limit. A source reads elements of other ranks by one-sided reads, for which
those ranks run no code.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

import aiote

from .. import service
from ..service.background import run_shielded
from .convert import cast, quantize
from .copies import Copy
from .dtypes import ITEMSIZE
from .layout import Layout
from .plan import UpdatePlan, plan_update
from .protocol import (
    Descriptors,
    Digest,
    Numbers,
    PlanMismatchError,
    Sent,
    SourceService,
    SourceState,
    SourceStates,
    StaleUpdateError,
    TargetState,
    TargetStates,
    Update,
    WriteTarget,
    WriteTargets,
    check_epoch,
    digest_of,
    layout_of,
    packed_layout,
    places_of,
)
from .rank_memory import TENSOR_BYTES, Bytes, RankArrays, StagingMemory, in_thread, plain_errors
from .recipe import Recipe
from .remote import Names, RemoteTensors
from .sizes import LEAST, StagedRead, StagingSizes, check_limit, most_rows, small
from .tasks import Task, Write
from .writes import ROW_BYTES, RowBatch, Rows, Straight, move, packed, parts_of, rows_of, runs_of, write_rows

__all__ = ["Source", "serve_source"]

UNITS = 8
"""How many units run at a time: while one waits, the others go on."""
KEPT_STEPS = 1 << 14
"""The most steps to keep for the next update, about 1 KiB each. Computing a step takes longer than beginning it."""
READS = 16
"""How many rows of another source are read at a time: one read takes as long as beginning the others."""
KEPT_PLACES = 1 << 10
"""The most targets whose places are kept, 16 bytes for each tensor."""
CONVERTED = 5
"""Converting bytes takes this many times as long as copying them."""
AT_ONCE = 32
"""After this many steps, other tasks of the event loop get a turn: computing them takes some milliseconds."""
UNTRUE = (aiote.AioteError, ValueError, IndexError, KeyError)
"""The errors that make only one target fail. A wrong description of its memory causes some of them."""


class Source:
    """The weights of one training rank. Made by `serve_source`.

    The weights must not change while an update is sent: `await controller.update()` between two steps of the optimizer.
    """

    def __init__(
        self, engine: aiote.Engine, layout: Layout, rank: int, arrays: Mapping[str, Any], recipe: Recipe, limit: int
    ) -> None:
        self.engine, self.layout, self.rank, self.recipe = engine, layout, rank, recipe
        self.weights = RankArrays(layout, rank, arrays)
        self.staging = StagingMemory(engine, limit)
        self.plan: UpdatePlan | None = None
        self.digest = b""
        self._packed = packed_layout(layout.only(rank))
        self.latest: Update | None = None
        self.sources: dict[int, RemoteTensors] = {}
        self.names: dict[int, Names] = {}
        self.places: dict[bytes, Numbers] = {}
        self._steps: list[Task | Straight] = []

    def describe(self) -> SourceState:
        """Return the source's description of itself for its controller."""
        regions = Descriptors.of([region.descriptor for region in self.weights.regions])
        places = places_of(self.weights)
        return SourceState(self.rank, self._packed, places, regions, str(self.engine.address))

    async def prepare(self, sources: Sequence[SourceState], targets: Sequence[TargetState], gather: str) -> bytes:
        """Plan with these ranks; return the digest. Raises UsageError as `plan_described` and `check_limit`."""
        self.plan, self._steps = None, []
        nbytes = sum(one.layout.nbytes for one in sources) + sum(one.layout.nbytes for one in targets)
        plan, names = await in_thread(nbytes, functools.partial(plan_described, sources, targets, self.recipe, gather))
        check_limit(plan, self.rank, self.staging.limit)
        self.digest = plan.digest
        # Keep the places of other controllers' targets too, because their plan may be the same.
        self.places.update((digest_of(one.places), one.places) for one in targets)
        for known in list(self.places)[:-KEPT_PLACES]:
            del self.places[known]
        self.names = names[1]
        self.sources = {
            one.rank: RemoteTensors(self.engine, one.address, one.regions, one.places, names[0][one.rank], "read")
            for one in sources
        }
        self.plan = plan
        return self.digest

    def steps(self, plan: UpdatePlan) -> Iterator[Task | Straight]:
        """Yield this rank's steps, in order. The first update with a plan computes them, task by task."""
        if self._steps and self.plan is plan:
            yield from self._steps
            return
        made: list[Task | Straight] = []
        for task in plan.tasks(self.rank, functools.partial(small, plan=plan, limit=self.staging.limit)):
            for step in self._straight(task):
                if len(made) <= KEPT_STEPS:
                    made.append(step)
                yield step
        if self.plan is plan and len(made) <= KEPT_STEPS:
            self._steps = made

    def _straight(self, task: Task) -> Iterator[Task | Straight]:
        """Yield a direct task's writes of single rows as steps of their own, then the task with all other writes."""
        rest = []
        for write in task.writes:
            copy = write.copy
            if task.kind != "direct" or runs_of(copy) > 1:
                rest.append(write)
                continue
            size = ITEMSIZE[self.layout.tensors[copy.source].dtype]
            place = self.weights.places[copy.source]
            first = place.offset + copy.source_offset * size
            region = self.weights.regions[place.region][first : first + copy.elements * size]
            yield Straight(write.ranks, copy.target, copy.target_offset * size, region)
        if rest:
            yield task._replace(writes=tuple(rest))


def plan_described(
    sources: Sequence[SourceState], targets: Sequence[TargetState], recipe: Recipe, gather: Any
) -> tuple[UpdatePlan, list[dict[int, Names]]]:
    """Return the plan for ranks that have described themselves, and for both sides the numbers of each rank's tensors.

    Raises UsageError like `plan_update`, and for a rank that describes another rank's tensors.
    """
    sides, names = [], []
    # Ranks with the same names share one mapping.
    known: dict[tuple[str, ...], Names] = {}
    for side in (sources, targets):
        layouts = {one.rank: layout_of(one.layout) for one in side}
        for rank, layout in layouts.items():
            if any(ranks != (rank,) for tensor in layout.tensors.values() for ranks in tensor.ranks):
                raise aiote.UsageError(f"rank {rank}: the layout has other ranks' parts; describe its own part only")
        sides.append(Layout.merge(layouts.values()))
        held = {rank: tuple(n for n, t in layout.tensors.items() if t.ranks) for rank, layout in layouts.items()}
        names.append({rank: known.setdefault(one, {n: i for i, n in enumerate(one)}) for rank, one in held.items()})
    plan = plan_update(sides[0], sides[1], recipe, gather=gather)
    for target in targets:
        _check_tied(plan, target, names[1][target.rank])
    # Compute these here, because for a large model they take long, too. The plan keeps them.
    _ = plan.digest, plan.senders
    return plan, names


def _check_tied(plan: UpdatePlan, target: TargetState, names: Names) -> None:
    """Raise UsageError if two tensors of a rank are the same memory and are made from different sources."""
    places = target.places
    if places.shape != (len(names), 2) or len(np.unique(places, axis=0)) == len(places):
        return
    several: dict[tuple[int, ...], list[str]] = {}
    for name, place in zip(names, places.tolist(), strict=True):
        several.setdefault(tuple(place), []).append(name)
    made = {name: entry for entry in plan.entries for name in (entry.target, entry.scale) if name}
    for tied in several.values():
        held = {name: plan.targets.tensors[name].held_by()[target.rank].pieces for name in tied if name in made}
        if len({(held[name], made[name]._replace(cells=(), target="")) for name in held}) > 1:
            raise aiote.UsageError(
                f"{' and '.join(held)} are the same memory on target rank {target.rank}, but the recipe makes them of "
                "different sources: list all but one of them as untouched"
            )


class _Sending:
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
        self._batches = {rank: RowBatch(remote) for rank, (_, remote) in self._destinations.items()}
        self._under_way = anyio.Semaphore(UNITS)

    def _remote(self, to: WriteTarget) -> RemoteTensors:
        places = self.source.places.get(to.known) if to.places is None else to.places
        if places is None:
            raise PlanMismatchError(f"rank {self.source.rank} no longer knows where the tensors lie: prepare it again")
        return RemoteTensors(self.engine, to.address, to.regions, places, self.source.names[to.rank], "write")

    async def run(self) -> Sent:
        """Write everything, then commit to every target that has all of this source's part."""
        rank = self.source.rank
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
                await self._write(write.ranks, write.copy, size, region[start : start + nbytes])

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


class _ServedSource(SourceService):
    name = SourceService.name

    def __init__(self, source: Source, controllers: service.Callers) -> None:
        self._source, self._controllers = source, controllers

    @service.method(idempotent=True)
    async def describe(self) -> SourceState:
        # Only a controller may learn where the weights can be read.
        self._controllers.require()
        return self._source.describe()

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def prepare(self, sources: SourceStates, targets: TargetStates, gather: str) -> bytes:
        self._controllers.require()
        return await self._source.prepare(sources, targets, gather)

    @service.method(raises=[StaleUpdateError, PlanMismatchError])
    async def send(self, update: Update, digest: Digest, destinations: WriteTargets) -> Sent:
        self._controllers.require()
        source, before = self._source, self._source.latest
        check_epoch(update, 0 if before is None else before.epoch)
        if source.latest is not None and update <= source.latest:
            raise StaleUpdateError(f"{update} is not later than {source.latest}, which rank {source.rank} has sent")
        if source.plan is None or source.digest != digest:
            raise PlanMismatchError(f"rank {source.rank} does not have the plan {digest.hex()[:16]}: prepare it again")
        source.latest = update
        try:
            with plain_errors():
                return await _Sending(source, source.plan, destinations).run()
        except BaseException:
            # A failed update must not make this source refuse other updates.
            if source.latest == update:
                source.latest = before
            raise


@asynccontextmanager
async def serve_source(
    engine: aiote.Engine,
    layout: Layout,
    rank: int,
    arrays: Mapping[str, Any],
    recipe: Recipe | None = None,
    *,
    staging_bytes: int = 256 << 20,
    controllers: service.CallersLike = None,
) -> AsyncIterator[Source]:
    """Send a training rank's weights whenever a controller asks, until the end of an `async with`.

    `arrays` are the rank's parts by name, as `layout` describes them: numpy arrays, torch tensors, or arrays with
    `__cuda_array_interface__`. They stay in place, and must not change while an update is sent. All sources and the
    controller need the same `recipe`. `staging_bytes` bounds all other memory: larger units are sent in pieces, down to
    quantization blocks. `controllers` may order updates (`service.CallersLike`); "first" is the first that calls.

    Raises UsageError, which names the tensor, for an array that is not as the layout says, and for an engine with a
    cluster key if no controllers are given. The controller's `prepare` raises it if a block exceeds `staging_bytes`.
    """
    if staging_bytes < LEAST:
        raise aiote.UsageError(f"staging_bytes is {staging_bytes}, expected {LEAST} or more")
    callers = service.Callers(engine, controllers, "controller")
    make = functools.partial(Source, engine, layout, rank, arrays, recipe or Recipe(), staging_bytes)
    source = await in_thread(len(layout.tensors) * TENSOR_BYTES, make)
    await source.weights.register(engine, "read")
    try:
        async with service.serve(engine, _ServedSource(source, callers)):
            yield source
    finally:
        await run_shielded(source.staging.close)
        await run_shielded(source.weights.close)
