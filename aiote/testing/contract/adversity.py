"""The checks in which something is lost: another process is killed or stopped, a rail is lost and comes back."""

from __future__ import annotations

import time
from typing import Any

import anyio
import numpy as np

import aiote

from .far import NotHere
from .pair import EnginePair, expect

__all__ = ["killed_peer", "pulled_rail", "stopped_peer"]

STOPPED_S = 5.0
"""How long a peer stays stopped: longer than the silence after which an engine gives a peer up, by default."""
PIECE, PARTS = 1 << 18, 4
PULL_IMM = 0x9A11
NOTICE_S = 60.0
"""How long an engine may take to notice that a rail is lost, or is there again; its tries are up to 30 s apart."""
AFTERWARDS = 20


async def _until_refused(engine: aiote.Engine, source: aiote.Region, remote: aiote.RemoteRegion) -> None:
    """Write until a write fails."""
    while True:
        try:
            await engine.write(source, remote)
        except aiote.AioteError:
            return


async def _third_engine(world: EnginePair) -> tuple[aiote.Region, aiote.RemoteRegion]:
    """Start an engine in a process beside the second one; write to it once; return the source and the target."""
    remote = world.left.attach(await world.far("start"))
    _, source = world.source(remote.nbytes)
    await world.left.write(source, remote)
    return source, remote


async def killed_peer(world: EnginePair) -> str:
    source, remote = await _third_engine(world)
    await world.far("signal", "kill")
    killed = time.monotonic()
    await _until_refused(world.left, source, remote)
    world.figures["seconds until the error"] = time.monotonic() - killed
    await source.aclose()
    await world.settle()
    return "the write to it ended with an error, and the other peer was served"


async def stopped_peer(world: EnginePair) -> str:
    source, remote = await _third_engine(world)
    found, over = "the write waited until it went on", anyio.Event()

    async def write() -> None:
        nonlocal found
        try:
            await world.left.write(source, remote)
            end = "was complete"
        except aiote.AioteError:
            end = "ended with an error"
        if resumed:
            return
        found = f"the write {end} while it was stopped"
        world.figures["seconds until then"] = time.monotonic() - stopped
        over.set()

    await world.far("signal", "stop")
    stopped, resumed = time.monotonic(), False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await world.settle()
        with anyio.move_on_after(STOPPED_S):
            await over.wait()
        resumed = True
        await world.far("signal", "resume")
    await source.aclose()
    return f"{found}, and the other peer was served meanwhile"


class PartWriter:
    """Counted writes to several parts of a target: those of one part one after another, each with other bytes."""

    def __init__(self, world: EnginePair, data: Any, source: aiote.Region, remote: aiote.RemoteRegion) -> None:
        self._left = world.left
        self._source = source
        self._remote = remote
        self._data = data
        self._places = [0] * PARTS
        self.count = 0
        self.over = False
        self.failure: aiote.AioteError | None = None

    async def write(self, part: int, times: int = 1) -> None:
        """Write to a part so many times."""
        for _ in range(times):
            place = self._places[part] = (self._places[part] + 4099) % (len(self._data) - PIECE)
            target = self._remote[part * PIECE : (part + 1) * PIECE]
            await self._left.write_imm(self._source[place : place + PIECE], target, PULL_IMM)
            self.count += 1

    async def keep_writing(self, part: int, scope: anyio.CancelScope) -> None:
        """Write to a part until it is over. If a write fails, cancel the scope."""
        try:
            while not self.over:
                await self.write(part)
        except aiote.AioteError as error:
            self.failure = self.failure or error
            scope.cancel()

    @property
    def expected(self) -> Any:
        """The bytes that the target has now."""
        return np.concatenate([self._data[place : place + PIECE] for place in self._places])


class RailWatch:
    """The events of an engine that say that a rail is lost, or is there again."""

    def __init__(self, engine: aiote.Engine) -> None:
        self._happened = {name: anyio.Event() for name in ("rail.failed", "rail.back")}
        self.stop = engine.listen_events(self._hear)

    def _hear(self, event: aiote.Event) -> None:
        if event.name in self._happened:
            self._happened[event.name].set()

    async def wait(self, name: str, text: str) -> float:
        """Wait for an event and return how long that took. Raises Broken with the text if it does not come."""
        started = time.monotonic()
        with anyio.move_on_after(NOTICE_S):
            await self._happened[name].wait()
        expect(self._happened[name].is_set(), text)
        return time.monotonic() - started


async def pulled_rail(world: EnginePair) -> str:
    if world.pull is None:
        raise NotHere("no rail may be pulled here")
    size = PARTS * PIECE
    data, source = world.source(2 * size)
    number, remote = await world.target(size)
    writer = PartWriter(world, data, source, remote)
    failure: Exception | None = None
    how = ""
    async with anyio.create_task_group() as tasks:
        for part in range(1, PARTS):
            tasks.start_soon(writer.keep_writing, part, tasks.cancel_scope)
        try:
            how = await _lose_a_rail(world, writer)
        except Exception as error:  # raised below, because the group would wrap it
            failure = error
            tasks.cancel_scope.cancel()
        writer.over = True
    failure = failure or writer.failure
    if failure is not None:
        raise failure
    await world.far("wait", PULL_IMM, writer.count)
    await world.settle()
    more = await world.far("left_over", PULL_IMM)
    expect(more == 0, f"{writer.count} writes left {more} counts more than writes")
    found = await world.content(number, size)
    expect((found == writer.expected).all(), "after a rail was lost, the target has other bytes than the last writes")
    await source.aclose()
    await world.far("release", number)
    return f"{how}; {writer.count} writes"


async def _lose_a_rail(world: EnginePair, writer: PartWriter) -> str:
    """Lose a rail while others write; write while it is gone and after it came back. Return how it was lost."""
    assert world.pull is not None
    watch = RailWatch(world.left)
    try:
        await writer.write(0, AFTERWARDS)
        async with world.pull(world) as how:
            world.figures["seconds until the rail was given up"] = await watch.wait(
                "rail.failed", "the engine did not notice that a rail is lost"
            )
            await writer.write(0, AFTERWARDS)
        world.figures["seconds until it was used again"] = await watch.wait("rail.back", "the rail did not come back")
        await writer.write(0, AFTERWARDS)
    finally:
        watch.stop()
    return how
