"""Whole rounds of tokens in a GPU's memory: emulated, with the kernels' own source, and on a GPU if one is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

import aiote
from aiote.moe import GroupBrokenError, MoeConfig, MoeOverflowError, device, device_round
from cuda_emulation import EmulatedGpu
from engines import PATIENCE_S, opened, until
from moe_ranks import Array, Ranks, Tokens, all_of, compute, expert, ranks, reference, stored, whole_round

PACKED: dict[str, Any] = {"placement": "packed"}
SHAPES = {
    "grouped": MoeConfig(experts=7, top_k=2, hidden=16, tokens=9, rows=60, scales=3, **PACKED),
    "contiguous": MoeConfig(experts=9, top_k=4, hidden=3, tokens=6, rows=120, layout="contiguous", align=8, **PACKED),
    "private": MoeConfig(experts=6, top_k=4, hidden=8, tokens=7, rows=90, private=3, out_dtype="float32", **PACKED),
    "fp8": MoeConfig(experts=9, top_k=3, hidden=40, tokens=7, dtype="float8_e4m3fn", scales=5, **PACKED),
    "fp16": MoeConfig(experts=5, top_k=3, hidden=5, tokens=5, dtype="float16", out_dtype="float16", **PACKED),
    "one value": MoeConfig(experts=70, top_k=9, hidden=1, tokens=5, dtype="float32", out_dtype="float16", **PACKED),
}


class Place(NamedTuple):
    """A GPU, and how arrays get there and back."""

    launcher: Any
    there: Any
    back: Any


def on_a_gpu() -> Place:
    import cupy

    return Place(device.CudaLauncher(0), cupy.asarray, cupy.asnumpy)


GPU = pytest.param("gpu", marks=[pytest.mark.needs_gpu, pytest.mark.needs_cupy])


@pytest.fixture(params=[pytest.param("emulated", marks=pytest.mark.needs_cxx), GPU])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "gpu":
        yield on_a_gpu()
        return
    gpu = EmulatedGpu(request.getfixturevalue("emulation"))
    yield Place(gpu, gpu.array, gpu.fetch)
    gpu.close()


def drawn(rng: np.random.Generator, config: MoeConfig, tokens: int, **more: Any) -> Tokens:
    one = Tokens(rng, config, tokens, **more)
    if config.dtype == "float16":
        # NumPy has that type: raw bits of it would be other numbers.
        one.x = rng.standard_normal((tokens, config.hidden)).astype(np.float16)
    return one


def moved(place: Place, one: Tokens) -> list[Any]:
    """Return the tokens as arrays of the GPU's, rows of which lie at any stride and at multiples of their elements."""
    x, scales = (
        None if rows is None else place.there(np.pad(rows, ((0, 0), (1, 2))))[:, 1:-2] for rows in (one.x, one.scales)
    )
    return [x, place.there(one.ids), place.there(one.weights), scales]


def filled(place: Place, group: Any, batch: Any) -> Array:
    """Return what a rank's experts make of a batch, computed by the host."""
    config, x = group.config, place.back(batch.x)
    y = np.zeros((*x.shape[:-1], config.hidden), stored(np.zeros(1), config.out_dtype).dtype)
    for number, count in enumerate(batch.expert_num_tokens.tolist()):
        start = 0 if config.layout == "grouped" else int(batch.offsets[number])
        at = (*((number,) if config.layout == "grouped" else ()), slice(start, start + count))
        y[at] = expert(config, group.sizes.first(group.rank) + number, x[at])
    return y


async def rounds(place: Place, config: MoeConfig, count: int, number: int = 3) -> None:
    """Make rounds on so many GPUs, and the same on CPUs: rows, scales, sources and sums have the same bits."""
    rng = np.random.default_rng(count)
    async with (
        ranks(lambda: opened("local"), count, config, device=place.launcher) as gpus,
        ranks(lambda: opened("local"), count, config) as cpus,
    ):
        for turn in range(number):
            given = [drawn(rng, config, int(rng.integers(0, config.tokens + 1))) for _ in gpus]
            twins = await whole_round(cpus, given)

            async def one(gpu: Any, tokens: Tokens, twin: Any, turn: int = turn) -> None:
                batch = await gpu.dispatch(*moved(place, tokens))
                assert batch.expert_num_tokens.tolist() == twin.expert_num_tokens.tolist()
                where = batch.source
                assert where.tolist() == twin.source.tolist()
                real = where[..., 0] >= 0
                assert place.back(batch.x)[real].tobytes() == twin.x[real].tobytes()
                if config.scales:
                    assert place.back(batch.scales)[real].tobytes() == twin.scales[real].tobytes()
                assert place.back(batch.topk_weights)[real].tobytes() == twin.topk_weights[real].tobytes()
                y = place.there(filled(place, gpu, batch))
                before = stored(np.ones((len(tokens.ids), config.hidden), np.float32), config.out_dtype)
                if turn == 0:
                    sums = await gpu.combine(batch, y)
                else:
                    sums = await gpu.combine(batch, y, out=place.there(before))
                assert place.back(sums).tobytes() == reference(config, tokens, batch.dropped).tobytes()

            await all_of(*[lambda g=g, t=t, w=w: one(g, t, w) for g, t, w in zip(gpus, given, twins, strict=True)])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
async def test_rounds_on_gpus_have_the_bits_of_rounds_on_cpus(place, shape, count):
    await rounds(place, SHAPES[shape], count)


class Devices:
    """What each rank in turn is opened with, as `**` asks for it."""

    def __init__(self, *devices: Any) -> None:
        self._next = iter(devices)

    def keys(self) -> list[str]:
        return ["device"]

    def __getitem__(self, key: str) -> Any:
        return next(self._next)


async def test_ranks_on_gpus_and_on_cpus_are_of_one_group(place):
    config, rng = SHAPES["grouped"], np.random.default_rng(5)
    async with anyio.create_task_group() as tasks:
        groups = Ranks(lambda: opened("local"), config, tasks, Devices(place.launcher, None))  # type: ignore[arg-type]
        await groups.start([None, None], 0, 1)

        async def one(group: Any, tokens: Tokens) -> None:
            if group.launcher is None:
                batch = await group.dispatch(tokens.x, tokens.ids, tokens.weights, tokens.scales)
                sums = await group.combine(batch, compute(group, batch))
            else:
                batch = await group.dispatch(*moved(place, tokens))
                sums = place.back(await group.combine(batch, place.there(filled(place, group, batch))))
            assert sums.tobytes() == reference(config, tokens).tobytes()

        for _ in range(3):
            given = [drawn(rng, config, 5) for _ in groups]
            await all_of(*[lambda g=g, t=t: one(g, t) for g, t in zip(groups, given, strict=True)])
        groups.over.set()


async def test_rows_that_do_not_fit_are_dropped_or_refused_as_on_cpus(place):
    config = MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, rows=3, on_overflow="drop", private=2, **PACKED)
    await rounds(place, config, 3)
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
                with pytest.raises(GroupBrokenError, match="a GPU has not run"):
                    await group.reset()
                lane = group._lanes[0]
        assert caught.group_contains(GroupBrokenError, match="a GPU has not run")
        assert not group.memory._regions
        assert lane in device_round._kept
        gpu.go_on()
        await until(lambda: lane.idle)
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
            described[8] = 1 << 40
            described[7] = 1 << 30
            describe(*described, **more)

        lane.gpu.describe = lies

        async def fails(group: Any, one: Tokens) -> None:
            with pytest.raises(aiote.AioteError):
                batch = await group.dispatch(*moved(place, one))
                await group.combine(batch)

        given = [Tokens(rng, config, 9, wild=False) for _ in groups]
        await all_of(*[lambda g=g, t=t: fails(g, t) for g, t in zip(groups, given, strict=True)])


async def test_arrays_that_a_gpu_cannot_take_are_refused_and_nothing_is_broken(place):
    config, rng = SHAPES["fp16"], np.random.default_rng(3)
    async with ranks(lambda: opened("local"), 1, config, device=place.launcher) as (group,):
        one = drawn(rng, config, 4, wild=False)
        x, ids, weights, _ = moved(place, one)
        for text, given in {
            "x: an array in the GPU's memory": (one.x, ids, weights),
            "topk_ids: an array in the GPU's memory": (x, one.ids, weights),
            "x: expected float16": (place.there(one.x.astype(np.float32)), ids, weights),
            "lie together": (x, ids, place.there(np.ones((4, 6), np.float32))[:, ::2]),
            "scales=0": (x, ids, weights, x),
        }.items():
            with pytest.raises(aiote.UsageError, match=text):
                group.dispatch_send(*given)
        # Of rows any stride and address will do, but not of sums.
        wide = place.there(np.zeros(4 * 16 + 1, np.uint8))
        odd = wide[1:].reshape(4, 16)[:, :10]
        batch = await group.dispatch(x, ids, weights)
        y = place.there(filled(place, group, batch))
        with pytest.raises(aiote.UsageError, match="multiples of 2"):
            await group.combine(batch, y, out=_as(odd, np.uint16))
        assert group.membership.failure is None


def _as(array: Any, kind: Any) -> device.Span:
    """Return bytes at an odd address as larger elements, which no array of NumPy's or cupy's can be made to be."""
    found = array.__cuda_array_interface__
    rows, nbytes = found["shape"]
    size = np.dtype(kind).itemsize
    return device.Span.at(found["data"][0], (rows, nbytes // size), np.dtype(kind).str, (found["strides"][0], size))


@pytest.mark.parametrize(
    "config",
    [
        MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, placement="direct"),
        MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, copies="rank"),
        MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, on_loss="mask"),
    ],
)
async def test_what_only_cpus_do_is_refused(place, config):
    with pytest.raises(ExceptionGroup) as caught:
        async with ranks(lambda: opened("local"), 1, config, device=place.launcher):
            pass
    assert caught.group_contains(aiote.UsageError, match="device: ")
