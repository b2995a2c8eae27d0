"""Borrowed memory from the host and from `__cuda_array_interface__`: accepted, refused, held and given back."""

from __future__ import annotations

import array
import copy
import ctypes
import gc
import mmap
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote_native.system.buffers import AcquiredBuffer, acquire


class Cuda:
    """Lend an invented address through __cuda_array_interface__; the memory is never touched."""

    def __init__(self, **changes: Any) -> None:
        interface = {"version": 3, "shape": (3, 4), "strides": None, "typestr": "<f4", "data": (0x7F0000000000, False)}
        self.__cuda_array_interface__ = {
            key: value for key, value in (interface | changes).items() if value != "absent"
        }


class CudaOnDevice(Cuda):
    def __init__(self, device: tuple[Any, Any]) -> None:
        super().__init__()
        self.device = device

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self.device


def address_of(lender: Any) -> int:
    return np.frombuffer(lender, dtype=np.uint8).ctypes.data


# -- the buffer protocol


@pytest.mark.parametrize(
    ("lender", "itemsize", "readonly"),
    [
        pytest.param(b"sixteen bytes...", 1, True, id="bytes"),
        pytest.param(bytearray(16), 1, False, id="bytearray"),
        pytest.param(array.array("d", [1.0, 2.0]), 8, False, id="array"),
        pytest.param((ctypes.c_uint32 * 4)(), 4, False, id="ctypes"),
        pytest.param(memoryview(bytearray(32))[8:24], 1, False, id="memoryview slice"),
        pytest.param(memoryview(bytearray(16)).toreadonly(), 1, True, id="read-only memoryview"),
        pytest.param(memoryview(bytearray(16)).cast("H", (2, 4)), 2, False, id="cast memoryview"),
    ],
)
def test_host_buffers_are_acquired_with_size_and_access(lender: Any, itemsize: int, readonly: bool) -> None:
    buffer = acquire(lender)
    assert (buffer.address, buffer.nbytes) == (address_of(lender), 16)
    assert (buffer.itemsize, buffer.readonly) == (itemsize, readonly)
    assert (buffer.source, buffer.device, buffer.device_id) == ("buffer", "cpu", 0)


@pytest.mark.parametrize(
    "lender",
    [
        pytest.param(np.arange(12, dtype=np.int16).reshape(3, 4), id="C"),
        pytest.param(np.asfortranarray(np.arange(12.0).reshape(3, 4)), id="F"),
        pytest.param(np.array(7, dtype=np.int64), id="0-d"),
        pytest.param(np.arange(12)[4:8], id="slice"),
        pytest.param(np.arange(24).reshape(2, 3, 4).transpose(2, 1, 0), id="reversed axes"),
        pytest.param(np.zeros(3, dtype=[("key", "u1"), ("value", "f8")]), id="structured"),
        pytest.param(np.zeros((4, 1, 3))[:, ::7], id="axis of one"),
        pytest.param(np.zeros(3, dtype="M8[s]"), id="without a buffer format"),
    ],
)
def test_numpy_arrays_are_acquired_with_their_memory(lender: np.ndarray[Any, Any]) -> None:
    buffer = acquire(lender)
    assert (buffer.address, buffer.nbytes) == (lender.ctypes.data, lender.nbytes)
    assert (buffer.itemsize, buffer.readonly, buffer.source) == (lender.itemsize, False, "buffer")


def test_a_read_only_numpy_array_is_read_only() -> None:
    lender = np.arange(4)
    lender.flags.writeable = False
    assert acquire(lender).readonly


def test_the_bytes_are_the_lenders_own() -> None:
    lender = np.arange(6, dtype=np.int32)
    buffer = acquire(lender)
    ctypes.memmove(buffer.address, b"\xff" * buffer.nbytes, buffer.nbytes)
    assert lender.tolist() == [-1] * 6


@pytest.mark.parametrize(("access", "readonly"), [(mmap.ACCESS_WRITE, False), (mmap.ACCESS_READ, True)])
def test_mmap_stays_open_until_release(access: int, readonly: bool) -> None:
    lender = mmap.mmap(-1, 8192, access=access)
    buffer = acquire(lender)
    assert (buffer.nbytes, buffer.readonly) == (8192, readonly)
    with pytest.raises(BufferError):
        lender.close()
    buffer.release()
    lender.close()


def test_bytearray_cannot_be_resized_until_release() -> None:
    lender = bytearray(16)
    buffer = acquire(lender)
    with pytest.raises(BufferError):
        lender.append(1)
    buffer.release()
    lender.append(1)
    assert len(lender) == 17


def test_bytearray_is_unlocked_when_the_buffer_is_dropped() -> None:
    lender = bytearray(16)
    buffer = acquire(lender)
    del buffer
    lender.append(1)


@pytest.mark.parametrize(
    ("lender", "numbers"),
    [
        (np.arange(12, dtype=np.int32)[::2], r"shape \(6,\), strides \(8,\) in bytes of 4-byte"),
        (np.arange(12, dtype=np.int32)[::-1], r"strides \(-4,\)"),
        (np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2], r"shape \(3, 2\), strides \(16, 4\)"),
        (np.broadcast_to(np.arange(3), (4, 3)), r"strides \(0, 8\)"),
        (memoryview(bytearray(16))[::2], r"shape \(8,\), strides \(2,\)"),
    ],
)
def test_memory_that_is_not_contiguous_is_refused(lender: Any, numbers: str) -> None:
    with pytest.raises(ValueError, match=rf"not contiguous: .*{numbers}.*numpy\.ascontiguousarray.*tensor\.contiguous"):
        acquire(lender)


@pytest.mark.parametrize(
    "lender", [b"", bytearray(), np.zeros((0, 4)), np.zeros((4, 0), order="F"), Cuda(shape=(0, 4))]
)
def test_an_empty_buffer_is_refused(lender: Any) -> None:
    with pytest.raises(ValueError, match="is empty"):
        acquire(lender)


def test_a_failed_check_unlocks_the_lender() -> None:
    lender = bytearray(16)
    with pytest.raises(ValueError, match="not contiguous"):
        acquire(memoryview(lender)[::2])
    lender.append(1)


@pytest.mark.parametrize("thing", [7, None, "text", [1, 2], object(), Cuda.mro, lambda: None])
def test_what_is_no_buffer_is_refused_by_its_type(thing: Any) -> None:
    with pytest.raises((TypeError, BufferError)) as failure:
        acquire(thing)
    assert type(thing).__qualname__ in str(failure.value)


def test_the_refusal_of_what_is_no_buffer_lists_what_is_accepted() -> None:
    with pytest.raises(TypeError, match=r"list has no memory.*__cuda_array_interface__.*buffer protocol.*__dlpack__"):
        acquire([1, 2, 3])


def test_a_refusal_carries_the_lenders_words() -> None:
    lender = memoryview(b"gone")
    lender.release()
    with pytest.raises(BufferError, match=r"memoryview refuses.*released memoryview") as failure:
        acquire(lender)
    assert isinstance(failure.value.__cause__, ValueError)


class Holder(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("thing", ctypes.py_object))


@pytest.mark.parametrize(
    ("lender", "said"),
    [
        pytest.param(np.array([1, "a", None], dtype=object), "ndarray of object", id="objects"),
        pytest.param(np.array(None), "ndarray of object", id="0-d"),
        pytest.param(memoryview(np.array([None])), "memoryview of O", id="memoryview"),
        pytest.param(np.zeros(2, [("a", "f4"), ("b", "O")]), "ndarray of .*'b', 'O'", id="a field"),
        pytest.param(np.zeros(2, [("a", [("b", "O", (2,))])]), "ndarray of .*'b', 'O'", id="a field of a field"),
        pytest.param(np.zeros(2, [("a", "M8[s]"), ("b", "O")]), "ndarray of .*'b', 'O'", id="beside a date"),
        pytest.param(np.array([None, 1]).view(np.recarray), "recarray of", id="recarray"),
        pytest.param((ctypes.py_object * 2)(1, "a"), "of <O", id="ctypes"),
        pytest.param((Holder * 2)(), "of T{<i:number:.*<O:thing:}", id="ctypes structure"),
        pytest.param((ctypes.c_char_p * 2)(b"a", b"b"), "of <z", id="char*"),
        pytest.param((ctypes.c_wchar_p * 2)("a", "b"), "of <Z", id="wchar_t*"),
        pytest.param((ctypes.POINTER(ctypes.c_int) * 2)(), "of &<i", id="pointers"),
        pytest.param((ctypes.CFUNCTYPE(None) * 2)(), r"of X\{\}", id="functions"),
    ],
)
def test_an_array_of_pointers_is_refused_with_its_type(lender: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*: its elements are pointers"):
        acquire(lender)


@pytest.mark.parametrize("mask", [[0, 1], False, np.ma.nomask])
def test_an_array_with_a_mask_is_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"MaskedArray has a mask, .*array\.filled"):
        acquire(np.ma.array([1.0, 2.0], mask=mask))


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="it came with NumPy 2.0")
def test_strings_of_any_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"StringDType.*: its elements are pointers"):
        acquire(np.array(["a"], dtype=np.dtypes.StringDType()))


@pytest.mark.parametrize(
    ("lender", "nbytes"),
    [
        pytest.param(np.zeros(2, [("O", "i4"), ("Over", "f4"), ("z", "S3")]), 22, id="names"),
        pytest.param(np.zeros(2, np.complex128), 32, id="complex"),
        pytest.param(np.zeros(2, [("c", "c8"), ("t", "M8[s]")]), 32, id="dates"),
        pytest.param((ctypes.c_void_p * 2)(), 16, id="addresses"),
        pytest.param(np.zeros(2, "U4"), 32, id="text"),
    ],
)
def test_what_only_looks_like_pointers_is_acquired(lender: Any, nbytes: int) -> None:
    assert acquire(lender).nbytes == nbytes


@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 688 came with Python 3.12")
def test_python_lender_is_given_back_exactly_once() -> None:
    class Lender:
        def __init__(self) -> None:
            self.memory, self.released = bytearray(8), 0

        def __buffer__(self, flags: int) -> memoryview:
            return memoryview(self.memory)

        def __release_buffer__(self, view: memoryview) -> None:
            self.released += 1
            buffer.release()  # a hook that comes back

    lender = Lender()
    buffer = acquire(lender)
    assert (buffer.nbytes, buffer.readonly, lender.released) == (8, False, 0)
    buffer.release()
    lender.memory.append(1)
    assert lender.released == 1


# -- __cuda_array_interface__


@pytest.mark.parametrize(
    ("changes", "nbytes", "itemsize"),
    [
        ({}, 48, 4),
        ({"version": 2}, 48, 4),
        ({"strides": "absent"}, 48, 4),
        ({"strides": (16, 4)}, 48, 4),
        ({"strides": (4, 12)}, 48, 4),
        ({"shape": (np.int64(3),), "typestr": "<V2"}, 6, 2),
        ({"shape": (), "typestr": "|b1"}, 1, 1),
        ({"typestr": "<M8[ns]"}, 96, 8),
        ({"mask": None}, 48, 4),
    ],
)
def test_cuda_arrays_are_acquired_with_their_memory(changes: dict[str, Any], nbytes: int, itemsize: int) -> None:
    buffer = acquire(Cuda(**changes))
    assert (buffer.address, buffer.nbytes, buffer.itemsize) == (0x7F0000000000, nbytes, itemsize)
    assert (buffer.source, buffer.device, buffer.device_id) == ("cuda_array_interface", "cuda", -1)
    assert not buffer.readonly


def test_a_read_only_cuda_array_is_read_only() -> None:
    assert acquire(Cuda(data=(4096, True))).readonly


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((2, 3), ("cuda", 3)),
        ((13, 1), ("cuda_managed", 1)),
        ((10, 2), ("rocm", 2)),
        ((1, 0), ("cuda", -1)),
        ((7, 0), ("cuda", -1)),
        (("cuda", 0), ("cuda", -1)),
    ],
)
def test_cuda_device_is_asked_of_dlpack(device: tuple[Any, Any], expected: tuple[str, int]) -> None:
    buffer = acquire(CudaOnDevice(device))
    assert (buffer.device, buffer.device_id) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "absent", "data": "absent"}, "lacks shape, data"),
        ({"version": 1}, "version 1, expected 2 or 3"),
        ({"version": None}, "version None"),
        ({"mask": Cuda()}, "has a mask"),
        ({"shape": 12}, "shape is 12, expected a tuple"),
        ({"shape": (3, 4.0)}, "expected integers"),
        ({"shape": (2**63,)}, "expected integers of 64 bits"),
        ({"shape": (1,) * 65}, "at most 64"),
        ({"shape": (3, -4)}, "negative length"),
        ({"shape": (2**62, 2)}, r"more than 2\*\*63-1"),
        ({"strides": (4,)}, r"strides \(4,\) for shape \(3, 4\)"),
        ({"typestr": "f4"}, "typestr 'f4'"),
        ({"typestr": "<U4"}, "whole bytes"),
        ({"typestr": "|O8"}, "whole bytes"),
        ({"typestr": "<f0"}, "whole bytes"),
        ({"typestr": 4}, "typestr 4"),
        ({"data": 4096}, "expected \\(pointer, readonly\\)"),
        ({"data": (4096,)}, "expected \\(pointer, readonly\\)"),
        ({"data": ("0x10", False)}, "expected an integer as the pointer"),
        ({"data": (-1, False)}, "not a 64-bit address"),
        ({"data": (2**64, False)}, "not a 64-bit address"),
        ({"data": (0, False)}, "null pointer for 48 bytes"),
        ({"data": (None, False)}, "null pointer for 48 bytes"),
        ({"data": (2**64 - 47, False)}, "pass the end of the address space"),
    ],
)
def test_a_malformed_cuda_interface_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BufferError, match=message):
        acquire(Cuda(**changes))


def test_a_cuda_array_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not contiguous: shape \(3, 4\), strides \(32, 4\) in bytes"):
        acquire(Cuda(strides=(32, 4)))


def test_a_cuda_interface_that_is_no_dict_is_refused() -> None:
    lender = Cuda()
    lender.__cuda_array_interface__ = None  # type: ignore[assignment]
    with pytest.raises(BufferError, match="it is NoneType, expected a dict"):
        acquire(lender)


# -- what holds for all


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False), st.integers(1, 2))
def test_contiguity_is_what_numpy_says(shape: list[int], random: Any, step: int) -> None:
    whole = np.zeros([*shape, 2], dtype=np.int16)[..., ::step]
    axes = list(range(whole.ndim))
    random.shuffle(axes)
    lender = whole.transpose(axes)
    dense = lender.flags.c_contiguous or lender.flags.f_contiguous
    for candidate in (lender, Cuda(shape=lender.shape, strides=lender.strides, typestr="<i2")):
        if dense:
            assert acquire(candidate).nbytes == lender.nbytes
        else:
            with pytest.raises(ValueError, match="not contiguous"):
                acquire(candidate)


@pytest.mark.parametrize("make", [lambda: bytearray(64), Cuda, lambda: np.arange(9)])
def test_refcounts_return_to_the_baseline(make: Callable[[], Any]) -> None:
    lender = make()
    baseline = sys.getrefcount(lender)
    for _ in range(50):
        acquire(lender).release()
        kept = acquire(lender)
    assert sys.getrefcount(lender) in (baseline, baseline + 1)
    del kept
    assert sys.getrefcount(lender) == baseline


@pytest.mark.parametrize("bad", [memoryview(bytearray(8))[::2], Cuda(typestr="<U4"), Cuda(strides=(1, 1))])
def test_refcounts_return_after_failures(bad: Any) -> None:
    baseline = sys.getrefcount(bad)
    for _ in range(50):
        with pytest.raises((ValueError, BufferError)):
            acquire(bad)
    assert sys.getrefcount(bad) == baseline


def test_a_buffer_keeps_its_lender_until_release() -> None:
    lender = Cuda()
    alive = weakref.ref(lender)
    buffer = acquire(lender)
    del lender
    gc.collect()
    assert alive() is not None
    buffer.release()
    assert alive() is None
    assert (buffer.address, buffer.nbytes) == (0, 0)
    assert "released" in repr(buffer)


def test_a_cycle_of_lender_and_buffer_is_collected() -> None:
    class Lender(bytearray):
        buffer: AcquiredBuffer

    lender = Lender(8)
    lender.buffer = acquire(lender)
    alive = weakref.ref(lender)
    del lender
    gc.collect()
    assert alive() is None


def test_a_buffer_is_made_by_acquire_alone() -> None:
    with pytest.raises(TypeError, match=r"call acquire\(obj\)"):
        AcquiredBuffer(b"bytes")  # type: ignore[arg-type]
    buffer = acquire(b"bytes")
    assert repr(buffer).startswith("<AcquiredBuffer of bytes, 5 bytes read-only, at 0x")
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError):
            copied(buffer)
    with pytest.raises(AttributeError):
        buffer.address = 1  # type: ignore[misc]
