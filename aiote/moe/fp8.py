"""Blocks of 128 values as fp8 (e4m3) and a scale, by the arithmetic of DeepEP's dispatch kernel, on torch tensors.

A scale is the block's largest magnitude, at least 1e-4, times 1 / 448 in float32. It may be rounded up to a power of
two, whose exponent alone then suffices (ue8m0). Values beyond the range of fp8 become its largest value; NaN stays NaN.
"""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "cast", "exponents"]

BLOCK = 128
LEAST = 1e-4
LARGEST = 448.0


def cast(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (n, hidden) as float8_e4m3fn, and the scales (n, hidden / 128) that multiply them at the receiver."""
    values = x.float().view(len(x), x.size(1) // BLOCK, BLOCK)
    # Like fmaxf, ignore a NaN when computing the largest magnitude.
    most = values.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(2).clamp(min=LEAST)
    inverse = most * torch.tensor(1 / LARGEST, dtype=torch.float32)
    if round_scale:
        exponent = _log2_ceil(inverse)
        scale, inverse = _power_of_two(-exponent), _power_of_two(exponent)
    else:
        scale = LARGEST / most
    made = (values * scale.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return made.view(x.shape), inverse


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """Return the exponents of scales (n, s) that are powers of two, packed four to an int32 (n, s / 4)."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)


def _log2_ceil(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    return (bits >> 23 & 0xFF) - 127 + (bits & 0x7FFFFF != 0).int()


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent + 127 << 23).view(torch.float32)
