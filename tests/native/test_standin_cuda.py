"""The stand-in for the CUDA driver is worse than a GPU: what it is to find, it finds."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support import TESTS
from support.gpu.standin_cuda import (
    ILLEGAL_ADDRESS,
    GpuArray,
    broken,
    checked,
    driver,
    gpu_copy,
    held,
    on_device,
    paced,
    pending,
)
from support.rails.rail_pair import filled

SIZE = 100_000
NOT_READY = 600


@pytest.fixture
def cuda() -> Iterator[Any]:
    with on_device(0) as cuda:
        yield cuda


@pytest.fixture
def stream(cuda: Any) -> Iterator[ctypes.c_void_p]:
    yield from stream_of(cuda, 1)


@pytest.fixture
def blocking(cuda: Any) -> Iterator[ctypes.c_void_p]:
    yield from stream_of(cuda, 0)


def stream_of(cuda: Any, flags: int) -> Iterator[ctypes.c_void_p]:
    made = ctypes.c_void_p()
    checked(cuda.cuStreamCreate(ctypes.byref(made), flags))
    yield made
    checked(cuda.cuStreamDestroy_v2(made))


def at(array: GpuArray) -> ctypes.c_uint64:
    return ctypes.c_uint64(array.address)


def copied(cuda: Any, to: GpuArray, source: GpuArray, stream: ctypes.c_void_p) -> int:
    return int(cuda.cuMemcpyAsync(at(to), at(source), ctypes.c_size_t(source.nbytes), stream))


def kernel(cuda: Any, stream: ctypes.c_void_p | None, to: GpuArray, value: int, us: int) -> None:
    checked(cuda.standin_kernel(stream, at(to), ctypes.c_size_t(to.nbytes), value, us))


def test_the_host_does_not_reach_device_memory():
    array = GpuArray(4096)
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="Bad address") as told:
            os.writev(write_end, [(ctypes.c_char * 16).from_address(array.address)])
        assert told.value.errno == errno.EFAULT
    finally:
        os.close(read_end)
        os.close(write_end)
    script = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[1]); from support.gpu.standin_cuda import GpuArray; "
        "ctypes.string_at(GpuArray(8).address, 1)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script, TESTS], timeout=60, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGSEGV


def test_copies_are_late_and_their_end_is_seen_in_order(cuda, stream):
    source, target = gpu_copy(filled(SIZE)), GpuArray(SIZE)
    word = ctypes.c_void_p()
    checked(cuda.cuMemHostAlloc(ctypes.byref(word), ctypes.c_size_t(4096), 3))
    seen = ctypes.c_uint32.from_address(word.value or 0)
    with held():
        checked(copied(cuda, target, source, stream))
        checked(cuda.cuStreamWriteValue32_v2(stream, ctypes.c_uint64(word.value or 0), 7, 0))
        assert (cuda.cuStreamQuery(stream), seen.value, target.seen.any()) == (NOT_READY, 0, False)
    checked(cuda.cuStreamSynchronize(stream))
    assert (seen.value, target.seen.all()) == (7, True)
    checked(cuda.cuMemFreeHost(word))


def test_a_copy_is_done_in_pieces_that_come_in_no_order(cuda, stream):
    source, target = gpu_copy(filled(SIZE)), GpuArray(SIZE)
    ahead = False
    with paced(2000, seed=3):
        while not ahead:  # on a busy machine one copy may be over between two looks
            target.seen[:] = 0
            checked(copied(cuda, target, source, stream))
            while cuda.cuStreamQuery(stream) == NOT_READY:
                look = tuple(target.seen[:: SIZE // 8] != 0)
                ahead |= any(b and not a for a, b in itertools.pairwise(look))


def test_a_stream_that_waits_for_nothing_reads_too_early(cuda, stream, blocking):
    """What is to be found: a copy on another stream than the kernel's, and with an event between them, or without."""
    target = GpuArray(SIZE)
    event = ctypes.c_void_p()
    checked(cuda.cuEventCreate(ctypes.byref(event), 2))
    early = GpuArray(SIZE)
    kernel(cuda, blocking, target, 1, 50_000)
    checked(cuda.cuEventRecord(event, blocking))
    assert cuda.cuEventQuery(event) == NOT_READY
    checked(copied(cuda, early, target, stream))
    checked(cuda.cuStreamSynchronize(stream))
    assert not early.seen.any()
    checked(cuda.cuStreamSynchronize(blocking))
    assert (cuda.cuEventQuery(event), target.seen.all()) == (0, True)


def test_pageable_memory_is_read_at_once_and_written_before_the_call_returns(cuda, stream):
    source, target = filled(SIZE), GpuArray(SIZE)
    where = ctypes.c_uint64(source.ctypes.data)
    with held():
        checked(cuda.cuMemcpyAsync(at(target), where, ctypes.c_size_t(SIZE), stream))
        kept = source.copy()
        source[:] = 0
    checked(cuda.cuMemcpyAsync(where, at(target), ctypes.c_size_t(SIZE), stream))
    assert np.array_equal(source, kept)


def test_a_broken_device_fails_every_call_and_ends_nothing(cuda, stream):
    source, target = gpu_copy(filled(SIZE)), GpuArray(SIZE)
    with held():
        checked(copied(cuda, target, source, stream))
        with broken():
            assert cuda.cuStreamQuery(stream) == ILLEGAL_ADDRESS == copied(cuda, target, source, stream)
            assert cuda.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
            with on_device(1):
                assert cuda.cuStreamQuery(None) == 0
            while pending():  # what is left when the device is whole again would be copied, from memory that is gone
                os.sched_yield()
    assert not target.seen.any()


def test_a_call_without_a_context_and_one_that_is_to_fail_say_so(cuda):
    popped = ctypes.c_void_p()
    checked(cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)))
    assert cuda.cuStreamQuery(None) == 201
    checked(cuda.cuCtxPushCurrent_v2(popped))
    cuda.standin_fail(b"cuStreamQuery", 1, 999)
    assert [cuda.cuStreamQuery(None) for _ in range(3)] == [0, 999, 0]


def test_a_child_of_a_fork_has_no_driver(cuda):
    child = os.fork()
    if child == 0:
        os._exit(cuda.cuStreamQuery(None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_what_a_test_keeps_is_its_own():
    before = driver().standin_pending()
    array = gpu_copy(b"bytes")
    assert (bytes(array.seen), before) == (b"bytes", 0)
