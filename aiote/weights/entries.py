"""Combine the recipe with both layouts into one entry for each target tensor, and check them.

All errors in names, shapes and types are raised here, before a byte moves; each error names the tensor. Tensors that
look the same, as those of a model's layers do, share their cells, which are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import UsageError
from .cells import Cell, Need, cells_of
from .dtypes import ITEMSIZE
from .layout import Layout, Tensor
from .placement import LocalTensor, Sharding
from .recipe import Expression, Part, Quantized, Recipe, ResolvedExpression, source

__all__ = ["Entry", "bytes_needed", "entries_of", "part_of"]

Block = tuple[int, int]


class Entry(NamedTuple):
    """One target tensor: the parts that it is made of, its cells, and how its elements are converted.

    Source ranks put the elements together in the type `dtype`. If this is not the target's type (`converted`), or with
    a `block`, they must convert the elements before they write. `scale` names the tensor of the blocks' scales, or is
    empty.
    """

    target: str
    dtype: str
    converted: bool
    scale: str
    block: Block | None
    parts: tuple[Part, ...]
    cells: tuple[Cell, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the smallest box that a rank can make by itself: one element, or one block."""
        dims = len(self.parts[0].extent) if self.parts else 0
        return (1,) * dims if self.block is None else (1,) * (dims - 2) + self.block


def entries_of(sources: Layout, targets: Layout, recipe: Recipe, whole: bool) -> list[Entry]:
    """Return an entry for each target tensor that an update writes, in the order of the targets' layout.

    Raises UsageError for tensors of one side that are missing on the other and not listed in the recipe, for shapes and
    types that do not fit, and for quantization blocks that a target rank holds only in part. A tensor without elements
    may be missing on the other side.
    """
    scales = _scales(targets, recipe)
    used: set[str] = set()

    def source_of(name: str) -> tuple[tuple[int, ...], str]:
        if name not in sources.tensors:
            raise UsageError(f"there is no source tensor {name}")
        used.add(name)
        return sources.tensors[name].shape, sources.tensors[name].dtype

    known: dict[object, tuple[Cell, ...]] = {}
    found, missing = [], []
    for name in targets.tensors:
        if name in scales or recipe.is_untouched(name):
            continue
        if name not in recipe.targets and name not in sources.tensors:
            if all(targets.tensors[name].shape):
                missing.append(name)
            continue
        try:
            rule = recipe.targets.get(name, name)
            found.append(_entry(name, rule, sources, targets, source_of, known, whole=whole))
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    _complain("target tensors have no source", missing, "name them in the recipe, or list them as untouched")
    unread = [
        name
        for name, tensor in sources.tensors.items()
        if name not in used and all(tensor.shape) and not recipe.is_unused(name)
    ]
    _complain("source tensors are not used", unread, "name them in the recipe, or list them as unused")
    return found


def _complain(what: str, names: list[str], remedy: str) -> None:
    if names:
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UsageError(f"{len(names)} {what}: {some}; {remedy}")


def _scales(targets: Layout, recipe: Recipe) -> set[str]:
    """Return the names of the tensors of scales.

    Raises UsageError for names in the recipe that the targets do not have, and for scales that are made twice.
    """
    unknown = [name for name in recipe.targets if name not in targets.tensors]
    _complain("tensors of the recipe are none of the targets", unknown, "take them out, or add them to the layout")
    scales = [entry.scale for entry in recipe.targets.values() if isinstance(entry, Quantized)]
    _complain(
        "tensors of scales are none of the targets",
        [name for name in scales if name not in targets.tensors],
        "add them to the layout",
    )
    _complain(
        "tensors of scales are made twice",
        [name for name in scales if name in recipe.targets or scales.count(name) > 1] if scales else [],
        "give each quantized target its own",
    )
    return set(scales)


def _entry(
    name: str,
    rule: Expression | Quantized | str,
    sources: Layout,
    targets: Layout,
    source_of: object,
    known: dict[object, tuple[Cell, ...]],
    *,
    whole: bool,
) -> Entry:
    target = targets.tensors[name]
    quantized = rule if isinstance(rule, Quantized) else None
    expression = rule.expression if isinstance(rule, Quantized) else rule
    made = (source(expression) if isinstance(expression, str) else expression).resolve(source_of)  # type: ignore[arg-type]
    if made.shape != target.shape:
        raise UsageError(f"the recipe makes it of shape {made.shape}, but the targets have {target.shape}")
    if quantized:
        _check_blocks(target, targets.tensors[quantized.scale], quantized)
    dtype, converted = _conversion(made, target, quantized)
    block = quantized.block if quantized else None
    pairs = [(part, sources.tensors[part.source].sharding) for part in made.parts]
    key = (target.sharding, block, tuple((sharding, part[1:]) for part, sharding in pairs))
    if key not in known:
        known[key] = cells_of(target.sharding, pairs, block, whole)
    scale = quantized.scale if quantized else ""
    return Entry(name, dtype, converted, scale, block, tuple(made.parts), known[key])


def _conversion(made: ResolvedExpression, target: Tensor, quantized: Quantized | None) -> tuple[str, bool]:
    """Return the type in which source ranks put elements together, and whether they convert the elements after that.

    Raises UsageError if the types of the sources, the recipe and the target do not fit together.
    """
    if quantized:
        if ITEMSIZE[target.dtype] != 1:
            raise UsageError(
                f"it is quantized, but its type is {target.dtype}: expected a type of one byte, such as F8_E4M3"
            )
        return made.cast or made.dtype, True
    if made.cast is None and made.dtype != target.dtype:
        raise UsageError(f"the sources have {made.dtype} and the targets {target.dtype}: add .cast() to the recipe")
    if made.cast and made.cast != target.dtype:
        raise UsageError(f"the recipe casts it to {made.cast}, but the targets have {target.dtype}")
    return made.dtype, made.dtype != target.dtype


def _check_blocks(target: Tensor, scale: Tensor, quantized: Quantized) -> None:
    """Raise UsageError unless every target rank holds whole blocks and exactly their scales, in the same places."""
    if len(target.shape) < 2:
        raise UsageError(f"it is quantized by blocks, but has shape {target.shape}, expected two dimensions or more")
    size = (1,) * (len(target.shape) - 2) + quantized.block
    expected = _in_blocks(target.shape, size)
    if scale.shape != expected:
        raise UsageError(f"its scales {quantized.scale} have shape {scale.shape}, expected {expected}")
    theirs = scale.held_by()
    seen: set[tuple[LocalTensor, LocalTensor | None]] = set()
    for rank, held in target.held_by().items():
        pair = (held, theirs.get(rank))
        if pair in seen:
            continue
        seen.add(pair)
        blocks = _blocks_held(held, target.sharding, size)
        if pair[1] is None or blocks != set(pair[1].pieces):
            raise UsageError(
                f"target rank {rank} holds blocks of it whose scales in {quantized.scale} lie "
                "elsewhere: shard both in the same way"
            )


def _in_blocks(shape: Iterable[int], size: Iterable[int]) -> tuple[int, ...]:
    return tuple(-(-extent // block) for extent, block in zip(shape, size, strict=True))


def _blocks_held(held: LocalTensor, sharding: Sharding, size: tuple[int, ...]) -> set[tuple[tuple[int, ...], ...]]:
    """Return the pieces of the tensor of scales that belong to what a rank holds of the weight.

    Raises UsageError if the rank holds a block only in part.
    """
    for piece in held.pieces:
        for start, stop, local, block, extent in zip(*piece, size, sharding.shape, strict=True):
            if start % block or local % block or (stop % block and stop != extent):
                raise UsageError(
                    f"a target rank's part, {start} to {stop} of {extent} at {local}, splits blocks of {block}: "
                    "quantize by blocks whose size divides the ranks' parts"
                )
    return {tuple(_in_blocks(numbers, size) for numbers in piece) for piece in held.pieces}


def bytes_needed(entry: Entry, cell: Cell, targets: Layout) -> list[tuple[tuple[int, ...], int]]:
    """Return the target ranks that need bytes of a cell, grouped by what they hold, and how many each of them needs."""
    target = targets.tensors[entry.target]
    size = ITEMSIZE[target.dtype]
    scale = ITEMSIZE[targets.tensors[entry.scale].dtype] if entry.scale else 0
    return [(target.ranks[need.held], need.elements * size + need.blocks * scale) for need in cell.needs]


def part_of(entry: Entry, cell: Cell, start: tuple[int, ...], stop: tuple[int, ...]) -> Cell:
    """Return a box of a cell as a cell, with the needs for this box. The box must consist of whole blocks."""
    size = entry.size
    blocks = math.prod(_in_blocks(map(int.__sub__, stop, start), size))
    elements = math.prod(map(int.__sub__, stop, start))
    # Cells end where any target rank's part ends: a rank that needs some of a cell needs all of it, once or more often.
    all_of_it = math.prod(map(int.__sub__, cell.stop, cell.start))
    needs = (need.elements // all_of_it for need in cell.needs)
    wants = tuple(Need(n.held, times * elements, times * blocks) for n, times in zip(cell.needs, needs, strict=True))
    return cell._replace(start=start, stop=stop, needs=wants)
