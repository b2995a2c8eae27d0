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

import numpy as np

import aiote

from .. import service
from ..aio import plain_errors, run_shielded
from .dtypes import ITEMSIZE
from .layout import Layout
from .mapped import Mappings
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
    WriteTargets,
    check_epoch,
    digest_of,
    layout_of,
    packed_layout,
    places_of,
)
from .rank_memory import TENSOR_BYTES, RankArrays, StagingMemory, in_thread
from .recipe import Recipe
from .remote import Names, RemoteTensors
from .sending import UpdateSender
from .sizes import LEAST, check_limit, small
from .tasks import Task
from .writes import Straight, runs_of

__all__ = ["Source", "serve_source"]

KEPT_STEPS = 1 << 14
"""The most steps to keep for the next update, about 1 KiB each. Computing a step takes longer than beginning it."""
KEPT_PLACES = 1 << 10
"""The most targets whose places are kept, 16 bytes for each tensor."""


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
        self.mappings = Mappings(engine, self.weights)
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
                return await UpdateSender(source, source.plan, destinations).run()
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
        source.mappings.close()
        await run_shielded(source.staging.close)
        await run_shielded(source.weights.close)
