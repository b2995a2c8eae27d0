"""What can be registered, what is refused and in which words, and how long the buffer is held."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest

import aiote
from support.engines.opening import across, each_provider, linked, opened

pytestmark = pytest.mark.libfabric

PATTERN = bytes(range(64))


class OnlyDLPack:
    """Lends a NumPy array through DLPack alone, as a tensor of a library that has no buffer protocol."""

    def __init__(self, lender: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.lender = lender
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.lender.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OnCuda:
    """Says that its memory is a GPU's; with `device` (3, 0) it is pinned host memory, at a real address."""

    def __init__(self, lender: np.ndarray, device: tuple[int, int] = (2, 0)) -> None:
        self.lender = lender
        self.device = device
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": lender.shape,
            "typestr": lender.dtype.str,
            "data": (lender.ctypes.data, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, len(PATTERN))
    memory[:] = PATTERN
    return memory


def numbers() -> np.ndarray:
    return np.frombuffer(bytearray(PATTERN), np.uint8)


LENDERS = {
    "numpy": (numbers, True),
    "numpy-matrix": (lambda: numbers().view(np.float32).reshape(4, 4), True),
    "numpy-fortran": (lambda: numbers().reshape(8, 8).T, True),
    "bytearray": (lambda: bytearray(PATTERN), True),
    "bytes": (lambda: PATTERN, False),
    "mmap": (mapped, True),
    "array": (lambda: array.array("H", PATTERN), True),
    "ctypes": (lambda: (ctypes.c_ubyte * 64)(*PATTERN), True),
    "memoryview-slice": (lambda: memoryview(bytearray(b"x" * 8 + PATTERN + b"y" * 8))[8:-8], True),
    "memoryview-readonly": (lambda: memoryview(bytearray(PATTERN)).toreadonly(), False),
    "dlpack": (lambda: OnlyDLPack(numbers()), True),
    "pinned": (lambda: OnCuda(numbers(), (3, 0)), True),
}


@each_provider
@pytest.mark.verbs_once("kind")
@pytest.mark.parametrize("kind", LENDERS)
async def test_memory_of_every_kind_is_sent_and_filled(provider, kind):
    make, writable = LENDERS[kind]
    async with linked(provider) as (left, right):
        region = left.register(make())
        assert (region.nbytes, len(region), region.writable, region.closed) == (64, 64, writable, False)
        arrived = bytearray(64)
        await left.write(region, across(left, right, arrived))
        assert arrived == PATTERN
        if not writable:
            return
        await left.read(across(left, right, PATTERN[::-1]), region)
        await left.write(region, across(left, right, arrived))
        assert arrived == PATTERN[::-1]


@pytest.mark.needs_torch
async def test_torch_tensors_are_sent_and_filled():
    import torch

    async with linked("tcp") as (left, right):
        tensor = torch.arange(16, dtype=torch.bfloat16)
        arrived = torch.zeros(16, dtype=torch.bfloat16)
        await left.write(left.register(tensor), across(left, right, arrived))
        assert torch.equal(tensor, arrived)


@each_provider
@pytest.mark.verbs_once("make", "says")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda: "text", r"register: str has no memory to lend: expected .*buffer protocol", id="text"),
        pytest.param(lambda: 7, r"register: int has no memory to lend", id="number"),
        pytest.param(lambda: None, r"register: NoneType has no memory to lend", id="none"),
        pytest.param(lambda: [1, 2], r"register: list has no memory to lend", id="list"),
        pytest.param(lambda: b"", r"register: .*empty", id="empty-bytes"),
        pytest.param(lambda: np.empty((3, 0)), r"register: the buffer of numpy.ndarray is empty", id="empty-array"),
        pytest.param(
            lambda: np.zeros((8, 8))[:, ::2], r"register: .*not contiguous.*numpy\.ascontiguousarray", id="strided"
        ),
        pytest.param(lambda: memoryview(bytearray(8))[::2], r"register: .*not contiguous", id="strided-view"),
        pytest.param(lambda: np.array([1, "a"], object), r"register: ndarray of object: .*pointers", id="objects"),
        pytest.param(lambda: np.ma.zeros(2), r"register: MaskedArray has a mask", id="masked"),
        pytest.param(lambda: OnlyDLPack(np.zeros((8, 8))[::2]), r"register: .*not contiguous", id="strided-dlpack"),
        pytest.param(
            lambda: OnCuda(np.zeros(4)),
            # Over verbs it is asked for as a DMA-BUF, over our own rails it is copied: no driver here does either,
            # nor the stand-in of other tests, once it is loaded.
            r"memory of device 'cuda' cannot be registered with \S+, which reach host memory only: .*pinned host"
            r"|export memory of a GPU: .*cuMemGetHandleForAddressRange"
            r"|open the CUDA driver: /none: cannot open|CUDA_ERROR_INVALID_VALUE",
            id="gpu",
        ),
        pytest.param(lambda: OnCuda(np.zeros(4), (13, 0)), r"memory of device 'cuda_managed'", id="managed"),
    ],
)
async def test_what_has_no_memory_to_lend_is_refused_with_the_reason(provider, make, says):
    async with opened(provider, libcuda="/none") as engine:
        lender = make()
        asked = provider in ("verbs", "local", "socket") and getattr(lender, "device", None) == (2, 0)
        with pytest.raises(aiote.FabricError if asked else aiote.UsageError, match=says):
            engine.register(lender)
        engine.register(bytearray(8))


async def test_a_refused_buffer_is_given_back():
    async with opened("tcp") as engine:
        lender = np.zeros(4)
        held = OnCuda(lender)
        alive = weakref.ref(held)
        with pytest.raises(aiote.UsageError):
            engine.register(held)
        del held
        gc.collect()
        assert alive() is None


@each_provider
@pytest.mark.blocking_allowed("two garbage collections of everything that the tests have made")
async def test_a_region_holds_its_buffer(provider):
    async with opened(provider) as engine:
        array_ = np.arange(100)
        alive = weakref.ref(array_)
        region = engine.register(array_)
        del array_
        gc.collect()
        assert alive() is not None
        await region.aclose()
        gc.collect()
        assert alive() is None


async def test_the_engine_holds_the_region_s_buffer_though_nobody_holds_the_region():
    async with linked("tcp") as (left, right):
        memory = np.zeros(64, np.uint8)
        alive = weakref.ref(memory)
        remote = left.attach(right.register(memory).descriptor)
        del memory
        gc.collect()
        await left.write(left.register(PATTERN), remote)
        assert alive() is not None
        assert alive().tobytes() == PATTERN
    gc.collect()
    assert alive() is None


async def test_a_registered_buffer_can_neither_be_resized_nor_closed():
    async with opened("tcp") as engine:
        grows, maps = bytearray(8), mapped()
        regions = engine.register(grows), engine.register(maps)
        with pytest.raises(BufferError):
            grows.append(1)
        with pytest.raises(BufferError):
            maps.close()
        for region in regions:
            await region.aclose()
        grows.append(1)
        maps.close()


async def test_closing_the_engine_gives_buffers_back():
    memory = bytearray(8)
    async with opened("tcp") as engine:
        region = engine.register(memory)
    memory.append(1)
    await region.aclose()


@each_provider
async def test_memory_registered_twice_has_two_regions_with_their_own_keys(provider):
    """Two regions with their own keys: the longer one is not cut to the first, which may end before it."""
    memory = np.zeros(256, np.uint8)
    async with linked(provider) as (left, right):
        part = right.register(memory[:64])
        whole = right.register(memory)
        again = right.register(memory)
        assert len({part.descriptor, whole.descriptor, again.descriptor}) == 3
        assert (part.nbytes, whole.nbytes) == (64, 256)
        remote = left.attach(whole.descriptor)
        await part.aclose()
        await left.write(left.register(bytes(range(256))), remote)
        assert memory.tobytes() == bytes(range(256))
        await whole.aclose()
        await left.write(left.register(PATTERN), left.attach(again.descriptor)[64:128])
        assert memory[64:128].tobytes() == PATTERN


async def test_a_closed_region_s_key_is_dead():
    """What was told to peers before a region was closed reaches no memory any more.

    On tcp: the shm of libfabric 1.17 never answers a bad key, and that of 2.5 says that it went well.
    """
    memory = bytearray(64)
    async with linked("tcp") as (left, right):
        region = right.register(memory)
        remote = left.attach(region.descriptor)
        await region.aclose()
        with pytest.raises(aiote.TransferError):
            await left.write(left.register(PATTERN), remote)
        assert memory == bytes(64)
