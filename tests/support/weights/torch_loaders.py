"""What torch offers on a tensor, for loaders that are drawn, as `numpy_loaders` has it for NumPy."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch

from support.weights import plans as weight_plans
from support.weights.drawn_loaders import Step, swallowed
from support.weights.numpy_loaders import axis, numbers, order, shape_of

DTYPES = [torch.float32] * 4 + [torch.bfloat16] * 2 + [torch.float16, torch.float64, torch.int32, torch.int8]
TO = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


def source(rng: random.Random) -> Any:
    """Return a tensor of values that every type here holds without overflow."""
    shape = [rng.choice([1, 2, 2, 3, 4, 4, 6]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3]))]
    if shape and rng.random() < 0.03:
        shape[0] = 0
    made = torch.tensor([rng.gauss(0, 20) for _ in range(torch.Size(shape).numel())])
    return made.reshape(shape).clamp(-100, 100).to(rng.choice(DTYPES))


def index(rng: random.Random, x: Any) -> Any:
    several: list[Any] = []
    for extent in x.shape[: rng.randint(0, x.ndim)]:
        ends = [None, *range(-extent, extent + 1)]
        several.append(rng.choice([slice(rng.choice(ends), rng.choice(ends), rng.choice([None, 1, 2])), slice(None)]))
        if rng.random() < 0.3 and extent:
            several[-1] = rng.randrange(-extent, extent)
    if rng.random() < 0.2:
        several.insert(rng.randint(0, len(several)), None)
    if rng.random() < 0.2:
        several.append(...)
    return several[0] if len(several) == 1 and rng.random() < 0.5 else tuple(several)


def moves(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that views are made by."""
    a, b = (axis(rng, x), axis(rng, x)) if x.ndim else (0, 0)
    axes, wanted, place = order(rng, x), shape_of(rng, Sized(x)), index(rng, x)
    extent = x.shape[a] if x.ndim else 0
    start, parts = rng.randint(-extent, extent), rng.randint(1, 3)
    length = rng.randint(0, max(extent - start % (extent or 1), 0))
    sizes = [length, extent - length]
    return [
        (f"x[{place}]", lambda y: y[place]),
        (f"x.permute({axes})", lambda y: y.permute(axes)),
        (f"x.permute(*{axes})", lambda y: y.permute(*axes)),
        (f"torch.permute(x, dims={axes})", lambda y: torch.permute(y, dims=axes)),
        (f"x.transpose({a}, {b})", lambda y: y.transpose(a, b)),
        (f"torch.transpose(x, dim0={a}, dim1={b})", lambda y: torch.transpose(y, dim0=a, dim1=b)),
        (f"x.swapaxes({a}, {b})", lambda y: y.swapaxes(a, b)),
        (f"torch.movedim(x, {a}, {b})", lambda y: torch.movedim(y, a, b)),
        ("x.t()", lambda y: y.t()),
        ("x.T", lambda y: y.T),
        ("x.mT", lambda y: y.mT),
        (f"x.reshape({wanted})", lambda y: y.reshape(wanted)),
        (f"x.reshape(*{wanted})", lambda y: y.reshape(*wanted)),
        (f"torch.reshape(x, {wanted})", lambda y: torch.reshape(y, wanted)),
        (f"x.view({wanted})", lambda y: y.view(wanted)),
        (f"x.contiguous().view(*{wanted})", lambda y: y.contiguous().view(*wanted)),
        (f"x.flatten({a})", lambda y: y.flatten(a)),
        ("x.flatten()", lambda y: y.flatten()),
        ("torch.ravel(x)", lambda y: torch.ravel(y)),
        (f"x.unflatten({a}, (-1, {parts}))", lambda y: y.unflatten(a, (-1, parts))),
        ("x.squeeze()", lambda y: y.squeeze()),
        (f"torch.squeeze(x, {a})", lambda y: torch.squeeze(y, a)),
        (f"x.unsqueeze({a})", lambda y: y.unsqueeze(a)),
        ("x.expand(2, ...)", lambda y: y.expand(2, *y.shape)),
        ("torch.broadcast_to(x, (1, ...))", lambda y: torch.broadcast_to(y, (1, *y.shape))),
        (f"x.narrow({a}, {start}, {length})", lambda y: y.narrow(a, start, length)),
        (f"torch.narrow(x, dim={a}, ...)", lambda y: torch.narrow(y, dim=a, start=start, length=length)),
        (f"x.select({a}, {start})", lambda y: y.select(a, start)),
        (f"x.diagonal({parts - 1})", lambda y: y.diagonal(parts - 1)),
        (f"x.chunk({parts}, {a})[i]", lambda y: y.chunk(parts, a)),
        (f"torch.chunk(x, chunks={parts}, dim={a})[i]", lambda y: torch.chunk(y, chunks=parts, dim=a)),
        (f"x.split({parts}, {a})[i]", lambda y: y.split(parts, a)),
        (f"torch.split(x, {sizes}, dim={a})[i]", lambda y: torch.split(y, sizes, dim=a)),
        (f"torch.split(x, {parts})[i]", lambda y: torch.split(y, split_size_or_sections=parts)),
        (f"x.tensor_split({parts}, {a})[i]", lambda y: y.tensor_split(parts, a)),
        (f"x.tensor_split([1], {a})[i]", lambda y: y.tensor_split([1], dim=a)),
        ("torch.hsplit(x, 2)[i]", lambda y: torch.hsplit(y, 2)),
        (f"x.unbind({a})[i]", lambda y: y.unbind(a)),
        ("list(x)[i]", list),
        ("torch.atleast_2d(x)", lambda y: torch.atleast_2d(y)),
    ]


class Sized:
    """What `shape_of` asks of an array."""

    def __init__(self, tensor: Any) -> None:
        self.size = tensor.numel()


def makes(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that make new tensors of elements."""
    a = axis(rng, x) if x.ndim else 0
    extent = x.shape[a] if x.ndim else 0
    chosen, by, dtype = numbers(rng, extent) if extent else [0], rng.randint(-3, 3), rng.choice(TO)
    positive = torch.tensor([one % max(extent, 1) for one in chosen])
    return [
        (f"x.to({dtype})", lambda y: y.to(dtype)),
        (f"x.to(cpu, {dtype})", lambda y: y.to("cpu", dtype, copy=True)),
        (f"x.to(dtype={dtype})", lambda y: y.to(dtype=dtype, non_blocking=True)),
        (f"x.type({dtype})", lambda y: y.type(dtype)),
        ("x.float()", lambda y: y.float()),
        ("x.half()", lambda y: y.half()),
        ("x.bfloat16()", lambda y: y.bfloat16()),
        ("x.to(cpu)", lambda y: y.to(torch.device("cpu"))),
        ("x.clone()", lambda y: y.clone(memory_format=torch.contiguous_format)),
        ("x.detach().cpu()", lambda y: y.detach().cpu()),
        ("x.data.contiguous()", lambda y: y.data.contiguous()),
        ("copy.deepcopy(x)", copy.deepcopy),
        (f"x.flip({a})", lambda y: y.flip(a)),
        (f"torch.flip(x, dims=[{a}])", lambda y: torch.flip(y, dims=[a])),
        (f"x.roll({by}, {a})", lambda y: y.roll(by, a)),
        (f"torch.roll(x, {by})", lambda y: torch.roll(y, by)),
        (f"x.index_select({a}, {positive})", lambda y: y.index_select(a, positive)),
        (f"x[{chosen}]", lambda y: y[chosen]),
        (f"x[tensor({chosen})]", lambda y: y[positive]),
        ("x.repeat(2, 1, ...)", lambda y: y.repeat(2, *[1] * (y.ndim - 1))),
        (f"torch.repeat_interleave(x, 2, dim={a})", lambda y: torch.repeat_interleave(y, 2, dim=a)),
        ("x.repeat_interleave(2)", lambda y: y.repeat_interleave(2)),
        ("x.type_as(x.half())", lambda y: y.type_as(y.half())),
    ]


def joins(rng: random.Random, x: Any) -> list[tuple[str, Callable[[list[Any]], Any]]]:
    """Return steps that put tensors of one shape together."""
    a, b = (axis(rng, x), axis(rng, x, 1)) if x.ndim else (0, 0)
    return [
        (f"torch.cat(all, {a})", lambda several: torch.cat(several, a)),
        (f"torch.cat(all, dim={a})", lambda several: torch.cat(tuple(several), dim=a)),
        (f"torch.concatenate(all, axis={a})", lambda several: torch.concatenate(several, axis=a)),
        (f"torch.stack(all, {b})", lambda several: torch.stack(several, b)),
        ("torch.vstack(all)", torch.vstack),
        ("torch.hstack(all)", torch.hstack),
        ("torch.dstack(all)", torch.dstack),
        ("torch.column_stack(all)", torch.column_stack),
    ]


def hostile(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that need values, change them, or that no recipe says."""
    mask = torch.arange(x.numel()).reshape(x.shape) % 2 == 0
    return [
        ("x * 2", lambda y: y * 2),
        ("-x", lambda y: -y),
        ("x.mul_(2)", lambda y: y.clone().mul_(2)),
        ("x.__iadd__(1)", lambda y: y.clone().__iadd__(1)),
        ("torch.where(mask, x, 0)", lambda y: torch.where(mask, y, 0)),
        ("x[mask]", lambda y: y[mask]),
        ("x.masked_fill(mask, 0)", lambda y: y.masked_fill(mask, 0)),
        ("torch.einsum('...->...', x)", lambda y: torch.einsum("...->...", y)),
        ("torch.tensor(x)", lambda y: torch.tensor(y)),
        ("torch.as_tensor(x)", lambda y: torch.as_tensor(y) * 1),
        ("x.numpy()", lambda y: torch.from_numpy(y.numpy())),
        ("x.tolist()", lambda y: torch.tensor(y.tolist())),
        ("x.view(torch.int16)", lambda y: y.view(torch.int16)),
        ("x.view(torch.uint8)", lambda y: y.view(torch.uint8)),
        ("x.as_strided((2,), (1,))", lambda y: y.as_strided((2,), (1,))),
        ("x.tril()", lambda y: y.tril()),
        ("x.sort()", lambda y: y.sort(-1)[0]),
        ("x if x.sum() > 0 else -x", lambda y: y if y.sum() > 0 else -y),
        ("torch.nn.functional.pad(x, (1, 1))", lambda y: torch.nn.functional.pad(y, (1, 1))),
        ("zeros.add_(x)", lambda y: torch.zeros(y.shape, dtype=y.dtype).add_(y)),
        ("torch.cat([x], out=zeros)", lambda y: torch.cat([y], out=torch.zeros(y.shape, dtype=y.dtype))),
        ("torch.cat([x, zeros])", lambda y: torch.cat([y, torch.zeros_like(y)])),
        ("x.resize_(2)", lambda y: y.clone().resize_(2)),
        ("x.rot90()", lambda y: y.rot90()),
        ("x if x.is_contiguous() else x.t()", lambda y: y if y.is_contiguous() else y.t()),
        ("try: -x; except: x", lambda y: swallowed(lambda: -y, y)),
        ("x.gather", lambda y: y.gather(0, torch.zeros(y.shape, dtype=torch.int64))),
        ("torch.empty_like(x).copy_(x)", lambda y: torch.empty_like(y).copy_(y)),
    ]


def asks(rng: random.Random, x: Any) -> list[Step]:
    """Return steps that look at what a tensor has besides values."""
    return [
        ("x if x.dtype == float32 else x.mT", lambda y: y if y.dtype == torch.float32 else y.mT),
        ("x if isinstance(x, torch.Tensor) else x.mT", lambda y: y if isinstance(y, torch.Tensor) else y.mT),
        ("x if torch.is_tensor(x) else x.mT", lambda y: y if torch.is_tensor(y) else y.mT),
        ("x.reshape(x.numel())", lambda y: y.reshape(y.numel())),
        ("x.reshape(x.size(0), -1)", lambda y: y.reshape(y.size(0), -1)),
        ("x if x.dim() == 2 else x.flatten()", lambda y: y if y.dim() == 2 else y.flatten()),
        ("x[: len(x) // 2]", lambda y: y[: len(y) // 2]),
        ("x if x.is_floating_point() else x.mT", lambda y: y if y.is_floating_point() else y.mT),
        ("x if torch.is_floating_point(x) else x.mT", lambda y: y if torch.is_floating_point(y) else y.mT),
        ("x if not x.is_quantized else x.mT", lambda y: y if not y.is_quantized else y.mT),
        ("x if hasattr(x, 'astype') else x.mT", lambda y: y if hasattr(y, "astype") else y.mT),
        ("x if x.element_size() == 4 else x.mT", lambda y: y if y.element_size() == 4 else y.mT),
    ]


def target(rng: random.Random, x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a parameter, and what takes of it a view of the shape of a tensor."""
    dtype = x.dtype if rng.random() < 0.7 else rng.choice([torch.float32, torch.float16, torch.bfloat16])
    axes = list(range(x.ndim))
    rng.shuffle(axes)
    big, window = [], []
    for at in axes:
        extent, before, step = x.shape[at], rng.choice([0, 0, 0, 1]), rng.choice([1, 1, 1, 2])
        big.append(before + extent * step + rng.choice([0, 0, 1]))
        window.append(slice(before, before + extent * step, step))
    back = [axes.index(at) for at in range(x.ndim)]
    made = torch.full(big, weight_plans.UNTOUCHED, dtype=dtype)
    return made, lambda p: p[(*window, ...)].permute(back)


def writes(rng: random.Random, x: Any, view: Callable[[Any], Any]) -> list[tuple[str, Callable[[Any, Any], Any]]]:
    """Return ways to write a tensor to a parameter."""
    mask = torch.arange(x.numel()).reshape(x.shape) % 2 == 0
    plain: list[tuple[str, Callable[[Any, Any], Any]]] = [
        ("p.copy_(x)", lambda p, y: view(p).copy_(y)),
        ("p.data.copy_(x, non_blocking=True)", lambda p, y: view(p.data).copy_(y, non_blocking=True)),
        ("p[...] = x", lambda p, y: view(p).__setitem__(..., y)),
        ("p[()] = x", lambda p, y: view(p).__setitem__((), y)),
        ("p[:] = x[None]", lambda p, y: view(p).__setitem__(slice(None), y[None])),
        ("p.copy_ twice", lambda p, y: [view(p).copy_(one) for one in (y, y)]),
        ("p.fill_(0), p.copy_", lambda p, y: view(p.fill_(-1)).copy_(y)),
    ]
    return plain * 16 + [
        ("p[mask] = x[mask]", lambda p, y: view(p).__setitem__(mask, y[mask])),
        ("p.copy_, p.mul_(2)", lambda p, y: view(p).copy_(y).mul_(2)),
        ("p.copy_, p.data *= 2", lambda p, y: [view(p).copy_(y), p.data.__imul__(2)]),
        ("p.copy_, p.fill_(0)", lambda p, y: [view(p).copy_(y), p.fill_(0)]),
        ("p += x", lambda p, y: view(p).add_(y)),
        ("p.set_(x)", lambda p, y: p.set_(y.to(p.dtype))),
        ("p.data = x", lambda p, y: setattr(p, "data", y.to(p.dtype))),
        ("torch.add(x, 0, out=p)", lambda p, y: torch.add(y, 0, out=view(p))),
        ("torch.cat([x], out=p)", lambda p, y: torch.cat([y], out=view(p))),
        ("p.masked_scatter_(mask, x)", lambda p, y: view(p).masked_scatter_(mask, y)),
        ("p.index_copy_(0, range, x)", lambda p, y: view(p).index_copy_(0, torch.arange(len(y)), y)),
        ("torch._foreach_copy_([p], [x])", lambda p, y: torch._foreach_copy_([view(p)], [y])),
        ("p.lerp_(x, 1)", lambda p, y: view(p).lerp_(y, 1)),
        ("p.copy_(x), p[::2] = p[::2].flip(0)", lambda p, y: [view(p).copy_(y), p.copy_(p.flip(0))]),
    ]


def is_usable(found: Any) -> bool:
    """Tell whether what a step made is a tensor to go on with."""
    return (
        isinstance(found, torch.Tensor) and found.numel() <= 500 and found.ndim <= 5 and found.dtype in (*DTYPES, *TO)
    )


def copied(parameter: Any) -> Any:
    """Return a copy of a parameter."""
    return parameter.clone()
