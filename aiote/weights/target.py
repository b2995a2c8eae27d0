"""An inference rank: it lends the memory of its weights for one update at a time, and counts who has committed.

| versions  | sources write to                     | until the commit the rank has                          |
|-----------|--------------------------------------|--------------------------------------------------------|
| `inplace` | the weights                          | weights that are torn                                  |
| `gated`   | the weights, while a window is open  | weights that are torn, in a window that it opened      |
| `shadow`  | other memory, copied at the commit   | the old version, bit by bit                            |

No code of the rank runs while bytes arrive. Memory is lent by lease for one update: after an aborted one nothing is
written any more, whatever its sources do.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import anyio

import aiote

from .. import service
from ..service.background import to_the_end
from .layout import Layout
from .protocol import (
    StaleUpdateError,
    State,
    Step,
    TargetService,
    TargetState,
    Update,
    UpdateOrder,
    packed_layout,
    places_of,
)
from .rank_memory import RankMemory

__all__ = ["Target", "serve_target"]

IMMEDIATES = 1 << 28


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
    ) -> None:
        if versions not in ("inplace", "gated", "shadow"):
            raise aiote.UsageError(f'versions is {versions!r}, expected "inplace", "gated" or "shadow"')
        self.engine = engine
        self.weights = RankMemory(layout, rank, arrays)
        self.written = self.weights
        if versions == "shadow":
            # What no update writes, padding, is copied at the commits, too.
            self.written = RankMemory.allocated(layout, rank)
            self.weights.copy_to(self.written)
        self.rank, self.replica, self.versions = rank, replica, versions
        self.state: State = "empty"
        self.update: Update | None = None
        self.epoch = 0
        self.current: _Incoming | None = None
        self._on_commit = on_commit
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

    def change(self, state: State) -> None:
        """Take note of a state, and wake who waits for one."""
        self.state = state
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def wait_version(self, version: int) -> None:
        """Wait until the weights are of this version or a later one. Cancelling loses nothing."""
        while (self.version if self.version is not None else -1) < version:
            await self._changed.wait()

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

    async def install(self, update: Update) -> None:
        """Make what was written the version, and tell the program. Once begun, no cancellation ends it halfway."""

        async def swap() -> None:
            if self.written is not self.weights:
                # Once more where it was interrupted: nobody can write to either any more, so that gives the same.
                await anyio.to_thread.run_sync(self.written.copy_to, self.weights)
            self.update = update
            self.change("ready")

        try:
            await to_the_end(swap)
        finally:
            # Also where it was cancelled meanwhile: the weights are new, and the program has to know.
            if self.update == update and self._on_commit is not None:
                told = self._on_commit(update.version)
                if inspect.isawaitable(told):
                    await told


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

    def __init__(self, target: Target) -> None:
        self._target = target

    @service.method(idempotent=True)
    async def describe(self) -> TargetState:
        return self._target.described()

    @service.method(raises=[StaleUpdateError])
    async def update(self, order: UpdateOrder) -> AsyncIterator[Step]:
        target, mine = self._target, _Incoming(order.update)
        await self._displace(order.update)
        target.current = mine
        leases: list[aiote.Lease] = []
        counter: aiote.Counter | None = None
        try:
            with mine.step():
                await target.opened()
            counter = _counter(target.engine)
            lent = _lent(target, order.sources, leases)
            if target.versions != "shadow":
                target.change("updating")
            yield Step("lent", counter.imm, lent, places_of(target.written))
            with mine.step():
                await counter.wait(len(order.sources)) if order.sources else None
            yield Step("counted")
            with mine.step():
                await mine.asked.wait()
            await _revoke(leases)
            await target.install(order.update)
            yield Step("committed")
        finally:
            await self._over(mine, leases, counter)

    async def _over(self, mine: _Incoming, leases: list[aiote.Lease], counter: aiote.Counter | None) -> None:
        async def revoke() -> None:
            await _revoke(leases)

        try:
            await to_the_end(revoke)
        finally:
            # Also where the revocation was interrupted once more: the next update must not wait for this one.
            if counter is not None:
                counter.close()
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
            target.epoch = update.epoch
            if (current := target.current) is None:
                return
            if update.epoch <= current.update.epoch:
                raise StaleUpdateError(f"rank {target.rank} takes part in {current.update}; {update} is no later epoch")
            current.abort(f"{current.update} makes way for {update}")
            await current.done.wait()

    @service.method(idempotent=True, raises=[StaleUpdateError])
    async def commit(self, update: Update) -> None:
        target = self._target
        if target.update == update and target.state == "ready":
            return
        if target.current is None or target.current.update != update:
            raise StaleUpdateError(f"rank {target.rank} has no update {update} under way; it has {target.update}")
        target.current.asked.set()


def _counter(engine: aiote.Engine) -> aiote.Counter:
    """Return the counter of an immediate drawn at random: a late commit of an earlier update must not count."""
    return engine.counter(secrets.randbelow(IMMEDIATES))


def _lent(target: Target, sources: list[str], leases: list[aiote.Lease]) -> list[list[bytes]]:
    """Lend every region to every source; return the descriptors."""
    lent = []
    for source in sources:
        first = len(leases)
        for region in target.written.regions:
            leases.append(region.lease(slice(0, region.nbytes), source))
        lent.append([lease.descriptor for lease in leases[first:]])
    return lent


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
) -> AsyncIterator[Target]:
    """Take updates of an inference rank's weights for the length of an `async with`.

    `arrays` are the rank's parts by name, as `layout` describes them for `rank`: numpy arrays, or torch tensors on the
    CPU; they stay in place meanwhile. Ranks of one `replica` get a version together. `versions` says what sources write
    to, see the module; `shadow` takes the weights' memory once more. `on_commit` is called with each version when the
    weights are of it, before the controller hears of the commit: to forget a prefix cache, for one.

    Raises UsageError, which names the tensor, for an array that is not as the layout says.
    """
    target = Target(engine, layout, rank, arrays, replica, versions, on_commit)
    await target.written.register(engine, "write")
    try:
        async with service.serve(engine, _ServedTarget(target)):
            yield target
    finally:
        await to_the_end(target.written.close)
