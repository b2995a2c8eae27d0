"""What NumPy offers on an array, for loaders that are drawn: what moves elements, and some of what does not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from support.weights.drawn_loaders import Step, swallowed
from support.weights.recorded_updates import untouched

DTYPES = [np.float32] * 5 + [np.float16, np.float64, np.int32, np.int8]


def source(rng: random.Random) -> Any:
    """Return an array of values that every type here holds without overflow."""
    shape = [rng.choice([1, 2, 2, 3, 4, 4, 6]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3]))]
    if shape and rng.random() < 0.03:
        shape[0] = 0
    dtype = np.dtype(rng.choice(DTYPES))
    numbers = [rng.gauss(0, 20) for _ in range(int(np.prod(shape)))]
    return np.clip(np.array(numbers).reshape(shape), -100, 100).astype(dtype)


def axis(rng: random.Random, x: Any, more: int = 0) -> int:
    return rng.randrange(-x.ndim - more, x.ndim + more)


def order(rng: random.Random, x: Any) -> list[int]:
    several = list(range(x.ndim))
    rng.shuffle(several)
    return [one - x.ndim if rng.random() < 0.3 else one for one in several]


def shape_of(rng: random.Random, x: Any) -> list[int]:
    size, made = x.size, []
    while size > 1 and rng.random() < 0.7:
        factor = rng.choice([n for n in range(1, size + 1) if size % n == 0])
        made.append(factor)
        size //= factor
    made.append(size)
    if rng.random() < 0.4 and x.size:
        made[rng.randrange(len(made))] = -1
    return made


def a_slice(rng: random.Random, extent: int) -> slice:
    ends = [None, *range(-extent, extent + 1)]
    return slice(rng.choice(ends), rng.choice(ends), rng.choice([None, None, None, 1, 2, -1, -2]))


def index(rng: random.Random, x: Any) -> Any:
    several: list[Any] = []
    for extent in x.shape[: rng.randint(0, x.ndim)]:
        several.append(
            rng.choice([a_slice(rng, extent), slice(None), rng.randrange(-extent, extent) if extent else slice(None)])
        )
    if rng.random() < 0.2:
        several.insert(rng.randint(0, len(several)), None)
    if rng.random() < 0.2:
        several.append(...)
    return several[0] if len(several) == 1 and rng.random() < 0.5 else tuple(several)


def numbers(rng: random.Random, extent: int) -> list[int]:
    return [rng.randrange(-extent, extent) for _ in range(rng.randint(1, 4))]


def moves(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that views are made by."""
    a, b = (axis(rng, x), axis(rng, x)) if x.ndim else (0, 0)
    axes, wanted, place, several = order(rng, x), shape_of(rng, x), index(rng, x), [axis(rng, x)] if x.ndim else []
    kind = rng.choice(["C", "C", "C", "F", "A"])
    wide = (rng.randint(1, 3), *x.shape)
    extent = x.shape[a] if x.ndim else 0
    parts = rng.choice([n for n in range(1, max(extent, 1) + 1) if extent % n == 0] or [1])
    cuts = sorted(rng.randrange(extent + 1) for _ in range(2))
    every: list[tuple[str, Callable[[Any], Any]]] = [
        (f"x[{place}]", lambda y: y[place]),
        (f"x.transpose({axes})", lambda y: y.transpose(axes)),
        (f"x.transpose(*{axes})", lambda y: y.transpose(*axes)),
        (f"np.transpose(x, axes={axes})", lambda y: np.transpose(y, axes=axes)),
        ("x.transpose()", lambda y: y.transpose()),
        ("x.T", lambda y: y.T),
        ("x.mT", lambda y: y.mT),
        (f"x.swapaxes({a}, {b})", lambda y: y.swapaxes(a, b)),
        (f"np.swapaxes(x, {a}, {b})", lambda y: np.swapaxes(y, axis1=a, axis2=b)),
        (f"np.moveaxis(x, {a}, {b})", lambda y: np.moveaxis(y, a, b)),
        (f"np.rollaxis(x, {a}, {b})", lambda y: np.rollaxis(y, a, b)),
        (f"x.reshape({wanted}, order={kind})", lambda y: y.reshape(wanted, order=kind)),
        (f"x.reshape(*{wanted})", lambda y: y.reshape(*wanted)),
        (f"np.reshape(x, {wanted}, {kind})", lambda y: np.reshape(y, wanted, kind)),
        (f"x.ravel({kind})", lambda y: y.ravel(kind)),
        (f"np.ravel(x, order={kind})", lambda y: np.ravel(y, order=kind)),
        (f"x.flatten({kind})", lambda y: y.flatten(kind)),
        ("x.squeeze()", lambda y: y.squeeze()),
        (f"np.squeeze(x, axis={a})", lambda y: np.squeeze(y, axis=a)),
        (f"np.expand_dims(x, {a})", lambda y: np.expand_dims(y, a)),
        (f"np.broadcast_to(x, {wide})", lambda y: np.broadcast_to(y, wide)),
        ("np.atleast_2d(x)", lambda y: np.atleast_2d(y)),
        ("np.atleast_3d(x)", lambda y: np.atleast_3d(y)),
        (f"np.flip(x, {a})", lambda y: np.flip(y, a)),
        (f"np.flip(x, axis={several})", lambda y: np.flip(y, axis=tuple(several))),
        ("np.flip(x)", lambda y: np.flip(y)),
        ("np.fliplr(x)", lambda y: np.fliplr(y)),
        (f"np.rot90(x, {parts})", lambda y: np.rot90(y, parts)),
        (f"x.diagonal({parts - 1})", lambda y: y.diagonal(parts - 1)),
        ("np.diagonal(x, axis1=-1, axis2=0)", lambda y: np.diagonal(y, axis1=-1, axis2=0)),
        (f"np.split(x, {parts}, {a})[i]", lambda y: np.split(y, parts, a)),
        (f"np.split(x, {cuts}, axis={a})[i]", lambda y: np.split(y, cuts, axis=a)),
        (f"np.array_split(x, 3, axis={a})[i]", lambda y: np.array_split(y, 3, axis=a)),
        ("np.vsplit(x, 2)[i]", lambda y: np.vsplit(y, 2)),
        ("np.hsplit(x, [1])[i]", lambda y: np.hsplit(y, [1])),
        ("list(x)[i]", list),
    ]
    return every


def makes(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that make new arrays of elements."""
    a = axis(rng, x) if x.ndim else 0
    extent = x.shape[a] if x.ndim else 0
    chosen, by = numbers(rng, extent) if extent else [0], rng.randint(-3, 3)
    dtype = rng.choice(
        [np.float16, "e", "<f2", float, "float32", np.dtype("f8"), np.float32, int, np.int64, "int32", x.dtype]
    )
    casting = rng.choice(["unsafe", "same_kind", "safe", "no"])
    kind = rng.choice("CFAK")
    lists: Any = rng.choice([chosen, np.array(chosen)])
    return [
        (f"x.astype({dtype!r})", lambda y: y.astype(dtype)),
        (f"x.astype({dtype!r}, casting={casting})", lambda y: y.astype(dtype, casting=casting, copy=False)),
        (f"x.astype({dtype!r}, order={kind})", lambda y: y.astype(dtype, kind)),
        (f"x.copy({kind})", lambda y: y.copy(kind)),
        (f"np.copy(x, order={kind})", lambda y: np.copy(y, order=kind)),
        ("copy.copy(x)", copy.copy),
        (f"np.roll(x, {by}, {a})", lambda y: np.roll(y, by, a)),
        (f"np.roll(x, {by})", lambda y: np.roll(y, by)),
        (f"np.roll(x, [{by}, 1], axis=[{a}, 0])", lambda y: np.roll(y, (by, 1), axis=(a, 0))),
        (f"np.repeat(x, 2, axis={a})", lambda y: np.repeat(y, 2, axis=a)),
        ("x.repeat(3)", lambda y: y.repeat(3)),
        (f"np.take(x, {lists}, axis={a})", lambda y: np.take(y, lists, axis=a)),
        (f"x.take({chosen}, {a})", lambda y: y.take(chosen, a)),
        (f"x[{chosen}]", lambda y: y[lists]),
        (f"x[:, {chosen}]", lambda y: y[:, lists]),
        (f"x[..., {chosen}]", lambda y: y[..., lists]),
    ]


def joins(rng: random.Random, x: Any) -> list[tuple[str, Callable[[list[Any]], Any]]]:
    """Return steps that put arrays of one shape together."""
    a, b = (axis(rng, x), axis(rng, x, 1)) if x.ndim else (0, 0)
    return [
        (f"np.concatenate(all, axis={a})", lambda several: np.concatenate(several, axis=a)),
        (
            f"np.concatenate(all, {a}, dtype=f8)",
            lambda several: np.concatenate(several, a, dtype="f8", casting="unsafe"),
        ),
        ("np.concatenate(all, axis=None)", lambda several: np.concatenate(tuple(several), axis=None)),
        (f"np.stack(all, axis={b})", lambda several: np.stack(several, axis=b)),
        ("np.vstack(all)", np.vstack),
        ("np.hstack(all)", np.hstack),
        ("np.dstack(all)", np.dstack),
        ("np.column_stack(all)", np.column_stack),
    ]


def hostile(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that need values, change them, or that no recipe says."""
    mask = np.arange(x.size).reshape(x.shape) % 2 == 0
    return [
        ("x * 2", lambda y: y * 2),
        ("-x", lambda y: -y),
        ("x + x", lambda y: y + y),
        ("x.__iadd__(1)", lambda y: y.__iadd__(1)),
        ("np.positive(x)", lambda y: np.positive(y)),
        ("np.where(mask, x, 0)", lambda y: np.where(mask, y, 0)),
        ("np.where(mask, 0, x)", lambda y: np.where(mask, 0, y)),
        ("x[mask]", lambda y: y[mask]),
        ("x[mask.tolist()]", lambda y: y[mask.tolist()]),
        ("np.einsum('...->...', x)", lambda y: np.einsum("...->...", y)),
        ("np.einsum('ij->ji', x)", lambda y: np.einsum("ij->ji", y)),
        ("np.array(x)", lambda y: np.array(y)),
        ("np.asarray(x, order='F')", lambda y: np.asarray(y, order="F")),
        ("np.ascontiguousarray(x)", lambda y: np.ascontiguousarray(y)),
        ("np.tile(x, 2)", lambda y: np.tile(y, 2)),
        ("np.pad(x, 1)", lambda y: np.pad(y, 1)),
        ("np.tril(x)", lambda y: np.tril(y)),
        ("np.append(x, x)", lambda y: np.append(y, y)),
        ("np.sort(x)", lambda y: np.sort(y)),
        ("x.clip(0, 1)", lambda y: y.clip(0, 1)),
        ("x.view(np.int16)", lambda y: y.view(np.int16)),
        ("np.resize(x, 4)", lambda y: np.resize(y, 4)),
        ("x if x.sum() > 0 else -x", lambda y: y if y.sum() > 0 else -y),
        ("np.array(x.tolist())", lambda y: np.array(y.tolist())),
        ("np.frombuffer(x)", lambda y: np.frombuffer(y, y.dtype)),
        ("x.reshape(order='K')", lambda y: y.ravel("K")),
        ("zeros, np.add(x, 0, out)", lambda y: np.add(y, 0, out=np.zeros(y.shape, y.dtype))),
        ("np.block([x, x])", lambda y: np.block([y, y])),
        ("np.ix_ of x", lambda y: y[np.ix_(*[range(n) for n in y.shape])]),
        ("np.nan_to_num(x)", lambda y: np.nan_to_num(y)),
        ("try: -x; except: x", lambda y: swallowed(lambda: -y, y)),
        ("try: x.sum(); except: x", lambda y: swallowed(lambda: y * y.sum(), y)),
    ]


def asks(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that look at what a tensor has besides values."""
    return [
        ("x if x.dtype == float32 else x.T", lambda y: y if y.dtype == np.float32 else y.T),
        ("x if isinstance(x, np.ndarray) else x.T", lambda y: y if isinstance(y, np.ndarray) else y.T),
        ("x.reshape(x.size)", lambda y: y.reshape(y.size)),
        ("x if x.ndim == 2 else x.ravel()", lambda y: y if y.ndim == 2 else y.ravel()),
        ("x.reshape(len(x), -1)", lambda y: y.reshape(len(y), -1)),
        ("x[: np.shape(x)[0] // 2]", lambda y: y[: np.shape(y)[0] // 2]),
        ("x if x.dtype.kind == 'f' else x.T", lambda y: y if y.dtype.kind == "f" else y.T),
        ("x if hasattr(x, 'narrow') else x.T", lambda y: y if hasattr(y, "narrow") else y.T),
        ("x if x.itemsize == 4 else x.T", lambda y: y if y.itemsize == 4 else y.T),
        ("x if np.ndim(x) > 1 else x[::-1]", lambda y: y if np.ndim(y) > 1 else y[::-1]),
    ]


def target(rng: random.Random, x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a parameter, and what takes of it a view of the shape of an array."""
    dtype = x.dtype if rng.random() < 0.7 else np.dtype(rng.choice([np.float32, np.float16, np.float64, np.int32]))
    axes = list(range(x.ndim))
    rng.shuffle(axes)
    big, window = [], []
    for at in axes:
        extent, before = x.shape[at], rng.choice([0, 0, 0, 1])
        step = rng.choice([1, 1, 1, 1, 2, -1])
        big.append(before + extent * abs(step) + rng.choice([0, 0, 1]))
        window.append(
            slice(before, before + extent * abs(step), abs(step))
            if step > 0
            else slice(before + extent - 1, before - 1 if before else None, -1)
        )
    back = [axes.index(at) for at in range(x.ndim)]
    made = untouched(tuple(big), dtype)
    if rng.random() < 0.2:
        made = untouched(tuple(big[::-1]), dtype).T
    return made, lambda p: p[(*window, ...)].transpose(back)


def writes(rng: random.Random, x: Any, view: Callable[[Any], Any]) -> list[tuple[str, Callable[[Any, Any], Any]]]:
    """Return ways to write an array to a parameter."""
    casting = rng.choice(["unsafe", "unsafe", "same_kind", "no"])
    mask = np.arange(x.size).reshape(x.shape) % 2 == 0
    plain: list[tuple[str, Callable[[Any, Any], Any]]] = [
        ("np.copyto(p, x, casting='unsafe')", lambda p, y: np.copyto(view(p), y, casting="unsafe")),
        (f"np.copyto(dst=p, src=x, casting={casting})", lambda p, y: np.copyto(dst=view(p), src=y, casting=casting)),
        ("np.copyto(p, x, 'unsafe', True)", lambda p, y: np.copyto(view(p), y, "unsafe", True)),
        ("np.copyto(p, x[None])", lambda p, y: np.copyto(view(p), y[None], casting="unsafe")),
        ("np.copyto twice", lambda p, y: [np.copyto(view(p), one, casting="unsafe") for one in (y, y)]),
    ]
    return plain * 14 + [
        ("np.copyto(p, x, where=mask)", lambda p, y: np.copyto(view(p), y, casting="unsafe", where=mask)),
        ("p[...] = x", lambda p, y: view(p).__setitem__(..., y)),
        ("p[()] = x", lambda p, y: view(p).__setitem__((), y)),
        ("np.copyto, p *= 2", lambda p, y: [np.copyto(view(p), y, casting="unsafe"), view(p).__imul__(2)]),
        ("np.copyto, p.fill(0)", lambda p, y: [np.copyto(view(p), y, casting="unsafe"), view(p).fill(0)]),
        ("p += x", lambda p, y: view(p).__iadd__(y.astype(p.dtype))),
        ("np.add(x, 0, out=p)", lambda p, y: np.add(y, 0, out=view(p), casting="unsafe")),
        ("np.copyto(p, x * 1)", lambda p, y: np.copyto(view(p), y * 1, casting="unsafe")),
        ("np.concatenate([x], out=p)", lambda p, y: np.concatenate([y], out=view(p), casting="unsafe")),
        ("np.take(x, range, out=p)", lambda p, y: np.take(y, range(len(y)), axis=0, out=view(p))),
        ("p.flat = x", lambda p, y: setattr(view(p), "flat", y)),
        ("p's first half of x", lambda p, y: np.copyto(view(p)[: len(y) // 2], y[: len(y) // 2], casting="unsafe")),
    ]


def is_usable(found: Any) -> bool:
    """Tell whether what a step made is an array to go on with."""
    return isinstance(found, (np.ndarray, np.generic)) and found.size <= 500 and found.ndim <= 5


def copied(parameter: Any) -> Any:
    """Return a copy that lies in memory as the parameter does."""
    return parameter.copy("K")
