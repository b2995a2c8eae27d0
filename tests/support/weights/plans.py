"""Carries out a plan of a weight update on NumPy arrays, one for each tensor of each rank, in memory.

Elements are numbers that name themselves. A cast adds a quarter, so it is seen. A "quantized" element is the element
and a half, and the scale of a block is the sum of its elements: enough to see that a block was made of the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from aiote.weights import Copy, Layout, Task, UpdatePlan

Array = NDArray[np.float64]
Store = dict[int, dict[str, Array]]
Cast = Callable[[Array, str, str], Array]
UNTOUCHED = -1.0


def local_size(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements an array of such strides reaches over."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def hold(layout: Layout, values: Mapping[str, Array]) -> Store:
    """Return what each rank holds of whole tensors, as flat arrays."""
    store: Store = {rank: {} for rank in layout.ranks}
    for name, tensor in layout.tensors.items():
        for rank, held in tensor.held_by().items():
            flat = np.full(local_size(held.shape, held.strides), UNTOUCHED)
            local = np.lib.stride_tricks.as_strided(flat, held.shape, [8 * stride for stride in held.strides])
            for piece in held.pieces:
                extent = tuple(map(int.__sub__, piece.stop, piece.start))
                local[window(piece.local, extent)] = values[name][window(piece.start, extent)]
            store[rank][name] = flat
    return store


def window(start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))


def elements(flat: Array, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return the view that one side of a copy names; it must lie within the array."""
    assert min(strides) >= 0
    assert 0 <= offset <= len(flat) - local_size(shape, strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, [8 * stride for stride in strides])


def source_of(copy: Copy, flat: Array) -> Array:
    return elements(flat, copy.source_offset, copy.shape, copy.source_strides)


def target_of(copy: Copy, flat: Array) -> Array:
    return elements(flat, copy.target_offset, copy.shape, copy.target_strides)


def marked(staged: Array, dtype: str, to: str) -> Array:
    """Return elements as a cast leaves them: a quarter tells that there was one."""
    return staged + 0.25 if dtype != to else staged


def make(task: Task, staged: Array, to: str, cast: Cast) -> dict[str, Array]:
    """Return what a task's staging array becomes, by the tensor that it goes to."""
    if task.block is None:
        return {task.target: cast(staged, task.dtype, to)}
    return {task.target: staged + 0.5, task.scale: block_sums(staged, task.block)}


def block_sums(whole: Array, block: tuple[int, int]) -> Array:
    """Return the sum of every block of the two innermost dimensions."""
    for axis, size in zip((-2, -1), block, strict=True):
        whole = np.add.reduceat(whole, range(0, whole.shape[axis], size), axis=axis)
    return whole


def carry_out(
    plan: UpdatePlan, stores: Store, small: Callable[[Task], bool] | None = None, cast: Cast = marked
) -> tuple[Store, dict[int, dict[str, Array]]]:
    """Return what each target rank has after an update, and how often each element was written."""
    blank = {n: np.full(t.shape, UNTOUCHED) for n, t in plan.targets.tensors.items()}
    memory = hold(plan.targets, blank)
    count = hold(plan.targets, {n: np.zeros(t.shape) for n, t in plan.targets.tensors.items()})
    for rank in plan.sources.ranks:
        for task in plan.tasks(rank, small):
            made = stage(plan, task, stores, cast)
            for ranks, copy in task.writes:
                begin = stores[rank][copy.source] if task.kind == "direct" else made[copy.target].ravel()
                for target in ranks:
                    target_of(copy, memory[target][copy.target])[...] = source_of(copy, begin)
                    target_of(copy, count[target][copy.target])[...] += 1
    return memory, count


def stage(plan: UpdatePlan, task: Task, stores: Store, cast: Cast = marked) -> dict[str, Array]:
    """Read what a task reads, each element once at most, and make of it what it writes."""
    if task.kind == "direct":
        assert not task.reads
        return {}
    shape = tuple(map(int.__sub__, task.stop, task.start))
    staged, times = np.zeros(math.prod(shape)), np.zeros(math.prod(shape))
    for rank, copy in task.reads:
        target_of(copy, staged)[...] = source_of(copy, stores[rank][copy.source])
        target_of(copy, times)[...] += 1
    assert times.max() == 1
    return make(task, staged.reshape(shape), plan.targets.tensors[task.target].dtype, cast)
