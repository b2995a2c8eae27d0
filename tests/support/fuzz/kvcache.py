"""What is fuzzed of the KV cache: what decode ranks say to a prefill rank. The targets `part` and `fetch` take the
arguments of one call each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

import aiote
from aiote.kvcache.mapping import MOST_PIECES, CacheMap, PageRow
from aiote.kvcache.moving import check_rows
from aiote.kvcache.protocol import PushRequest, SentPageRow, Transfers, rows_of
from aiote.kvcache.tensors import CacheSpec
from aiote.service import codec
from aiote.service.definition import methods_of
from support.kv.caches import Model, Side, built

MODEL = Model(layers=2, item=4, state=5)
SOURCE = built(MODEL, Side(pages=64), "prefill").caches[0].spec
PART = built(MODEL, Side(pages=48, tokens=2, order="field token head"), "decode").caches[0].spec
MAP = CacheMap(SOURCE, PART)
METHODS = {method.attribute: method for method in methods_of(Transfers)}
OPEN, PUSH = METHODS["open"], METHODS["push"]
MOST_UNITS = 1 << 12
"""Of a group: more would take the fuzzer's time, and no other path."""


def part(data: bytes) -> None:
    """Take the arguments of `open`: what maps moves within the memories that the part says it has."""
    try:
        spec, *_ = msgspec.structs.astuple(codec.decode(OPEN.read_arguments, data))
    except ValueError:
        return
    try:
        spec.check()
        found = CacheMap(SOURCE, spec)
    except aiote.AioteError as error:
        assert len(str(error)) < 2000
        return
    for moves in found.moves.values():
        for move in moves:
            pages = spec.groups[move.pattern.group]
            grid = move.pattern.target
            last = (pages - 1) * grid.page_stride + (grid.units - 1) * grid.unit_stride
            last += sum((axis.times - 1) * axis.target for axis in move.pattern.axes) + move.pattern.nbytes
            assert move.target_offset + last <= spec.memories[move.target_memory]


def fetch(data: bytes) -> None:
    """Take the arguments of `push`: what is accepted is as many pieces as are counted, within the part's memories."""
    try:
        (asked,) = msgspec.structs.astuple(codec.decode(PUSH.read_arguments, data))
    except ValueError:
        return
    try:
        rows = rows_of(asked.rows)
        check_rows(PART, rows)
        spans = MAP.spans(rows, asked.tokens)
        counts = MAP.counts(spans)
    except aiote.AioteError as error:
        assert len(str(error)) < 2000
        return
    assert max(counts, default=0) <= MOST_PIECES
    units = dict(zip(MAP.units, spans, strict=True))
    if max(map(len, spans)) > MOST_UNITS:
        return
    source = {group: zeros(span, MAP.units[group][1]) for group, span in units.items()}
    MAP.check_source(source, spans)
    for count, moves in zip(counts, MAP.moves.values(), strict=True):
        pieces = 0
        for move in moves:
            group = move.pattern.group
            target = rows.get(group) or PageRow([])
            offsets = np.array(list(move.pattern.offsets(source[group], target, units[group])[1]), np.int64)
            ends = offsets + move.target_offset + move.pattern.nbytes
            assert not len(ends) or 0 <= int(offsets.min()) <= int(ends.max()) <= PART.memories[move.target_memory]
            pieces += len(offsets)
        assert pieces == count


def zeros(span: range, in_page: int) -> Any:
    """Return pages of a source that hold a span of units, all of them page 0."""
    first = span.start // in_page
    return rows_of({0: SentPageRow(np.zeros(-(-span.stop // in_page) - first, np.int64), first)})[0]


KVCACHE: dict[str, Callable[[bytes], None]] = {"part": part, "fetch": fetch}


# Seeds.


def kvcache_seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of these targets: target, name, bytes."""
    opened = {name: codec.encode(OPEN.arguments(spec, [0, 1], []))[0] for name, spec in parts().items()}
    fetched = {name: codec.encode(PUSH.arguments(one))[0] for name, one in fetches().items()}
    return {"part": opened, "fetch": fetched}


def parts() -> dict[str, CacheSpec]:
    """Return parts of a decode rank's cache for the prefill rank of the target: right ones, and some that are not."""
    first = PART.tensors[0]
    changed = {
        "far": {"offset": 1 << 40},
        "no-memory": {"memory": 9},
        "overlapping": {"page_stride": 1},
        "other-heads": {"first_head": 3},
        "odd-pages": {"tokens": 3},
    }
    lies = {name: msgspec.structs.replace(first, **change) for name, change in changed.items()}
    return {"right": PART, "alike": SOURCE} | {
        name: msgspec.structs.replace(PART, tensors=(lie, *PART.tensors[1:])) for name, lie in lies.items()
    }


def fetches() -> dict[str, PushRequest]:
    """Return requests for the prefill rank of the target: right ones, and some that are not."""
    pages = np.arange(10, dtype=np.int64)
    right = PushRequest(1, "r", 19, 5, {0: SentPageRow(pages, 0), 1: SentPageRow(pages[:1], 0)})
    changes: dict[str, dict[str, Any]] = {
        "right": {},
        "from-the-third-page": {"rows": {0: SentPageRow(pages[2:], 2)}},
        "no-rows": {"rows": {}},
        "far": {"rows": {0: SentPageRow(pages + 40, 0)}},
        "negative": {"rows": {0: SentPageRow(pages - 1, 0)}},
        "late": {"rows": {0: SentPageRow(pages, 1 << 39)}, "tokens": (1 << 40) - 1},
        "long": {"tokens": 1 << 30},
    }
    return {name: msgspec.structs.replace(right, **change) for name, change in changes.items()}
