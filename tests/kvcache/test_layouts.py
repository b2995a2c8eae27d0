"""Caches of the kinds that models have: latent vectors, narrow types with scales, drafts, states; and of torch."""

from __future__ import annotations

import numpy as np
import pytest

from aiote.errors import UsageError
from aiote.kvcache import Cache, CacheMap, MappingError, PageRow, assign
from aiote.kvcache.moving import check_rows
from aiote.kvcache.routing import block_hashes
from aiote.kvcache.tensors import CacheTensor
from support.kv.caches import expected, same, value

NONE = PageRow(np.empty(0, np.int64))


def moved(source: Cache, target: Cache, here: dict[int, PageRow], there: dict[int, PageRow], tokens: int) -> None:
    """Move a request by what the map says, and check each byte of the target by the definition of a tensor alone."""
    for cache, rows in ((source, here), (target, there)):
        check_rows(cache.spec, rows)
    flat = [memory.reshape(-1).view(np.uint8) for memory in source.memories]
    for wanted, memory in zip(expected(source, here, tokens), flat, strict=True):
        memory[...] = wanted
    (part,) = assign([source.spec], target.spec)
    found = CacheMap(source.spec, part)
    spans = found.spans(there, tokens)
    found.check_source(here, spans)
    units = dict(zip(found.units, spans, strict=True))
    into = [memory.reshape(-1).view(np.uint8) for memory in target.memories]
    for moves in found.moves.values():
        for move in moves:
            group = move.pattern.group
            rows = here.get(group, NONE), there.get(group, NONE)
            ours, theirs = map(np.array, move.pattern.offsets(*rows, units[group]))
            for begin, end in zip(ours + move.source_offset, theirs + move.target_offset, strict=True):
                piece = flat[move.source_memory][begin : begin + move.pattern.nbytes]
                into[move.target_memory][end : end + move.pattern.nbytes] = piece
    assert same(target, expected(target, there, tokens))


def rows(*pages: list[int], start: int = 0) -> dict[int, PageRow]:
    return {group: PageRow(row, start if group == 0 else 0) for group, row in enumerate(pages)}


def test_latent_vectors_have_no_heads_and_pages_of_two_sizes():
    source, target = Cache("prefill"), Cache("decode")
    source.add(np.zeros((3, 9, 16, 24), np.float16), "layer page token item", fields=["latent"])
    target.add(np.zeros((3, 9, 4, 24), np.float16), "layer page token item", fields=["latent"])
    moved(source, target, rows([7, 2]), rows([3, 1, 8, 0, 5, 6], start=2), 32)
    # All ranks of a tensor-parallel group have the same: one that reads it is given all.
    (part, other) = assign([source.spec, source.spec], target.spec)
    assert [tensor.layer for tensor in part.tensors] == [0, 2]
    assert [tensor.layer for tensor in other.tensors] == [1]


def test_eight_bit_values_go_with_their_scales_in_other_layouts():
    source, target = Cache("prefill"), Cache("decode")
    for cache, values, scales in (
        (source, ((6, 2, 3, 8, 16), "page field head token item"), ((2, 6, 3, 8), "field page head token")),
        (target, ((6, 2, 8, 3, 16), "page field token head item"), ((6, 8, 3, 2), "page token head field")),
    ):
        cache.add(np.zeros(values[0], np.uint8), values[1], fields=["k", "v"], dtype="float8_e4m3fn")
        cache.add(np.zeros(scales[0], np.float32), scales[1], fields=["k_scale", "v_scale"])
    moved(source, target, rows([5, 0]), rows([1, 4]), 16)
    other = Cache("other")
    other.add(
        np.zeros((6, 2, 3, 8, 16), np.uint8), "page field head token item", fields=["k", "v"], dtype="float8_e5m2"
    )
    with pytest.raises(MappingError, match=r"prefill .*float8_e4m3fn.* other .*float8_e5m2"):
        CacheMap(source.spec, other.spec)


def test_a_draft_layer_an_indexer_and_a_state_have_pages_of_their_own():
    source, target = Cache("prefill"), Cache("decode")
    for cache, order in ((source, "field head token"), (target, "field token head")):
        sizes = {"field": 2, "head": 2, "token": 4}
        shape = [sizes[axis] for axis in order.split()]
        cache.add(np.zeros((2, 8, *shape, 4), np.float16), f"layer page {order} item", fields=["k", "v"])
        # The draft model's layer behind the others, with heads of another size, in the same pages.
        cache.add(np.zeros((8, *shape, 2), np.float16), f"page {order} item", layer=2, fields=["k", "v"])
        cache.add(np.zeros((2, 8, 4, 6), np.uint8), "layer page token item", fields=["indexer"])
        cache.add(np.zeros((2, 5, 37), np.float32), "layer page item", group=1, fields=["state"])
    moved(source, target, rows([3, 7, 1], [4]), rows([2, 0, 6], [0]), 11)


def test_a_window_moves_the_pages_that_it_has_left():
    source, target = Cache("prefill"), Cache("decode")
    for cache in (source, target):
        cache.add(np.zeros((8, 2, 1, 4, 4), np.uint8), "page field head token item", fields=["k", "v"])
    here, there = {0: PageRow([6, 2], 3)}, {0: PageRow([1, 5], 3)}
    moved(source, target, here, there, 20)


@pytest.mark.parametrize("dtype", [object, [("k", "f4"), ("v", "O")]])
def test_arrays_of_python_objects_are_refused(dtype):
    array = np.zeros((4, 2), dtype)
    for add in (lambda: Cache("one").add(array, "page item"), lambda: Cache("one").hold(array)):
        with pytest.raises(UsageError, match="one: an array of .* holds Python objects"):
            add()


def test_arrays_with_a_mask_are_refused():
    array = np.ma.zeros((4, 2))
    for use in (
        lambda: Cache("one").add(array, "page item"),
        lambda: Cache("one").hold(array),
        lambda: PageRow(np.ma.array([0, 1], mask=[0, 1])),
        lambda: block_hashes(np.ma.arange(8), 4),
    ):
        with pytest.raises(UsageError, match=r"it has a mask, .*array\.filled"):
            use()


def test_what_is_no_array_of_the_cpu_is_refused():
    with pytest.raises(ValueError, match="CPU"):
        Cache("one").add("text", "page item")


def test_arrays_of_other_libraries_are_taken_as_they_are():
    class Theirs:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array
            self.__array_interface__ = array.__array_interface__

    class Packed:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **how: object) -> object:
            return self.array.__dlpack__(**how)

        def __dlpack_device__(self) -> object:
            return self.array.__dlpack_device__()

    whole = np.zeros((3, 4, 5), np.float32)
    for wrapped in (Theirs(whole), Packed(whole)):
        cache = Cache("one")
        cache.add(wrapped, "page token item")
        assert cache.memories[0].__array_interface__["data"][0] == whole.__array_interface__["data"][0]
        assert cache.spec.tensors[0].dtype == "float32"


@pytest.mark.needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
def test_tensors_of_torch_are_cached_where_they_are(dtype):
    import torch

    kind = getattr(torch, dtype)
    storage = torch.zeros(4 * 6 * 2 * 3 * 8 * 16, dtype=torch.float32).view(kind)
    whole = storage[: 4 * 6 * 2 * 3 * 8 * 16].reshape(4, 6, 2, 3, 8, 16)
    source, target = Cache("prefill"), Cache("decode")
    for layer in range(4):
        source.add(whole[layer].transpose(2, 3), "page field token head item", layer=layer, fields=["k", "v"])
    assert len(source.memories) == 1
    assert {tensor.dtype for tensor in source.tensors} == {dtype}
    target.add(torch.zeros(4, 6, 2, 8, 3, 16, dtype=kind), "layer page field token head item", fields=["k", "v"])
    moved(source, target, rows([5, 0]), rows([1, 4]), 16)
    first: CacheTensor = source.tensors[0]
    raw = whole.view(torch.uint8).reshape(-1)[: first.item_bytes]
    assert not np.array_equal(raw.numpy(), value(first, 0, 0))  # page 0 is the second of the request
    with pytest.raises(ValueError, match="meta"):
        source.add(torch.zeros(1, 2, device="meta"), "page item")
