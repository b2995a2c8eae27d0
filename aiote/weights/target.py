"""An inference rank as a target of updates: it lends its weights' memory to one update at a time, and counts commits.

| versions  | sources write to                     | until the commit the rank has                          |
|-----------|--------------------------------------|--------------------------------------------------------|
| `inplace` | the weights                          | weights that are torn                                  |
| `gated`   | the weights, while a window is open  | weights that are torn, in a window that it opened      |
| `shadow`  | other memory, copied at the commit   | the old version, bit by bit                            |

With `shadow`, a commit copies only the tensors that the update writes; all other tensors belong to the program.

No code of the rank runs while bytes arrive. The rank lends memory by leases, for one update, and a shadow also as
shared memory. After an update is aborted, its sources write to nothing that the rank uses, whatever they do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Literal

import anyio
import numpy as np

import aiote

from .. import service
from ..aio import Condition, current_loop, run_background_tasks, run_shielded
from .layout import Layout
from .protocol import (
    Descriptors,
    Numbers,
    StaleUpdateError,
    State,
    Step,
    TargetService,
    TargetState,
    Update,
    UpdateOrder,
    check_epoch,
    packed_layout,
    places_of,
)
from .rank_memory import TENSOR_BYTES, RankArrays, in_thread
from .shadow import Shadow

__all__ = ["Target", "serve_target"]


class Target:
    """The weights of one inference rank. Made by `serve_target`.

    `state` is "empty" (no update was ever committed), "updating" (an update writes to the weights), "torn" (an update
    wrote to the weights and was not committed) or "ready".
    """

    def __init__(
        self,
        engine: aiote.Engine,
        layout: Layout,
        rank: int,
        arrays: Mapping[str, Any],
        *,
        replica: str,
        versions: Literal["inplace", "gated", "shadow"],
        on_commit: Callable[[int], Awaitable[None] | None] | None,
        limit: float,
        share_memory: bool,
    ) -> None:
        if versions not in ("inplace", "gated", "shadow"):
            raise aiote.UsageError(f'versions is {versions!r}, expected "inplace", "gated" or "shadow"')
        self.engine = engine
        self.weights = RankArrays(layout, rank, arrays, written=True)
        self.shadow = Shadow(engine, self.weights, shares=share_memory) if versions == "shadow" else None
        self._overlapping = self.weights.overlapping()
        self.rank, self.replica, self.versions = rank, replica, versions
        self.state: State = "empty"
        self.update: Update | None = None
        self.epoch = 0
        self.current: _Incoming | None = None
        self.ended = False
        self._on_commit, self._limit = on_commit, limit
        self._packed = packed_layout(layout.only(rank))
        self._open = versions != "gated"
        self._changed = Condition()

    @property
    def written(self) -> RankArrays:
        """The memory that sources write to."""
        return self.weights if self.shadow is None else self.shadow.arrays

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first commit, and while the weights are updating or torn."""
        return None if self.update is None or self.state in ("torn", "updating") else self.update.version

    def describe(self) -> TargetState:
        """Return the target's description of itself for its controller."""
        places = places_of(self.written)
        return TargetState(self.rank, self.replica, self.versions, self.state, self.update, self._packed, places)

    def names_of(self, numbers: Numbers) -> list[str]:
        """Return the names of the tensors with these numbers. Raises UsageError for a number without a tensor."""
        held = [name for name in self.weights.layout.tensors if name in self.weights.places]
        if numbers.ndim != 1 or (len(numbers) and int(np.max(numbers)) >= len(held)):
            raise aiote.UsageError(f"an update names tensors beyond the {len(held)} of rank {self.rank}")
        return [held[number] for number in numbers.tolist()]

    def check_apart(self, names: Iterable[str]) -> None:
        """Raise UsageError if two tensors that an update writes share elements, because the last write would win."""
        written = set(names)
        for one, other in self._overlapping:
            if one in written and other in written:
                raise aiote.UsageError(
                    f"{one} and {other} share memory on rank {self.rank}, and the update writes both: list one of them "
                    "as untouched"
                )

    def change(self, state: State) -> None:
        """Set the state, and wake the tasks that wait for a change."""
        self.state = state
        self._changed.wake_all()

    async def wait_version(self, version: int) -> None:
        """Wait until the weights have this version or a later one. Cancelling loses nothing.

        Raises ClosedError if the target or its engine is closed.
        """
        while (self.version if self.version is not None else -1) < version:
            if self.ended:
                raise aiote.ClosedError("the target is closed, so no version can come any more")
            await self._changed.wait()

    def end(self) -> None:
        """Record that the target takes no more updates, and wake the tasks that wait for one."""
        self.ended = True
        self.change(self.state)

    async def end_with_engine(self) -> None:
        """Wait until the engine is closed, then end the target."""
        await self.engine.wait_closed()
        self.end()

    @asynccontextmanager
    async def window(self) -> AsyncIterator[None]:
        """Let updates write to the weights until the end of an `async with`; only with `versions="gated"`.

        The end of the block waits for an update that has begun. To bound this time, put a cancel scope around the
        `async with`: if the scope is cancelled, the update is aborted, and the weights are torn. Raises UsageError for
        other `versions`.
        """
        if self.versions != "gated":
            raise aiote.UsageError(
                f'window: the target has versions={self.versions!r}; only versions="gated" has windows'
            )
        self._open = True
        self.change(self.state)
        try:
            yield
            await self._changed.until(lambda: self.current is None)
        finally:
            self._open = False
            if self.current is not None:
                self.current.abort("the window was closed")
                with anyio.CancelScope(shield=True):
                    await self._changed.until(lambda: self.current is None)

    async def wait_open(self) -> None:
        """Wait until an update may write to the weights."""
        await self._changed.until(lambda: self._open)

    async def install(self, update: Update, names: Iterable[str]) -> None:
        """Make the bytes that were written to these tensors the current version, and call `on_commit`.

        A cancellation takes effect only after both. `on_commit` has `limit` seconds; its error is raised here.
        """

        async def swap() -> None:
            if self.shadow is not None:
                # An interruption makes `run_shielded` call this again. Sources have ended: the result is the same.
                await self.shadow.install(names)
            # Only a commit raises the epoch, so a controller that begins an update and leaves does not keep others out.
            self.update, self.epoch = update, update.epoch
            self.change("ready")

        try:
            await run_shielded(swap)
        finally:
            # Call the program even after a cancellation, because the weights are new.
            if self.update == update and self._on_commit is not None:
                await self._call_on_commit(self._on_commit, update.version)

    async def _call_on_commit(self, on_commit: Callable[[int], Awaitable[None] | None], version: int) -> None:
        """Call `on_commit` in a task of its own, so that a cancellation of the update does not reach it."""
        failures: list[Exception] = []

        async def call() -> None:
            try:
                with anyio.fail_after(self._limit):
                    told = on_commit(version)
                    if inspect.isawaitable(told):
                        await told
            except TimeoutError:
                failures.append(TimeoutError(f"on_commit took longer than {self._limit} s (limit)"))
            except Exception as error:
                failures.append(error)

        task = current_loop().spawn(call, name="aiote weights: on_commit")
        await run_shielded(task.join)
        if failures:
            raise failures[0]


class _Incoming:
    """An update in progress at a target. `abort` cancels its current step, and prevents further steps."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.aborted = ""
        self.asked, self.done = anyio.Event(), anyio.Event()
        self._scope: anyio.CancelScope | None = None

    def abort(self, reason: str) -> None:
        """Abort the update. The first reason is kept."""
        self.aborted = self.aborted or reason
        if self._scope is not None:
            self._scope.cancel()

    @contextmanager
    def guard_step(self) -> Iterator[None]:
        """Surround a step that may wait. Raises StaleUpdateError if the update was aborted before the step's end."""
        if not self.aborted:
            with anyio.CancelScope() as self._scope:
                yield
            self._scope = None
        if self.aborted:
            raise StaleUpdateError(self.aborted)


class _ServedTarget(TargetService):
    name = TargetService.name

    def __init__(self, target: Target, controllers: service.Callers) -> None:
        self._target = target
        self._controllers = controllers

    @service.method(idempotent=True)
    async def describe(self) -> TargetState:
        return self._target.describe()

    @service.method(raises=[StaleUpdateError])
    async def update(self, order: UpdateOrder) -> AsyncIterator[Step]:
        self._controllers.require()
        target, mine = self._target, _Incoming(order.update)
        check_epoch(order.update, target.epoch)
        if len(order.written) != len(order.sources):
            raise aiote.UsageError(
                f"the order lists {len(order.sources)} sources, but tensors for {len(order.written)}"
            )
        written = [target.names_of(numbers) for numbers in order.written]
        target.check_apart(itertools.chain(*written))
        await self._displace(order.update)
        target.current = mine
        leases: list[aiote.Lease] = []
        counted = ExitStack()
        try:
            with mine.guard_step():
                await target.wait_open()
            # Use new immediates, because a late commit of an earlier update must not count. Each source has one of its
            # own, because a source that commits twice must not count for another one.
            blocks = [counted.enter_context(target.engine.reserve_immediates(1, [one])) for one in order.sources]
            counters = [counted.enter_context(target.engine.counter(block.first)) for block in blocks]
            shared = b""
            if target.shadow is not None:
                await target.shadow.prepare(order.sources)
                shared = target.shadow.descriptor
            lent = _lease_regions(target, order.sources, written, leases)
            if target.shadow is None:
                target.change("updating")
            yield Step("lent", [counter.imm for counter in counters], lent, places_of(target.written), shared)
            with mine.guard_step():
                for counter in counters:
                    await counter.wait()
            yield Step("counted")
            with mine.guard_step():
                await mine.asked.wait()
            await _revoke(leases)
            await target.install(order.update, dict.fromkeys(itertools.chain(*written)))
            yield Step("committed")
        finally:
            await self._end_update(mine, leases, counted)

    async def _end_update(self, mine: _Incoming, leases: list[aiote.Lease], counted: ExitStack) -> None:
        async def revoke() -> None:
            await _revoke(leases)

        try:
            await run_shielded(revoke)
        finally:
            # Do this even if the revocation was interrupted again: the next update must not wait for this one.
            counted.close()
            target = self._target
            target.current = None
            target.change("torn" if target.state == "updating" else target.state)
            mine.done.set()

    async def _displace(self, update: Update) -> None:
        """Abort an update of an earlier epoch, and wait for its end. Raises StaleUpdateError if `update` is too old."""
        target = self._target
        while True:
            # Check again after each wait, because the update that had to make way may have been committed.
            if target.update is not None and update.version <= target.update.version:
                raise StaleUpdateError(f"{update} is not later than {target.update}, which rank {target.rank} has")
            if update.epoch < target.epoch:
                raise StaleUpdateError(f"{update} comes from an earlier controller than that of epoch {target.epoch}")
            if (current := target.current) is None:
                return
            if update.epoch <= current.update.epoch:
                raise StaleUpdateError(
                    f"rank {target.rank} takes part in {current.update}, and {update} has no later epoch"
                )
            current.abort(f"{current.update} makes way for {update}")
            await current.done.wait()

    @service.method(idempotent=True, raises=[StaleUpdateError])
    async def commit(self, update: Update) -> None:
        self._controllers.require()
        target = self._target
        if target.update == update and target.state == "ready":
            return
        if target.current is None or target.current.update != update:
            raise StaleUpdateError(f"rank {target.rank} has no update {update} under way; it has {target.update}")
        target.current.asked.set()


def _lease_regions(
    target: Target, sources: Sequence[str], written: Sequence[Sequence[str]], leases: list[aiote.Lease]
) -> Descriptors:
    """Lend each source, under one lease, the regions that it writes to; return the descriptors."""
    memory, found = target.written, []
    for source, names in zip(sources, written, strict=True):
        numbers = sorted({memory.places[name].region for name in names})
        several = [b""] * len(memory.regions)
        if numbers:
            leases.append(target.engine.lease([memory.regions[number] for number in numbers], source))
            for number, descriptor in zip(numbers, leases[-1].descriptors, strict=True):
                several[number] = descriptor
        found += several
    return Descriptors.of(found)


async def _revoke(leases: list[aiote.Lease]) -> None:
    for lease in leases:
        lease.begin_revoking()
    while leases:
        await leases[-1].revoke()
        leases.pop()


@asynccontextmanager
async def serve_target(
    engine: aiote.Engine,
    layout: Layout,
    rank: int,
    arrays: Mapping[str, Any],
    *,
    replica: str = "",
    versions: Literal["inplace", "gated", "shadow"] = "shadow",
    on_commit: Callable[[int], Awaitable[None] | None] | None = None,
    limit: float = 60.0,
    share_memory: bool = True,
    controllers: service.CallersLike = None,
) -> AsyncIterator[Target]:
    """Take updates of an inference rank's weights, until the end of an `async with`.

    `arrays` are the rank's parts by name, as `layout` describes them for `rank`: numpy arrays, torch tensors, or arrays
    with `__cuda_array_interface__`, on the CPU or on a GPU. They stay in place while the target is served. Ranks of one
    `replica` get a version together. `versions` says what sources write to, see the module; `shadow` needs the weights'
    memory a second time. `on_commit` is called with each version once the weights have it, before the controller hears
    of the commit, for example to clear a prefix cache. It has `limit` seconds. If it raises, the replica fails in the
    controller's report, although the weights are new. With `share_memory` sources of this host map the shadow and copy
    into it; docs/weights.md says what that trusts them with. `controllers` are the engines that may update the target:
    their addresses, a predicate of the peer, or "first", the first engine that begins an update, as long as it is
    connected.

    Raises UsageError, which names the tensor, for an array that is not as the layout says, or is read-only; and if the
    engine has a cluster key and no controllers are given.
    """
    callers = service.Callers(engine, controllers, "controller")
    make = functools.partial(
        Target,
        engine,
        layout,
        rank,
        arrays,
        replica=replica,
        versions=versions,
        on_commit=on_commit,
        limit=limit,
        share_memory=share_memory,
    )
    work = sum(tensor.nbytes for tensor in layout.tensors.values()) + len(layout.tensors) * TENSOR_BYTES
    target: Target = await in_thread(work, make)
    await target.written.register(engine, "write")
    try:
        async with service.serve(engine, _ServedTarget(target, callers)), run_background_tasks(target.end_with_engine):
            yield target
    finally:
        target.end()
        await run_shielded((target.shadow or target.weights).close)
