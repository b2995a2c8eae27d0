"""What the planner of the mapping says, carried out on bytes, and beside a reference that goes item by item."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.errors import UsageError
from aiote.kvcache.mapping import CacheMap, MappingError, PageRow, assign
from aiote.kvcache.tensors import Cache, CacheSpec, CacheTensor
from support.kv.caches import PAGE_ORDERS, Model, Side, built, fill, item, rows, spread, value


def move(source: Cache, target: Cache, part: CacheSpec, here: dict, there: dict, tokens: int, seen: list) -> None:
    """Carry out all moves between two ranks, layer by layer, and count what is written."""
    cache_map = CacheMap(source.spec, part)
    spans = cache_map.spans(there, tokens)
    cache_map.check_source(here, spans)
    counts = dict(zip(cache_map.layers, cache_map.counts(spans), strict=True))
    units = dict(zip(cache_map.units, spans, strict=True))
    for layer in cache_map.layers:
        pieces = 0
        for one in cache_map.moves[layer]:
            group = one.pattern.group
            starts = one.pattern.offsets(here[group], there[group], units[group])
            for begin, end in zip(*starts, strict=True):
                begin, end, nbytes = begin + one.source_offset, end + one.target_offset, one.pattern.nbytes
                data = source.memories[one.source_memory].reshape(-1)[begin : begin + nbytes]
                assert len(data) == nbytes
                target.memories[one.target_memory].reshape(-1)[end : end + nbytes] = data
                seen[one.target_memory][end : end + nbytes] += 1
                pieces += 1
        assert pieces == counts[layer]


def transfer(
    model: Model, left: Side, right: Side, tokens: int, skip: int = 0, seed: int = 0, window: bool = False
) -> None:
    """Move a request from all ranks of one side to all of the other, and look at each byte of the latter."""
    random = np.random.default_rng(seed)
    built(model, left, "prefill"), built(model, right, "decode")
    # The source may have let go of what the target does not want.
    gone = skip * right.tokens // left.tokens if window else 0
    here, there = rows(left, tokens, random, gone), rows(right, tokens, random, skip)
    unit = min(left.tokens, right.tokens)
    whole = -(-tokens // unit) * unit
    fill(left, here, whole)
    specs = [cache.spec for cache in left.caches]
    for turn, target in enumerate(right.caches):
        seen = [np.zeros(memory.nbytes, np.int64) for memory in target.memories]
        for source, part in zip(left.caches, assign(specs, target.spec, turn), strict=True):
            move(source, target, part, here, there, tokens, seen)
        expected = [np.zeros(memory.nbytes, np.int64) for memory in target.memories]
        for tensor in target.tensors:
            for page, head, inner, token in spread(tensor, there[tensor.group], whole):
                at = item(target, tensor, page, head, inner)
                expected[tensor.memory][at] += 1
                got = target.memories[tensor.memory].reshape(-1)[at]
                assert np.array_equal(got, value(tensor, head, token)), (str(tensor), page, head, token)
        assert all(np.array_equal(a, b) for a, b in zip(seen, expected, strict=True))


def sides(heads: int) -> st.SearchStrategy[Side]:
    ranks = [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]
    return st.builds(
        Side,
        ranks=st.sampled_from(ranks),
        stages=st.sampled_from([1, 2]),
        order=st.sampled_from(PAGE_ORDERS),
        tokens=st.sampled_from([1, 2, 4, 8]),
        apart=st.booleans(),
        pages=st.just(24),
    )


@given(st.data())
def test_each_item_is_written_once_and_nothing_else(data):
    model = data.draw(
        st.builds(
            Model,
            layers=st.sampled_from([1, 2]),
            heads=st.sampled_from([1, 2, 4]),
            item=st.sampled_from([1, 3]),
            state=st.sampled_from([0, 5]),
            scales=st.booleans(),
        )
    )
    left, right = data.draw(sides(model.heads)), data.draw(sides(model.heads))
    tokens = data.draw(st.integers(0, 19))
    transfer(
        model,
        left,
        right,
        tokens,
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(0, 99)),
        data.draw(st.booleans()),
    )


def pieces(left: Side, right: Side, model: Model | None = None) -> list[tuple[int, int]]:
    """Return size and number of the pieces that a unit of the first layer has."""
    model = model or Model()
    source, target = built(model, left, "prefill").caches[0], built(model, right, "decode").caches[0]
    (part,) = assign([source.spec], target.spec)
    moves = CacheMap(source.spec, part).moves[0]
    return [(one.pattern.nbytes, math.prod(axis.times for axis in one.pattern.axes)) for one in moves]


def test_what_lies_alike_goes_as_whole_pages():
    page = 2 * 4 * 4 * 3
    for order in PAGE_ORDERS:
        assert pieces(Side(order=order), Side(order=order)) == [(page, 1)]
    assert pieces(Side(apart=True), Side(apart=True)) == [(page // 2, 1)] * 2
    # As vLLM's CPU backend has it, and half of the heads: a row for each field.
    assert pieces(Side(order="head token field"), Side(ranks=2, order="head token field")) == [(page // 2, 1)]
    assert pieces(Side(order="field head token"), Side(ranks=2, order="field head token")) == [(page // 4, 2)]


def test_pieces_are_as_large_as_both_sides_allow():
    assert pieces(Side(), Side(order="field token head")) == [(3, 32)]
    assert pieces(Side(tokens=8), Side(tokens=4)) == [(12, 8)]
    assert pieces(Side(tokens=8, order="field token head"), Side(tokens=4, order="field token head")) == [(48, 2)]


def refused(left: Side, right: Side, here: Model, there: Model | None = None) -> str:
    sources = [cache.spec for cache in built(here, left, "prefill").caches]
    target = built(there or here, right, "decode").caches[0].spec
    with pytest.raises(MappingError) as caught:
        for source, part in zip(sources, assign(sources, target), strict=True):
            CacheMap(source, part)
    return str(caught.value)


def test_what_cannot_be_mapped_names_both_sides():
    cases = [
        refused(Side(), Side(), Model(layers=1), Model(layers=2)),
        refused(Side(tokens=4), Side(tokens=6), Model()),
        refused(Side(), Side(), Model(item=3), Model(item=4)),
        refused(Side(), Side(), Model(state=8), Model(state=9)),
        refused(Side(), Side(), Model(heads=2), Model(heads=4)),
        refused(Side(), Side(), Model(), Model(scales=True)),
    ]
    for text in cases:
        assert "prefill 0.0" in text
        assert "decode 0.0" in text


def test_pages_that_the_source_lacks_are_named():
    model = Model()
    source, target = built(model, Side(), "prefill").caches[0], built(model, Side(), "decode").caches[0]
    (part,) = assign([source.spec], target.spec)
    cache_map = CacheMap(source.spec, part)
    here, there = {0: PageRow(np.arange(2), 1)}, {0: PageRow(np.arange(3))}
    with pytest.raises(MappingError, match=r"decode 0\.0 wants units 0 to 2 .* prefill 0\.0 has 1 to 2"):
        cache_map.check_source(here, cache_map.spans(there, 12))
    cache_map.check_source(here, cache_map.spans({0: PageRow(np.arange(9), 1)}, 12))
    with pytest.raises(MappingError, match="has none"):
        cache_map.check_source({}, cache_map.spans(there, 12))


def test_replicated_heads_are_shared_out_over_ranks_and_layers():
    model, left = Model(heads=1, layers=4), Side(ranks=2)
    specs = [cache.spec for cache in built(model, left, "prefill").caches]
    target = built(model, Side(), "decode").caches[0].spec
    shares = [[part.layers for part in assign(specs, target, turn)] for turn in range(2)]
    assert shares == [[[0, 2], [1, 3]], [[1, 3], [0, 2]]]


def test_a_cache_of_arrays_is_what_their_strides_say():
    cache = Cache("one")
    whole = np.zeros((2, 3, 2, 5, 4, 8), np.float16)
    cache.add(whole[:, :, 0], "layer page head token item", fields=["k"])
    cache.add(whole[:, :, 1], "layer page head token item", fields=["v"])
    assert len(cache.memories) == 1
    both = Cache("both")
    both.add(whole, "layer page field head token item", fields=["k", "v"])
    assert sorted(cache.spec.tensors, key=str) == sorted(both.spec.tensors, key=str)
    assert (both.spec.layers, both.spec.groups) == ([0, 1], {0: 3})
    held = Cache("held")
    held.hold(whole.view(np.uint8).reshape(-1))
    for layer in range(2):
        # As tensors of another library: views of nothing that numpy knows.
        array = np.asarray(memoryview(whole[layer]))
        held.add(array, "page field head token item", layer=layer, fields=["k", "v"])
    assert (held.spec.memories, sorted(held.spec.tensors, key=str)) == (
        both.spec.memories,
        sorted(both.spec.tensors, key=str),
    )
    with pytest.raises(UsageError, match="contiguous"):
        held.hold(whole[..., ::2])
    for axes in ("layer page field head token", "page page field head token item", "layer field head page token x"):
        with pytest.raises(UsageError):
            both.add(whole, axes, fields=["k", "v"])
    with pytest.raises(UsageError, match="gaps"):
        both.add(whole[..., ::2], "layer page field head token item", fields=["k", "v"])
    with pytest.raises(UsageError, match="fields"):
        both.add(whole, "layer page field head token item")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"offset": 100}, "ends at byte"),
        ({"memory": 1}, "names memory 1, and there are 1"),
        ({"head_stride": 3}, "a stride of 3"),
        ({"page_stride": 30}, "a stride of 30"),
        ({"layer": 1}, "was added twice"),
        ({"tokens": 2}, "its group also has pages"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change, text):
    fields = {"field": "k", "group": 0, "dtype": "uint8", "memory": 0, "offset": 0, "pages": 3, "page_stride": 32}
    fields |= {"tokens": 4, "token_stride": 4, "first_head": 0, "head_count": 2, "head_stride": 16, "item_bytes": 4}
    tensors = CacheTensor(**(fields | {"layer": 1})), CacheTensor(**(fields | {"layer": 0} | change))
    with pytest.raises(UsageError, match=text):
        CacheSpec("one", (96,), tensors).check()
