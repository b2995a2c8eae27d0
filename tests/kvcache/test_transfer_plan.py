"""A plan, carried out on arrays: every byte of every decode rank comes from where the global cache says, once.

The caches are arrays with one number for each byte, and the number says which byte of the global cache it is; so a
byte from the wrong layer, page, token, head or element is seen, whatever its value would have been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiote.core.paging import PageList, pair_pages
from aiote.errors import UsageError
from aiote.kvcache import CacheLayout, PageTable, TransferPlan, plan_transfer

Numbers = NDArray[np.int64]

# The sizes of groups that a number of heads is tried with.
SIZES = {
    1: (1, 2, 3, 4, 6),
    2: (1, 2, 4, 6),
    3: (1, 3, 6, 9),
    4: (1, 2, 4, 8, 12),
    6: (1, 2, 3, 6, 12),
    8: (1, 2, 4, 8),
}
LLAMA = CacheLayout(layers=80, kv_heads=8, head_size=128, page_tokens=16, dtype="bfloat16")


@dataclass
class World:
    """A layout, two groups, how many pages move, and the pools and page numbers of every rank of both."""

    plan: TransferPlan
    pages: int
    cuts: tuple[int, ...]
    sources: list[PageTable]
    targets: list[PageTable]


def some_pages(plan: TransferPlan, pages: int, cuts: tuple[int, ...], first: int, seed: int) -> World:
    """Return a world with page numbers in no order, and pools of different sizes."""
    random = np.random.default_rng(seed)

    def tables(ranks: int) -> list[PageTable]:
        pools = random.integers(pages + 1, pages + 5, ranks)
        return [PageTable(random.permutation(pool)[:pages], int(pool), first) for pool in pools]

    return World(plan, pages, cuts, tables(plan.prefill), tables(plan.decode))


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    mla = draw(st.booleans())
    kv_heads = 1 if mla else draw(st.sampled_from(sorted(SIZES)))
    layers, head_size, page_tokens = (draw(st.integers(1, 3)) for _ in range(3))
    dtype = draw(st.sampled_from(["int8", "float8_e4m3fn", "bfloat16", "float32"]))
    layout = CacheLayout(layers, kv_heads, head_size, page_tokens, dtype, draw(st.sampled_from(["HND", "NHD"])), mla)
    return plan_transfer(layout, draw(st.sampled_from(SIZES[kv_heads])), draw(st.sampled_from(SIZES[kv_heads])))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    plan = draw(plans())
    pages = draw(st.integers(0, 6))
    cuts = tuple(sorted(draw(st.lists(st.integers(0, pages), max_size=2))))
    return some_pages(plan, pages, cuts, draw(st.integers(0, 9)), draw(st.integers(0, 1000)))


def global_cache(layout: CacheLayout, pages: int) -> Numbers:
    """Number every byte: [layers, pages, parts, kv_heads, page_tokens, bytes of an element row]."""
    shape = (layout.layers, pages, layout.parts, layout.kv_heads, layout.page_tokens)
    shape += (layout.head_size * layout.itemsize,)
    return np.arange(np.prod(shape)).reshape(shape)


def cache_of(layout: CacheLayout, rank: int, ranks: int, table: PageTable) -> Numbers:
    """Return a rank's memory, a number for each byte, -1 where no page of the table lies."""
    dealt = np.repeat(np.arange(layout.kv_heads), max(1, ranks // layout.kv_heads)).reshape(ranks, -1)
    held = global_cache(layout, len(table))[:, :, :, dealt[rank]]
    if layout.order == "NHD":
        held = held.swapaxes(3, 4)
    memory = np.full((layout.layers, table.pool, *held.shape[2:]), -1)
    memory[:, table.numbers] = held
    return memory.reshape(-1)


def carry_out(world: World) -> tuple[list[Numbers], list[Numbers], list[int], list[int]]:
    """Return each decode rank's memory, how often each of its bytes was written, its writes, each prefill rank's bytes.

    What `write_pages` does with the families is taken from its reference, `aiote.core.paging`.
    """
    plan, layout = world.plan, world.plan.layout
    stores = [cache_of(layout, rank, plan.prefill, table) for rank, table in enumerate(world.sources)]
    memories = [np.full(layout.pool_bytes(plan.decode, table.pool), -1) for table in world.targets]
    touched = [np.zeros(len(memory), np.int64) for memory in memories]
    writes, sent = [0] * plan.decode, [0] * plan.prefill
    for begin, end in zip((0, *world.cuts), (*world.cuts, world.pages), strict=True):
        for route in plan.routes:
            source, target = world.sources[route.source][begin:end], world.targets[route.target][begin:end]
            for layer in range(layout.layers):
                move = route.move(layer, source, target)
                for here, there, length in pair_pages(PageList(*move.source), PageList(*move.target)):
                    memories[route.target][there : there + length] = stores[route.source][here : here + length]
                    touched[route.target][there : there + length] += 1
                    assert here + length <= len(stores[route.source])
                    assert there + length <= len(memories[route.target])
                writes[route.target] += move.writes
                sent[route.source] += move.writes * route.run.piece_bytes
    return memories, touched, writes, sent


def check(world: World) -> None:
    """Carry a plan out and compare every byte, and the number of writes."""
    plan, layout = world.plan, world.plan.layout
    memories, touched, writes, sent = carry_out(world)
    for rank, table in enumerate(world.targets):
        expected = cache_of(layout, rank, plan.decode, table)
        assert np.array_equal(memories[rank], expected)
        assert np.array_equal(touched[rank], (expected >= 0).astype(np.int64))
        assert writes[rank] == plan.writes(rank, world.pages, layout.layers)
        assert plan.writes(rank, world.pages) * layout.layers == writes[rank]
    assert sum(sent) == plan.decode * layout.layers * world.pages * layout.page_bytes(plan.decode)


@given(worlds())
def test_every_byte_arrives_once_and_no_other(world: World) -> None:
    check(world)


@given(worlds())
def test_moves_of_layers_with_the_same_turn_differ_by_a_step_in_offset(world: World) -> None:
    for route in world.plan.routes:
        source, target = world.sources[route.source], world.targets[route.target]
        steps = route.steps(source, target)
        for layer in range(route.layers):
            first = layer % route.every
            if first >= route.layers:
                continue
            moves = route.move(first, source, target), route.move(layer, source, target)
            for before, after, step in zip(*moves, steps, strict=True):
                assert np.array_equal(before.indices, after.indices)
                assert after == before._replace(indices=after.indices, offset=before.offset + (layer - first) * step)


@pytest.mark.parametrize("kind", ["HND", "NHD", "MLA"])
@pytest.mark.parametrize("kv_heads", sorted(SIZES))
def test_groups_of_every_pair_of_sizes_get_each_byte_once(kv_heads: int, kind: str) -> None:
    order: Any = kind.replace("MLA", "HND")
    layout = CacheLayout(2, 1 if kind == "MLA" else kv_heads, 2, 3, "bfloat16", order, kind == "MLA")
    for prefill in SIZES[kv_heads]:
        for decode in SIZES[kv_heads]:
            check(some_pages(plan_transfer(layout, prefill, decode), 5, (2,), 1, prefill * decode))


@given(plans(), st.integers(0, 30), st.integers(0, 20), st.integers(1, 40))
@example(plan_transfer(CacheLayout(61, 1, 576, 64, "bfloat16", mla=True), 12, 8), 0, 7, 1)
@example(plan_transfer(CacheLayout(61, 1, 576, 64, "bfloat16", mla=True), 7, 3), 3, 2, 24)
def test_prefill_ranks_send_equal_shares(plan: TransferPlan, first: int, pages: int, layers: int) -> None:
    layout = plan.layout
    a, b = layout.copies(plan.prefill), layout.copies(plan.decode)
    total, rank_page = np.zeros(plan.prefill, np.int64), layout.page_bytes(plan.prefill)
    for layer in range(layers):
        taken = np.zeros(plan.prefill, np.int64)
        for route in plan.routes:
            taken[route.source] += len(range(pages)[route.share(layer, first)]) * route.run.nbytes
        spread = taken.max() - taken.min()
        assert spread <= (rank_page if a > 1 else 0)
        assert spread == 0 or pages * b % a
        total += taken
    cycle = a // np.gcd(a, b)
    assert total.max() - total.min() <= min(layers % cycle, cycle - layers % cycle) * rank_page


@given(plans(), st.integers(0, 30), st.integers(0, 12), st.integers(0, 12))
@example(plan_transfer(CacheLayout(3, 2, 8, 4, "int8"), 6, 4), 2, 5, 3)
def test_ranks_take_pages_in_the_documented_turn_wherever_a_table_is_split(
    plan: TransferPlan, first: int, some: int, more: int
) -> None:
    layout = plan.layout
    a, b = layout.copies(plan.prefill), layout.copies(plan.decode)
    pages = some + more
    # Numbers that are places, so that they can be read off; where the source's table begins makes no difference.
    source, target = PageTable(range(pages), 64), PageTable(range(first, first + pages), 64, first)
    for route in plan.routes:
        for layer in range(layout.layers):
            moves = [route.move(layer, source[part], target[part]) for part in (slice(some), slice(some, None))]
            taken = [number for move in moves for number in move.target.indices[:: route.run.pieces]]
            assert [number // route.run.pieces for number in taken] == [
                p for p in range(first, first + pages) if ((p + layer) * b + route.target % b) % a == route.source % a
            ]


@given(plans())
def test_routes_are_ordered_and_found_from_both_sides(plan: TransferPlan) -> None:
    pairs = [(route.source, route.target) for route in plan.routes]
    assert pairs == sorted(set(pairs))
    assert [route for rank in range(plan.prefill) for route in plan.outgoing(rank)] == list(plan.routes)
    incoming = [route for rank in range(plan.decode) for route in plan.incoming(rank)]
    assert sorted(incoming, key=lambda route: (route.source, route.target)) == list(plan.routes)
    assert all(0 <= route.turn < route.every for route in plan.routes)
    assert all(side.stride * route.run.pieces == side.page_bytes for route in plan.routes for side in sides(route))
    layout = plan.layout
    same = layout.page_bytes(plan.prefill) == layout.page_bytes(plan.decode)
    rows = 1 if same else layout.parts * (layout.page_tokens if layout.order == "NHD" else 1)
    assert {route.run.pieces for route in plan.routes} == {rows}


def sides(route: Any) -> tuple[Any, Any]:
    return route.run.source, route.run.target


def shape(plan: TransferPlan) -> list[tuple[int, ...]]:
    return [(r.source, r.target, r.run.pieces, r.run.piece_bytes, r.every, r.turn) for r in plan.routes]


def test_two_ranks_and_one_exchange_halves_of_a_page() -> None:
    half = 4 * 16 * 128 * 2
    assert shape(plan_transfer(LLAMA, 2, 1)) == [(0, 0, 2, half, 1, 0), (1, 0, 2, half, 1, 0)]
    second = plan_transfer(LLAMA, 2, 1).routes[1].run
    assert (second.source.offset, second.source.stride, second.source.page_bytes) == (0, half, 2 * half)
    assert (second.target.offset, second.target.stride, second.target.page_bytes) == (half, 2 * half, 4 * half)
    assert shape(plan_transfer(LLAMA, 1, 2)) == [(0, 0, 2, half, 1, 0), (0, 1, 2, half, 1, 0)]
    assert shape(plan_transfer(LLAMA, 2, 2)) == [(0, 0, 1, 2 * half, 1, 0), (1, 1, 1, 2 * half, 1, 0)]
    assert plan_transfer(LLAMA, 2, 1).writes(0, 10, 80) == 10 * 80 * 4


def test_ranks_with_latent_vectors_are_paired_by_number() -> None:
    latent = CacheLayout(61, 1, 576, 64, "bfloat16", mla=True)
    page = 64 * 576 * 2
    assert shape(plan_transfer(latent, 2, 2)) == [(0, 0, 1, page, 1, 0), (1, 1, 1, page, 1, 0)]
    assert shape(plan_transfer(latent, 2, 4)) == [(rank % 2, rank, 1, page, 1, 0) for rank in (0, 2, 1, 3)]
    assert shape(plan_transfer(latent, 4, 2)) == [(rank, rank % 2, 1, page, 2, rank // 2) for rank in range(4)]
    assert plan_transfer(latent, 4, 2).writes(1, 10, 61) == 610


def test_indices_of_a_move_are_contiguous_and_in_the_order_of_the_tables() -> None:
    table = PageTable([5, 0, 2, 7], 8)
    for plan in (plan_transfer(LLAMA, 2, 4), plan_transfer(CacheLayout(3, 1, 8, 4, "int8", mla=True), 3, 1)):
        for family in plan.routes[0].move(1, table, table):
            assert (family.indices.dtype, family.indices.ndim) == (np.dtype(np.int64), 1)
            assert family.indices.flags.c_contiguous
            assert all(type(number) is int for number in family[1:])
    move = plan_transfer(LLAMA, 2, 4).routes[1].move(1, table[:2], table[1:3])
    assert move.source.indices.tolist() == [10, 11, 0, 1]
    assert move.target.indices.tolist() == [0, 1, 4, 5]
    assert (move.writes, move.source.page_bytes, move.source.stride) == (4, 8192, 16384)
    assert move.source.offset == 8 * 32768 + 8192
    assert (move.target.stride, move.target.offset) == (8192, 8 * 16384)


def test_a_page_table_copies_its_numbers_and_keeps_its_place_when_sliced() -> None:
    numbers = np.array([4, 9, 1], np.uint8)
    table = PageTable(numbers, 10, first=3)
    numbers[0] = 7
    assert table.numbers.tolist() == [4, 9, 1]
    with pytest.raises(ValueError, match="read-only"):
        table.numbers[0] = 1
    part = table[1:][1:]
    assert (part.numbers.tolist(), part.first, part.pool, len(part)) == ([1], 5, 10, 1)
    assert (len(PageTable([], 1)), PageTable(range(3), 3).numbers.tolist()) == (0, [0, 1, 2])
    assert repr(table) == "<PageTable of 3 pages from place 3, in a pool of 10>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 8], 8), "page 1 of the table is 8, expected 0 to 7 in a pool of 8"),
        (([0, -1], 8), "page 1 of the table is -1"),
        (([2**63], 8), "page 0 of the table is 9223372036854775808"),
        (([2**64], 8), "must be a row of integers"),
        (([1.0], 8), "must be a row of integers, got list with 1 dimensions of float64"),
        (([True], 8), "must be a row of integers"),
        (([[1]], 8), "must be a row of integers"),
        (([[1], [1, 2]], 8), "must be a row of integers"),
        ((iter([1]), 8), "must be a row of integers"),
        (([], 0), "pool is 0, expected at least 1"),
        (([], 1, -1), "first is -1, expected at least 0"),
    ],
)
def test_wrong_page_tables_are_refused_with_the_reason(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as failure:
        PageTable(*arguments)
    assert message in str(failure.value)


def test_slices_of_a_table_with_a_step_are_refused() -> None:
    for item in (0, slice(None, None, 2)):
        with pytest.raises(UsageError, match="takes a slice without a step"):
            PageTable([1, 2], 8)[item]  # type: ignore[index]


def test_wrong_moves_are_refused_with_the_reason() -> None:
    route = plan_transfer(LLAMA, 1, 1).routes[0]
    two, twice = PageTable([1, 2], 8), PageTable([2, 2], 8)
    assert route.move(79, twice, two).writes == 2
    for arguments, message in [
        ((80, two, two), "layer is 80, expected 0 to 79"),
        ((0, two, two[:1]), "2 source pages for 1 target pages"),
        ((0, two, twice), "a target page comes twice"),
        ((0, two, PageTable([1, 2], 2**50)), "expected less than 2\\*\\*63"),
    ]:
        with pytest.raises(UsageError, match=message):
            route.move(*arguments)


def test_wrong_groups_and_ranks_are_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="the prefill group: 8 heads cannot be spread over 3 ranks"):
        plan_transfer(LLAMA, 3, 1)
    with pytest.raises(UsageError, match="the decode group: ranks is 0, expected at least 1"):
        plan_transfer(LLAMA, 1, 0)
    with pytest.raises(UsageError, match="layout must be a CacheLayout, got str"):
        plan_transfer("HND", 1, 1)  # type: ignore[arg-type]
    plan = plan_transfer(LLAMA, 2, 4)
    assert plan is plan_transfer(CacheLayout(80, 8, 128, 16, "bfloat16"), np.int64(2), 4)
    with pytest.raises(UsageError, match="source is 2, expected a rank from 0 to 1"):
        plan.outgoing(2)
    with pytest.raises(UsageError, match="target is 4, expected a rank from 0 to 3"):
        plan.writes(4, 1)
    with pytest.raises(UsageError, match="pages is -1"):
        plan.writes(0, -1)
