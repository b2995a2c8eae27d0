"""Whole rounds of tokens in a GPU's memory: emulated, with the kernels' own source, and on a GPU if one is here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.moe import GroupBrokenError, MoeConfig, MoeOverflowError, device, device_round, open_group
from support.checkout.page_blocks import block, replaced, run
from support.engines.opening import PATIENCE_S, linked, opened, until
from support.gpu.emulation import EmulatedGpu
from support.moe.devices import Place, drawn, filled, moved, on_a_gpu, rounds
from support.moe.ranks import Tokens, all_of, expert, ranks, reference

PACKED: dict[str, Any] = {"placement": "packed"}
SHAPES = {
    "grouped": MoeConfig(experts=7, top_k=2, hidden=16, tokens=9, rows=60, scales=3, **PACKED),
    "contiguous": MoeConfig(experts=9, top_k=4, hidden=3, tokens=6, rows=120, layout="contiguous", align=8, **PACKED),
    "private": MoeConfig(experts=6, top_k=4, hidden=8, tokens=7, rows=90, private=3, out_dtype="float32", **PACKED),
    "fp8": MoeConfig(experts=9, top_k=3, hidden=40, tokens=7, dtype="float8_e4m3fn", scales=5, **PACKED),
    "fp16": MoeConfig(experts=5, top_k=3, hidden=5, tokens=5, dtype="float16", out_dtype="float16", **PACKED),
    "one value": MoeConfig(experts=70, top_k=9, hidden=1, tokens=5, dtype="float32", out_dtype="float16", **PACKED),
    "direct": MoeConfig(experts=7, top_k=2, hidden=16, tokens=9, rows=60, scales=3, placement="direct"),
    "direct contiguous": MoeConfig(
        experts=5, top_k=3, hidden=5, tokens=6, rows=96, layout="contiguous", align=4, placement="direct", scales=1
    ),
    "by rank": MoeConfig(
        experts=9, top_k=4, hidden=8, tokens=7, rows=90, copies="rank", dtype="float8_e4m3fn", scales=2
    ),
    "by rank contiguous": MoeConfig(
        experts=9, top_k=4, hidden=3, tokens=6, layout="contiguous", align=8, copies="rank", out_dtype="float32"
    ),
    "partial sums": MoeConfig(experts=9, top_k=4, hidden=8, tokens=7, copies="rank", reduce="expert"),
    "partial sums contiguous": MoeConfig(
        experts=7, top_k=3, hidden=9, tokens=5, layout="contiguous", copies="rank", reduce="expert", dtype="float32"
    ),
    "rank": MoeConfig(experts=9, top_k=4, hidden=8, tokens=7, layout="rank", copies="rank", reduce="expert", scales=1),
    "mask": MoeConfig(experts=9, top_k=2, hidden=8, tokens=7, on_loss="mask", out_dtype="float32"),
    "mask by rank": MoeConfig(experts=9, top_k=3, hidden=6, tokens=7, on_loss="mask", copies="rank"),
    "mask contiguous": MoeConfig(experts=9, top_k=3, hidden=6, tokens=7, on_loss="mask", layout="contiguous"),
}


GPU = pytest.param("gpu", marks=[pytest.mark.needs_gpu, pytest.mark.needs_cupy])


@pytest.fixture(params=[pytest.param("emulated", marks=pytest.mark.needs_cxx), GPU])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "gpu":
        yield on_a_gpu()
        return
    gpu = EmulatedGpu(request.getfixturevalue("emulation"))
    yield Place(gpu, gpu.array, gpu.fetch)
    gpu.close()


local = partial(opened, "local")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
async def test_rounds_on_gpus_have_the_bits_of_rounds_on_cpus(place, shape, count):
    await rounds(local, place, SHAPES[shape], [True] * count, 3)


@pytest.mark.parametrize("shape", SHAPES)
async def test_ranks_on_gpus_and_on_cpus_are_of_one_group(place, shape):
    await rounds(local, place, SHAPES[shape], [True, False, True], 3)


async def test_the_page_s_layer_gives_what_one_process_would(place):
    text = replaced(block("moe", 3), "device=0", "device=launcher")
    layer = (await run(text, open_group=open_group, launcher=place.launcher))["on_a_gpu"]
    config, rng = MoeConfig(experts=8, top_k=2, hidden=16, tokens=9), np.random.default_rng(1)
    given = [Tokens(rng, config, 5 + n, wild=False) for n in range(2)]
    async with linked("local") as engines:
        members = [engine.address for engine in engines]

        async def of(rank: int) -> Any:
            def experts(x: Any) -> Any:
                rows, first = place.back(x), 4 * rank
                made = [expert(config, first + number, rows[number]) for number in range(len(rows))]
                return place.there(np.stack(made))

            x, ids, weights, _ = moved(place, given[rank])
            return place.back(await layer(engines[rank], members, rank, config, x, ids, weights, experts))

        sums = await all_of(lambda: of(0), lambda: of(1))
    for one, found in zip(given, sums, strict=True):
        assert np.array_equal(found, reference(config, one))


async def test_rows_that_do_not_fit_are_dropped_or_refused_as_on_cpus(place):
    small = {"experts": 4, "top_k": 2, "hidden": 8, "tokens": 6, "rows": 3, "on_overflow": "drop"}
    for more in ({"private": 2}, {"placement": "direct"}, {"copies": "rank"}, {"copies": "rank", "reduce": "expert"}):
        for layout in ("grouped", "contiguous"):
            await rounds(local, place, MoeConfig(**small, **more, layout=layout), [True, True, False], 3)
    config = MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, rows=3, **PACKED)
    rng = np.random.default_rng(1)
    async with ranks(lambda: opened("local"), 2, config, device=place.launcher) as groups:
        full = [Tokens(rng, config, 6, wild=False) for _ in groups]

        async def refused(group: Any, one: Tokens) -> None:
            with pytest.raises(MoeOverflowError):
                await group.dispatch(*moved(place, one))

        await all_of(*[lambda g=g, t=t: refused(g, t) for g, t in zip(groups, full, strict=True)])


async def test_a_round_waits_for_a_stream_that_is_busy_and_the_loop_does_not(emulation):
    config, gpu = SHAPES["grouped"], EmulatedGpu(emulation)
    place, rng = Place(gpu, gpu.array, gpu.fetch), np.random.default_rng(3)
    try:
        async with ranks(lambda: opened("local"), 2, config, device=gpu) as groups:
            gpu.hold()
            given = [Tokens(rng, config, 5) for _ in groups]
            parts = [moved(place, one) for one in given]
            started = [group.dispatch_send(*part) for group, part in zip(groups, parts, strict=True)]
            before = [group.engine.statistics().posted for group in groups]
            turns = []
            await until(lambda: turns.append(None) or len(turns) > 50)
            assert [group.engine.statistics().posted for group in groups] == before
            gpu.go_on()
            batches = await all_of(*[one.dispatch_recv for one in started])
            made = [gpu.array(filled(place, group, batch)) for group, batch in zip(groups, batches, strict=True)]
            combine = [lambda g=g, b=b, y=y: g.combine(b, y) for g, b, y in zip(groups, batches, made, strict=True)]
            sums = await all_of(*combine)
            for found, one in zip(sums, given, strict=True):
                assert gpu.fetch(found).tobytes() == reference(config, one).tobytes()
    finally:
        gpu.close()


@pytest.mark.parametrize("step", ["held", "routed"])
async def test_a_round_that_is_cancelled_on_a_gpu_is_begun_anew_after_a_reset(emulation, step):
    config, gpu = SHAPES["grouped"], EmulatedGpu(emulation)
    place, rng = Place(gpu, gpu.array, gpu.fetch), np.random.default_rng(3)
    try:
        async with ranks(lambda: opened("local"), 2, config, device=gpu) as groups:
            given = [Tokens(rng, config, 5) for _ in groups]
            parts = [moved(place, one) for one in given]
            if step == "held":
                gpu.hold()
            groups[0].dispatch_send(*parts[0])
            groups[0].abort()
            await until(lambda: groups[1].membership.failure is not None)
            gpu.go_on()
            await all_of(*[group.reset for group in groups])
            batches = await all_of(*[lambda g=g, p=p: g.dispatch(*p) for g, p in zip(groups, parts, strict=True)])
            made = [gpu.array(filled(place, group, batch)) for group, batch in zip(groups, batches, strict=True)]
            combine = [lambda g=g, b=b, y=y: g.combine(b, y) for g, b, y in zip(groups, batches, made, strict=True)]
            for found, one in zip(await all_of(*combine), given, strict=True):
                assert gpu.fetch(found).tobytes() == reference(config, one).tobytes()
    finally:
        gpu.close()


async def test_memory_stays_until_the_kernels_that_use_it_have_run(emulation):
    """Of a group that is left in the middle of a round, while the GPU is busy with something else."""
    config, gpu = SHAPES["grouped"], EmulatedGpu(emulation)
    place, rng = Place(gpu, gpu.array, gpu.fetch), np.random.default_rng(3)
    try:
        async with ranks(lambda: opened("local"), 1, config, device=gpu) as groups:
            gpu.hold()
            parts = moved(place, drawn(rng, config, 5))
            groups[0].dispatch_send(*parts)
            groups.over.set()
            turns = []
            await until(lambda: turns.append(None) or len(turns) > 200)
            assert len(groups[0].memory._regions) == 2
            gpu.go_on()
            await until(lambda: not groups[0].memory._regions)
    finally:
        gpu.close()


async def test_a_gpu_that_is_busy_for_too_long_is_an_error_and_its_memory_is_kept(emulation, monkeypatch):
    """Nobody waits for it for ever: neither a reset nor who leaves the group."""
    monkeypatch.setattr(device_round, "KERNELS_S", 2.0)
    config, gpu = SHAPES["grouped"], EmulatedGpu(emulation)
    place, rng = Place(gpu, gpu.array, gpu.fetch), np.random.default_rng(3)
    try:
        with anyio.fail_after(PATIENCE_S), pytest.raises(ExceptionGroup) as caught:
            async with ranks(lambda: opened("local"), 1, config, device=gpu) as (group,):
                gpu.hold()
                group.dispatch_send(*moved(place, drawn(rng, config, 5)))
                with pytest.raises(GroupBrokenError, match="the GPU did not run"):
                    await group.reset()
                lane = group._lanes[0]
        assert caught.group_contains(GroupBrokenError, match="the GPU did not run")
        assert not group.memory._regions
        assert lane in device_round._kept
        gpu.go_on()
        await until(lambda: lane.is_idle)
        device_round.keep()
        assert lane not in device_round._kept
    finally:
        gpu.close()


async def test_a_lie_of_a_gpu_breaks_the_group(place):
    """Lengths that leave the memory of a rank are an error, on every rank."""
    config, rng = SHAPES["grouped"], np.random.default_rng(3)
    async with ranks(lambda: opened("local"), 2, config, device=place.launcher) as groups:
        lane = groups[0]._lanes[0]
        describe = lane.gpu.describe

        def lies(*given: Any, **more: Any) -> None:
            described = list(given)
            described[4] = given[4]._replace(most=1 << 30, row=1 << 40)
            describe(*described, **more)

        lane.gpu.describe = lies

        async def fails(group: Any, one: Tokens) -> None:
            with pytest.raises(aiote.AioteError):
                batch = await group.dispatch(*moved(place, one))
                await group.combine(batch)

        given = [Tokens(rng, config, 9, wild=False) for _ in groups]
        await all_of(*[lambda g=g, t=t: fails(g, t) for g, t in zip(groups, given, strict=True)])


async def test_numbers_and_sums_may_lie_at_any_stride_and_address(place):
    config, rng = SHAPES["fp16"], np.random.default_rng(3)
    one = drawn(rng, config, 4)
    width = config.hidden * 2
    async with ranks(local, 1, config, device=place.launcher) as (group,):
        for number in range(3):
            x, ids, weights, _ = moved(place, one)
            if number == 1:
                ids, weights = (place.there(np.repeat(rows, 2, 1))[:, ::2] for rows in (one.ids, one.weights))
            elif number == 2:
                ids, weights = (place.there(np.pad(rows, ((0, 0), (0, 3))))[:, :-3] for rows in (one.ids, one.weights))
            memory = place.there(np.zeros(4 * 16 + 1, np.uint8))
            odd = memory[1:].reshape(4, 16)[:, :width]
            batch = await group.dispatch(x, ids, weights)
            await group.combine(batch, place.there(filled(place, group, batch)), out=_as(odd, np.uint16))
            assert place.back(odd).tobytes() == reference(config, one).tobytes()


async def test_arrays_that_a_gpu_cannot_take_are_refused_and_nothing_is_broken(place):
    config, rng = SHAPES["fp16"], np.random.default_rng(3)
    async with ranks(lambda: opened("local"), 1, config, device=place.launcher) as (group,):
        one = drawn(rng, config, 4, wild=False)
        x, ids, weights, _ = moved(place, one)
        for text, given in {
            "x: expected an array in the GPU's memory": (one.x, ids, weights),
            "topk_ids: expected an array in the GPU's memory": (x, one.ids, weights),
            "x: expected float16": (place.there(one.x.astype(np.float32)), ids, weights),
            "scales=0": (x, ids, weights, x),
        }.items():
            with pytest.raises(aiote.UsageError, match=text):
                group.dispatch_send(*given)
        assert group.membership.failure is None


def _as(array: Any, kind: Any) -> device.KernelArray:
    """Return bytes at an odd address as larger elements, which no array of NumPy's or cupy's can be made to be."""
    found = array.__cuda_array_interface__
    rows, nbytes = found["shape"]
    size = np.dtype(kind).itemsize
    return device.KernelArray.at(
        found["data"][0], (rows, nbytes // size), np.dtype(kind).str, (found["strides"][0], size)
    )
