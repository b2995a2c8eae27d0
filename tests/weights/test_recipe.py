"""Expressions, and what is refused before anything moves: names, shapes, types, blocks."""

from __future__ import annotations

import numpy as np
import pytest

from aiote.errors import UsageError
from aiote.weights import (
    Layout,
    Recipe,
    Replicate,
    Runs,
    Shard,
    UpdatePlan,
    cat,
    plan_update,
    quantized,
    source,
    stack,
)

SHAPES = {
    "a": ((4, 6), "BF16"),
    "b": ((4, 6), "BF16"),
    "c": ((2, 6), "BF16"),
    "f": ((4, 6), "F32"),
    "e": ((0, 6), "BF16"),
}


def parts_of(expression) -> list[tuple]:
    return [tuple(part) for part in expression.resolve(SHAPES.__getitem__).parts]


def test_parts_say_which_box_comes_from_where():
    fused = cat("a", "c").transpose().narrow(1, 3, 2)
    assert parts_of(fused) == [("a", (3, 0), (0, 0), (6, 1), (1, 0)), ("c", (0, 0), (0, 1), (6, 1), (1, 0))]
    experts = stack("a", "b").select(1, 2)
    assert parts_of(experts) == [("a", (2, 0), (0, 0), (1, 6), (-1, 1)), ("b", (2, 0), (1, 0), (1, 6), (-1, 1))]
    assert experts.resolve(SHAPES.__getitem__).shape == (2, 6)
    assert parts_of(source("c").pad(0, to=8, before=5)) == [("c", (0, 0), (5, 0), (2, 6), (0, 1))]
    assert parts_of(source("e")) == []
    assert parts_of(cat("e", "c"))[0][2] == (0, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cat("a", "c", dim=1), "differ in another dimension"),
        (lambda: cat("a", "f"), "several types"),
        (lambda: stack("a", "c"), "cannot be stacked"),
        (lambda: source("a").permute(0, 0), "expected each of"),
        (lambda: source("a").transpose(0, 2), "no dimension 2"),
        (lambda: source("a").narrow(0, 3, 2), "not within"),
        (lambda: source("a").narrow(0, -1, 2), "not within"),
        (lambda: source("a").select(0, 4), "not within"),
        (lambda: source("a").pad(0, to=3), "cannot be 3 long"),
        (lambda: cat(), "at least one"),
        (lambda: cat(7), "got int"),
        (lambda: quantized("a", scale="s", block=(0, 1)), "two sizes"),
        (lambda: Recipe(unused="ab"), "several patterns"),
        (lambda: source("a").cast("F5"), "dtype"),
    ],
)
def test_expressions_that_mean_nothing_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make().resolve(SHAPES.__getitem__)


def plan(sources: dict, targets: dict, recipe: Recipe | None = None, ranks: int = 2) -> UpdatePlan:
    return plan_update(Layout.over(range(ranks), sources), Layout.over(range(ranks), targets), recipe)


def test_tensors_that_one_side_lacks_are_refused_unless_listed():
    x, y = {"x": ((4,), "F32", Shard(0))}, {"y": ((4,), "F32", Shard(0))}
    with pytest.raises(UsageError, match="1 target tensors have no source: y"):
        plan(x, y)
    with pytest.raises(UsageError, match="1 source tensors are not used: y"):
        plan(x | y, x)
    with pytest.raises(UsageError, match="none of the targets: z"):
        plan(x, x, Recipe({"z": "x"}))
    with pytest.raises(UsageError, match="x: there is no source tensor y"):
        plan(x, x, Recipe({"x": "y"}))


def test_tensors_listed_as_unused_or_untouched_are_left_out():
    x, y = {"x": ((4,), "F32", Shard(0))}, {"y.cache": ((4,), "F32", Shard(0))}
    assert [entry.target for entry in plan(x | y, x, Recipe(unused=("*.cache",))).entries] == ["x"]
    assert [entry.target for entry in plan(x, x | y, Recipe(untouched=("y.*",))).entries] == ["x"]


def test_a_tied_tensor_goes_to_two_places():
    x = ((4,), "F32", Shard(0))
    tied = plan({"x": x}, {"x": x, "head": x}, Recipe({"head": "x"}))
    assert sum(tied.traffic.sent.values()) == 32


def test_shapes_and_types_that_do_not_fit_are_refused():
    x = {"x": ((4, 2), "F32", Shard(0))}
    with pytest.raises(UsageError, match=r"x: the recipe makes it of shape \(4, 2\)"):
        plan(x, {"x": ((2, 4), "F32", Shard(0))})
    with pytest.raises(UsageError, match=r"x: the sources have F32 and the targets BF16: add \.cast\(\)"):
        plan(x, {"x": ((4, 2), "BF16", Shard(0))})
    with pytest.raises(UsageError, match="x: the recipe casts it to F16, but the targets have BF16"):
        plan(x, {"x": ((4, 2), "BF16", Shard(0))}, Recipe({"x": source("x").cast("F16")}))
    assert [t.kind for t in plan(x, x, Recipe({"x": source("x").cast()})).tasks(0)] == ["direct"]


def test_a_source_with_a_hole_is_refused_by_name():
    hole = Runs(0, (((0, 1),), ((2, 4),)))
    with pytest.raises(UsageError, match="x: no source rank holds the elements of w"):
        plan({"w": ((4,), "F32", hole)}, {"x": ((4,), "F32", Shard(0))}, Recipe({"x": "w"}))


def quantize(
    weight: tuple, scale: tuple, block: tuple[int, int] = (2, 2), shape=(6, 6), blocks=(3, 3), dtype="F8_E4M3"
) -> UpdatePlan:
    recipe = Recipe({"x": quantized("x", scale="s", block=block)})
    targets = {"x": (shape, dtype, weight), "s": (blocks, "F32", scale)}
    return plan({"x": (shape, "BF16", Shard(0))}, targets, recipe, 3)


def test_blocks_that_are_not_whole_on_every_target_rank_are_refused():
    assert quantize((Shard(0),), (Shard(0),)).traffic.sent == {0: 24, 1: 24, 2: 24}
    with pytest.raises(UsageError, match="x: a target rank's part, 0 to 2 of 6 at 0, splits blocks of 3"):
        quantize((Shard(0),), (Replicate(),), (3, 3), blocks=(2, 2))
    with pytest.raises(UsageError, match="target rank 0 holds blocks of it whose scales in s lie elsewhere"):
        quantize((Shard(0),), (Replicate(),))
    with pytest.raises(UsageError, match=r"its scales s have shape \(3, 3\), expected \(2, 3\)"):
        quantize((Shard(0),), (Shard(0),), (3, 2))
    with pytest.raises(UsageError, match="expected a type of one byte"):
        quantize((Shard(0),), (Shard(0),), dtype="BF16")
    with pytest.raises(UsageError, match="expected two dimensions or more"):
        quantize((Shard(0),), (Shard(0),), shape=(6,), blocks=(3,))


def test_scales_without_a_tensor_of_their_own_are_refused():
    x, s = ((2, 2), "BF16", Replicate()), ((1, 1), "F32", Replicate())
    f8 = ((2, 2), "F8_E4M3", Replicate())
    with pytest.raises(UsageError, match="tensors of scales are none of the targets: s"):
        plan({"x": x}, {"x": f8}, Recipe({"x": quantized("x", scale="s")}))
    with pytest.raises(UsageError, match="made twice: s"):
        twice = {name: quantized("x", scale="s") for name in ("x", "y")}
        plan({"x": x}, {"x": f8, "y": f8, "s": s}, Recipe(twice))


def test_a_wrong_way_to_gather_is_refused():
    layout = Layout.over(np.arange(2), {"x": ((4,), "F32", Shard(0))})
    with pytest.raises(UsageError, match="gather is"):
        plan_update(layout, layout, gather="never")
