"""The shadow that sources of the target's host map: right bytes in one copy, and nothing late from whoever has it."""

from __future__ import annotations

import threading
import time
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote import service
from aiote.weights import Layout, Replicate, serve_target
from aiote.weights.copies import Copy
from aiote.weights.mapped import MappedTensors
from aiote.weights.protocol import Step, TargetService, Update, UpdateOrder
from aiote.weights.rank_memory import RankArrays
from aiote.weights.shadow import MOST_CONNECTED, Shadow
from support.engines.opening import opened, pair, until
from support.weights.updates import ranks

pytestmark = pytest.mark.anyio

COUNT = 1024
LAYOUT = Layout.over([0], {"a": ((COUNT,), "U8", Replicate()), "b": ((COUNT,), "U8", Replicate())})


def carried(engine: aiote.Engine) -> int:
    """Return the bytes that an engine has moved for itself over all its rails."""
    return sum(engine.statistics().carried)


@pytest.mark.parametrize(
    "how",
    ["shared", "refused by the target", "refused by the sources", "refused by the kernel", "the target is silent"],
)
@pytest.mark.parametrize("provider", ["local", "socket", "tcp"])
async def test_sources_copy_into_the_shadow_or_write_to_it(provider, how, monkeypatch):
    settings = {"share_memory": how != "refused by the target"}
    if how == "refused by the sources":
        monkeypatch.setenv("AIOTE_MAX_MAPPED_BYTES", "0")
    if how == "refused by the kernel":
        monkeypatch.setattr(aiote.Engine, "share_memory", no_memory)
    if how == "the target is silent":
        monkeypatch.setattr(aiote.Engine, "map_memory", no_answer)
    async with ranks(provider, **settings) as made:
        made.train(1)
        await made.controller.update(1)
        made.check(1)
        before = [carried(engine) for engine in made.engines[:2]]
        for version in (2, 3):
            made.train(version)
            assert (await made.controller.update(version)).committed == [""]
            made.check(version)
        nbytes = sum(target.weights.nbytes for target in made.targets)
        moved = sum(carried(engine) for engine in made.engines[:2]) - sum(before)
        assert (moved < nbytes // 2) == (how == "shared")


async def no_memory(*_arguments: Any) -> Any:
    raise aiote.FabricError(12, "there is none", operation="share memory")


async def no_answer(*_arguments: Any, **_named: Any) -> Any:
    await anyio.sleep_forever()


class Holder:
    """A source that has mapped a target's shadow, and the target's side of its updates."""

    def __init__(self, engine: aiote.Engine, rank: aiote.Engine, epoch: int = 1) -> None:
        self.engine, self.target = engine, service.client(engine, rank.address, TargetService)
        self._epoch = epoch

    async def begin(self, version: int, *more: aiote.Engine) -> tuple[Any, Step]:
        """Begin an update of this source and others; return its stream of steps, and what was lent."""
        sources = [str(one.address) for one in (self.engine, *more)]
        written = [np.zeros(1, np.uint64)] * len(sources)
        stream: Any = self.target.update(UpdateOrder(Update(self._epoch, version), sources, written))
        return stream, await anext(stream)

    async def map(self, lent: Step) -> np.ndarray:
        return np.frombuffer((await self.engine.map_memory(lent.shared)).view, np.uint8)


async def test_a_source_that_has_mapped_it_meets_no_later_update():
    for change in ("failed", "another source", "a source less"):
        await meets_no_later_update(change)


async def meets_no_later_update(change: str) -> None:
    memory = {"a": np.full(COUNT, 1, np.uint8), "b": np.full(COUNT, 2, np.uint8)}
    async with pair("local") as (engine, rank), opened("local") as other:
        async with serve_target(rank, LAYOUT, 0, memory) as target:
            holder = Holder(engine, rank)
            stream, lent = await holder.begin(1, *([other] if change == "a source less" else []))
            old = await holder.map(lent)
            await stream.aclose()
            await until(lambda: target.current is None)
            if change != "failed":
                # As after a commit, without one: what was written counts.
                target.shadow._stale = False
            stream, again = await holder.begin(2, *([other] if change == "another source" else []))
            assert again.shared
            assert again.shared != lent.shared
            old[:] = 9
            assert not (target.written.views[0] == 9).any()
            assert (target.written.bytes_of("a") == 1).all()
            assert (target.written.bytes_of("b") == 2).all()
            await stream.aclose()
        with pytest.raises(aiote.PeerError, match="no such memory"):
            await engine.map_memory(again.shared)


async def test_memory_stays_from_one_committed_update_to_the_next():
    async with ranks("local", share_memory=True) as made:
        descriptors = []
        for version in (1, 2, 3):
            made.train(version)
            await made.controller.update(version)
            descriptors.append([target.shadow.descriptor for target in made.targets])
        assert descriptors[0] == descriptors[1] == descriptors[2]
        assert all(descriptors[0])


async def test_a_source_that_writes_on_and_on_spoils_no_update_of_others():
    """It keeps writing to all that it ever mapped, in updates that fail, while others bring the versions."""
    async with ranks("local", share_memory=True, controllers=lambda _: True) as made, opened("local") as engine:
        mapped: list[np.ndarray] = []
        over = threading.Event()

        def spoil() -> None:
            while not over.is_set():
                for memory in tuple(mapped):
                    memory[:] = 9
                # This thread is to take no processor from the loop.
                time.sleep(0.0005)

        thread = threading.Thread(target=spoil)
        thread.start()
        try:
            for version in range(1, 7):
                made.train(version)
                if version % 2:
                    for rank in made.engines[2:4]:
                        holder = Holder(engine, rank, made.controller.epoch)
                        stream, lent = await holder.begin(version)
                        mapped.append(await holder.map(lent))
                        await stream.aclose()
                    await until(lambda: all(target.current is None for target in made.targets))
                assert (await made.controller.update(version)).committed == [""]
                made.check(version)
        finally:
            over.set()
            thread.join()
            mapped.clear()


@pytest.mark.parametrize("ticks", range(0, 40, 3))
async def test_a_cancelled_preparation_loses_nothing(ticks):
    weights = RankArrays(LAYOUT, 0, {"a": np.full(COUNT, 1, np.uint8), "b": np.full(COUNT, 2, np.uint8)})
    async with pair("local") as (engine, rank):
        shadow = Shadow(rank, weights, shares=True)
        await shadow.arrays.register(rank, "write")
        async with anyio.create_task_group() as group:
            group.start_soon(shadow.prepare, [str(engine.address)])
            for _ in range(ticks):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await shadow.prepare([str(engine.address)])
        with await engine.map_memory(shadow.descriptor) as memory:
            assert memory.nbytes == shadow.nbytes
        assert (shadow.arrays.bytes_of("b") == 2).all()
        await shadow.close()
        assert not rank._links.sharing._own


async def test_an_update_connects_to_some_sources_of_its_host_alone(monkeypatch):
    weights = RankArrays(LAYOUT, 0, {"a": np.zeros(COUNT, np.uint8), "b": np.zeros(COUNT, np.uint8)})
    asked = []
    async with opened("local") as rank:

        async def connect(address: aiote.Address) -> None:
            asked.append(address)
            raise aiote.PeerError(str(address), "it refuses")

        monkeypatch.setattr(rank, "connect", connect)
        shadow = Shadow(rank, weights, shares=True)
        here = [f"aiote://{rank.address.host}:{port}/{'1' * 32}.{'1' * 16}" for port in range(1, MOST_CONNECTED + 20)]
        elsewhere = [f"aiote://192.0.2.1:{port}/{'1' * 32}.{'1' * 16}" for port in range(1, 20)]
        await shadow.prepare([*elsewhere, *here])
        assert {str(one) for one in asked} == set(here[:MOST_CONNECTED])
        assert not shadow.descriptor
        await shadow.close()


async def test_a_cancelled_update_leaves_nothing_for_the_next():
    async with ranks("local", share_memory=True) as made:
        for version in range(2, 62, 2):
            made.train(version)
            async with anyio.create_task_group() as group:
                group.start_soon(made.controller.update, version)
                for _ in range(4 * version):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            made.train(version + 1)
            assert (await made.controller.update(version + 1)).committed == [""]
            made.check(version + 1)


numbers = st.integers(0, 80)


@given(numbers, st.lists(st.tuples(st.integers(1, 9), numbers), min_size=1, max_size=3), st.sampled_from([1, 2, 8]))
def test_no_description_leads_out_of_the_shared_memory(place, sides, size):
    whole = np.zeros(64 + 256 + 64, np.uint8)
    mapped = MappedTensors(whole[64:320], np.array([[0, place]], np.uint64), {"a": 0})
    shape, strides = tuple(extent for extent, _ in sides), tuple(stride for _, stride in sides)
    dense = np.ones((int(np.prod(shape)) + 1) * size, np.uint8)
    here = tuple(int(np.prod(shape[at + 1 :])) for at in range(len(shape)))
    copy = Copy("x", "a", shape, 0, here, place, strides)
    last = place + (place + sum((extent - 1) * stride for extent, stride in sides) + 1) * size
    try:
        mapped.carry_out(copy, size, dense)
    except aiote.UsageError:
        assert last > 256
    else:
        assert last <= 256
        assert whole[64:320].any()
    assert not whole[:64].any()
    assert not whole[320:].any()


def test_places_outside_of_the_shared_memory_are_refused():
    for places in ([[1, 0]], [[0, 257]], [[0, 2**63]], [[0, 0], [0, 0]]):
        mapped = MappedTensors(np.zeros(256, np.uint8), np.array(places, np.uint64), {"a": 0})
        with pytest.raises(aiote.UsageError, match="outside of the 256 bytes|expected the places"):
            mapped.tensor("a")
