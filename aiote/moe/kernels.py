"""The native kernels that move and sum rows on a CPU. This module is the only one that imports them.

The kernels do not allocate; `number_rows` allocates the counts that it returns and a copy of the ids. All kernels
release the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiote_native.kernels.moe import combine, copy_rows, copy_runs, find_runs, lay_out, pack, route, unfold

__all__ = ["combine", "copy_rows", "copy_runs", "find_runs", "lay_out", "number_rows", "pack", "unfold"]

Places = NDArray[np.int32]


def number_rows(
    ids: NDArray[Any], experts: int, local: int, ranks: int, by_rank: bool, out: Places
) -> tuple[Places, Places]:
    """Number rows, or copies by rank, into `out`; return the rows for each expert and the copies for each rank.

    A row's number is its position in the source's order; an id that names no expert gets -1.
    """
    rows, copies = np.empty(experts, np.int32), np.empty(ranks, np.int32)
    route(ids.astype(np.int64), experts, local, by_rank=by_rank, out=out, rows=rows, copies=copies)
    return rows, copies
