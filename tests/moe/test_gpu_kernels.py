"""The GPU's kernels give what NumPy and the native kernels give, bit for bit: emulated, and on a GPU if one is here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import aiote
from aiote.moe import device, kernels
from support import machine
from support.gpu.emulation import Emulation
from support.moe import twins as moe_twins

# Five properties: ten thousand shapes in all at full length.
many = settings(max_examples=2000) if machine.LONG else settings()
seeds = st.integers(0, 1 << 32)
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}


class Place(NamedTuple):
    """Where the kernels run: how they are opened for experts and ranks, and how arrays get there and back."""

    opened: Callable[..., device.GpuKernels]
    there: Callable[[Any], Any]
    back: Callable[[Any], Any]


def emulated(emulation: Emulation) -> Place:
    def opened(rng: np.random.Generator, experts: int, ranks: int) -> device.GpuKernels:
        emulation.order = int(rng.integers(0, 4))
        threads, blocks = 32 * int(rng.integers(1, 4)), int(rng.integers(1, 4))
        return device.GpuKernels(emulation, experts, ranks, threads=threads, blocks=blocks)

    return Place(opened, lambda array: array, lambda array: array)


def on_a_gpu() -> Place:
    import cupy

    launcher = device.CudaLauncher(0)

    def opened(rng: np.random.Generator, experts: int, ranks: int) -> device.GpuKernels:
        return device.GpuKernels(launcher, experts, ranks, threads=int(rng.choice([32, 256, 1024])))

    return Place(opened, cupy.asarray, cupy.asnumpy)


GPU = pytest.param("gpu", marks=[pytest.mark.needs_gpu, pytest.mark.needs_cupy])


@pytest.fixture(scope="module", params=[pytest.param("emulated", marks=pytest.mark.needs_cxx), GPU])
def place(request):
    return on_a_gpu() if request.param == "gpu" else emulated(request.getfixturevalue("emulation"))


def memory(rng: np.random.Generator, rows: int, nbytes: int, unit: int = 1) -> NDArray[np.uint8]:
    """Return rows of bytes at a stride and an address that are any multiple of the unit, often of 16."""
    unit = max(unit, int(rng.choice([1, 4, 16])))
    stride, start = -(-nbytes // unit) * unit + unit * int(rng.integers(0, 3)), unit * int(rng.integers(0, 3))
    whole: NDArray[np.uint8] = rng.integers(0, 256, rows * stride + start + 32, np.uint8)
    start += -whole.ctypes.data % 16
    return whole[start : start + rows * stride].reshape(rows, stride)[:, :nbytes]


def ids_of(rng: np.random.Generator, tokens: int, top_k: int, experts: int, *types: Any) -> Any:
    """Return ids: some that are no experts, some named more than once."""
    return rng.integers(-2, experts + 2, (tokens, top_k)).astype(rng.choice(types))


@many
@given(
    seed=seeds,
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 9),
    experts=st.one_of(st.integers(1, 300), st.just(7000)),
    ranks=st.integers(1, 6),
    by_rank=st.booleans(),
)
def test_numbers_of_rows_and_of_copies(place, seed, tokens, top_k, experts, ranks, by_rank):
    """Of so many experts, too, that the counters of all warps have no room in shared memory."""
    rng = np.random.default_rng(seed)
    ids = ids_of(rng, tokens, top_k, experts, np.int32, np.int64, np.uint32)
    shape = experts, -(-experts // ranks), ranks, by_rank
    out, twin = place.there(np.full((tokens, top_k), 77, np.int32)), np.empty((2, tokens, top_k), np.int32)
    found = place.opened(rng, experts, ranks).number_rows(place.there(ids), *shape, out)
    known = ids.astype(np.int32)
    for numbered, wanted in zip((kernels.number_rows, moe_twins.numbered), twin, strict=True):
        expected = numbered(known, *shape, wanted)
        assert place.back(out).tolist() == wanted.tolist()
        assert [place.back(one).tolist() for one in found] == [one.tolist() for one in expected]


@many
@given(
    seed=seeds,
    tokens=st.integers(0, 7),
    top_k=st.integers(1, 5),
    width=st.one_of(st.integers(1, 70), st.integers(1, 9).map(lambda n: 64 * n)),
    scales=st.integers(0, 9),
    by_rank=st.booleans(),
)
def test_rows_are_packed(place, seed, tokens, top_k, width, scales, by_rank):
    rng = np.random.default_rng(seed)
    at = np.empty((tokens, top_k), np.int32)
    rows, copies = kernels.number_rows(ids_of(rng, tokens, top_k, 6, np.int64), 6, 2, 3, by_rank, at)
    sent = copies if by_rank else rows.reshape(3, 2).sum(1)
    first, last = int(sent[0]), int(sent[0] + sent[1])
    x, beside, tail = memory(rng, tokens, width), memory(rng, tokens, scales), memory(rng, tokens, 4 + 8 * top_k)
    row = width + scales + tail.shape[1] + 3
    sides = [memory(rng, tokens * top_k, row), memory(rng, last - first, row)]
    given = [place.there(side.copy()) for side in sides]
    parts = [place.there(part) for part in (at, x, beside, tail)]
    there, tokens_there, *behind = parts
    place.opened(rng, 6, 3).pack(
        *given,
        first,
        last,
        there,
        tokens_there,
        scales=behind[0],
        tail=behind[1],
        scales_at=width,
        tail_at=width + scales,
    )
    for pack in (kernels.pack, moe_twins.pack):
        twins = [side.copy() for side in sides]
        pack(*twins, first, last, at, x, scales=beside, tail=tail, scales_at=width, tail_at=width + scales)
        assert [place.back(side).tobytes() for side in given] == [twin.tobytes() for twin in twins]


@many
@given(seed=seeds, width=st.one_of(st.integers(1, 40), st.just(64)), count=st.integers(0, 6))
def test_runs_are_copied(place, seed, width, count):
    rng = np.random.default_rng(seed)
    source, to = memory(rng, 30, width), memory(rng, 30, width)
    runs = np.stack((np.arange(count) * 5, rng.integers(0, 26, count), rng.integers(0, 5, count)), 1).astype(np.int64)
    nbytes = int(rng.integers(1, width + 1))
    given = place.there(to.copy())
    place.opened(rng, 1, 1).copy_runs(given, place.there(source), place.there(runs), nbytes)
    for copy_runs in (kernels.copy_runs, moe_twins.copy_runs):
        twin = to.copy()
        copy_runs(twin, source, runs, nbytes)
        assert place.back(given).tobytes() == twin.tobytes()


@many
@given(
    seed=seeds, copies=st.integers(0, 40), top_k=st.integers(1, 5), held=st.integers(0, 70), width=st.integers(1, 33)
)
def test_copies_are_unfolded(place, seed, copies, top_k, held, width):
    rng = np.random.default_rng(seed)
    source, ids = memory(rng, copies, width), rng.integers(-1, held + 4, (copies, top_k)).astype(np.int32)
    base, room = np.arange(held, dtype=np.int64) * 6, rng.integers(0, 7, held).astype(np.int64)
    before, to = rng.integers(0, 3, held).astype(np.int64), memory(rng, 6 * held, width)
    results = []
    for unfold in (place.opened(rng, held, 0).unfold, kernels.unfold, moe_twins.unfold):
        move = place if not results else place._replace(there=lambda array: array, back=lambda array: array)
        rows, places, seen = (
            move.there(one) for one in (to.copy(), np.empty((copies, top_k), np.int32), before.copy())
        )
        given = move.there(source), width, move.there(ids), 3, move.there(base)
        unfold(rows, *given, room=move.there(room), places=places, seen=seen)
        results.append((move.back(rows).tobytes(), move.back(places).tolist(), move.back(seen).tolist()))
    assert results[0] == results[1] == results[2]


@many
@given(
    seed=seeds,
    dtype=st.sampled_from(list(WIDTHS)),
    tokens=st.integers(0, 4),
    top_k=st.integers(1, 9),
    hidden=st.one_of(st.integers(1, 130), st.integers(1, 20).map(lambda n: 8 * n)),
    how=st.integers(0, 7),
)
def test_sums(place, seed, dtype, tokens, top_k, hidden, how):
    """Of any bits: infinities, NaN with any payload, denormals, halves that round to even; at any address."""
    rng, size = np.random.default_rng(seed), WIDTHS[dtype]
    rows = memory(rng, 12, hidden * size, int(rng.choice([1, size])))
    weights = rng.choice([0.0, -0.0, 1.0, math.nan, math.inf, 0.37, -1e-40, 3e38], (tokens, top_k)).astype(np.float32)
    if how & 1:
        values = (rng.standard_normal((12, hidden)) * 2.0 ** rng.integers(-30, 18)).astype(np.float32)
        rows[...] = moe_twins.rounded(values, dtype)
        weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    places = rng.integers(-1, 12, (tokens, top_k)).astype(np.int32)
    factors = weights if how & 2 else None
    out = memory(rng, tokens, hidden * size, int(rng.choice([1, size])))
    # A copy keeps neither a stride nor an address, which the kernels choose their width by.
    given = place.there(out)
    expected = []
    for combine in (kernels.combine, moe_twins.combine):
        twin = out.copy()
        combine(twin, rows, places, factors, dtype, bool(how & 4))
        expected.append(twin.tobytes())
    more = None if factors is None else place.there(factors)
    moved = place.there(rows), place.there(places), more
    place.opened(rng, 1, 1).combine(given, *moved, dtype, bool(how & 4))
    assert [place.back(given).tobytes()] * 2 == expected


@pytest.mark.parametrize("hidden", [5, 16])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_a_sum_follows_the_order_of_k_and_rounds_each_product(place, dtype, hidden):
    """Else it is 1 where it follows another order, and 2**-24 where a product is fused with its sum."""
    rows = moe_twins.rounded(np.repeat(np.array([[1], [1 + 2**-7]], np.float32), hidden, 1), dtype)
    places = np.array([[0, 0, 0], [-1, 0, 1]], np.int32)
    weights = np.array([[1, 2**24, -(2**24)], [0, -(1 + 2**-7 + 2**-17), 1 + 2**-17]], np.float32)
    sums = place.there(np.full_like(rows, 1))
    moved = (place.there(one) for one in (rows, places, weights))
    place.opened(np.random.default_rng(1), 1, 1).combine(sums, *moved, dtype, False)
    assert not place.back(sums).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_two_bytes_is_read_and_rounded(place, dtype):
    """Each by itself, and with a part of it on top, which makes numbers halfway between two and beside that."""
    rng = np.random.default_rng(1)
    rows = np.arange(1 << 16).astype(np.uint16).reshape(1, -1).view(np.uint8)
    for part in (0.0, 2.0**-8, 2.0**-9, -(2.0**-9), 2.0**-11, 2.0**-12, 3 * 2.0**-13):
        weights, places = np.array([[1, part]], np.float32), np.zeros((1, 2), np.int32)
        sums, twin = place.there(np.zeros_like(rows)), np.zeros_like(rows)
        moved = (place.there(one) for one in (rows, places, weights))
        place.opened(rng, 1, 1).combine(sums, *moved, dtype, False)
        kernels.combine(twin, rows, places, weights, dtype, False)
        assert place.back(sums).tobytes() == twin.tobytes()


def test_a_flag_is_raised_by_each_round_even_without_rows(place):
    """With the number of the round; and what waits for the host goes on once the host has raised its flag."""
    opened = place.opened(np.random.default_rng(1), 4, 2)
    empty, no_ids = place.there(np.zeros((0, 2), np.int32)), place.there(np.zeros((0, 2), np.int64))
    rows = place.there(np.zeros((3, 16), np.uint8))
    for number in (1, 2, 3):
        opened.number_rows(no_ids, 4, 2, 2, False, empty, begins=True, raises=1)
        opened.words[2] = number
        opened.pack(rows, rows, 0, 0, empty, rows[:0], scales=rows[:0], tail=rows[:0], waits=2, raises=3)
        opened.copy_runs(rows, rows, place.there(np.zeros((0, 3), np.int64)), 16, waits=2, raises=4)
        opened.combine(rows[:0], rows, empty, None, "float32", False, waits=2, raises=5)
        place.back(rows)
        assert opened.words.tolist() == [0, number, number, number, number, number, 0, 0]


def test_an_aborted_round_touches_nothing(place):
    """Though the flag that a kernel waits for is never raised."""
    opened = place.opened(np.random.default_rng(1), 4, 2)
    opened.number_rows(
        place.there(np.zeros((1, 2), np.int32)), 4, 2, 2, False, place.there(np.zeros((1, 2), np.int32)), begins=True
    )
    opened.words[0] = 1
    rows, source = (place.there(np.full((2, 16), value, np.uint8)) for value in (1, 2))
    places = place.there(np.zeros((2, 1), np.int32))
    ints = [place.there(np.ones(1, np.int64)) for _ in range(3)]
    opened.copy_runs(rows, source, place.there(np.array([[0, 0, 2]])), 16, waits=2, raises=3)
    nothing = source[:, :0]
    opened.pack(rows, rows, 0, 0, places, source, scales=nothing, tail=nothing, waits=2, raises=3)
    found = place.there(np.zeros((2, 1), np.int32))
    opened.unfold(rows, source, 16, places, 0, ints[0], room=ints[1], places=found, seen=ints[2], waits=2)
    opened.combine(rows, source, places, None, "float32", False, waits=2, raises=3)
    assert place.back(rows).tolist() == [[1] * 16] * 2
    assert opened.words.tolist() == [1] + [0] * 7


def test_arrays_that_kernels_cannot_take_are_refused(place):
    opened = place.opened(np.random.default_rng(1), 4, 2)
    rows, places = place.there(np.zeros((2, 18), np.uint8)), place.there(np.zeros((2, 1), np.int32))
    with pytest.raises(aiote.UsageError, match="of type uint8"):
        opened.copy_runs(places, rows, place.there(np.zeros((0, 3), np.int64)), 4)
    with pytest.raises(aiote.UsageError, match="int32, uint32 or int64"):
        opened.number_rows(place.there(np.zeros((2, 1))), 4, 2, 2, False, places)
    with pytest.raises(aiote.UsageError, match="expected contiguous"):
        opened.number_rows(place.there(np.zeros((2, 2), np.int32))[:, :1], 4, 2, 2, False, places)
    with pytest.raises(aiote.UsageError, match="opened for 6"):
        opened.number_rows(places, 5, 3, 2, False, places)
    with pytest.raises(aiote.UsageError, match="GPU's memory"):
        opened.copy_runs([[1]], rows, places, 4)


@many
@given(
    seed=seeds,
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 9),
    experts=st.integers(1, 300),
    ranks=st.integers(1, 6),
    most=st.integers(1, 90),
    by_rank=st.booleans(),
    limits=st.tuples(st.integers(0, 60), st.integers(0, 200)),
)
def test_a_round_is_described(place, seed, tokens, top_k, experts, ranks, most, by_rank, limits):
    """What the host reads, and what is written to each other rank, follow from the ids alone."""
    rng = np.random.default_rng(seed)
    ids, local = ids_of(rng, tokens, top_k, experts, np.int32, np.int64, np.uint32), -(-experts // ranks)
    me = int(rng.integers(ranks))
    weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    known, at = ids.astype(np.int32), np.empty((2, tokens, top_k), np.int32)
    rows, copies = kernels.number_rows(known, experts, local, ranks, False, at[0])
    kernels.number_rows(known, experts, local, ranks, True, at[1])
    opened = place.opened(rng, experts, ranks)
    here, (position, copy) = place.there(ids), [place.there(np.empty_like(one)) for one in at]
    counts = opened.number_rows(here, experts, local, ranks, False, position)
    opened.number_rows(here, experts, local, ranks, True, copy)
    tail = memory(rng, tokens, 4 + 8 * top_k, 4)
    made = [np.empty_like(weights), np.empty_like(at[0]), np.empty_like(at[0])]
    made += [np.zeros(1 + experts + ranks, np.uint32), *np.zeros((3, ranks - 1), np.int64)]
    behind, *given = (place.there(one) for one in (tail, *made))
    numbered = position, copy if by_rank else None
    bounds, described = device.Bounds(local, me, most, 48, 1000, *limits, 640), device.DescribedRound(*given)
    opened.describe(here, place.there(weights), numbered, counts, bounds, behind, described=described)
    kept, mirror, copy_mirror, route, lengths, begins, routed = (place.back(one) for one in given)
    assert kept.tobytes() == weights.tobytes()
    assert mirror.tolist() == at[0].tolist()
    assert not by_rank or copy_mirror.tolist() == at[1].tolist()
    assert route.tolist() == [int(rows.sum()), *rows.tolist(), *copies.tolist()]
    padded = np.zeros(ranks * local, np.int64)
    padded[:experts] = rows
    for_rank = padded.reshape(ranks, local).sum(1)
    sent = copies.astype(np.int64) if by_rank else for_rank
    fits = bool((rows <= limits[0]).all() and (for_rank <= limits[1]).all())
    others = [(me + 1 + number) % ranks for number in range(ranks - 1)]
    assert lengths.tolist() == (np.minimum(sent, most) * 48 * fits)[others].tolist()
    assert begins.tolist() == (1000 + (np.cumsum(sent) - sent) * 48)[others].tolist()
    assert routed.tolist() == [640 * fits] * len(others)
    expected = np.concatenate(
        (np.arange(tokens, dtype=np.uint32)[:, None], np.where((known >= 0) & (known < experts), known, -1)), 1
    ).astype(np.int32)
    assert place.back(behind)[:, : 4 + 4 * top_k].tobytes() == expected.tobytes()
    assert place.back(behind)[:, 4 + 4 * top_k :].tobytes() == weights.tobytes()
