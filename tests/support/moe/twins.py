"""The kernels of `aiote.moe` in NumPy: what the native ones are compared with, bit for bit.

Rows are lines of two-dimensional arrays of bytes, whatever they hold; places are numbers of lines, -1 for none. Sums
are of float32, term after term in the order of k, each product rounded by itself; a NaN is written as one and the same
pattern, for which of two it would be is up to the compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Places = NDArray[np.int32]


def numbered(ids: NDArray[Any], experts: int, local: int, ranks: int, by_rank: bool, out: Places) -> tuple[Any, Any]:
    """Number what tokens ask for, ids (tokens, k), in the order of the experts, or of ranks with copies by rank."""
    known = (ids >= 0) & (ids < experts)
    expert = np.where(known, ids, experts).astype(np.int64)
    rows = np.bincount(expert.reshape(-1), minlength=experts + 1)[:experts]
    rank = np.where(known, expert // local, ranks)
    asked = np.zeros((len(ids), ranks + 1), np.int64)
    np.put_along_axis(asked, rank, 1, 1)
    asked = asked[:, :ranks]
    copies = asked.sum(0)
    if by_rank:
        before = np.cumsum(copies) - copies + np.cumsum(asked, 0) - asked
        out[...] = np.where(known, np.take_along_axis(before, np.minimum(rank, ranks - 1), 1), -1)
    else:
        order = np.argsort(expert.reshape(-1), kind="stable")
        numbers = np.empty(order.size, np.int64)
        numbers[order] = np.arange(order.size)
        out[...] = np.where(known, numbers.reshape(ids.shape), -1)
    return rows.astype(np.int32), copies.astype(np.int32)


def pack(
    sent: Bytes, own: Bytes, first: int, last: int, at: Places, x: Bytes, *, scales: Bytes, tail: Bytes,
    scales_at: int = 0, tail_at: int = 0,
) -> None:  # fmt: skip
    """Make rows of tokens: token t goes to each row that `at` (tokens, k) names, its scales and tail behind it."""
    for slot in range(at.shape[1]):
        chosen = np.flatnonzero(at[:, slot] >= 0)
        place = at[chosen, slot]
        mine = (place >= first) & (place < last)
        for rows, tokens, lines in ((own, chosen[mine], place[mine] - first), (sent, chosen[~mine], place[~mine])):
            rows[lines, : x.shape[1]] = x[tokens]
            rows[lines, scales_at : scales_at + scales.shape[1]] = scales[tokens]
            rows[lines, tail_at : tail_at + tail.shape[1]] = tail[tokens]


def copy_runs(to: Bytes, source: Bytes, runs: NDArray[np.int64], nbytes: int) -> None:
    """Copy the first bytes of rows, for each run (row there, row here, count)."""
    for there, here, count in runs.tolist():
        to[there : there + count, :nbytes] = source[here : here + count, :nbytes]


def unfold(
    to: Bytes, source: Bytes, nbytes: int, ids: Places, first: int, base: NDArray[np.int64], *,
    room: NDArray[np.int64], places: Places, seen: NDArray[np.int64],
) -> None:  # fmt: skip
    """Copy each copy of `source` to the place of every expert that it is for: ids (copies, k), of all ranks' experts.

    Those of this rank begin at `first`; the rows of each lie from `base` on, and there is `room` for so many. Fills
    `places` (copies, k), -1 where there is none, and `seen` with how many rows each expert had, dropped ones too.
    """
    for line, experts in enumerate((ids - first).tolist()):
        for slot, expert in enumerate(experts):
            places[line, slot] = -1
            if 0 <= expert < len(base):
                if seen[expert] < room[expert]:
                    places[line, slot] = base[expert] + seen[expert]
                    to[places[line, slot], :nbytes] = source[line, :nbytes]
                seen[expert] += 1


def combine(
    out: Bytes, rows: Bytes, places: Places, weights: NDArray[np.float32] | None, dtype: str, accumulate: bool
) -> None:
    """Sum rows: line i of `out` becomes the sum over k of `weights[i, k]` times row `places[i, k]`, skipping -1.

    Without weights rows are summed as they are. `accumulate` adds what is there already, last.
    """
    width = out.shape[1]
    total = np.zeros((len(places), width // (4 if dtype == "float32" else 2)), np.float32)
    with np.errstate(all="ignore"):
        for slot in range(places.shape[1]):
            chosen = np.flatnonzero(places[:, slot] >= 0)
            term = floats(rows[places[chosen, slot], :width], dtype)
            if weights is not None:
                term = weights[chosen, slot, None] * term
            total[chosen] += term
        if accumulate:
            total += floats(np.ascontiguousarray(out), dtype)
        out[...] = rounded(total, dtype)


def floats(rows: Bytes, dtype: str) -> NDArray[np.float32]:
    """Return what bytes hold as float32."""
    if dtype == "float32":
        return rows.view(np.float32)
    if dtype == "float16":
        return rows.view(np.float16).astype(np.float32)
    return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32], dtype: str) -> Bytes:
    """Return float32 as bytes of a type, rounded to the nearest, ties to even."""
    nan = np.isnan(values)
    if dtype == "float32":
        return np.where(nan, np.uint32(0x7FC00000), values.view(np.uint32)).view(np.uint8)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16).view(np.uint16)
        return np.where(nan, np.uint16(0x7E00), halves).view(np.uint8)
    bits = values.view(np.uint32)
    nearest = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(nan, np.uint16(0x7FC0), nearest).view(np.uint8)
