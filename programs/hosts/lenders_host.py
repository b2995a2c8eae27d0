"""Real lenders of GPU memory, unchanged, on the stand-in for the driver: numba-cuda, cuda-core and cupy.

`make test-connectors ARGS=lenders` runs this in an environment with these libraries; it is no part of `make test`.
numba-cuda and cuda-core allocate, and make their streams, through the stand-in. cupy's own allocations need the CUDA
runtime, which does not take the stand-in for a driver, so its arrays are over memory that the tests allocate.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aiote
from support.gpu.standin_cuda import GpuArray, busy, driver, launched, standin_path

SIZE = 70_000
LATE_US = 15_000
SETTINGS = {"libcuda": standin_path(), "drain_timeout": 30.0, "heartbeat_timeout": 10.0}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load the stand-in before a library loads a driver: it is then the libcuda.so.1 of the whole process.

    Version 3 of cupy's interface would ask the runtime for the current stream.
    """
    os.environ["CUPY_CUDA_ARRAY_INTERFACE_EXPORT_VERSION"] = "2"
    driver()


@dataclass
class Lent:
    """An array of a library, and its address."""

    array: Any
    address: int
    nbytes: int = SIZE

    @property
    def seen(self) -> Any:
        """The bytes as they are now, in no order with any stream."""
        alias = int(driver().standin_alias(ctypes.c_uint64(self.address)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(alias))


def numba_array() -> Lent:
    from numba import cuda

    array = cuda.device_array(SIZE, np.uint8)
    return Lent(array, array.__cuda_array_interface__["data"][0])


def core_buffer() -> Lent:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    buffer = device.allocate(SIZE, stream=device.default_stream)
    return Lent(buffer, int(buffer.handle))


def cupy_array() -> Lent:
    import cupy

    memory = GpuArray(SIZE)
    lent = cupy.cuda.UnownedMemory(memory.address, SIZE, memory, 0)
    array = cupy.ndarray((SIZE,), np.uint8, cupy.cuda.MemoryPointer(lent, 0))
    return Lent(array, memory.address)


LENDERS = {"numba": numba_array, "cuda.core": core_buffer, "cupy": cupy_array}
each_lender = pytest.mark.parametrize("make", LENDERS.values(), ids=LENDERS)
each_wire = pytest.mark.parametrize("wire", ["local", "socket"])


def numba_stream() -> Any:
    from numba import cuda

    return cuda.stream()


def core_stream() -> Any:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    return device.create_stream()


STREAMS: dict[str, Callable[[], Any]] = {"numba": numba_stream, "cuda.core": core_stream}


def address_of(stream: Any) -> int:
    made = getattr(stream, "handle", stream)
    return int(getattr(made, "value", made))


@each_wire
@each_lender
def test_bytes_go_from_and_to_arrays(make, wire):
    async def between() -> None:
        async with aiote.open_engine(wire, **SETTINGS) as left, aiote.open_engine(wire, **SETTINGS) as right:
            source, target = make(), make()
            source.seen[:], target.seen[:] = np.arange(SIZE) % 251, 0
            region, there = left.register(source.array), right.register(target.array)
            assert (region.device, there.device, len(region)) == ("cuda:0", "cuda:0", SIZE)
            remote = left.attach(there.descriptor)
            await left.write(region, remote)
            assert np.array_equal(source.seen, target.seen)
            source.seen[:] = 0
            await left.read(remote, region)
            assert np.array_equal(source.seen, target.seen)

    asyncio.run(between())


@each_wire
@pytest.mark.parametrize("library", STREAMS)
def test_a_write_is_behind_the_kernels_of_a_librarys_stream(library, wire):
    async def behind() -> None:
        async with aiote.open_engine(wire, **SETTINGS) as left, aiote.open_engine(wire, **SETTINGS) as right:
            source, target, stream = LENDERS[library](), np.zeros(SIZE, np.uint8), STREAMS[library]()
            region, remote = left.register(source.array), left.attach(right.register(target).descriptor)
            for value in (7, 8):
                with busy():
                    launched(source, value, LATE_US, address_of(stream))
                    transfer = left.submit_write(region, remote, stream=stream)
                await transfer
                assert (target == value).all()

    asyncio.run(behind())


def test_what_numba_copies_back_is_what_a_peer_has_written():
    from numba import cuda

    async def written() -> None:
        async with aiote.open_engine("local", **SETTINGS) as left, aiote.open_engine("local", **SETTINGS) as right:
            source = np.arange(SIZE).astype(np.uint8)
            target = cuda.to_device(np.zeros(SIZE, np.uint8))
            remote = left.attach(right.register(target).descriptor)
            await left.write_imm(left.register(source), remote, 7)
            await right.counter(7).wait(1)
            assert np.array_equal(target.copy_to_host(), source)

    asyncio.run(written())


def test_parts_of_arrays_are_registered_and_strided_ones_are_refused():
    async def registered() -> None:
        async with aiote.open_engine("local", **SETTINGS) as engine:
            for make in (numba_array, cupy_array):
                array = make().array
                assert len(engine.register(array[100:300])) == 200
                with pytest.raises(aiote.UsageError, match="contiguous"):
                    engine.register(array[::2])

    asyncio.run(registered())


def test_pinned_memory_of_cuda_core_is_the_hosts():
    from cuda.core import LegacyPinnedMemoryResource

    async def registered() -> None:
        async with aiote.open_engine("local", **SETTINGS) as engine:
            region = engine.register(LegacyPinnedMemoryResource().allocate(SIZE))
            assert (region.device, region.reach["local"].way) == ("cuda_host:0", "direct")

    asyncio.run(registered())
