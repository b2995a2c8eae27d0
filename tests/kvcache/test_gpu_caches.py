"""Caches in memory of GPUs, on the stand-in for the driver: `Cache.add` takes their arrays, and the same bytes move."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote import gpu
from aiote.core.gpu_arrays import GpuArray, gpu_array
from aiote.kvcache import Cache, Consumer, PageRow, Producer
from support.engines.opening import PATIENCE_S, opened, until
from support.gpu.standin_cuda import Adopted, busy, driver, launched, new_stream, paced, standin_path
from support.kv.caches import Model, Side, expected, fill, rank_cache, rows, same
from support.kv.worlds import prefill, world

pytestmark = pytest.mark.libfabric

TOKENS = 19
MODEL = Model(layers=3, state=5, scales=True)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("AIOTE_LIBCUDA", standin_path())


def on_gpu(side: Side, name: str, device: int) -> Cache:
    """Make a side's cache of arrays of a GPU; the side itself has the same bytes, as the test sees them."""
    arrays: list[Any] = []

    def host(shape: tuple[int, ...], kind: type) -> Any:
        arrays.append(np.zeros(shape, kind))
        return arrays[-1]

    side.caches = [rank_cache(MODEL, side, name, 0, 0, host)]
    left = iter(arrays)
    return rank_cache(MODEL, side, name, 0, 0, lambda *_: Adopted(next(left), device))


@pytest.mark.parametrize("provider", ["local", "socket"])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("right_order", ["head token field", "field token head"])
async def test_a_request_moves_between_caches_on_two_gpus(provider, reads, right_order):
    left, right = Side(), Side(order=right_order)
    source, target = on_gpu(left, "prefill", 0), on_gpu(right, "decode", 1)
    random = np.random.default_rng(1)
    here, there = rows(left, TOKENS, random), rows(right, TOKENS, random)
    fill(left, here, 20)
    with anyio.fail_after(PATIENCE_S), paced(5):
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(opened(provider, libcuda=standin_path())) for _ in range(2)]
            producer = await stack.enter_async_context(Producer(engines[0], source))
            consumer = await stack.enter_async_context(Consumer(engines[1], target))
            async with anyio.create_task_group() as group:
                group.start_soon(prefill, producer, "r", TOKENS, here, 1)
                places = [engines[0].address]
                async with consumer.receive(places, "r", tokens=TOKENS, rows=there, reads=reads) as reception:
                    await reception.arrived()
    assert same(right.caches[0], expected(right.caches[0], there, 20))


@pytest.mark.parametrize("provider", ["local+cuda", "socket+cuda"])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_pages_of_other_sizes_move_between_memories_of_gpus(provider, reads):
    left, right = Side(), Side(tokens=8)
    async with world(provider, left, right) as w:
        here, there = w.rows(TOKENS)
        fill(left, here, 20)
        async with anyio.create_task_group() as group:
            group.start_soon(prefill, w.producers[0], "r", TOKENS, here, 1)
            async with w.consumers[0].receive(w.places, "r", tokens=TOKENS, rows=there, reads=reads) as reception:
                await reception.arrived()
        assert same(right.caches[0], expected(right.caches[0], there, 20, 0xEE))


def simple(pages: np.ndarray, name: str, device: int) -> Cache:
    cache = Cache(name)
    cache.add(Adopted(pages, device), "layer page item", fields=["kv"])
    return cache


@pytest.mark.parametrize("way", ["stream", "default", "value"])
async def test_a_layer_is_written_behind_the_kernels_that_compute_it(way):
    """By a stream, by the default one, and as a captured model tells it: by a value that it changes."""
    layers, size = 3, 60_000
    here, there = np.zeros((layers, 1, size), np.uint8), np.zeros((layers, 1, size), np.uint8)
    memory = Adopted(here)
    cache = Cache("prefill")
    cache.add(memory, "layer page item", fields=["kv"])
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(opened("local", libcuda=standin_path())) for _ in range(2)]
        producer = await stack.enter_async_context(Producer(engines[0], cache))
        consumer = await stack.enter_async_context(Consumer(engines[1], simple(there, "decode", 1)))
        stream = stack.enter_context(new_stream(blocking=way == "default"))
        word = stack.enter_context(gpu.WatchedValue())
        page = {0: PageRow([0])}

        async def compute() -> None:
            async with producer.offer("r", tokens=1, rows=page) as offer:
                for layer in range(layers):
                    launched(Part(memory, layer * size, size), layer + 1, 2000, stream)
                    if way == "value":
                        launched(Part(word.device, 0, 1), layer + 1, 0, stream)
                    else:
                        offer.computed(layer, stream=stream if way == "stream" else None)
                if way == "value":
                    await offer.follow(word)

        async with anyio.create_task_group() as group:
            async with consumer.receive([engines[0].address], "r", tokens=1, rows=page) as reception:
                with busy():
                    group.start_soon(compute)
                    if way != "value":
                        await until(lambda: reception.layers or engines[0].statistics().queued == layers)
                    assert (reception.layers, there.any()) == (0, False)
                for layer in range(layers):
                    await reception.arrived(layer + 1)
                    assert (there[layer] == layer + 1).all()


class Part:
    """Some bytes of memory of a device, as a kernel of the stand-in takes them."""

    def __init__(self, memory: Any, start: int, nbytes: int) -> None:
        self.address = memory.__cuda_array_interface__["data"][0] + start
        self.nbytes = nbytes


async def test_layers_arrive_while_later_ones_are_computed():
    """A layer that a value tells of waits for no kernel behind it."""
    here, there = np.ones((2, 1, 5000), np.uint8), np.zeros((2, 1, 5000), np.uint8)
    memory = Adopted(here)
    cache = Cache("prefill")
    cache.add(memory, "layer page item", fields=["kv"])
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(opened("local", libcuda=standin_path())) for _ in range(2)]
        producer = await stack.enter_async_context(Producer(engines[0], cache))
        consumer = await stack.enter_async_context(Consumer(engines[1], simple(there, "decode", 1)))
        stream = stack.enter_context(new_stream(blocking=True))
        word = stack.enter_context(gpu.WatchedValue())
        page = {0: PageRow([0])}

        async def compute() -> None:
            async with producer.offer("r", tokens=1, rows=page) as offer:
                await offer.follow(word)

        async with anyio.create_task_group() as group:
            group.start_soon(compute)
            async with consumer.receive([engines[0].address], "r", tokens=1, rows=page) as reception:
                with busy():
                    launched(Part(memory, 5000, 5000), 2, 0, stream)
                    word.value = 1
                    await reception.arrived(1)
                    assert ((there[0] == 1).all(), there[1].any()) == (True, False)
                word.value = 2
                await reception.arrived(2)


def test_views_of_one_array_share_its_memory_and_nothing_is_touched():
    whole = Adopted(np.zeros((2, 8, 4, 16), np.float16))
    cache = Cache("one")
    for field, number in (("k", 0), ("v", 1)):
        cache.add(View(whole, number), "page token item", fields=[field])
    assert [memory.nbytes for memory in cache.memories] == [2048]
    assert [(tensor.memory, tensor.offset, tensor.page_stride) for tensor in cache.tensors] == [
        (0, 0, 128),
        (0, 1024, 128),
    ]
    memory = cache.memories[0]
    assert isinstance(memory, GpuArray)
    assert "GpuArray uint8 (2048,)" in repr(memory) == str(memory)
    for use in (lambda: memory + 1, lambda: np.concatenate([memory, memory])):
        with pytest.raises(TypeError):
            use()


class View:
    """Half of an array, as cupy has it: with a `base`."""

    def __init__(self, base: Adopted, number: int) -> None:
        self.base = base
        address = base.address + number * 1024
        self.__cuda_array_interface__ = base.__cuda_array_interface__ | {"shape": (8, 4, 16), "data": (address, False)}


@pytest.mark.parametrize("wrong", [{"shape": (0, 4)}, {"strides": (-4, 1)}])
def test_what_is_no_memory_is_refused(wrong):
    array = Adopted(np.zeros((4, 4), np.uint8))
    array.__cuda_array_interface__ |= wrong
    with pytest.raises(aiote.UsageError, match="expected positive ones"):
        gpu_array(array)
