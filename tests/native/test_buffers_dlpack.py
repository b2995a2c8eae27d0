"""Borrowed memory through DLPack, from an honest exporter and from forged ones: every deleter runs exactly once."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote_native.system.buffers import acquire
from support.gpu.dlpack import DLTensor

# -- a DLPack exporter made of ctypes, after https://dmlc.github.io/dlpack/latest/c_api.html


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


def c_api(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


capsule_new = c_api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# A capsule that is being destroyed has no reference left to count: it goes by address.
capsule_is_valid = c_api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
capsule_get_name = c_api("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)


class Tensor:
    """Lend host memory through DLPack, with every field open to forgery; count the deleter's calls."""

    def __init__(
        self, array: Any = None, *, versioned: bool = True, major: int = 1, flags: int = 0, **fields: Any
    ) -> None:
        self.array = np.arange(12, dtype=np.int32).reshape(3, 4) if array is None else array
        self.versioned, self.deleted, self.exported = versioned, 0, 0
        self.device: tuple[int, int] = fields.pop("device", (1, 0))
        self.capsule_name: bytes | None = fields.pop("capsule_name", None)
        self.on_delete: Callable[[], object] | None = None
        shape = fields.pop("shape", self.array.shape)
        strides = fields.pop("strides", tuple(step // self.array.itemsize for step in self.array.strides))
        self.shape = None if shape is None else (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * max(1, len(strides)))(*strides)
        tensor = {
            "data": self.array.ctypes.data,
            "device_type": self.device[0],
            "device_id": self.device[1],
            "ndim": 0 if shape is None else len(shape),
            "bits": self.array.itemsize * 8,
            "lanes": 1,
            "shape": self.shape,
            "strides": self.strides,
        } | fields
        self.deleter = DELETER(self._delete)
        self.destructor = DELETER(self._destroy)
        self.managed: Any = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        self.managed.deleter = self.deleter
        self.managed.dl_tensor = DLTensor(**{key: value for key, value in tensor.items() if value is not None})
        if versioned:
            self.managed.major, self.managed.flags = major, flags

    def _delete(self, address: int) -> None:
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1
        if self.on_delete:
            self.on_delete()

    def _destroy(self, capsule: int) -> None:
        if capsule_is_valid(capsule, self.name):
            self._delete(ctypes.addressof(self.managed))

    @property
    def name(self) -> bytes:
        return b"dltensor_versioned" if self.versioned else b"dltensor"

    def export(self) -> Any:
        self.exported += 1
        return capsule_new(
            ctypes.addressof(self.managed),
            self.capsule_name or self.name,
            ctypes.cast(self.destructor, ctypes.c_void_p),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: None = None, max_version: tuple[int, int] | None = None) -> Any:
        assert not self.versioned or (max_version is not None and max_version >= (1, 0))
        return self.export()


class OldTensor(Tensor):
    """A lender from before DLPack 1.0, which knows no max_version."""

    def __init__(self, array: Any = None, **fields: Any) -> None:
        super().__init__(array, versioned=False, **fields)

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return self.export()


# -- DLPack


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
def test_a_dlpack_tensor_is_acquired_and_deleted_on_release(kind: type[Tensor]) -> None:
    lender = kind()
    buffer = acquire(lender)
    assert (buffer.address, buffer.nbytes, buffer.itemsize) == (lender.array.ctypes.data, 48, 4)
    assert (buffer.source, buffer.device, buffer.device_id, buffer.readonly) == ("dlpack", "cpu", 0, False)
    assert lender.deleted == 0
    buffer.release()
    assert lender.deleted == 1


def test_an_old_capsule_from_a_lender_that_knows_versions_is_taken() -> None:
    lender = Tensor(versioned=False)
    acquire(lender).release()
    assert (lender.exported, lender.deleted) == (1, 1)


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
def test_dlpack_deleter_runs_exactly_once(kind: type[Tensor]) -> None:
    lender = kind()
    capsules = [lender.export()]
    lender.export = lambda: capsules[0]  # type: ignore[method-assign]
    buffer = acquire(lender)
    assert capsule_get_name(capsules[0]) == b"used_" + lender.name
    with pytest.raises(BufferError, match="expected a fresh capsule"):
        acquire(lender)
    lender.on_delete = buffer.release  # a deleter that comes back
    buffer.release()
    buffer.release()
    capsules.clear()
    lender.on_delete = None
    del buffer
    gc.collect()
    assert lender.deleted == 1


def test_dlpack_deleter_runs_when_the_buffer_is_dropped() -> None:
    lender = Tensor()
    acquire(lender)
    assert lender.deleted == 1


def test_a_dlpack_tensor_without_a_deleter_is_released() -> None:
    lender = Tensor()
    lender.managed.deleter = DELETER()
    acquire(lender).release()
    assert lender.deleted == 0


def test_dlpack_keeps_the_memory_alive_without_its_lender() -> None:
    lender = Tensor(np.full(3, 5, dtype=np.uint8))
    deleted: list[int] = []
    held, managed = (lender.array, lender.shape, lender.strides), lender.managed
    managed.deleter = DELETER(deleted.append)
    buffer = acquire(lender)
    gone = weakref.ref(lender)
    del lender
    gc.collect()
    assert ctypes.string_at(buffer.address, buffer.nbytes) == b"\5\5\5"
    assert (gone() is None, deleted) == (True, [])
    buffer.release()
    assert (deleted, len(held)) == ([ctypes.addressof(managed)], 3)


def test_the_read_only_flag_of_dlpack_makes_a_buffer_read_only() -> None:
    assert acquire(Tensor(flags=1)).readonly
    assert not acquire(Tensor(flags=1 << 40)).readonly


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
def test_the_byte_offset_of_dlpack_moves_the_address(kind: type[Tensor]) -> None:
    lender = kind(shape=(2, 4), byte_offset=16)
    buffer = acquire(lender)
    assert (buffer.address, buffer.nbytes) == (lender.array.ctypes.data + 16, 32)


@pytest.mark.parametrize(
    ("number", "name"), [(1, "cpu"), (2, "cuda"), (3, "cuda_host"), (10, "rocm"), (13, "cuda_managed")]
)
def test_dlpack_devices_are_told_by_name_and_number(number: int, name: str) -> None:
    buffer = acquire(Tensor(device=(number, 5)))
    assert (buffer.device, buffer.device_id) == (name, 5)


def test_dlpack_device_out_of_reach_is_refused_before_the_export() -> None:
    lender = Tensor(device=(7, 0))
    with pytest.raises(BufferError, match=r"device type 7, expected one of 1 \(cpu\)"):
        acquire(lender)
    assert lender.exported == 0


@pytest.mark.parametrize(
    ("strides", "shape", "dense"),
    [
        (None, (3, 4), True),
        ((4, 1), (3, 4), True),
        ((1, 3), (3, 4), True),
        ((99, 1), (1, 12), True),
        ((), (), True),
        ((2,), (6,), False),
        ((-1,), (6,), False),
        ((0, 1), (3, 4), False),
        ((5, 1), (2, 4), False),
    ],
)
def test_dlpack_strides_are_taken_only_where_memory_is_contiguous(
    strides: tuple[int, ...] | None, shape: tuple[int, ...], dense: bool
) -> None:
    lender = Tensor(shape=shape, strides=strides)
    if dense:
        assert acquire(lender).nbytes == 4 * math.prod(shape)
    else:
        with pytest.raises(ValueError, match=r"not contiguous.*in elements of 4-byte"):
            acquire(lender)
    assert lender.deleted == 1


@pytest.mark.parametrize(("bits", "lanes", "itemsize"), [(32, 1, 4), (16, 4, 8), (4, 2, 1), (8, 3, 3)])
def test_dlpack_elements_of_several_lanes_have_their_bytes(bits: int, lanes: int, itemsize: int) -> None:
    buffer = acquire(Tensor(shape=(2,), strides=None, bits=bits, lanes=lanes))
    assert (buffer.itemsize, buffer.nbytes) == (itemsize, 2 * itemsize)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"code": 3}, ValueError, "opaque handles"),
        ({"bits": 4}, ValueError, "elements of 1 x 4 bits, expected whole bytes"),
        ({"bits": 6, "lanes": 3}, ValueError, "3 x 6 bits"),
        ({"bits": 4, "lanes": 2, "flags": 4}, ValueError, "2 x 4 bits"),
        ({"bits": 0}, BufferError, "malformed.* 0 bits"),
        ({"lanes": 0}, BufferError, "malformed: 2 dimensions, a shape, 0 lanes"),
        ({"ndim": -1}, BufferError, "malformed: -1 dimensions"),
        ({"ndim": 65}, BufferError, "malformed: 65 dimensions"),
        ({"shape": None, "ndim": 1}, BufferError, "malformed: 1 dimensions, no shape"),
        ({"shape": (3, -4)}, BufferError, r"malformed: its shape \(3, -4\) has a negative length"),
        ({"shape": (-3, 0)}, BufferError, "negative length"),
        ({"shape": (2**32, 2**31)}, BufferError, r"more than 2\*\*63-1 bytes"),
        ({"shape": (2**62,), "strides": None}, BufferError, r"more than 2\*\*63-1 bytes"),
        ({"data": None}, BufferError, "null pointer for 48 bytes"),
        ({"data": None, "byte_offset": 64}, BufferError, "null pointer"),
        ({"byte_offset": 2**64 - 8}, BufferError, "pass the end of the address space"),
        ({"data": 2**64 - 47}, BufferError, "pass the end of the address space"),
        ({"device_type": 2**31 - 1}, BufferError, "on device type 2147483647, unlike its __dlpack_device__ said"),
        ({"flags": 2}, BufferError, "is a copy"),
        ({"major": 2}, BufferError, "DLPack version 2, expected 1"),
        ({"capsule_name": b"other"}, BufferError, "expected a fresh capsule"),
    ],
)
def test_forged_dlpack_tensors_are_refused_with_the_reason(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    lender = Tensor(**fields)
    with pytest.raises(error, match=message):
        acquire(lender)
    assert lender.deleted == (0 if "capsule_name" in fields else 1)


@pytest.mark.parametrize("answer", [None, 7, (1,), (1, 2, 3), ("cpu", 0)])
def test_a_malformed_dlpack_device_is_refused(answer: Any) -> None:
    lender = Tensor()
    lender.device = answer
    with pytest.raises(BufferError, match="malformed: __dlpack_device__ failed"):
        acquire(lender)


@pytest.mark.parametrize("answer", [None, b"dltensor", object()])
def test_an_export_that_is_no_dlpack_capsule_is_refused(answer: Any) -> None:
    lender = Tensor()
    lender.export = lambda: answer  # type: ignore[method-assign]
    with pytest.raises(BufferError, match="malformed: __dlpack__ returned"):
        acquire(lender)


@pytest.mark.parametrize("error", [RuntimeError("requires grad: call detach()"), TypeError("no"), BufferError("no")])
def test_dlpack_refusal_carries_the_lenders_words(error: Exception) -> None:
    lender = Tensor()

    def export() -> Any:
        raise error

    lender.export = export  # type: ignore[method-assign]
    with pytest.raises(BufferError, match="refuses to lend") as failure:
        acquire(lender)
    assert str(error) in str(failure.value)


# -- beside the other protocols


def test_the_order_is_cuda_then_buffer_then_dlpack() -> None:
    class Everything(bytearray):
        """Lends by all three."""

    lender: Any = Everything(8)
    lender.__dlpack_device__ = lender.__dlpack__ = None
    lender.__cuda_array_interface__ = {"version": 3, "shape": (8,), "typestr": "|u1", "data": (4096, False)}
    assert acquire(lender).source == "cuda_array_interface"
    del lender.__cuda_array_interface__
    assert acquire(lender).source == "buffer"
    assert acquire(Tensor()).source == "dlpack"


def test_the_next_protocol_is_asked_when_one_refuses() -> None:
    class Shy(Tensor):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise KeyError("float8_e4m3fn")

    lender = Shy()
    assert acquire(lender).source == "dlpack"
    lender.export = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(BufferError, match=r"__cuda_array_interface__: KeyError: 'float8_e4m3fn'; __dlpack__: ZeroDiv"):
        acquire(lender)


@pytest.mark.needs_torch
def test_torch_tensors_are_acquired_with_their_memory() -> None:
    import torch

    lender = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    buffer = acquire(lender)
    assert (buffer.address, buffer.nbytes, buffer.device) == (lender.data_ptr(), 24, "cpu")
    with pytest.raises(ValueError, match="not contiguous"):
        acquire(lender[:, ::2])
    with pytest.raises(BufferError, match="refuses to lend"):
        acquire(torch.ones(3, requires_grad=True))


# -- what holds for all


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False), st.integers(1, 2))
def test_contiguity_is_what_numpy_says(shape: list[int], random: Any, step: int) -> None:
    whole = np.zeros([*shape, 2], dtype=np.int16)[..., ::step]
    axes = list(range(whole.ndim))
    random.shuffle(axes)
    lender = whole.transpose(axes)
    dense = lender.flags.c_contiguous or lender.flags.f_contiguous
    if dense:
        assert acquire(Tensor(lender)).nbytes == lender.nbytes
    else:
        with pytest.raises(ValueError, match="not contiguous"):
            acquire(Tensor(lender))


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
@pytest.mark.parametrize(("bits", "accepted"), [(32, True), (4, False)])
def test_refcounts_return_to_the_baseline(kind: type[Tensor], bits: int, accepted: bool) -> None:
    lender = kind(bits=bits)
    baseline = sys.getrefcount(lender)
    for _ in range(50):
        if accepted:
            acquire(lender).release()
        else:
            with pytest.raises(ValueError, match="4 bits"):
                acquire(lender)
    assert sys.getrefcount(lender) == baseline
    assert lender.deleted == lender.exported == 50


@pytest.mark.parametrize(("device", "asked"), [(1, {}), (2, {"stream": -1}), (13, {"stream": -1})])
@pytest.mark.parametrize("versioned", [True, False])
def test_no_order_is_asked_of_a_gpu_s_streams(device, asked, versioned):
    """By default it would be made with the legacy stream, which breaks the capture of a graph."""
    told: list[dict[str, Any]] = []

    class Lender:
        def __dlpack_device__(self) -> tuple[int, int]:
            return device, 0

        def __dlpack__(self, **arguments: Any) -> Any:
            if not versioned and "max_version" in arguments:
                raise TypeError
            told.append(arguments)
            raise BufferError("seen enough")

    with pytest.raises(BufferError, match="seen enough"):
        acquire(Lender())
    assert told == [{"max_version": (1, 1), **asked} if versioned else asked]
