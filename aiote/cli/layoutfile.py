"""Layouts and recipes of weight updates as files, TOML or JSON, for `aiote plan weights`.

    # trainers.toml
    ranks = 4
    [tensors]
    "layers.{i=0..3}.q" = {shape = [4096, 4096], dtype = "BF16", placements = ["shard(0)"]}

    # recipe.toml
    unused = ["*.rotary"]
    [targets]
    "layers.{i=0..3}.qkv" = {cat = ["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"]}
    "head" = {source = "embed", pad = {dim = 0, to = 128}}

`{i=0..3}` in a name, or in an item of a list, generates one name or item for each number. A layout of several meshes
has a list `group` of such tables. The result of `Layout.describe()` is a layout, too.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aiote.errors import UsageError
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
    cat,
    packed,
    quantized,
    source,
    stack,
)

__all__ = ["read_layout", "read_recipe"]

RANGE = re.compile(r"\{(\w+)=(\d+)\.\.(\d+)\}")
MOST_NAMES = 1 << 20


def read_layout(path: Path) -> Layout:
    """Read a layout. For a wrong one, raises UsageError that names the file and the tensor."""
    table = _table(path)
    with _Within(str(path)):
        if "shardings" in table:
            return Layout.from_description(table)
        groups = table.get("group", [table])
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise UsageError("group: expected a list of tables; begin each with [[group]]")
        return Layout.merge(_group(group) for group in groups)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. For a wrong one, raises UsageError that names the file and the target."""
    table = _table(path)
    with _Within(str(path)):
        _known(table, ("targets", "unused", "untouched"))
        targets = {}
        for name, rule in _named(table.get("targets", {}), "targets"):
            with _Within(name):
                targets[name] = _rule(rule)
        return Recipe(targets, *(tuple(_texts(table.get(key, []), key)) for key in ("unused", "untouched")))


class _Within:
    """Prefix the message of a UsageError with the place at which it occurred."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UsageError):
            raise UsageError(f"{self._where}: {error}") from None


def _table(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"{path}: this is not {kind}: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: expected a table, got {type(table).__name__}")
    return table


def _known(table: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in table:
        if name not in names:
            raise UsageError(f"{name} is unknown, expected {', '.join(names)}")


def _texts(values: Any, what: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise UsageError(f"{what} is {values!r}, expected a list of texts")
    return values


# Names with ranges.


def _named(table: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Yield the names of a table with their values, repeated for each number of their ranges."""
    if not isinstance(table, dict):
        raise UsageError(f"{what} is {table!r}, expected a table")
    for name, value in table.items():
        yield from _spread(name, [name, value])


def _spread(where: str, item: Any) -> Iterator[Any]:
    """Yield an item for each number of the ranges in `where`, with the numbers substituted in the whole item."""
    found = RANGE.search(where)
    if found is None:
        yield item
        return
    first, last = int(found[2]), int(found[3])
    if not first <= last < first + MOST_NAMES:
        raise UsageError(f"{found[0]} is not a range: expected the smaller number first")
    text = json.dumps(item)
    for number in range(first, last + 1):

        def put(text: str, number: int = number) -> str:
            return text.replace(found[0], str(number)).replace(f"{{{found[1]}}}", str(number))

        yield from _spread(put(where), json.loads(put(text)))


def _items(values: Any, what: str) -> list[Any]:
    if not isinstance(values, list):
        raise UsageError(f"{what} is {values!r}, expected a list")
    return [one for value in values for one in _spread(json.dumps(value), value)]


# Layouts.


def _group(table: dict[str, Any]) -> Layout:
    _known(table, ("ranks", "mesh", "tensors"))
    if ("ranks" in table) == ("mesh" in table):
        raise UsageError("give either ranks = N, or mesh = [[0, 1], [2, 3]]")
    try:
        mesh = Mesh.of(np.asarray(range(table["ranks"]) if "ranks" in table else table["mesh"]))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the mesh is wrong: {error}") from None
    tensors = {}
    for name, entry in _named(table.get("tensors"), "tensors"):
        with _Within(name):
            tensors[name] = _tensor(entry, mesh)
    return Layout.over(mesh, tensors)


def _tensor(entry: Any, mesh: Mesh) -> tuple[list[int], str, list[Any]]:
    if not isinstance(entry, dict):
        raise UsageError(f'it is {entry!r}, expected {{shape = [...], dtype = "BF16", placements = [...]}}')
    _known(entry, ("shape", "dtype", "placements"))
    try:
        shape, dtype = [int(extent) for extent in entry["shape"]], str(entry["dtype"])
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is missing") from None
    except (TypeError, ValueError):
        raise UsageError(f"shape is {entry['shape']!r}, expected numbers") from None
    names = _texts(entry.get("placements", ["replicate"] * len(mesh.shape)), "placements")
    if len(names) != len(mesh.shape):
        raise UsageError(f"{len(names)} placements for a mesh of {len(mesh.shape)} axes, expected one for each")
    return shape, dtype, [_placement(name, places) for name, places in zip(names, mesh.shape, strict=True)]


def _placement(text: str, places: int) -> Replicate | Shard | StridedShard | Runs:
    """Return a placement on an axis of `places` places, from its text such as "packed(0, 4096/32, 1024/8)"."""
    found = re.fullmatch(r"(\w+)(?:\(([\d\s,/]+)\))?", text.strip())
    kind = found[1] if found else ""
    words = [word.strip() for word in (found[2] or "").split(",")] if found else []
    try:
        if kind == "packed" and len(words) > 1:
            parts = [(int(size), int(heads)) if heads else int(size) for size, _, heads in map(_halves, words[1:])]
            return packed(int(words[0]), places, *parts)
        numbers = [int(word) for word in words if word]
        makers: dict[tuple[str, int], Callable[..., Any]] = {
            ("replicate", 0): Replicate,
            ("shard", 1): Shard,
            ("strided", 2): StridedShard,
        }
        made: Replicate | Shard | StridedShard = makers[kind, len(numbers)](*numbers)
        return made
    except UsageError:
        raise
    except (KeyError, ValueError):
        raise UsageError(
            f"placement {text!r}: expected replicate, shard(DIM), strided(DIM, FACTOR) or packed(DIM, SIZE/HEADS, ...)"
        ) from None


def _halves(text: str) -> tuple[str, str, str]:
    return text.partition("/")


# Recipes.


def _rule(rule: Any) -> Expression | Quantized:
    """Return the expression that a target is made of."""
    if isinstance(rule, dict) and "quantized" in rule:
        how = rule["quantized"]
        if not isinstance(how, dict) or "scale" not in how:
            raise UsageError(f'quantized is {how!r}, expected {{scale = "name"}}, optionally with block = [128, 128]')
        _known(how, ("scale", "block"))
        rest = {key: value for key, value in rule.items() if key != "quantized"}
        return quantized(_expression(rest), scale=str(how["scale"]), block=tuple(how.get("block", (128, 128))))
    return _expression(rule)


MODIFIERS: dict[str, Callable[[Expression, Any], Expression]] = {
    "transpose": lambda made, dims: made.transpose() if dims is True else made.transpose(*dims),
    "permute": lambda made, dims: made.permute(*dims),
    "narrow": lambda made, numbers: made.narrow(*numbers),
    "select": lambda made, numbers: made.select(*numbers),
    "pad": lambda made, how: made.pad(**how),
    "cast": lambda made, dtype: made.cast("" if dtype is True else dtype),
}


def _expression(rule: Any) -> Expression:
    """Return an expression from a name, or from a table with source, cat or stack, and modifiers in their order."""
    if isinstance(rule, str):
        return source(rule)
    if not isinstance(rule, dict):
        raise UsageError(f"{rule!r} is not a rule: expected a name or a table")
    _known(rule, ("source", "cat", "stack", "dim", *MODIFIERS))
    if sum(kind in rule for kind in ("source", "cat", "stack")) != 1:
        raise UsageError("expected one of source, cat and stack in a rule")
    if "source" in rule:
        made = source(str(rule["source"]))
    else:
        kind, put = ("cat", cat) if "cat" in rule else ("stack", stack)
        made = put(*map(_expression, _items(rule[kind], kind)), dim=int(rule.get("dim", 0)))
    for name, value in rule.items():
        if name in MODIFIERS:
            try:
                made = MODIFIERS[name](made, value)
            except TypeError as error:
                raise UsageError(f"{name} is {value!r}: {error}") from None
    return made
