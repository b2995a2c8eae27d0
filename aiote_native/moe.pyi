from typing import Any

from numpy import dtype, float32, int32, int64, ndarray, uint8

Bytes = ndarray[Any, dtype[uint8]]
Places = ndarray[Any, dtype[int32]]
Ints = ndarray[Any, dtype[int64]]

def use_avx2(wanted: bool) -> bool: ...
def route(ids: Ints, experts: int, local: int, by_rank: bool, out: Places, rows: Places, copies: Places) -> None: ...
def pack(
    sent: Bytes,
    own: Bytes,
    first: int,
    last: int,
    at: Places,
    x: Bytes,
    scales: Bytes,
    tail: Bytes,
    scales_at: int,
    tail_at: int,
) -> None: ...
def copy_runs(to: Bytes, source: Bytes, runs: Ints, nbytes: int) -> None: ...
def unfold(
    to: Bytes,
    source: Bytes,
    nbytes: int,
    ids: Places,
    first: int,
    base: Ints,
    room: Ints,
    places: Places,
    seen: Ints,
) -> None: ...
def combine(
    out: Bytes, rows: Bytes, places: Places, weights: ndarray[Any, dtype[float32]] | None, dtype: str, accumulate: bool
) -> None: ...
