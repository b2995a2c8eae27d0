"""Ranks that are lost, or do not answer, in the midst of an update: whoever can go on does, and every wait ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

import aiote
from aiote.testing import Fabric, run
from aiote.weights import (
    Controller,
    Layout,
    Recipe,
    Replicate,
    Shard,
    TensorBuffer,
    UpdateError,
    quantized,
    serve_source,
    serve_target,
)
from aiote.weights.protocol import Sent
from aiote.weights.sending import UpdateSender
from support.engines.opening import until

SHAPE = (48, 32)
VALUES = {name: np.arange(1536, dtype=np.float32).reshape(SHAPE) + first for name, first in (("a", 0), ("b", 5000))}
SOURCES = Layout.over(range(3), {name: (SHAPE, "F32", Replicate()) for name in VALUES})
TARGETS = Layout.over(range(2), {name: (SHAPE, "F32", Shard(0)) for name in VALUES})


class Ranks:
    """Three sources that hold everything, the two ranks of a replica, and a controller."""

    def __init__(self) -> None:
        self.engines: list[aiote.Engine] = []
        self.sources: list[Any] = []
        self.targets: list[Any] = []
        self.arrays = [{name: np.zeros((24, 32), np.float32) for name in VALUES} for _ in range(2)]
        self.controller: Controller

    def check(self) -> None:
        for rank, arrays in enumerate(self.arrays):
            for name, values in VALUES.items():
                np.testing.assert_array_equal(arrays[name], values[rank * 24 : rank * 24 + 24])


@asynccontextmanager
async def ranks(fabric: Fabric, recipe: Recipe | None = None, **settings: Any) -> AsyncIterator[Ranks]:
    made = Ranks()
    async with AsyncExitStack() as stack:
        made.engines = [await stack.enter_async_context(fabric.open_engine()) for _ in range(6)]
        for rank, engine in enumerate(made.engines[:3]):
            serving = serve_source(engine, SOURCES, rank, VALUES, recipe)
            made.sources.append(await stack.enter_async_context(serving))
        for rank, engine in enumerate(made.engines[3:5]):
            target = serve_target(engine, TARGETS, rank, made.arrays[rank], **settings)
            made.targets.append(await stack.enter_async_context(target))
        addresses = [engine.address for engine in made.engines]
        made.controller = Controller(made.engines[5], addresses[:3], addresses[3:5], recipe, limit=20.0)
        yield made


def test_two_sources_that_are_lost_at_once_are_replaced():
    async def main(fabric: Fabric) -> None:
        async with ranks(fabric) as made:
            await made.controller.update(1)
            for engine in made.engines[:2]:
                engine.abort()
            report = await made.controller.update(2)
            assert (report.committed, report.failed, report.attempts) == ([""], {}, 2)
            made.check()
            made.engines[2].abort()
            with pytest.raises(UpdateError, match="nothing was planned"):
                await made.controller.update(3)

    run(main, 1)


def test_a_source_that_dies_after_its_commits_is_not_missed(monkeypatch):
    dies_after_its_commits(monkeypatch, slow=False)


def test_a_rank_that_has_committed_is_left_out_of_the_next_attempt(monkeypatch):
    """The other rank of its replica has not committed when the source dies: only that one is updated once more."""
    dies_after_its_commits(monkeypatch, slow=True)


def dies_after_its_commits(monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> None:
    async def main(fabric: Fabric) -> None:
        async with ranks(fabric) as made:
            victim, late = made.sources[0], made.targets[1]
            right, install = UpdateSender.run, late.install

            async def dies(self: Any) -> Any:
                sent = await right(self)
                if self.source is victim:
                    await until(lambda: made.targets[0].version == 1 and (slow or late.version == 1))
                    made.engines[0].abort()
                    await anyio.sleep_forever()
                return sent

            async def never(*arguments: Any) -> None:
                monkeypatch.setattr(late, "install", install)
                await anyio.sleep_forever()

            monkeypatch.setattr(UpdateSender, "run", dies)
            if slow:
                monkeypatch.setattr(late, "install", never)
            report = await made.controller.update(1)
            assert (report.committed, report.failed, report.attempts) == ([""], {}, 2 if slow else 1)
            assert [target.version for target in made.targets] == [1, 1]
            made.check()
            assert (await made.controller.update(2)).committed == [""]

    run(main, 2)


def test_a_source_that_cannot_read_from_another_is_kept():
    async def main(fabric: Fabric) -> None:
        # Two hold half the rows each; a block of 32 rows crosses the edge at row 24.
        parts = [(0, 24), (24, 48)]
        sources = Layout.merge(
            Layout.of_buffers(rank, {"a": TensorBuffer(SHAPE, "F32", (low, 0), (high, 32))})
            for rank, (low, high) in enumerate(parts)
        )
        recipe = Recipe({"a": quantized("a", scale="s", block=(32, 32))})
        layout = Layout.over([0], {"a": (SHAPE, "F8_E4M3", Replicate()), "s": ((2, 1), "F32", Replicate())})
        arrays = {"a": np.zeros(SHAPE, ml_dtypes.float8_e4m3fn), "s": np.zeros((2, 1), np.float32)}
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(fabric.open_engine()) for _ in range(4)]
            held = []
            for rank, (low, high) in enumerate(parts):
                serving = serve_source(engines[rank], sources, rank, {"a": VALUES["a"][low:high].copy()}, recipe)
                held.append(await stack.enter_async_context(serving))
            await stack.enter_async_context(serve_target(engines[2], layout, 0, arrays))
            addresses = [engine.address for engine in engines]
            controller = Controller(engines[3], addresses[:2], addresses[2:3], recipe)
            plan = await controller.prepare()
            (gatherer,) = {plan.units[number].maker for number in plan.meshes}

            def refused(name: str) -> Any:
                raise aiote.UsageError("it does not answer")

            held[gatherer].sources[1 - gatherer].tensor = refused
            with pytest.raises(UpdateError) as caught:
                await controller.update(1)
            assert str(addresses[1 - gatherer]) in caught.value.reasons
            assert str(addresses[gatherer]) not in caught.value.reasons
            assert "a: no source rank holds" in str(caught.value)
            # Neither is forgotten.
            assert (await controller.update(1)).committed == [""]

    run(main, 3)


def test_a_program_that_does_not_return_from_on_commit_fails_alone():
    told: list[int] = []

    async def main(fabric: Fabric) -> None:
        async def on_commit(version: int) -> None:
            told.append(version)
            if version == 1:
                await anyio.sleep_forever()

        async with ranks(fabric, on_commit=on_commit, limit=5.0) as made:
            with pytest.raises(UpdateError, match=r"on_commit took longer than 5.0 s"):
                await made.controller.update(1)
            made.check()
            assert [target.version for target in made.targets] == [1, 1]
            assert (await made.controller.update(2)).committed == [""]
        assert told == [1, 1, 2, 2]

    run(main, 4)


def test_a_target_that_never_says_that_it_has_committed_fails(monkeypatch):
    async def main(fabric: Fabric) -> None:
        async with ranks(fabric) as made:

            async def never(*arguments: Any) -> None:
                await anyio.sleep_forever()

            monkeypatch.setattr(made.targets[1], "install", never)
            with pytest.raises(UpdateError, match="its commit took longer than 20.0 s"):
                await made.controller.update(1)

    run(main, 5)


@pytest.mark.parametrize("how", ["engine", "target"])
def test_who_waits_for_a_version_hears_that_none_will_come(how):
    async def main(fabric: Fabric) -> None:
        heard = anyio.Event()

        async def waits(target: Any) -> None:
            with pytest.raises(aiote.ClosedError):
                await target.wait_version(1)
            heard.set()

        async with anyio.create_task_group() as group:
            async with ranks(fabric) as made:
                for target in made.targets[:1]:
                    group.start_soon(waits, target)
                await anyio.sleep(1)
                if how == "engine":
                    made.engines[3].abort()
                    await heard.wait()
            await heard.wait()

    run(main, 6)


def test_a_commit_leaves_alone_what_the_update_does_not_write():
    """Of a shadow, too: what the program has written since is its own; and what a failed update wrote is forgotten."""

    async def main(fabric: Fabric) -> None:
        async with ranks(fabric, Recipe(unused=("b",), untouched=("b",))) as made:
            for arrays in made.arrays:
                arrays["b"][:] = 7
            await made.controller.update(1)
            for arrays in made.arrays:
                assert (arrays["b"] == 7).all()
                arrays["b"][:] = 8
            # As an update leaves it that was to write it, and failed.
            made.targets[1].written.bytes_of("b")[:] = 3
            made.targets[1].shadow._stale = True
            await made.controller.update(2)
            for target, arrays in zip(made.targets, made.arrays, strict=True):
                assert (arrays["b"] == 8).all()
                assert not (target.written.bytes_of("b") == 3).any()

    run(main, 7)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(Sent(0, 0, 0, {}, {1: "no"}), id="a source from which it does not gather"),
        pytest.param(Sent(0, 0, 0, {7: "no"}), id="a target to which it does not write"),
        pytest.param(None, id="nothing"),
    ],
)
def test_a_source_that_says_what_cannot_be_or_nothing_is_lost_itself(monkeypatch, said):
    async def main(fabric: Fabric) -> None:
        async with ranks(fabric) as made:
            right, liar = UpdateSender.run, made.sources[0]

            async def lies(self: Any) -> Any:
                if self.source is not liar:
                    return await right(self)
                return said or await anyio.sleep_forever()

            monkeypatch.setattr(UpdateSender, "run", lies)
            begun = anyio.current_time()
            report = await made.controller.update(1)
            assert (report.committed, report.failed, report.attempts) == ([""], {}, 2)
            # Of the first attempt the others may have said what they had sent.
            assert report.sent.keys() == {1, 2}
            assert anyio.current_time() - begun == pytest.approx(0 if said else made.controller.limit, abs=5)
            made.check()

    run(main, 4)
