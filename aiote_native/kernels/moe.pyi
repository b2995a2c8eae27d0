from typing import Any

from numpy import dtype, float32, int32, int64, ndarray, uint8

_Bytes = ndarray[Any, dtype[uint8]]
_Places = ndarray[Any, dtype[int32]]
_Ints = ndarray[Any, dtype[int64]]

def use_avx2(wanted: bool) -> bool: ...
def route(
    ids: _Ints, experts: int, local: int, *, by_rank: bool, out: _Places, rows: _Places, copies: _Places
) -> None: ...
def lay_out(
    experts: _Ints,
    copies: _Ints | None,
    *,
    rows: int,
    align: int,
    grouped: bool,
    whole: bool,
    tables: _Ints,
    places: _Ints,
    pairs: _Ints,
) -> tuple[int, bool]: ...
def find_runs(tables: _Ints, places: _Ints, source: int, target: int, out: _Ints, ends: _Ints) -> None: ...
def pack(
    sent: _Bytes,
    own: _Bytes,
    first: int,
    last: int,
    at: _Places,
    x: _Bytes,
    *,
    scales: _Bytes,
    tail: _Bytes,
    scales_at: int = 0,
    tail_at: int = 0,
) -> None: ...
def copy_runs(to: _Bytes, source: _Bytes, runs: _Ints, nbytes: int) -> None: ...
def copy_rows(to: _Bytes, source: _Bytes, there: _Ints, here: _Ints, nbytes: int) -> None: ...
def unfold(
    to: _Bytes,
    source: _Bytes,
    nbytes: int,
    ids: _Places,
    first: int,
    base: _Ints,
    *,
    room: _Ints,
    places: _Places,
    seen: _Ints,
) -> None: ...
def combine(
    out: _Bytes,
    rows: _Bytes,
    places: _Places,
    weights: ndarray[Any, dtype[float32]] | None,
    dtype: str,
    accumulate: bool,
    *,
    own: _Bytes | None = ...,
) -> None: ...
