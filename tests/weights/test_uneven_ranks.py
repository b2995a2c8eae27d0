"""Ranks that hold nothing, names that are none, and target tensors that share memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiote
from aiote.weights import (
    Controller,
    Layout,
    Recipe,
    Recording,
    Replicate,
    Shard,
    TensorBuffer,
    UpdateError,
    cat,
    record,
    serve_source,
    serve_target,
    source,
)
from support.engines.opening import opened

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
THREE = Layout.over(range(3), {"w": ((2, 3), "F32", Shard(0))})
ONE = Layout.over(range(1), {"w": ((2, 3), "F32", Replicate())})
ARRAYS = Sequence[Mapping[str, Any]]


@asynccontextmanager
async def served(
    sources: tuple[Layout, ARRAYS], targets: tuple[Layout, ARRAYS], recipe: Recipe, versions: Any = "shadow"
) -> AsyncIterator[Controller]:
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(opened("local"))
        addresses: list[list[aiote.Address]] = [[], []]
        for side, (layout, several) in enumerate((sources, targets)):
            for rank, arrays in enumerate(several):
                engine = await stack.enter_async_context(opened("local"))
                addresses[side].append(engine.address)
                serving: Any = (
                    serve_target(engine, layout, rank, arrays, versions=versions)
                    if side
                    else serve_source(engine, layout, rank, arrays, recipe)
                )
                await stack.enter_async_context(serving)
        yield Controller(own, *addresses, recipe)


async def test_a_source_rank_without_rows_sends_nothing():
    target = {"w": np.zeros((2, 3), np.float32)}
    sources = THREE, [{"w": ROWS[:1].copy()}, {"w": ROWS[1:].copy()}, {}]
    async with served(sources, (ONE, [target]), Recipe()) as controller:
        for version in (1, 2):
            report = await controller.update(version)
            assert report.failed == {}
            assert {rank: sent.written for rank, sent in report.sent.items()} == {0: 12, 1: 12, 2: 0}
    assert np.array_equal(target["w"], ROWS)


async def test_a_target_rank_without_rows_takes_the_version():
    arrays: list[dict[str, Any]] = [{"w": np.zeros((1, 3), np.float32)} for _ in range(2)] + [{}]
    async with served((ONE, [{"w": ROWS}]), (THREE, arrays), Recipe()) as controller:
        assert (await controller.update(1)).failed == {}
        assert [state.update is not None for state in (await controller.describe()).values()] == [True] * 3
    assert np.array_equal(np.concatenate([one["w"] for one in arrays[:2]]), ROWS)


async def test_a_tensor_without_elements_is_none_of_an_updates():
    layout = Layout.over(range(1), {"w": ((2, 3), "F32", Replicate()), "none": ((0, 3), "F32", Replicate())})
    target = {"w": np.zeros((2, 3), np.float32), "none": np.zeros((0, 3), np.float32)}
    source = {"w": ROWS, "none": np.zeros((0, 3), np.float32)}
    async with served((layout, [source]), (layout, [target]), Recipe()) as controller:
        assert (await controller.update(1)).failed == {}
    assert np.array_equal(target["w"], ROWS)


NAMED = {
    "renamed": source("none"),
    "both": cat("none", "none"),
    "cast": source("none").cast(),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", [Recipe(NAMED), Recipe(NAMED, unused=["*"])])
async def test_a_recipe_may_name_tensors_without_elements(recipe, ranks):
    empty = {name: ((0, 3), "F16" if name == "cast" else "F32", Shard(0)) for name in (*NAMED, "none", "theirs")}
    targets = Layout.over(range(ranks), {"renamed": empty.pop("renamed"), "w": ((2, 3), "F32", Shard(0))} | empty)
    sources = Layout.over(
        range(1),
        {name: ((0, 3), "F32", Replicate()) for name in ("none", "mine")} | {"w": ((2, 3), "F32", Replicate())},
    )
    arrays: list[dict[str, Any]] = [{"w": np.zeros((2 // ranks, 3), np.float32)} for _ in range(ranks)]
    for one in arrays:
        one |= {name: np.zeros((0, 3), np.float32) for name in (*NAMED, "none", "theirs")}
        one["cast"] = np.zeros((0, 3), np.float16)
    own = {name: np.zeros((0, 3), np.float32) for name in ("none", "mine")} | {"w": ROWS}
    async with served((sources, [own]), (targets, arrays), recipe) as controller:
        for version in (1, 2):
            report = await controller.update(version)
            assert report.failed == {}
            assert {rank: sent.written for rank, sent in report.sent.items()} == {0: 24}
    assert np.array_equal(np.concatenate([one["w"] for one in arrays]), ROWS)


@pytest.mark.parametrize("rows", [0, 1])
async def test_what_is_recorded_of_an_empty_parameter_is_an_update(rows):
    """A rank that has no part of a parameter, or no rank that has one, such as a layer without experts."""
    arrays = [{"p": np.zeros((2, 3), np.float32), "x": np.zeros((each, 3), np.float32)} for each in (rows, 0)]

    def load(pairs: Any, own: Mapping[str, Any]) -> None:
        for _, w in pairs:
            np.copyto(own["p"], w)
            np.copyto(own["x"], w[: len(own["x"])])

    recordings = {rank: record(partial(load, own=own), own, ONE) for rank, own in enumerate(arrays)}
    targets, recipe = Recording.merge(recordings)
    async with served((ONE, [{"w": ROWS}]), (targets, arrays), recipe) as controller:
        assert (await controller.update(1)).failed == {}
    assert all(np.array_equal(one["p"], ROWS) for one in arrays)
    assert np.array_equal(arrays[0]["x"], ROWS[:rows])


async def test_a_recipe_that_names_what_no_side_has_is_refused():
    target = {"w": np.zeros((2, 3), np.float32)}
    async with served((ONE, [{"w": ROWS}]), (ONE, [target]), Recipe({"x": source("w")})) as controller:
        with pytest.raises(aiote.UsageError, match="1 tensors of the recipe are none of the targets: x"):
            await controller.update(1)


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_name_that_is_none_is_refused(name):
    words = f"a tensor is named {name!r}: expected text of at least one character"
    with pytest.raises(aiote.UsageError, match=words):
        Layout.over(range(1), {"a": ((4,), "F32", Replicate()), name: ((4,), "F32", Replicate())})
    with pytest.raises(aiote.UsageError, match=words):
        Layout.of_buffers(0, {name: TensorBuffer((4,), "F32")})


def test_a_description_with_an_empty_name_is_refused():
    plain = ONE.describe()
    plain["tensors"][""] = plain["tensors"].pop("w")
    with pytest.raises(aiote.UsageError, match="a tensor is named ''"):
        Layout.from_description(plain)


TWO = Layout.over(range(1), {name: ((2, 3), "F32", Replicate()) for name in ("a", "b")})


@pytest.mark.parametrize("versions", ["shadow", "inplace"])
async def test_one_array_of_two_sources_is_refused(versions):
    both = np.zeros((2, 3), np.float32)
    sources = TWO, [{"a": ROWS, "b": ROWS + 10}]
    async with served(sources, (TWO, [{"a": both, "b": both}]), Recipe(), versions) as controller:
        with pytest.raises(aiote.UsageError, match="a and b are the same memory on target rank 0, .* list all but one"):
            await controller.update(1)
    assert not both.any()


@pytest.mark.parametrize("versions", ["shadow", "inplace"])
async def test_one_array_of_one_source_is_written_under_both_names(versions):
    both, recipe = np.zeros((2, 3), np.float32), Recipe({"a": "w", "b": "w"})
    async with served((ONE, [{"w": ROWS}]), (TWO, [{"a": both, "b": both}]), recipe, versions) as controller:
        assert (await controller.update(1)).failed == {}
    assert np.array_equal(both, ROWS)


@pytest.mark.parametrize("versions", ["shadow", "inplace"])
async def test_arrays_that_share_some_elements_are_refused_unless_one_is_untouched(versions):
    memory = np.zeros((3, 3), np.float32)
    arrays = {"a": memory[:2], "b": memory[1:]}
    async with served((TWO, [{"a": ROWS, "b": ROWS}]), (TWO, [arrays]), Recipe(), versions) as controller:
        with pytest.raises(UpdateError, match="a and b share memory on rank 0, .* list one of them as untouched"):
            await controller.update(1)
        assert not memory.any()
    untouched = Recipe(untouched=("b",), unused=("b",))
    async with served((TWO, [{"a": ROWS, "b": ROWS}]), (TWO, [arrays]), untouched, versions) as controller:
        assert (await controller.update(1)).failed == {}
    assert np.array_equal(memory[:2], ROWS)


async def test_arrays_in_each_others_gaps_share_nothing():
    memory = np.zeros((2, 6), np.float32)
    arrays = {"a": memory[:, :3], "b": memory[:, 3:]}
    layout = Layout.of_buffers(0, {name: TensorBuffer((2, 3), "F32", strides=(6, 1)) for name in arrays})
    async with served((TWO, [{"a": ROWS, "b": ROWS + 10}]), (layout, [arrays]), Recipe()) as controller:
        assert (await controller.update(1)).failed == {}
    assert np.array_equal(memory, np.concatenate([ROWS, ROWS + 10], axis=1))
