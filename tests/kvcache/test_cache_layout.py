"""Where the bytes of a cache lie: shapes and offsets against plain numpy, heads against a list of them, and errors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.errors import UsageError
from aiote.kvcache import CacheLayout

LLAMA = {"layers": 80, "kv_heads": 8, "head_size": 128, "page_tokens": 16, "dtype": "bfloat16"}
sizes = st.integers(1, 12)


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int]:
    """(kv_heads, ranks) that go together."""
    one, factor = draw(sizes), draw(sizes)
    return draw(st.sampled_from([(one, one * factor), (one * factor, one)]))


@given(groups())
def test_heads_are_dealt_to_ranks_in_order_and_equally_often(group: tuple[int, int]) -> None:
    kv_heads, ranks = group
    layout = CacheLayout(**{**LLAMA, "kv_heads": kv_heads})
    copies = max(1, ranks // kv_heads)
    dealt = [head for head in range(kv_heads) for _ in range(copies)]
    each = len(dealt) // ranks
    assert [list(layout.heads(rank, ranks)) for rank in range(ranks)] == [
        dealt[rank * each : (rank + 1) * each] for rank in range(ranks)
    ]
    assert (layout.copies(ranks), layout.heads_held(ranks)) == (copies, each)


@given(groups(), sizes, sizes, sizes, st.sampled_from(["HND", "NHD"]), st.booleans(), st.data())
def test_a_layouts_offsets_are_those_of_a_numpy_array_of_its_shape(
    group: tuple[int, int], layers: int, tokens: int, size: int, order: Any, mla: bool, data: Any
) -> None:
    kv_heads, ranks = (1, group[1]) if mla else group
    layout = CacheLayout(layers, kv_heads, size, tokens, "float16", order, mla)
    pages = data.draw(sizes)
    pool = np.zeros((layers, pages, *layout.page_shape(ranks)), np.float16)
    layer, page = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, pages - 1))
    begin = pool[layer, page].__array_interface__["data"][0] - pool.__array_interface__["data"][0]
    assert begin == layout.layer_offset(layer, ranks, pages) + page * layout.page_bytes(ranks)
    assert pool.nbytes == layout.pool_bytes(ranks, pages)
    assert layout.page_bytes(ranks) == tokens * layout.token_bytes(ranks) == pool[0, 0].nbytes


def test_pages_have_the_shape_and_size_of_their_order_and_group() -> None:
    hnd = CacheLayout(**LLAMA)
    assert (hnd.page_shape(2), hnd.page_shape(16)) == ((2, 4, 16, 128), (2, 1, 16, 128))
    assert (hnd.page_bytes(1), hnd.page_bytes(8), hnd.page_bytes(32)) == (65536, 8192, 8192)
    assert dataclasses.replace(hnd, order="NHD").page_shape(2) == (2, 16, 4, 128)
    for order in ("HND", "NHD"):
        latent = CacheLayout(61, 1, 576, 64, "bfloat16", order, mla=True)
        assert (latent.page_shape(8), latent.page_bytes(8), latent.token_bytes(1)) == ((64, 576), 73728, 1152)
        assert latent.heads(7, 8) == range(1)


@given(sizes, st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_spans_one_after_another_move_every_page_once(page_tokens: int, lengths: list[int]) -> None:
    layout = CacheLayout(**{**LLAMA, "page_tokens": page_tokens})
    total, start = sum(lengths), 0
    table = list(range(layout.pages_for(total)))
    moved = []
    for number, length in enumerate(lengths):
        span = layout.span(start, start + length)
        touched = {token // page_tokens for token in range(start, start + length)}
        assert touched == set(range(span.first, span.end))
        assert span.pages == len(touched)
        last = number == len(lengths) - 1
        ready = table[span.ready(last)]
        # What moves before the end has its last token; what moves at the end has the sequence's.
        assert last or all((page + 1) * page_tokens <= span.stop for page in ready)
        moved += ready
        start += length
    assert moved == table
    assert (len(table) - bool(span.tail_tokens)) * page_tokens + span.tail_tokens == total


def test_a_partial_page_is_ready_with_the_last_chunk_alone() -> None:
    layout = CacheLayout(**LLAMA)
    span = layout.span(16, 52)
    assert (span.first, span.full, span.end, span.tail_tokens) == (1, 3, 4, 4)
    assert (span.ready(last=False), span.ready(last=True)) == (slice(1, 3), slice(1, 4))
    assert layout.filled_bytes(span.tail_tokens, 8) == 4 * 2 * 128 * 2
    assert layout.filled_bytes(16, 8) == layout.page_bytes(8)
    assert layout.filled_bytes(0, 8) == 0
    assert [layout.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize"),
    [
        ("float16", "float16", 2),
        ("half", "float16", 2),
        (np.float32, "float32", 4),
        (np.dtype("<i8"), "int64", 8),
        ("f4", "float32", 4),
        (bool, "bool", 1),
        ("bfloat16", "bfloat16", 2),
        ("torch.bfloat16", "bfloat16", 2),
        ("torch.float16", "float16", 2),
        ("float8_e4m3fn", "float8_e4m3fn", 1),
        ("float8_e5m2", "float8_e5m2", 1),
    ],
)
def test_element_types_are_known_by_name_and_size(dtype: Any, name: str, itemsize: int) -> None:
    layout = CacheLayout(**{**LLAMA, "dtype": dtype})
    assert (layout.dtype, layout.itemsize) == (name, itemsize)


def test_a_layout_travels_as_json_and_is_a_key() -> None:
    layout = CacheLayout(**{**LLAMA, "layers": np.int32(4), "dtype": np.float16})
    again = CacheLayout(**json.loads(json.dumps(dataclasses.asdict(layout))))
    assert again == layout
    assert len({again, layout}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0, expected at least 1"),
        ({"kv_heads": -1}, "kv_heads is -1, expected at least 1"),
        ({"head_size": 1.5}, "head_size is 1.5, expected an integer"),
        ({"page_tokens": "16"}, "page_tokens is '16', expected an integer"),
        ({"order": "DNH"}, "order is 'DNH', expected \"HND\""),
        ({"mla": True}, "kv_heads is 8 with mla, expected 1"),
        ({"dtype": "int4"}, "dtype is 'int4', expected a number type of numpy or one of bfloat16"),
        ({"dtype": None}, "dtype is None, expected"),
        ({"dtype": object}, "expected a number type"),
        ({"dtype": "S"}, "expected a number type"),
        ({"dtype": "U4"}, "expected a number type"),
        ({"dtype": "f4,f4"}, "expected a number type"),
        ({"dtype": {}}, "expected a number type"),
        ({"dtype": np.dtype("f4").newbyteorder()}, "in the other byte order: give the machine's own"),
    ],
)
def test_wrong_layouts_are_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as failure:
        CacheLayout(**{**LLAMA, **change})
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("heads", (0, 3), "8 heads cannot be spread over 3 ranks: expected a number of ranks that divides 8"),
        ("heads", (0, 12), "or a multiple of 8; choose another tensor-parallel size"),
        ("heads", (4, 4), "rank is 4, expected 0 to 3 in a group of 4"),
        ("heads", (-1, 4), "rank is -1, expected at least 0"),
        ("heads", (0, 0), "ranks is 0, expected at least 1"),
        ("page_bytes", (5,), "8 heads cannot be spread over 5 ranks"),
        ("page_shape", (5,), "8 heads cannot be spread over 5 ranks"),
        ("pool_bytes", (1, 0), "pages is 0, expected at least 1"),
        ("layer_offset", (80, 1, 4), "layer is 80, expected 0 to 79: the cache has 80"),
        ("layer_offset", (-1, 1, 4), "layer is -1, expected at least 0"),
        ("pages_for", (-1,), "tokens is -1, expected at least 0"),
        ("span", (-1, 4), "start is -1, expected at least 0"),
        ("span", (4, 4), "the tokens 4 to 4 (exclusive) are none"),
        ("filled_bytes", (17, 1), "tokens is 17, expected at most 16"),
    ],
)
def test_wrong_arguments_of_a_layouts_methods_are_refused_with_the_reason(
    call: str, arguments: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError) as failure:
        getattr(CacheLayout(**LLAMA), call)(*arguments)
    assert message in str(failure.value)
