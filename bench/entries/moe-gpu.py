"""Measure `aiote.moe`'s pack and combine on a GPU against its own copy rate; exits with 1 where one is below 0.8 of it.

    pip install 'aiote[cuda]' && python bench/run.py moe-gpu

Times are the GPU's own events, the median of RUNS, and each counts the bytes that it reads and writes. Rows are those
of a step with TOKENS of 7168, top-8 of 256; 8-bit with scales on the way there, bfloat16 on the way back. All arrays
lie in the GPU's memory; a group packs into memory of the host, over PCIe, which this does not measure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from aiote.moe.device import CudaLauncher, GpuKernels

TOKENS, TOP_K, EXPERTS, RANKS, HIDDEN, SCALES = 4096, 8, 256, 8, 7168, 56
RUNS, ENOUGH = 50, 0.8


def seconds(cupy: Any, body: Callable[[], object]) -> float:
    """Return how long a launch takes, by the GPU's own clock."""
    body()
    times = []
    for _ in range(RUNS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1000)
    return median(times)


def main() -> int:
    import cupy

    rng = np.random.default_rng(1)
    kernels = GpuKernels(CudaLauncher(0), EXPERTS, RANKS)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
    at, weights = cupy.zeros((TOKENS, TOP_K), np.int32), cupy.ones((TOKENS, TOP_K), np.float32)
    kernels.number_rows(cupy.asarray(ids), EXPERTS, EXPERTS // RANKS, RANKS, False, at)
    rows = TOKENS * TOP_K
    x, scales = cupy.zeros((TOKENS, HIDDEN), np.uint8), cupy.zeros((TOKENS, 4 * SCALES), np.uint8)
    tail, sent = cupy.zeros((TOKENS, 4 + 8 * TOP_K), np.uint8), cupy.zeros((rows, 7472), np.uint8)
    answers, sums = cupy.zeros((rows, 2 * HIDDEN), np.uint8), cupy.zeros((TOKENS, 2 * HIDDEN), np.uint8)
    copy = cupy.empty_like(answers)
    used = HIDDEN + 4 * SCALES + tail.shape[1]
    work: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: cupy.copyto(copy, answers), 2 * answers.nbytes),
        "pack": (
            lambda: kernels.pack(
                sent, sent, 0, 0, at, x, scales=scales, tail=tail, scales_at=HIDDEN, tail_at=HIDDEN + 4 * SCALES
            ),
            TOKENS * used + rows * used,
        ),
        "combine": (
            lambda: kernels.combine(sums, answers, at, weights, "bfloat16", False),
            answers.nbytes + sums.nbytes,
        ),
    }
    rates = {name: nbytes / seconds(cupy, body) / 1e9 for name, (body, nbytes) in work.items()}
    for name, rate in rates.items():
        print(f"{name:8} {rate:8.0f} GB/s  {rate / rates['copy']:5.2f} of copy")
    return int(min(rates["pack"], rates["combine"]) < ENOUGH * rates["copy"])


if __name__ == "__main__":
    sys.exit(main())
