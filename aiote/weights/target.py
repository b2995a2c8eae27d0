"""An inference rank: it lends the memory of its weights for one update at a time, and counts who has committed.

| versions  | sources write to                     | until the commit the rank has                          |
|-----------|--------------------------------------|--------------------------------------------------------|
| `inplace` | the weights                          | weights that are torn                                  |
| `gated`   | the weights, while a window is open  | weights that are torn, in a window that it opened      |
| `shadow`  | other memory, copied at the commit   | the old version, bit by bit                            |

A commit copies the tensors that the update writes, and no others: those are the program's own.

No code of the rank runs while bytes arrive. Memory is lent by lease for one update: after an aborted one nothing is
written any more, whatever its sources do.
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
from ..aio import current_loop
from ..service.background import beside, to_the_end
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
from .rank_memory import TENSOR_BYTES, RankMemory, in_thread

__all__ = ["Target", "serve_target"]


class Target:
    """The weights of one inference rank. Made by `serve_target`; `version` is None before the first commit.

    `state` is "empty" (nothing was ever committed), "updating" (an update writes to the weights), "torn" (one did, and
    was not committed) or "ready".
    """

    def __init__(
        self,
        engine: aiote.Engine,
        layout: Layout,
        rank: int,
        arrays: Mapping[str, Any],
        replica: str,
        versions: Literal["inplace", "gated", "shadow"],
        on_commit: Callable[[int], Awaitable[None] | None] | None,
        limit: float,
    ) -> None:
        if versions not in ("inplace", "gated", "shadow"):
            raise aiote.UsageError(f'versions is {versions!r}, expected "inplace", "gated" or "shadow"')
        self.engine = engine
        self.weights = RankMemory(layout, rank, arrays, written=True)
        self.written = self.weights
        if versions == "shadow":
            # What an update leaves out of the tensors that it writes, padding, is copied at the commits, too.
            self.written = RankMemory.allocated(layout, rank, self.weights.tied())
            self.weights.copy_to(self.written)
        self._overlapping = self.weights.overlapping()
        self.rank, self.replica, self.versions = rank, replica, versions
        self.state: State = "empty"
        self.update: Update | None = None
        self.epoch = 0
        self.current: _Incoming | None = None
        self.stale = self.ended = False
        self._on_commit, self._limit = on_commit, limit
        self._packed = packed_layout(layout.only(rank))
        self._open = versions != "gated"
        self._changed = anyio.Event()

    @property
    def version(self) -> int | None:
        """The version of the weights, None where they are none whole."""
        return None if self.update is None or self.state in ("torn", "updating") else self.update.version

    def described(self) -> TargetState:
        """Return what it tells its controller."""
        places = places_of(self.written)
        return TargetState(self.rank, self.replica, self.versions, self.state, self.update, self._packed, places)

    def named(self, numbers: Numbers) -> list[str]:
        """Return the names of these tensors of the layout. Raises UsageError for numbers of none."""
        held = [name for name in self.weights.layout.tensors if name in self.weights.places]
        if numbers.ndim != 1 or (len(numbers) and int(np.max(numbers)) >= len(held)):
            raise aiote.UsageError(f"an update names tensors beyond the {len(held)} of rank {self.rank}")
        return [held[number] for number in numbers.tolist()]

    def check_apart(self, names: Iterable[str]) -> None:
        """Raise UsageError where two tensors that an update writes share elements: the last write would win."""
        written = set(names)
        for one, other in self._overlapping:
            if one in written and other in written:
                raise aiote.UsageError(
                    f"{one} and {other} share memory on rank {self.rank}, and the update writes both: list one of them "
                    "as untouched"
                )

    def change(self, state: State) -> None:
        """Take note of a state, and wake who waits for one."""
        self.state = state
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def wait_version(self, version: int) -> None:
        """Wait until the weights are of this version or a later one. Cancelling loses nothing.

        Raises ClosedError when the target or its engine was closed.
        """
        while (self.version if self.version is not None else -1) < version:
            if self.ended:
                raise aiote.ClosedError("the target is closed, no version comes any more")
            await self._changed.wait()

    def end(self) -> None:
        """Take note that no update comes any more."""
        self.ended = True
        self.change(self.state)

    async def follow(self) -> None:
        """Return when the engine is closed."""
        await self.engine.wait_closed()
        self.end()

    @asynccontextmanager
    async def window(self) -> AsyncIterator[None]:
        """Let an update write to the weights for the length of an `async with`; only with `versions="gated"`.

        It is left when no update is under way. One that has begun is waited for, so bound it by a scope of your own:
        where that ends it, the update is aborted, and the weights are torn.
        """
        if self.versions != "gated":
            raise aiote.UsageError(f'a window is opened with versions="gated", not {self.versions!r}')
        self._open = True
        self.change(self.state)
        try:
            yield
            while self.current is not None:
                await self._changed.wait()
        finally:
            self._open = False
            if self.current is not None:
                self.current.abort("the window was closed")
                with anyio.CancelScope(shield=True):
                    while self.current is not None:
                        await self._changed.wait()

    async def opened(self) -> None:
        """Wait until an update may write."""
        while not self._open:
            await self._changed.wait()

    async def refresh(self) -> None:
        """Bring a shadow to what the weights are, where an update that failed has written to it."""
        if self.stale:
            copy = functools.partial(self.weights.copy_to, self.written)
            await to_the_end(functools.partial(in_thread, self.weights.nbytes, copy))
            self.stale = False

    async def install(self, update: Update, names: Iterable[str]) -> None:
        """Make what was written to these tensors the version, and tell the program.

        Once begun, no cancellation ends it halfway; the program has `limit` seconds.
        """

        async def swap() -> None:
            if self.written is not self.weights:
                # Once more where it was interrupted: nobody can write to either any more, so that gives the same.
                copy = functools.partial(self.written.copy_to, self.weights, names)
                await in_thread(self.weights.nbytes, copy)
                self.stale = False
            # Only a commit moves the epoch on: who begins an update and goes keeps nobody else out.
            self.update, self.epoch = update, update.epoch
            self.change("ready")

        try:
            await to_the_end(swap)
        finally:
            # Also where it was cancelled meanwhile: the weights are new, and the program has to know.
            if self.update == update and self._on_commit is not None:
                await self._tell(self._on_commit, update.version)

    async def _tell(self, on_commit: Callable[[int], Awaitable[None] | None], version: int) -> None:
        """Call the program in a task of its own, which no cancellation of the update reaches."""
        failures: list[Exception] = []

        async def call() -> None:
            try:
                with anyio.fail_after(self._limit):
                    told = on_commit(version)
                    if inspect.isawaitable(told):
                        await told
            except TimeoutError:
                failures.append(TimeoutError(f"on_commit took longer than {self._limit} s"))
            except Exception as error:
                failures.append(error)

        task = current_loop().spawn(call, name="aiote weights: on_commit")
        await to_the_end(task.join)
        if failures:
            raise failures[0]


class _Incoming:
    """An update that is under way at a target. `abort` ends the step that it is at, and it goes no further."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.aborted = ""
        self.asked, self.done = anyio.Event(), anyio.Event()
        self._scope: anyio.CancelScope | None = None

    def abort(self, reason: str) -> None:
        """End it."""
        self.aborted = self.aborted or reason
        if self._scope is not None:
            self._scope.cancel()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step that may wait. Raises StaleUpdateError when the update was aborted."""
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
        return self._target.described()

    @service.method(raises=[StaleUpdateError])
    async def update(self, order: UpdateOrder) -> AsyncIterator[Step]:
        self._controllers.require()
        target, mine = self._target, _Incoming(order.update)
        check_epoch(order.update, target.epoch)
        if len(order.written) != len(order.sources):
            raise aiote.UsageError(f"{len(order.sources)} sources write to tensors, got those of {len(order.written)}")
        written = [target.named(numbers) for numbers in order.written]
        target.check_apart(itertools.chain(*written))
        await self._displace(order.update)
        target.current = mine
        leases: list[aiote.Lease] = []
        counted = ExitStack()
        try:
            with mine.step():
                await target.opened()
            # A new immediate that counts these sources alone: a late commit of an earlier update must not count.
            block = counted.enter_context(target.engine.reserve_immediates(1, order.sources))
            counter = counted.enter_context(target.engine.counter(block.first))
            await target.refresh()
            lent = _lent(target, order.sources, written, leases)
            if target.versions != "shadow":
                target.change("updating")
            else:
                target.stale = True
            yield Step("lent", counter.imm, lent, places_of(target.written))
            with mine.step():
                await counter.wait(len(order.sources)) if order.sources else None
            yield Step("counted")
            with mine.step():
                await mine.asked.wait()
            await _revoke(leases)
            await target.install(order.update, dict.fromkeys(itertools.chain(*written)))
            yield Step("committed")
        finally:
            await self._over(mine, leases, counted)

    async def _over(self, mine: _Incoming, leases: list[aiote.Lease], counted: ExitStack) -> None:
        async def revoke() -> None:
            await _revoke(leases)

        try:
            await to_the_end(revoke)
        finally:
            # Also where the revocation was interrupted once more: the next update must not wait for this one.
            counted.close()
            target = self._target
            target.current = None
            target.change("torn" if target.state == "updating" else target.state)
            mine.done.set()

    async def _displace(self, update: Update) -> None:
        """Make way for an update; raise StaleUpdateError for one that is too late."""
        target = self._target
        while True:
            # Looked at again after each wait: the one that made way may have been committed meanwhile.
            if target.update is not None and update.version <= target.update.version:
                raise StaleUpdateError(f"{update} is no later than what rank {target.rank} has, {target.update}")
            if update.epoch < target.epoch:
                raise StaleUpdateError(f"{update} is of a controller before that of epoch {target.epoch}")
            if (current := target.current) is None:
                return
            if update.epoch <= current.update.epoch:
                raise StaleUpdateError(f"rank {target.rank} takes part in {current.update}; {update} is no later epoch")
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


def _lent(
    target: Target, sources: Sequence[str], written: Sequence[Sequence[str]], leases: list[aiote.Lease]
) -> Descriptors:
    """Lend each source the regions that it writes to under one lease; return the descriptors."""
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
    controllers: service.CallersLike = None,
) -> AsyncIterator[Target]:
    """Take updates of an inference rank's weights for the length of an `async with`.

    `arrays` are the rank's parts by name, as `layout` describes them for `rank`: numpy arrays, or torch tensors on the
    CPU; they stay in place meanwhile. Ranks of one `replica` get a version together. `versions` says what sources write
    to, see the module; `shadow` takes the weights' memory once more. `on_commit` is called with each version when the
    weights are of it, before the controller hears of the commit: to forget a prefix cache, for one. It has `limit`
    seconds; what it raises makes the replica fail in the controller's report, though the weights are new. `controllers`
    are the engines that may update it: their addresses, a predicate of the peer, or "first", the first that begins an
    update, as long as it is connected.

    Raises UsageError, which names the tensor, for an array that is not as the layout says, or is read-only; and where
    the engine has a cluster key and no controller is named.
    """
    callers = service.Callers(engine, controllers, "controller")
    make = functools.partial(Target, engine, layout, rank, arrays, replica, versions, on_commit, limit)
    work = sum(tensor.nbytes for tensor in layout.tensors.values()) + len(layout.tensors) * TENSOR_BYTES
    target: Target = await in_thread(work, make)
    await target.written.register(engine, "write")
    try:
        async with service.serve(engine, _ServedTarget(target, callers)), beside(target.follow):
            yield target
    finally:
        target.end()
        await to_the_end(target.written.close)
