"""The stand-in for the CUDA driver is worse than a GPU: what it is to find, it finds."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support import TESTS
from support.gpu.standin_cuda import (
    ILLEGAL_ADDRESS,
    GpuArray,
    broken,
    captured,
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


def test_a_full_stream_blocks_who_gives_it_more(cuda, stream):
    source, target, given = GpuArray(64), GpuArray(64), []
    blocked = driver().standin_blocked()

    def give() -> None:
        with on_device(0):
            for _ in range(300):
                checked(copied(cuda, target, source, stream))
                given.append(1)

    giver = threading.Thread(target=give)
    with held():
        giver.start()
        while driver().standin_blocked() == blocked:
            os.sched_yield()
        assert (len(given), pending()) == (256, 256)
    giver.join()
    checked(cuda.cuStreamSynchronize(stream))


def test_who_asks_what_is_done_breaks_captures_unless_the_thread_relaxes_that(cuda, stream, blocking):
    event, mode = ctypes.c_void_p(), ctypes.c_int(2)
    checked(cuda.cuEventCreate(ctypes.byref(event), 2))
    with captured(blocking.value or 0) as is_broken:
        checked(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        assert (cuda.cuStreamQuery(stream), cuda.cuEventQuery(event), is_broken()) == (0, 0, False)
        checked(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        assert (cuda.cuStreamQuery(stream), is_broken()) == (900, True)
        assert cuda.cuEventRecord(event, blocking) == 901
    with captured(blocking.value or 0) as is_broken:
        assert (cuda.cuStreamIsCapturing(None, ctypes.byref(mode)), is_broken()) == (906, False)
        assert (cuda.cuEventRecord(event, None), is_broken()) == (906, True)
    checked(cuda.cuEventDestroy_v2(event))


OPENER = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from support.gpu.standin_cuda import driver, on_device
handle, out = (ctypes.c_char * 64).from_buffer_copy(bytes.fromhex(sys.argv[2])), ctypes.c_uint64()
class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]
with on_device(1) as cuda:
    cuda.standin_isolate(1)
    codes = [cuda.cuIpcOpenMemHandle_v2(ctypes.byref(out), Handle.from_buffer_copy(handle), 1)]
    cuda.standin_isolate(0)
    codes.append(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(out), Handle.from_buffer_copy(handle), 1))
    codes.append(cuda.cuIpcGetMemHandle(ctypes.byref(Handle()), out))
    print(*codes, ctypes.string_at(cuda.standin_alias(out), 5).decode(), flush=True)
    sys.stdin.read()
    codes = [cuda.cuIpcCloseMemHandle(out), cuda.cuIpcCloseMemHandle(out)]
    print(*codes)
"""


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def test_another_process_opens_whole_allocations_and_what_it_has_open_is_not_to_be_freed(cuda):
    array, handle, out = gpu_copy(b"bytes"), Handle(), ctypes.c_uint64()
    assert cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(array.address + 1)) == 1
    checked(cuda.cuIpcGetMemHandle(ctypes.byref(handle), at(array)))
    assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(out), handle, 1) == 201
    command = [sys.executable, "-P", "-c", OPENER, str(TESTS), bytes(handle).hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as opener:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "217 0 1 bytes\n"
        violations = driver().standin_violations()
        del array
        assert driver().standin_violations() == violations + 1
        told, _ = opener.communicate(timeout=60)
    assert told == "0 1\n"


def test_dma_bufs_are_of_whole_pages_of_the_device_whose_context_is_current(cuda):
    array, fd = GpuArray(8192), ctypes.c_int()
    ask = functools.partial(cuda.cuMemGetHandleForAddressRange, ctypes.byref(fd))
    page, none = ctypes.c_size_t(4096), ctypes.c_ulonglong(0)
    assert ask(ctypes.c_uint64(array.address + 1), page, 1, none) == ask(at(array), ctypes.c_size_t(5), 1, none) == 1
    with on_device(1):
        assert ask(at(array), page, 1, none) == 1
    checked(ask(at(array), page, 1, none))
    os.close(fd.value)


SEGMENTS = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from support.gpu.standin_cuda import SEGMENT, GpuArray, checked, driver, on_device
size, address, handle, out = ctypes.c_size_t(SEGMENT), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
none, no_flags = ctypes.c_size_t(0), ctypes.c_ulonglong(0)
source = GpuArray(64)
with on_device(0) as cuda:
    made = cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(5), (ctypes.c_int * 8)(1, 1, 1, 0), no_flags)
    checked(cuda.cuMemCreate(ctypes.byref(handle), size, (ctypes.c_int * 8)(1, 1, 1, 0), no_flags))
    checked(cuda.cuMemAddressReserve(ctypes.byref(address), size, none, ctypes.c_uint64(0), no_flags))
    checked(cuda.cuMemMap(address, size, none, handle, no_flags))
    checked(cuda.cuMemRelease(handle))
    free = cuda.cuMemAddressFree(address, size)
    file = os.open("/dev/zero", os.O_RDONLY)
    taken = cuda.cuMemImportFromShareableHandle(ctypes.byref(out), ctypes.c_void_p(file), 1)
    copied = cuda.cuMemcpyAsync(address, ctypes.c_uint64(source.address), ctypes.c_size_t(64), None)
    code = cuda.cuStreamSynchronize(None)
    driver().standin_break(0, 0)
    freed = cuda.cuMemUnmap(address, size) or cuda.cuMemAddressFree(address, size)
print(made, free, taken, copied, freed, code)
"""


def test_segments_are_reached_by_the_devices_that_were_given_access_and_freed_in_order(cuda):
    """A copy to what is mapped and not yet accessible breaks the device, as on a GPU."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SEGMENTS, str(TESTS)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("1 1 1 0 0 700\n", "")
