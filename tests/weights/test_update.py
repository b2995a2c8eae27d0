"""Updates between engines: every byte of every target is what the recipe makes of the sources', or the old version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aiote
from aiote.weights import (
    Controller,
    Layout,
    PlanMismatchError,
    Recipe,
    Replicate,
    Target,
    TensorBuffer,
    UpdateError,
    cat,
    serve_source,
    serve_target,
    source,
)
from support.engines.opening import each_provider, go_round, opened, until
from support.gpu.standin_cuda import Adopted, driver, paced, standin_path
from support.machine import LONG
from support.weights.updates import RECIPE, SOURCES, part, ranks, whole

# Without LONG only what has that mark itself is tried on every loop.
pytestmark = [pytest.mark.anyio] if LONG else []

driver()  # compiled and loaded before a loop runs


@pytest.mark.anyio
@each_provider
async def test_every_byte_is_what_the_recipe_makes_of_the_sources(provider):
    async with ranks(provider) as made:
        assert [target.version for target in made.targets] == [None, None]
        for version in range(1, 4 if LONG else 3):
            made.train(version)
            report = await made.controller.update(version)
            assert report.committed == [""]
            assert [target.version for target in made.targets] == [version, version]
            made.check(version)


@pytest.mark.parametrize("provider", ["local", "socket"])
@pytest.mark.parametrize("versions", ["inplace", "gated", "shadow"])
async def test_every_byte_is_the_same_where_all_weights_are_on_gpus(provider, versions, monkeypatch):
    monkeypatch.setenv("AIOTE_LIBCUDA", standin_path())
    with paced(2):
        async with ranks(provider, versions, Adopted) as made, anyio.create_task_group() as group:
            if versions == "gated":
                for target in made.targets:
                    group.start_soon(in_windows, target, 2)
            for version in (1, 2):
                made.train(version)
                report = await made.controller.update(version)
                assert report.committed == [""]
                made.check(version)
            group.cancel_scope.cancel()


@pytest.mark.parametrize("versions", ["inplace", "shadow"])
async def test_memory_that_no_update_writes_stays_unchanged(versions):
    layout = Layout.over([0], {"embed": ((10, 4), "F32", Replicate())})
    padded = Layout.over([0], {"embed": ((16, 4), "F32", Replicate()), "rotary": ((4,), "F32", Replicate())})
    recipe = Recipe({"embed": source("embed").pad(0, to=16)}, untouched=("rotary",))
    values = {"embed": np.arange(40, dtype=np.float32).reshape(10, 4)}
    arrays = {"embed": np.full((16, 4), 7, np.float32), "rotary": np.full(4, 8, np.float32)}
    async with opened("sim") as one, opened("sim") as other, opened("sim") as own:
        async with (
            serve_source(one, layout, 0, values, recipe),
            serve_target(other, padded, 0, arrays, versions=versions),
        ):
            await Controller(own, [one.address], [other.address], recipe).update(1)
            assert np.array_equal(arrays["embed"][:10], values["embed"])
            assert (arrays["embed"][10:] == 7).all()
            assert (arrays["rotary"] == 8).all()


@pytest.mark.anyio
@pytest.mark.parametrize("versions", ["inplace", "gated", "shadow"])
async def test_a_target_has_the_version_or_says_that_it_is_torn(versions):
    told: list[int] = []
    async with ranks("sim", versions, on_commit=told.append) as made, anyio.create_task_group() as group:
        if versions == "gated":
            for target in made.targets:
                group.start_soon(in_windows, target, 2)
        made.train(1)
        await made.controller.update(1)
        assert told == [1, 1]
        made.check(1)
        made.train(2)
        made.engines[0].abort()
        with pytest.raises(UpdateError, match=r"version 2 was not committed: .*did not run|perhaps"):
            await made.controller.update(2)
        shadow = versions == "shadow"
        await until(lambda: all(target.state == ("ready" if shadow else "torn") for target in made.targets))
        assert [target.version for target in made.targets] == [1 if shadow else None] * 2
        if shadow:
            made.check(1)
        group.cancel_scope.cancel()
    assert told == [1, 1]


async def in_windows(target: Target, count: int) -> None:
    for _ in range(count):
        async with target.window():
            await target.wait_version(0 if target.version is None else target.version + 1)


async def test_arrays_that_lie_in_each_others_gaps_are_told_apart():
    shapes = {name: ((4, 4), "F32", Replicate()) for name in ("q", "k")}
    layout = Layout.over([0], shapes)
    parts = {name: TensorBuffer((4, 4), "F32", strides=(8, 1)) for name in shapes}
    values = {
        name: np.arange(first, first + 16, dtype=np.float32).reshape(4, 4) for name, first in (("q", 1), ("k", 50))
    }
    memory = np.zeros((4, 8), np.float32)
    async with opened("sim") as one, opened("sim") as other, opened("sim") as own:
        async with (
            serve_source(one, layout, 0, values),
            serve_target(other, Layout.of_buffers(0, parts), 0, {"q": memory[:, :4], "k": memory[:, 4:]}),
        ):
            await Controller(own, [one.address], [other.address]).update(1)
            assert np.array_equal(memory, np.concatenate([values["q"], values["k"]], axis=1))


async def test_two_controllers_of_the_same_sources_write_to_the_targets_of_each():
    """Their layouts are the same, and so are the plans; where the tensors lie is not."""
    shapes = {name: ((4, 4), "F32", Replicate()) for name in ("a", "b")}
    layout = Layout.over([0], shapes)
    values = {"a": np.full((4, 4), 1, np.float32), "b": np.full((4, 4), 2, np.float32)}
    memory = [np.zeros((2, 4, 4), np.float32) for _ in range(2)]
    arrays = [{"a": memory[0][0], "b": memory[0][1]}, {"a": memory[1][1], "b": memory[1][0]}]
    async with AsyncExitStack() as stack:
        source_engine, *engines = [await stack.enter_async_context(opened("sim")) for _ in range(5)]
        named = [engine.address for engine in engines[2:]]
        await stack.enter_async_context(serve_source(source_engine, layout, 0, values, controllers=named))
        for engine, held in zip(engines[:2], arrays, strict=True):
            await stack.enter_async_context(serve_target(engine, layout, 0, held, versions="inplace"))
        controllers = [Controller(engines[2 + n], [source_engine.address], [engines[n].address]) for n in range(2)]
        for controller in controllers:
            await controller.prepare()
        await controllers[0].update(1)
        await controllers[1].update(1)
        for held in arrays:
            assert np.array_equal(held["a"], values["a"])
            assert np.array_equal(held["b"], values["b"])


async def test_a_target_that_is_served_anew_in_other_memory_gets_the_next_version():
    """Sources were told where its tensors lay when the first update was planned; the second keeps the plan."""
    layout = Layout.over([0], {name: ((4, 4), "F32", Replicate()) for name in ("a", "b")})
    memory = np.zeros((3, 4, 4), np.float32)
    values = {"a": np.full((4, 4), 1, np.float32), "b": np.full((4, 4), 2, np.float32)}
    async with opened("sim") as one, opened("sim") as rank, opened("sim") as mine:
        async with serve_source(one, layout, 0, values) as source:
            controller = Controller(mine, [one.address], [rank.address])
            arrays = [{"a": memory[0], "b": memory[1]}, {"a": memory[2], "b": memory[1]}]
            for version, held in enumerate(arrays, 1):
                memory[:] = 0
                async with serve_target(rank, layout, 0, held, versions="inplace"):
                    await controller.update(version)
                assert np.array_equal(held["a"], values["a"])
                assert np.array_equal(held["b"], values["b"])
                assert not memory[2 if version == 1 else 0].any()
            async with serve_target(rank, layout, 0, arrays[0], versions="inplace"):
                await controller.update(3)
                source.places.clear()
                with pytest.raises(UpdateError, match="no longer knows where the tensors lie: prepare it again"):
                    await controller.update(4)
                assert (await controller.update(4)).committed == [""]


@pytest.mark.anyio
async def test_an_update_that_was_cancelled_can_be_made_once_more():
    async with ranks("sim", "gated") as made, anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as beside:
                beside.start_soon(made.controller.update, 1)
                await until(lambda: all(target.current for target in made.targets))
                scope.cancel()
        for target in made.targets:
            group.start_soon(in_windows, target, 1)
        assert (await made.controller.update(1)).committed == [""]
        made.check(0)


async def test_tensors_that_no_remaining_source_holds_are_named():
    async with ranks("sim") as made:
        await made.controller.update(1)
        made.engines[0].abort()
        with pytest.raises(UpdateError, match="qk: no source rank holds"):
            await made.controller.update(2)
        with pytest.raises(UpdateError, match="nothing was planned: .*qk: no source rank holds"):
            await made.controller.update(3)


async def test_updates_that_come_too_late_are_refused():
    async with ranks("sim") as made:
        await made.controller.update(5)
        made.train(4)
        with pytest.raises(UpdateError, match="not later than"):
            await made.controller.update(4)
        made.check(0)
        addresses = [engine.address for engine in made.engines]
        later = Controller(made.engines[4], addresses[:2], addresses[2:4], RECIPE)
        with pytest.raises(UpdateError, match="not later than"):
            await later.update(5)
        earlier = Controller(made.engines[4], addresses[:2], addresses[2:4], RECIPE, epoch=1)
        with pytest.raises(UpdateError, match="from an earlier controller"):
            await earlier.update(6)
        assert [target.version for target in made.targets] == [5, 5]


class Uncounted:
    """A counter to which nothing comes."""

    imm = 77

    def __init__(self) -> None:
        self.waited = False

    async def wait(self, count: int = 1) -> None:
        self.waited = True
        await anyio.sleep_forever()

    def close(self) -> None:
        pass


async def test_no_rank_of_a_replica_commits_before_all_have_everything(monkeypatch):
    counter, counted = Uncounted(), anyio.Event()
    async with ranks("sim") as made, anyio.create_task_group() as group:
        own = made.engines[3]
        monkeypatch.setattr(own, "counter", lambda _imm: nullcontext(counter))
        asked = made.targets[0].install

        async def install(update: Any) -> None:
            counted.set()
            await asked(update)

        monkeypatch.setattr(made.targets[0], "install", install)
        group.start_soon(made.controller.update, 1)
        await until(lambda: counter.waited and own.statistics().immediates)
        await go_round(200)
        assert not counted.is_set()
        group.cancel_scope.cancel()
    assert [target.version for target in made.targets] == [None, None]


async def test_a_later_controller_displaces_an_update_that_stands():
    async with ranks("sim", "gated") as made, anyio.create_task_group() as group:
        group.start_soon(fails, made.controller.update, 1)
        await until(lambda: all(target.current for target in made.targets))
        addresses = [engine.address for engine in made.engines]
        later = Controller(made.engines[4], addresses[:2], addresses[2:4], RECIPE)
        for target in made.targets:
            group.start_soon(in_windows, target, 1)
        assert (await later.update(2)).committed == [""]
        made.check(0)


async def fails(update: Callable[[int], Awaitable[object]], version: int) -> None:
    with pytest.raises(UpdateError):
        await update(version)


async def test_ranks_that_cannot_be_brought_together_are_explained():
    async with ranks("sim") as made:
        addresses = [engine.address for engine in made.engines]
        other = Controller(made.engines[4], addresses[:2], addresses[2:4], Recipe({"qk": cat("k", "q")}))
        with pytest.raises(PlanMismatchError, match="another plan"):
            await other.prepare()
        with pytest.raises(aiote.UsageError, match="qk"):
            await Controller(made.engines[4], addresses[:2], addresses[2:4]).prepare()
        with pytest.raises(aiote.UsageError, match="q"):
            await Controller(made.engines[4], addresses[:1], addresses[2:4], RECIPE).prepare()


async def test_arrays_that_are_not_as_the_layout_says_are_refused():
    async with opened("sim") as engine:
        right = part(SOURCES, 0, whole(0))
        for name, wrong, text in (
            ("q", right["q"][:-1], "q: the array is F32"),
            ("q", right["q"].astype(np.float64), "q: the array is F64"),
            ("up", right["up"].T, "up: the array is F32"),
            ("norm", [1.0], "norm: expected a numpy array"),
        ):
            with pytest.raises(aiote.UsageError, match=text):
                async with serve_source(engine, SOURCES, 0, {**right, name: wrong}):
                    pass
        del right["k"]
        with pytest.raises(aiote.UsageError, match="k: the layout gives it to this rank"):
            async with serve_target(engine, SOURCES, 0, right):
                pass


@pytest.mark.anyio
async def test_a_cancelled_update_leaves_the_old_version_and_nothing_under_way():
    async with ranks("sim") as made:
        await made.controller.update(1)
        made.train(2)
        for steps in range(0, 200, 7 if LONG else 40):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel_after, scope, steps)
                    await made.controller.update(2 + steps)
            versions = {target.version for target in made.targets}
            assert all(target.current is None for target in made.targets)
            if versions == {1}:
                made.check(0)
        made.train(3)
        await made.controller.update(1000)
        made.check(3)


async def cancel_after(scope: anyio.CancelScope, steps: int) -> None:
    for _ in range(steps):
        await anyio.lowlevel.checkpoint()
    scope.cancel()
