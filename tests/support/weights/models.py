"""Two small models of the shapes of Qwen3-MoE and DeepSeek-V3: their tensors, and what they compute with them.

Every element is a hash of its tensor's name, its index and the version, so each rank makes its own part alone, and one
in a wrong place is seen. `forward` takes tensors as trainers name them, whole or split over tensor parallel ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Shape = tuple[int, ...]
Arrays = Mapping[str, Any]

WORDS, PADDED = 2001, 2048
HIDDEN, HEADS, EXPERTS, INNER, LAYERS = 256, 4, 4, 256, 2
HEAD = 128
LATENT, PLAIN, TURNED, VALUE, DENSE = 128, 64, 64, 64, 512
"""DeepSeek-V3's: the latent rows of q and of kv, a head's rows without and with a position, its values, a dense MLP."""
KINDS = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
MATRICES = (".q", ".k", ".v", ".o", ".qkv", ".q_b", ".kv_b", ".qkv_a", ".w13", ".w2", ".gate_up", ".down")
"""The ends of the target tensors' names that an fp8 engine has quantized."""
TOKENS = np.array([3, 1999, 77, 1023, 1024, 500, 2000, 0])


def qwen() -> dict[str, tuple[Shape, str]]:
    """Return the trainers' tensors: grouped heads, and an MLP of experts by name in every layer."""
    found: dict[str, Shape] = {"embed": (WORDS, HIDDEN), "norm": (HIDDEN,), "head": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found |= {
            f"{at}.in_norm": (HIDDEN,),
            f"{at}.q": (HEADS * HEAD, HIDDEN),
            f"{at}.k": (HEAD, HIDDEN),
            f"{at}.v": (HEAD, HIDDEN),
            f"{at}.q_norm": (HEAD,),
            f"{at}.k_norm": (HEAD,),
            f"{at}.o": (HIDDEN, HEADS * HEAD),
            f"{at}.post_norm": (HIDDEN,),
            f"{at}.router": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            one = f"{at}.experts.{expert}"
            found |= {f"{one}.gate": (INNER, HIDDEN), f"{one}.up": (INNER, HIDDEN), f"{one}.down": (HIDDEN, INNER)}
    return {name: (shape, "BF16") for name, shape in found.items()}


def deepseek() -> dict[str, tuple[Shape, str]]:
    """Return the trainers' tensors: latent attention, a dense first layer, then stacked experts and a shared one."""
    found: dict[str, Shape] = {"embed": (WORDS, HIDDEN), "norm": (HIDDEN,), "head": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found |= {
            f"{at}.in_norm": (HIDDEN,),
            f"{at}.q_a": (LATENT, HIDDEN),
            f"{at}.q_a_norm": (LATENT,),
            f"{at}.q_b": (HEADS * (PLAIN + TURNED), LATENT),
            f"{at}.kv_a": (LATENT + TURNED, HIDDEN),
            f"{at}.kv_a_norm": (LATENT,),
            f"{at}.kv_b": (HEADS * (PLAIN + VALUE), LATENT),
            f"{at}.o": (HIDDEN, HEADS * VALUE),
            f"{at}.post_norm": (HIDDEN,),
        }
    mlp, shared = "layers.0.mlp", "layers.1.shared"
    found |= {f"{mlp}.gate": (DENSE, HIDDEN), f"{mlp}.up": (DENSE, HIDDEN), f"{mlp}.down": (HIDDEN, DENSE)}
    found |= {f"{shared}.gate": (INNER, HIDDEN), f"{shared}.up": (INNER, HIDDEN), f"{shared}.down": (HIDDEN, INNER)}
    found |= {
        "layers.1.router": (EXPERTS, HIDDEN),
        "layers.1.experts.gate_up": (EXPERTS, 2 * INNER, HIDDEN),
        "layers.1.experts.down": (EXPERTS, HIDDEN, INNER),
        "mtp": (HIDDEN, HIDDEN),
    }
    return {name: (shape, "BF16") for name, shape in found.items()} | {"layers.1.router_bias": ((EXPERTS,), "F32")}


TRAINED: dict[str, Callable[[], dict[str, tuple[Shape, str]]]] = {"qwen": qwen, "deepseek": deepseek}


def values(
    name: str, shape: Shape, dtype: str, version: int, start: Shape | None = None, stop: Shape | None = None
) -> Any:
    """Return a box of a tensor in a version, by default all of it: magnitudes of 1/512 to 1/2."""
    start, stop = start or (0,) * len(shape), stop or shape
    index = np.zeros((1,) * len(shape), np.uint32)
    for dim, (first, last) in enumerate(zip(start, stop, strict=True)):
        steps = np.arange(first, last, dtype=np.uint32) * np.uint32(math.prod(shape[dim + 1 :]))
        index = index + steps.reshape((-1,) + (1,) * (len(shape) - 1 - dim))
    mixed = index * np.uint32(0x9E3779B1) + np.uint32(zlib.crc32(f"{name} {version}".encode()))
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(13)
    exponent = np.uint32(118) + (mixed >> np.uint32(8)) % np.uint32(8)
    bits = (mixed >> np.uint32(31) << np.uint32(15)) | (exponent << np.uint32(7)) | (mixed & np.uint32(127))
    return (bits << np.uint32(16)).view(np.float32) if dtype == "F32" else bits.astype(np.uint16).view(KINDS[dtype])


def forward(model: str, dense: Sequence[Arrays], experts: Sequence[Arrays]) -> Any:
    """Return the logits of `TOKENS`: the sum of what tensor parallel ranks make (`dense`), and ranks with experts.

    Tensors are 64-bit numbers; so sums in another order differ by little.
    """
    attend = {"qwen": grouped_attention, "deepseek": latent_attention}[model]
    rows = len(dense[0]["embed"])
    x = sum(
        np.where((TOKENS // rows == rank)[:, None], one["embed"][TOKENS % rows], 0) for rank, one in enumerate(dense)
    )
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        y = rms(x, dense[0][f"{at}in_norm"])
        x = x + sum(attend(y, at, one) for one in dense)
        y = rms(x, dense[0][f"{at}post_norm"])
        for wide in ("mlp", "shared"):
            if f"{at}{wide}.down" in dense[0]:
                x = x + sum(gated(y, *(one[f"{at}{wide}.{part}"] for part in ("gate", "up", "down"))) for one in dense)
        if f"{at}router" in dense[0]:
            shares = softmax(y @ dense[0][f"{at}router"].T + dense[0].get(f"{at}router_bias", 0))
            x = x + sum(of_experts(y, shares, f"{at}experts.", one) for one in experts)
    return np.concatenate([rms(x, dense[0]["norm"]) @ one["head"].T for one in dense], -1)[:, :WORDS]


def rms(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def softmax(x: Any) -> Any:
    found = np.exp(x - x.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def of_experts(x: Any, shares: Any, at: str, one: Arrays) -> Any:
    """Return what the experts that a rank has make, each by its share."""
    here = [expert for expert in range(EXPERTS) if f"{at}{expert}.down" in one]
    return sum(
        shares[:, expert : expert + 1] * gated(x, *(one[f"{at}{expert}.{part}"] for part in ("gate", "up", "down")))
        for expert in here
    )


def causal(q: Any, k: Any, v: Any) -> Any:
    """Return attention of heads [head, position, size], as [position, head * size]."""
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    later = np.triu(np.ones(scores.shape[-2:], bool), 1)
    return (softmax(np.where(later, -np.inf, scores)) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def heads(x: Any, size: int) -> Any:
    return x.reshape(len(x), -1, size).transpose(1, 0, 2)


def grouped_attention(x: Any, at: str, one: Arrays) -> Any:
    q, k, v = (heads(x @ one[f"{at}{part}"].T, HEAD) for part in ("q", "k", "v"))
    return causal(rms(q, one[f"{at}q_norm"]), rms(k, one[f"{at}k_norm"]), v) @ one[f"{at}o"].T


def latent_attention(x: Any, at: str, one: Arrays) -> Any:
    q = heads(rms(x @ one[f"{at}q_a"].T, one[f"{at}q_a_norm"]) @ one[f"{at}q_b"].T, PLAIN + TURNED)
    both = x @ one[f"{at}kv_a"].T
    kv = heads(rms(both[:, :LATENT], one[f"{at}kv_a_norm"]) @ one[f"{at}kv_b"].T, PLAIN + VALUE)
    shared = np.broadcast_to(both[:, LATENT:], (len(kv), len(x), TURNED))
    return causal(q, np.concatenate([kv[..., :PLAIN], shared], -1), kv[..., PLAIN:]) @ one[f"{at}o"].T
