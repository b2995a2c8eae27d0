from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiote_native.requests.operations import PageIndex

_Grid = tuple[int, int, int]
_Axes = Sequence[tuple[int, int, int]]

class Integers:
    def __init__(self, name: str, values: object) -> None: ...

class PageNumbers:
    pages: NDArray[np.int64]
    start: int
    def __init__(self, pages: Any, start: int = 0) -> None: ...

def page_fault(rows: Mapping[int, PageNumbers], groups: dict[int, int], distinct: bool) -> tuple[int, bool] | None: ...

class RequestPlan:
    groups: list[int]
    def __init__(self, units: dict[int, tuple[int, int, int]], layers: list[tuple[tuple[int, int], ...]]) -> None: ...
    def spans(self, rows: Mapping[int, PageNumbers], tokens: int) -> list[range]: ...
    def counts(self, spans: list[range]) -> list[int]: ...
    def lacks(self, rows: Mapping[int, PageNumbers], spans: list[range]) -> int: ...

def piece_offsets(
    source_grid: _Grid,
    target_grid: _Grid,
    axes: _Axes,
    source: PageNumbers,
    target: PageNumbers,
    span: range,
) -> tuple[PageIndex, PageIndex]: ...

class RequestPages:
    def __init__(
        self,
        plan: RequestPlan,
        patterns: Sequence[tuple[int, int, _Grid, _Grid, _Axes]],
        source: Mapping[int, PageNumbers],
        target: Mapping[int, PageNumbers],
    ) -> None: ...
    def replace(self, source: Mapping[int, PageNumbers]) -> None: ...
    def offsets(self, spans: list[range], most: int) -> list[tuple[PageIndex, PageIndex] | None] | None: ...
