"""Values that kernels change, and memory of aiote's own, on the stand-in for the driver."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from typing import Any

import numpy as np
import pytest

import aiote
from aiote import gpu
from aiote_native.system.buffers import acquire
from support.engines.opening import across, each_progress, linked, run_script
from support.gpu.driver_calls import OF_VALUES
from support.gpu.hardware_cuda import needs_device, needs_standin
from support.gpu.lenders import DLManagedTensor, DLManagedTensorVersioned
from support.gpu.standin_cuda import (
    GpuArray,
    busy,
    captured,
    driver,
    failing,
    launched,
    new_stream,
    standin_path,
    synchronized,
)
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

gpus = functools.partial(linked, libcuda=standin_path())


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("AIOTE_LIBCUDA", standin_path())


class Array:
    """Device memory as a kernel of the stand-in takes it."""

    def __init__(self, lent: gpu.DeviceArray) -> None:
        interface = lent.__cuda_array_interface__
        self.address, self.nbytes = interface["data"][0], interface["shape"][0] * int(interface["typestr"][2:])
        self.keeps = lent


class OnlyDlpack:
    """What has DLPack and nothing else."""

    def __init__(self, memory: gpu.DeviceArray) -> None:
        self.memory = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __dlpack__(self, **given: Any) -> Any:
        return self.memory.__dlpack__(**given)


@each_progress
async def test_a_kernel_s_change_is_seen_behind_the_kernels_before_it(progress):
    async with gpus("local", progress=progress) as (engine, _):
        cache = GpuArray(50_000)
        with gpu.WatchedValue() as word, new_stream() as stream:
            changes = engine.watch(word)
            for value in (1, 2, 3):
                launched(cache, value, 3000, stream)
                launched(Array(word.device), value, 0, stream)
                old, new = await anext(changes)
                # The stand-in's kernel fills: all eight bytes of the value have the number.
                assert (new, bool((cache.seen == value).all())) == (value * 0x0101010101010101, True)
                assert old == (value - 1) * 0x0101010101010101
            await changes.aclose()


async def test_a_transfer_is_started_by_what_a_graph_changes():
    """What cannot be captured is not: the graph changes a value, and the loop starts the transfer when it sees that."""
    async with gpus("local") as (left, right):
        source, target = GpuArray(70_000), np.zeros(70_000, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with gpu.WatchedValue() as word, new_stream() as stream:
            changes = left.watch(word)
            with captured(stream) as broken_by_us:
                with pytest.raises(aiote.UsageError, match=r"aiote\.gpu\.WatchedValue"):
                    await left.write(region, remote, stream=stream)
                assert not broken_by_us()
            launched(source, 9, 2000, stream)
            launched(Array(word.device), 1, 0, stream)
            await anext(changes)
            await left.write(region, remote, stream=-1)
            await changes.aclose()
        assert (target == 9).all()


def test_the_host_sees_and_sets_the_value():
    needs_device(1)
    with gpu.WatchedValue(device=1) as word:
        assert (word.value, bytes(word)) == (0, bytes(8))
        word.value = 1 << 40
        assert np.asarray(word)[0] == 1 << 40
        launched(Array(word.device), 5, 0, None, 1)
        synchronized(None, 1)
        assert word.value == 0x0505050505050505
        assert acquire(word.device).device_id == 1
    assert word.closed
    with pytest.raises(ValueError, match="freed"):
        word.value  # noqa: B018
    with pytest.raises(BufferError, match="freed"):
        memoryview(word)


def test_a_value_that_somebody_watches_is_not_freed():
    word = gpu.WatchedValue()
    with memoryview(word), pytest.raises(BufferError, match="1 views"):
        word.close()
    word.close()
    word.close()


@pytest.mark.parametrize("make", [gpu.WatchedValue, lambda: gpu.allocate(100)], ids=["value", "memory"])
@pytest.mark.parametrize("versioned", [True, False])
def test_what_is_lent_through_dlpack_keeps_the_memory(make, versioned):
    made = make()
    lent = made.device if isinstance(made, gpu.WatchedValue) else made
    address = lent.__cuda_array_interface__["data"][0]
    version = {"max_version": (1, 1)} if versioned else {}
    capsule = lent.__dlpack__(stream=2, **version)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )(capsule, name)
    kind = DLManagedTensorVersioned if versioned else DLManagedTensor
    tensor = kind.from_address(pointer).tensor
    expected = (1, 0, 64) if isinstance(made, gpu.WatchedValue) else (100, 1, 8)
    assert (tensor.data, tensor.device_type, tensor.device_id, tensor.ndim) == (address, 2, 0, 1)
    assert (tensor.shape[0], tensor.code, tensor.bits) == expected
    del made, lent
    gc.collect()
    assert driver().standin_known(ctypes.c_uint64(address))
    del capsule
    gc.collect()
    assert not driver().standin_known(ctypes.c_uint64(address))


def test_a_taken_tensor_is_given_back_by_its_deleter():
    memory = gpu.allocate(64)
    address = memory.__cuda_array_interface__["data"][0]
    lender = OnlyDlpack(memory)
    taken = acquire(lender)
    assert (taken.address, taken.nbytes, taken.source, taken.device) == (address, 64, "dlpack", "cuda")
    del memory, lender
    gc.collect()
    assert driver().standin_known(ctypes.c_uint64(address))
    taken.release()
    gc.collect()
    assert not driver().standin_known(ctypes.c_uint64(address))


async def test_memory_of_aiote_s_own_is_a_region():
    needs_device(1)
    async with gpus("local") as (left, right):
        with gpu.allocate(300_000) as source, gpu.allocate(300_000, device=1) as target:
            there = right.register(target)
            data, back = filled(300_000), np.zeros(300_000, np.uint8)
            region = left.register(source)
            assert (region.nbytes, region.device, len(source)) == (300_000, "cuda:0", 300_000)
            await right.write(right.register(data), right.attach(region.descriptor))
            await left.write(region, left.attach(there.descriptor))
            await right.write(there, right.attach(left.register(back).descriptor))
            assert np.array_equal(data, back)
            await region.aclose()
            await there.aclose()
        assert source.closed


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: gpu.allocate(0),
        lambda: gpu.allocate(-1),
        lambda: gpu.allocate(1.5),  # type: ignore[arg-type]
        lambda: gpu.allocate(1, device=-1),
        lambda: gpu.WatchedValue(device=True),
        lambda: gpu.WatchedValue(device="cuda:0"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_size_or_device_is_refused(wrong):
    with pytest.raises(aiote.UsageError):
        wrong()


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(aiote.FabricError, match=r"on cuda:7.*cuDevicePrimaryCtxRetain"):
        gpu.WatchedValue(device=7)


@pytest.mark.parametrize(
    "name",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer_v2",
        OF_VALUES[0],
    ],
)
def test_a_call_that_fails_leaves_nothing(name):
    kept = driver().standin_memories()
    for make in (gpu.WatchedValue, lambda: gpu.allocate(64)):
        with failing(name):
            try:
                make()
            except aiote.FabricError as error:
                assert "CUDA_ERROR_OUT_OF_MEMORY: out of memory" in str(error)
    gc.collect()
    assert driver().standin_memories() == kept


@pytest.mark.parametrize("name", [OF_VALUES[1], "cuMemFreeHost", "cuCtxPushCurrent_v2", "cuDevicePrimaryCtxRelease_v2"])
def test_what_fails_to_be_freed_is_freed_again(name):
    kept = driver().standin_memories(), driver().standin_contexts()
    for make in (gpu.WatchedValue, lambda: gpu.allocate(64)):
        made = make()
        with failing(name):
            made.close()
        assert (driver().standin_memories(), driver().standin_contexts()) == kept


def test_a_child_of_a_fork_frees_nothing_of_its_parent():
    word = gpu.WatchedValue()
    child = os.fork()
    if child == 0:
        word.close()
        os._exit(0 if not word.closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert word.value == 0
    word.close()


def test_without_a_driver_it_says_so_and_importing_loads_none():
    done = run_script(
        """
        import pathlib
        import aiote
        from aiote import gpu
        print("libcuda" in pathlib.Path("/proc/self/maps").read_text())
        try:
            gpu.WatchedValue()
        except aiote.FabricError as error:
            print("open the CUDA driver" in str(error))
        """,
        AIOTE_LIBCUDA="/none/libcuda.so.1",
    )
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")


async def test_a_kernel_that_waits_does_not_keep_the_loop():
    needs_standin()
    async with gpus("local") as (engine, other):
        with gpu.WatchedValue() as word, new_stream() as stream:
            changes = engine.watch(word)
            with busy():
                launched(Array(word.device), 1, 0, stream)
                await other.send(engine.address, b"meanwhile")
                assert (await engine.recv()).data == b"meanwhile"
                assert word.value == 0
            assert await anext(changes) == (0, 0x0101010101010101)
            await changes.aclose()
