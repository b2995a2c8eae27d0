"""How trainers and inference ranks hold the models of `models`: layouts and recipe, and the same by plain NumPy.

Nothing of aiote is used for what a rank must have (`expected`), nor for what its tensors are called before they were
fused (`unfused`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from aiote.weights import (
    Layout,
    Quantized,
    Recipe,
    Replicate,
    Shard,
    StridedShard,
    cat,
    packed,
    quantized,
    slots,
    source,
    stack,
)
from support.weights import models
from support.weights.models import EXPERTS, HIDDEN, INNER, KINDS, LATENT, LAYERS, PADDED, Arrays, Shape

TRAINING = ("ep2 x fsdp2", "hsdp 2x2", "pp2 x fsdp2")
INFERENCE = ("tp2", "ep4", "tp2 x 2", "replicated 4")
SLOTS = ((0, 1), (1, 2), (2, 3), (3, 0))
"""The experts of each rank under EP4: every one has two slots, as an expert-parallel load balancer gives to some."""
BLOCK = 128
FILL = 0x55
"""The bytes of what no update has written."""


class Served(NamedTuple):
    """A target tensor: how tensor parallelism splits it along `dim`, and whether the first dimension is experts."""

    shape: Shape
    dim: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    experts: bool = False
    dtype: str = "BF16"


def trainers(training: str, model: str) -> Layout:
    """Return the layout of four trainers."""
    layouts = []
    for name, (shape, dtype) in models.TRAINED[model]().items():
        stacked = len(shape) == 3
        mesh: Any = range(4)
        placements: Any = Shard(0)
        if training == "hsdp 2x2":
            mesh, placements = [[0, 1], [2, 3]], (Replicate(), Shard(int(stacked)))
        elif training == "pp2 x fsdp2":
            mesh = [0, 1] if name == "embed" or name.startswith("layers.0.") else [2, 3]
            placements = Shard(int(stacked))
        elif stacked:
            # FSDP2 over what expert parallelism has split along the same dimension.
            mesh, placements = [[0, 2], [1, 3]], (StridedShard(0, 2), Shard(0))
        elif ".experts." in name:
            mesh = [0, 1] if int(name.split(".")[3]) < EXPERTS // 2 else [2, 3]
        layouts.append(Layout.over(mesh, {name: (shape, dtype, placements)}))
    return Layout.merge(layouts)


def served(model: str) -> dict[str, Served]:
    """Return the target tensors of a model."""
    heads = models.HEADS
    found = {"embed": Served((PADDED, HIDDEN), 0), "norm": Served((HIDDEN,)), "head": Served((PADDED, HIDDEN), 0)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        found |= {f"{at}in_norm": Served((HIDDEN,)), f"{at}post_norm": Served((HIDDEN,))}
        if model == "qwen":
            q, kv = (heads * models.HEAD, heads), (models.HEAD, 1)
            found |= {f"{at}qkv": Served((q[0] + 2 * kv[0], HIDDEN), 0, (q, kv, kv))}
            found |= {f"{at}o": Served((HIDDEN, q[0]), 1), f"{at}router": Served((EXPERTS, HIDDEN))}
            found |= {f"{at}{one}_norm": Served((models.HEAD,)) for one in "qk"}
        else:
            found |= {f"{at}qkv_a": Served((2 * LATENT + models.TURNED, HIDDEN)), f"{at}q_a_norm": Served((LATENT,))}
            found |= {f"{at}q_b": Served((heads * 128, LATENT), 0), f"{at}kv_b": Served((heads * 128, LATENT), 0)}
            found |= {f"{at}kv_a_norm": Served((LATENT,)), f"{at}o": Served((HIDDEN, heads * models.VALUE), 1)}
            name, size = ("mlp", models.DENSE) if layer == 0 else ("shared", INNER)
            found[f"{at}{name}.gate_up"] = Served((2 * size, HIDDEN), 0, ((size, 2), (size, 2)))
            found[f"{at}{name}.down"] = Served((HIDDEN, size), 1)
        if model == "qwen" or layer == 1:
            found[f"{at}w13"] = Served((EXPERTS, 2 * INNER, HIDDEN), 1, ((INNER, 2), (INNER, 2)), experts=True)
            found[f"{at}w2"] = Served((EXPERTS, HIDDEN, INNER), 2, experts=True)
    if model == "deepseek":
        found["layers.1.router"] = Served((EXPERTS, HIDDEN), dtype="F32")
        found["layers.1.router_bias"] = Served((EXPERTS,), dtype="F32")
    return found | {"rotary": Served((models.TURNED,), dtype="F32")}


def is_quantized(name: str) -> bool:
    """Tell whether an engine with fp8 has a target tensor quantized."""
    return name.endswith(models.MATRICES)


def scaled(tensor: Served) -> Served:
    """Return the tensor of the scales of a quantized one."""
    shape = (*tensor.shape[:-2], *(-(-extent // BLOCK) for extent in tensor.shape[-2:]))
    return tensor._replace(shape=shape, parts=tuple((size // BLOCK, n) for size, n in tensor.parts), dtype="F32")


def inference(kind: str, model: str, fp8: bool) -> Layout:
    """Return the layout of the inference ranks."""
    mesh = {"tp2": [0, 1], "tp2 x 2": [[0, 1], [2, 3]]}.get(kind, range(4))

    def placed(one: Served) -> Any:
        if kind == "ep4":
            return slots(0, SLOTS) if one.experts else Replicate()
        if not kind.startswith("tp2") or one.dim is None:
            split: Any = Replicate()
        else:
            split = packed(one.dim, 2, *one.parts) if one.parts else Shard(one.dim)
        return (Replicate(), split) if kind == "tp2 x 2" else split

    tensors = {}
    for name, one in served(model).items():
        small = fp8 and is_quantized(name)
        tensors[name] = (one.shape, "F8_E4M3" if small else one.dtype, placed(one))
        if small:
            tensors[f"{name}.scale"] = (scaled(one).shape, "F32", placed(scaled(one)))
    return Layout.over(mesh, tensors)


def recipe(model: str, fp8: bool) -> Recipe:
    """Return what target tensors are made of."""
    targets: dict[str, Any] = {name: source(name).pad(0, to=PADDED) for name in ("embed", "head")}
    for name in served(model):
        at, _, kind = name.rpartition(".")
        if kind == "qkv":
            targets[name] = cat(f"{at}.q", f"{at}.k", f"{at}.v")
        elif kind == "qkv_a":
            targets[name] = cat(f"{at}.q_a", f"{at}.kv_a")
        elif kind == "gate_up":
            targets[name] = cat(f"{at}.gate", f"{at}.up")
        elif kind in ("w13", "w2") and model == "deepseek":
            targets[name] = source(f"{at}.experts.{'gate_up' if kind == 'w13' else 'down'}")
        elif kind == "w13":
            targets[name] = stack(*(cat(f"{at}.experts.{e}.gate", f"{at}.experts.{e}.up") for e in range(EXPERTS)))
        elif kind == "w2":
            targets[name] = stack(*(f"{at}.experts.{e}.down" for e in range(EXPERTS)))
        elif kind == "router" and model == "deepseek":
            targets[name] = source(name).cast()
        if fp8 and is_quantized(name):
            targets[name] = quantized(targets.get(name, source(name)), scale=f"{name}.scale")
    assert any(isinstance(one, Quantized) for one in targets.values()) == fp8
    return Recipe(targets, unused=("mtp",), untouched=("rotary",))


# The same by plain NumPy.


def by_expert(whole: Arrays) -> dict[str, Any]:
    """Return whole tensors with those of stacked experts by their names."""
    found = {name: array for name, array in whole.items() if array.ndim < 3}
    for name, array in whole.items():
        if array.ndim == 3:
            at = name.rpartition(".")[0]
            for number, one in enumerate(array):
                parts = {"down": one} if name.endswith("down") else {"gate": one[:INNER], "up": one[INNER:]}
                found |= {f"{at}.{number}.{part}": matrix for part, matrix in parts.items()}
    return found


def expected(kind: str, model: str, fp8: bool, rank: int, whole: Arrays) -> dict[str, Any]:
    """Return what an inference rank has of trainers' whole tensors."""
    one = by_expert(whole)
    ranks, mine = (2, rank % 2) if kind.startswith("tp2") else (1, 0)
    experts = SLOTS[rank] if kind == "ep4" else range(EXPERTS)

    def share(array: Any, dim: int) -> Any:
        return np.split(array, ranks, dim)[mine]

    def fused(name: str) -> Any:
        at, _, last = name.rpartition(".")
        if last == "qkv":
            return np.concatenate([share(one[f"{at}.q"], 0), one[f"{at}.k"], one[f"{at}.v"]])
        if last == "qkv_a":
            return np.concatenate([one[f"{at}.q_a"], one[f"{at}.kv_a"]])
        if last == "gate_up":
            return np.concatenate([share(one[f"{at}.{part}"], 0) for part in ("gate", "up")])
        if last == "w13":
            names = [[f"{at}.experts.{e}.{part}" for part in ("gate", "up")] for e in experts]
            return np.stack([np.concatenate([share(one[part], 0) for part in both]) for both in names])
        if last == "w2":
            return np.stack([share(one[f"{at}.experts.{e}.down"], 1) for e in experts])
        if name in ("embed", "head"):
            room = np.full((PADDED, 2 * HIDDEN), FILL, np.uint8).view(ml_dtypes.bfloat16)
            room[: models.WORDS] = one[name]
            return share(room, 0)
        if last in ("q_b", "kv_b", "o", "down"):
            return share(one[name], 1 if last in ("o", "down") else 0)
        if name == "rotary":
            return np.full(4 * models.TURNED, FILL, np.uint8).view(np.float32)
        return one[name]

    found = {name: fused(name).astype(KINDS[tensor.dtype]) for name, tensor in served(model).items()}
    for name in [name for name in found if fp8 and is_quantized(name)]:
        found[name], found[f"{name}.scale"] = in_blocks(found[name])
    return found


def blocks(shape: Shape) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Yield where each block of a matrix, or of stacked ones, lies, and where its scale does."""
    for at in np.ndindex(*shape[:-2]):
        for row in range(0, shape[-2], BLOCK):
            for column in range(0, shape[-1], BLOCK):
                place = slice(row, row + BLOCK), slice(column, column + BLOCK)
                yield (*at, *place), (*at, row // BLOCK, column // BLOCK)


def in_blocks(array: Any) -> tuple[Any, Any]:
    """Quantize by blocks; return what comes out, and the scales."""
    found = np.zeros(array.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*array.shape[:-2], *(-(-extent // BLOCK) for extent in array.shape[-2:])), np.float32)
    for place, at in blocks(array.shape):
        block = array[place].astype(np.float32)
        scales[at] = np.abs(block).max() / np.float32(448)
        found[place] = (block / scales[at]).astype(ml_dtypes.float8_e4m3fn)
    return found, scales


def whole_numbers(arrays: Arrays) -> dict[str, Any]:
    """Return tensors as 64-bit numbers, quantized ones multiplied by their scales."""
    found = {name: array.astype(np.float64) for name, array in arrays.items() if not name.endswith(".scale")}
    for name in [name for name in found if f"{name}.scale" in arrays]:
        for place, at in blocks(found[name].shape):
            found[name][place] *= arrays[f"{name}.scale"][at]
    return found


def rounded(whole: Arrays) -> dict[str, Any]:
    """Return trainers' tensors as quantization leaves them; edges of fused ones are edges of blocks."""
    found = dict(whole)
    for name, array in by_expert(whole).items():
        last = name.rpartition(".")[2]
        if is_quantized(name) or last in ("gate", "up", "q_a", "kv_a"):
            found[name], found[f"{name}.scale"] = in_blocks(array)
    return found


def unfused(kind: str, model: str, rank: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's tensors by the names that trainers have; of experts those that it alone computes."""
    found = {}
    ranks = 2 if kind.startswith("tp2") else 1
    for name, array in numbers.items():
        at, _, last = name.rpartition(".")
        if last == "qkv":
            rows = models.HEADS * models.HEAD // ranks
            parts = np.split(array, [rows, rows + models.HEAD])
            found |= {f"{at}.{part}": one for part, one in zip("qkv", parts, strict=True)}
        elif last == "qkv_a":
            found |= {f"{at}.q_a": array[:LATENT], f"{at}.kv_a": array[LATENT:]}
        elif last == "gate_up":
            found |= dict(zip((f"{at}.gate", f"{at}.up"), np.split(array, 2), strict=True))
        elif last in ("w13", "w2"):
            for number, one in enumerate(array[:1] if kind == "ep4" else array):
                expert = f"{at}.experts.{SLOTS[rank][0] if kind == 'ep4' else number}"
                parts = {"down": one} if last == "w2" else dict(zip(("gate", "up"), np.split(one, 2), strict=True))
                found |= {f"{expert}.{part}": matrix for part, matrix in parts.items()}
        else:
            found[name] = array
    return found
