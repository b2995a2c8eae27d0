"""What the trained and the served model compute alike: norms, rotary embedding, attention, routing."""

from __future__ import annotations

import task
import torch
from torch import Tensor
from torch.nn import functional


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm, in the last dimension."""
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rotated(x: Tensor) -> Tensor:
    """Turn heads [batch, head, position, size] by their positions."""
    half = task.HEAD // 2
    angles = torch.outer(torch.arange(x.shape[2]), 10_000.0 ** -(torch.arange(half) / half))
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    """Return causal attention of projections [batch, position, heads * size], before the output projection."""
    heads = [x.unflatten(-1, (-1, task.HEAD)).transpose(1, 2) for x in (q, k, v)]
    turned = rotated(norm(heads[0], q_norm)), rotated(norm(heads[1], k_norm))
    found = functional.scaled_dot_product_attention(*turned, heads[2], is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).flatten(2)


def routed(x: Tensor, gate: Tensor) -> Tensor:
    """Return how much of each expert every token gets: ACTIVE of them, which sum to 1, and zeros."""
    chances = functional.linear(x, gate).softmax(-1)
    most, experts = chances.topk(task.ACTIVE, -1)
    return torch.zeros_like(chances).scatter(-1, experts, most / most.sum(-1, keepdim=True))
