"""Random layouts and recipes as hypothesis strategies, each with NumPy's own answer to what every target must hold.

Expressions are drawn from the target downwards: a shape is made by an operation of other shapes, until these are
source tensors, which then get a layout. `World.whole` computes the same with whole arrays, for values as well as for
the sets of ranks that hold each element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiote.weights import (
    Expression,
    Layout,
    Mesh,
    Quantized,
    Recipe,
    Replicate,
    Runs,
    Shard,
    StridedShard,
    Tensor,
    TensorBuffer,
    cat,
    quantized,
    source,
    stack,
)
from aiote.weights.dtypes import ITEMSIZE
from support.weights.plans import UNTOUCHED, block_sums, hold

Array = NDArray[np.float64]
Shape = tuple[int, ...]
Evaluate = Callable[[Mapping[str, Array], float], Array]
BLOCKS = ((1, 1), (2, 2), (3, 2), (1, 4))


@dataclass
class World:
    """Two layouts, a recipe, and what it means."""

    sources: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    recipe: dict[str, Expression | Quantized | str] = field(default_factory=dict)
    evaluate: dict[str, Evaluate] = field(default_factory=dict)
    cast: set[str] = field(default_factory=set)

    @property
    def plan_of(self) -> tuple[Layout, Layout, Recipe]:
        return Layout(self.sources), Layout(self.targets), Recipe(self.recipe)

    def values(self) -> dict[str, Array]:
        """Number all elements of all source tensors, in thousands of eights so that fractions and sums are exact."""
        first, found = 0, {}
        for name, tensor in self.sources.items():
            count = math.prod(tensor.shape)
            found[name] = np.arange(first, first + count, dtype=np.float64).reshape(tensor.shape)
            first += count
        return found

    def expected(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return every target tensor as it must be, and how often each of its elements is written."""
        values, found, times = self.values(), {}, {}
        for name, evaluate in self.evaluate.items():
            whole = evaluate(values, UNTOUCHED)
            rule = self.recipe[name]
            if isinstance(rule, Quantized):
                real = spread(block_sums((whole != UNTOUCHED).astype(float), rule.block) > 0, rule.block, whole.shape)
                sums = block_sums(np.where(whole == UNTOUCHED, 0, whole), rule.block)
                some = block_sums(real.astype(float), rule.block) > 0
                found[rule.scale], times[rule.scale] = np.where(some, sums, UNTOUCHED), some.astype(float)
                found[name] = np.where(real, np.where(whole == UNTOUCHED, 0, whole) + 0.5, UNTOUCHED)
                times[name] = real.astype(float)
            else:
                changed = whole + 0.25 if name in self.cast else whole
                found[name] = np.where(whole == UNTOUCHED, UNTOUCHED, changed)
                times[name] = (whole != UNTOUCHED).astype(float)
        return found, times

    def weights(self) -> dict[int, int]:
        """Return the bytes that must leave source ranks, by the set (as bits) of those that could send them."""
        masks = {name: holders_of(tensor) for name, tensor in self.sources.items()}
        _, times = self.expected()
        found: dict[int, int] = {}
        for name, evaluate in self.evaluate.items():
            rule, owners = self.recipe[name], evaluate(masks, 0.0)
            if isinstance(rule, Quantized):
                owners = makers_of_blocks(owners, rule.block)
            for tensor in (name, rule.scale) if isinstance(rule, Quantized) else (name,):
                shape = self.targets[tensor].shape
                mine = spread(owners, rule.block, shape) if tensor == name and owners.shape != shape else owners
                wanted = {name: np.where(times[tensor] > 0, mine, 0)}
                for local in hold(Layout({name: self.targets[tensor]}), wanted).values():
                    for mask, count in zip(*np.unique(local[name], return_counts=True), strict=True):
                        if mask > 0:
                            found[int(mask)] = (
                                found.get(int(mask), 0) + int(count) * ITEMSIZE[self.targets[tensor].dtype]
                            )
        return found


def spread(blocks: Array, block: tuple[int, int], shape: Shape) -> Array:
    """Return an array in which each element has what its block has."""
    for axis, size in zip((-2, -1), block, strict=True):
        blocks = np.repeat(blocks, size, axis=axis)
    return blocks[tuple(slice(extent) for extent in shape)]


def holders_of(tensor: Tensor) -> Array:
    """Return the ranks that hold each element of a tensor, as bits."""
    masks = np.zeros(tensor.shape, np.int64)
    for held, ranks in zip(tensor.sharding.held, tensor.ranks, strict=True):
        for piece in held.pieces:
            masks[tuple(map(slice, piece.start, piece.stop))] |= sum(1 << rank for rank in ranks)
    return masks.astype(np.float64)


def makers_of_blocks(owners: Array, block: tuple[int, int]) -> Array:
    """Return the ranks that have all of a block, else those that have some of it; padding has nobody."""
    every, some = np.where(owners > 0, owners, -1).astype(np.int64), owners.astype(np.int64)
    for axis, size in zip((-2, -1), block, strict=True):
        at = range(0, every.shape[axis], size)
        every = np.bitwise_and.reduceat(every, at, axis=axis)
        some = np.bitwise_or.reduceat(some, at, axis=axis)
    return np.where(every > 0, every, some).astype(np.float64)


def bound(weights: Mapping[int, int]) -> float:
    """Return what the busiest rank sends at least: the densest set of ranks, found by trying all."""
    everyone = 0
    for mask in weights:
        everyone |= mask
    best = 0.0
    for subset in subsets(everyone):
        inside = sum(weight for mask, weight in weights.items() if mask & ~subset == 0)
        best = max(best, inside / subset.bit_count())
    return best


def subsets(everyone: int) -> Iterator[int]:
    """Yield every set but the empty one of the bits of a number."""
    subset = everyone
    while subset:
        yield subset
        subset = (subset - 1) & everyone


@st.composite
def meshes(draw: st.DrawFn, ranks: int) -> Mesh:
    shape = draw(st.sampled_from([s for s in SHAPES if math.prod(s) <= ranks]))
    first = draw(st.integers(0, ranks - math.prod(shape)))
    chosen = np.arange(first, first + math.prod(shape))
    return Mesh.of((chosen[::-1] if draw(st.booleans()) else chosen).reshape(shape))


SHAPES = [(1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (2, 1, 2), (2, 2, 2)]


def partition(draw: st.DrawFn, extent: int, places: int) -> list[tuple[tuple[int, int], ...]]:
    """Return ranges for each of some places that cover an extent, in any order, some of them twice."""
    ends = sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=4))})
    spans = list(itertools.pairwise(ends))
    rows: list[list[tuple[int, int]]] = [[] for _ in range(places)]
    for span in draw(st.permutations(spans)):
        rows[draw(st.integers(0, places - 1))].append(span)
    if spans and draw(st.booleans()):
        rows[draw(st.integers(0, places - 1))].append(draw(st.sampled_from(spans)))
    return [tuple(row) for row in rows]


@st.composite
def placements(draw: st.DrawFn, shape: Shape, mesh: Shape) -> list[Replicate | Shard | StridedShard | Runs]:
    found: list[Replicate | Shard | StridedShard | Runs] = []
    cut: set[int] = set()
    while len(found) < len(mesh):
        axis = len(found)
        kind = draw(st.sampled_from(["shard", "shard", "replicate", "strided", "runs"])) if shape else "replicate"
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if kind == "strided" and axis + 1 < len(mesh):
            found += [StridedShard(dim, mesh[axis + 1]), Shard(dim)]
        elif kind == "runs" and dim not in cut:
            found.append(Runs(dim, tuple(partition(draw, shape[dim], mesh[axis]))))
        elif kind == "shard":
            found.append(Shard(dim))
        else:
            found.append(Replicate())
            continue
        cut.add(dim)
    return found


@st.composite
def tensors(draw: st.DrawFn, shape: Shape, dtype: str, ranks: int) -> Tensor:
    """Draw a tensor over a mesh, or in boxes with gaps between their rows, as plain buffers may be."""
    mesh = draw(meshes(ranks))
    if not shape or draw(st.integers(0, 4)):
        order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else None
        return Tensor.over(shape, dtype, mesh, draw(placements(shape, mesh.shape)), order)
    ends = [shape[0] * i // len(mesh.ranks) for i in range(len(mesh.ranks) + 1)]
    overlap, gap = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    layouts = []
    for i, rank in enumerate(mesh.ranks):
        start = (max(0, ends[i] - overlap), *(0 for _ in shape[1:]))
        stop = (ends[i + 1], *shape[1:])
        strides = tuple((gap + 1) * math.prod(extent + gap for extent in shape[d + 1 :]) for d in range(len(shape)))
        layouts.append(Layout.of_buffers(rank, {"x": TensorBuffer(shape, dtype, start, stop, strides)}))
    return Layout.merge(layouts).tensors["x"]


class Drawing:
    """Draws expressions, and the source tensors at their ends, into a world."""

    def __init__(self, draw: st.DrawFn, world: World, ranks: int, dtype: str) -> None:
        self.draw, self.world, self.ranks, self.dtype = draw, world, ranks, dtype

    def expression(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        kinds = ["end", "cat", "stack", "permute", "narrow", "select", "pad"] if depth and shape else ["end"]
        return getattr(self, self.draw(st.sampled_from(kinds)))(shape, depth - 1)

    def end(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        name = f"s{len(self.world.sources)}"
        self.world.sources[name] = self.draw(tensors(shape, self.dtype, self.ranks))
        return source(name), lambda values, empty: values[name]

    def axis(self, shape: Shape) -> int:
        return self.draw(st.integers(0, len(shape) - 1))

    def cat(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        dim = self.axis(shape)
        first = self.draw(st.integers(1, shape[dim]))
        sizes = [first] if first == shape[dim] else [first, shape[dim] - first]
        several = [self.expression((*shape[:dim], size, *shape[dim + 1 :]), depth) for size in sizes]
        whole = cat(*(e for e, _ in several), dim=dim)
        return whole, lambda values, empty: np.concatenate([f(values, empty) for _, f in several], axis=dim)

    def stack(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        dim = self.axis(shape)
        if shape[dim] > 4:
            return self.end(shape, depth)
        several = [self.expression(shape[:dim] + shape[dim + 1 :], depth) for _ in range(shape[dim])]
        whole = stack(*(e for e, _ in several), dim=dim)
        return whole, lambda values, empty: np.stack([f(values, empty) for _, f in several], axis=dim)

    def permute(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        dims = self.draw(st.permutations(range(len(shape))))
        inner, f = self.expression(tuple(shape[dims.index(i)] for i in range(len(shape))), depth)
        return inner.permute(*dims), lambda values, empty: f(values, empty).transpose(dims)

    def narrow(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        dim, before, after = self.axis(shape), self.draw(st.integers(0, 3)), self.draw(st.integers(0, 3))
        inner, f = self.expression((*shape[:dim], before + shape[dim] + after, *shape[dim + 1 :]), depth)
        at = (*(slice(None) for _ in range(dim)), slice(before, before + shape[dim]))
        return inner.narrow(dim, before, shape[dim]), lambda values, empty: f(values, empty)[at]

    def select(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        dim = self.draw(st.integers(0, len(shape)))
        extent = self.draw(st.integers(1, 3))
        index = self.draw(st.integers(0, extent - 1))
        inner, f = self.expression((*shape[:dim], extent, *shape[dim:]), depth)
        return inner.select(dim, index), lambda values, empty: f(values, empty).take(index, axis=dim)

    def pad(self, shape: Shape, depth: int) -> tuple[Expression, Evaluate]:
        dim = self.axis(shape)
        length = self.draw(st.integers(1, shape[dim]))
        before = self.draw(st.integers(0, shape[dim] - length))
        inner, f = self.expression((*shape[:dim], length, *shape[dim + 1 :]), depth)
        sides = [(0, 0)] * len(shape)
        sides[dim] = (before, shape[dim] - length - before)
        whole = inner.pad(dim, to=shape[dim], before=before)
        return whole, lambda values, empty: np.pad(f(values, empty), sides, constant_values=empty)


@st.composite
def worlds(draw: st.DrawFn, quantize: bool = True, largest: int = 9) -> World:
    """Draw a world of one to three target tensors, of at most 8 source and 8 target ranks."""
    world = World()
    ranks, others = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    for number in range(draw(st.integers(1, 3))):
        name = f"t{number}"
        dims = draw(st.integers(0, 3))
        shape = tuple(draw(st.integers(1, largest)) for _ in range(dims))
        dtype = draw(st.sampled_from(["BF16", "F32"]))
        expression, evaluate = Drawing(draw, world, ranks, dtype).expression(shape, 3)
        world.evaluate[name] = evaluate
        if quantize and dims >= 2 and draw(st.booleans()):
            block = draw(st.sampled_from(BLOCKS))
            world.recipe[name] = quantized(expression, scale=f"{name}.scale", block=block)
            add_quantized(draw, world, name, shape, block, draw(meshes(others)))
            continue
        kept = draw(st.booleans())
        world.recipe[name] = expression if kept else expression.cast()
        world.targets[name] = draw(tensors(shape, dtype if kept else "F16", others))
        if not kept:
            world.cast.add(name)
    return world


def add_quantized(draw: st.DrawFn, world: World, name: str, shape: Shape, block: tuple[int, int], mesh: Mesh) -> None:
    """Add a quantized target and its scales, spread in whole blocks over a mesh."""
    size = (1,) * (len(shape) - 2) + block
    blocks = tuple(-(-extent // step) for extent, step in zip(shape, size, strict=True))
    weight: list[Replicate | Runs] = []
    scale: list[Replicate | Runs] = []
    cut: set[int] = set()
    for places in mesh.shape:
        dim = draw(st.integers(0, len(shape) - 1))
        if dim in cut or draw(st.booleans()):
            weight.append(Replicate())
            scale.append(Replicate())
            continue
        cut.add(dim)
        rows = partition(draw, blocks[dim], places)
        # A block that is not whole must be the last that its rank has.
        rows = [tuple(sorted(row, key=lambda span: span[1] == blocks[dim])) for row in rows]
        rows = [row[:-1] if row[-1:] and row[-2:-1] == row[-1:] and row[-1][1] == blocks[dim] else row for row in rows]
        step = size[dim]
        scale.append(Runs(dim, tuple(rows)))
        weight.append(Runs(dim, tuple(tuple((a * step, min(b * step, shape[dim])) for a, b in row) for row in rows)))
    world.targets[name] = Tensor.over(shape, "F8_E4M3", mesh, weight)
    world.targets[f"{name}.scale"] = Tensor.over(blocks, "F32", mesh, scale)
