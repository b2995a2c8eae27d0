# cython: auto_pickle=False
"""Memory of callers: which arrays are accepted, how a buffer is held, and how much a message takes as objects."""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDED, PyBUF_STRIDED_RO, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer)
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint64_t, uintptr_t

import operator
import re
import sys

# Refuse arrays that must not be used as the bytes of their elements: those of pointers, and those with a mask.
#
# Bytes of a peer must not become a pointer that this process follows. So an array is refused if its elements, or fields
# of them, are Python objects or ctypes pointers. A mask lies beside the elements, which would travel without it.

# Parts of a PEP 3118 format. ctypes writes z for char* and Z for wchar_t*; NumPy writes Zf, Zd and Zg for complex
# numbers.
cdef object FIELD_NAME = re.compile(r":[^:]*:")
cdef object POINTER = re.compile(r"[O&Xz]|Z(?![fdg])")


cdef int get_view(object obj, Py_buffer* view) except -1:
    """Get a view, writable if it can be, with a format if there is one: NumPy cannot name datetime64 and bfloat16."""
    for access in (PyBUF_STRIDED, PyBUF_STRIDED_RO):
        for format in (PyBUF_FORMAT, 0):
            try:
                PyObject_GetBuffer(obj, view, access | format)
                return 0
            except (BufferError, TypeError, ValueError):  # NumPy raises ValueError for read-only memory
                if access == PyBUF_STRIDED_RO and format == 0:
                    raise
    return 0


cdef int refuse_mask(object obj) except -1:
    """Raise ValueError for an array with a mask."""
    masked = sys.modules.get("numpy.ma")  # before its import there are no masked arrays
    if masked is not None and isinstance(obj, masked.MaskedArray):
        raise ValueError(
            f"{type(obj).__qualname__} has a mask, which lies outside its elements; use "
            "array.filled(value), or array.data"
        )
    return 0


cpdef int check_elements(object obj, str format) except -1:
    """Raise ValueError for an array of pointers, or with a mask. `format` is its buffer's format, or None."""
    refuse_mask(obj)
    if format is None:
        # NumPy has types without a format: its strings of any length, and dates beside objects.
        found = getattr(getattr(obj, "dtype", None), "hasobject", False) is True
    else:
        # Most formats are one character, and every registration looks at one.
        found = format == "O" if len(format) == 1 else POINTER.search(FIELD_NAME.sub("", format)) is not None
    if found:
        raise ValueError(
            f"{type(obj).__qualname__} of {getattr(obj, 'dtype', format)}: its elements are pointers, to Python "
            "objects or other memory, and a peer's bytes would overwrite them; use an array of numbers or bytes"
        )
    return 0


# Borrowed memory: one flat run of bytes, from any lender.
#
# `acquire(obj)` asks an object for its memory and returns an `AcquiredBuffer`: an address, a length, and the kind of
# memory. The buffer keeps the lender alive *and exported* (a bytearray cannot be resized, an mmap cannot be closed, a
# tensor cannot be freed) until `release()`. This module must not know of registration, of rails or of the meaning of
# the bytes.
#
# `acquire` asks by three protocols, in this order:
#
# | protocol                   | memory    | what is held until release    | specified by                              |
# |----------------------------|-----------|-------------------------------|-------------------------------------------|
# | `__cuda_array_interface__` | GPU       | a reference to the object     | CUDA Array Interface (numba), v2 and v3   |
# | buffer protocol            | host      | the `Py_buffer`               | PEP 3118                                  |
# | `__dlpack__`               | host, GPU | the tensor, until its deleter | DLPack 0.x (unversioned) and 1.x          |
#
# If a lender refuses one protocol (because the protocol has no name for its dtype, say), `acquire` asks by the next
# one. It raises an error, with the lender's reasons, only when the lender refuses every protocol that it has.
#
# `acquire` checks whatever a lender says before it believes it, because these numbers end up in a NIC's page table. It
# takes an address and a length alone; it reads no byte, so it synchronises no stream. Kernels that write the memory
# must be finished, or ordered by the caller, before the caller submits a transfer that reads it.
#
# Memory is flat: an array counts as contiguous in C or in Fortran order, and stands for its bytes in the order of
# memory.

__all__ = ["AcquiredBuffer", "acquire", "section"]

cdef enum:
    MAX_NDIM = 64  # PyBUF_MAX_NDIM, and NumPy's limit; a larger number is garbage, not an array

cdef enum:
    FLAG_READ_ONLY = 1
    FLAG_IS_COPIED = 2
    FLAG_SUBBYTE_PADDED = 4

cdef enum:
    OPAQUE_HANDLE = 3  # of DLDataTypeCode

cdef enum:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3

# DLDeviceType, without the devices whose memory has no address: OpenCL and Vulkan hand out handles.
cdef dict DEVICES = {1: "cpu", 2: "cuda", 3: "cuda_host", 10: "rocm", 13: "cuda_managed"}

# The kinds whose number counts whole bytes: not t (bits), U (characters of four bytes) or O (pointers).
cdef object TYPESTR = re.compile(r"[<>|=][biufcmMSV]([0-9]{1,18})(?:\[[^\]]*\])?")

cdef str ACCEPTED = (
    "__cuda_array_interface__ (cupy, numba, torch on a GPU), the buffer protocol (bytes, bytearray, memoryview, mmap, "
    "array.array, ctypes, numpy) or __dlpack__ (torch, jax and other tensors)"
)


@cython.final
@cython.no_gc_clear  # a cleared view would never be given back, and its lender would stay locked for good
cdef class AcquiredBuffer:
    """Memory lent by another object, held until `release()` or until this object is freed.

    `nbytes` is the length and `itemsize` an element's size, in bytes. `device` is "cpu", "cuda", "cuda_host",
    "cuda_managed" or "rocm"; `device_id` is -1 where the lender does not say which device it is. `source` is the
    protocol that was used: "buffer", "dlpack" or "cuda_array_interface". Once released, `address` and `nbytes` are 0.
    """

    def __cinit__(self):
        self.device = ""
        self.source = ""
        self._lender = ""

    def __init__(self, *args, **kwargs):
        raise TypeError("an AcquiredBuffer is not built by hand: call acquire(obj)")

    def __dealloc__(self):
        self.release()

    def __repr__(self):
        if self.address == 0:
            return f"<AcquiredBuffer of {self._lender}, released>"
        access = "read-only" if self.readonly else "writable"
        where = f"at {self.address:#x} on {self.device}:{self.device_id}"
        return f"<AcquiredBuffer of {self._lender}, {self.nbytes} bytes {access}, {where}>"

    cdef int lend(self, Py_buffer* view, object exporter, uint64_t start, uint64_t nbytes, int flags) except -1:
        """Fill a view of some bytes. A release then waits until `take_back` has returned every view. Raises BufferError
        for memory that was released, and for memory of a device.
        """
        if self._dropped or self.address == 0:
            raise BufferError("the memory was released")
        if self.device_type not in (DL_CPU, DL_CUDA_HOST):
            raise BufferError(f"memory of {self.device!r} has no view on the host")
        PyBuffer_FillInfo(view, exporter, <void*> (self.address + start), nbytes, self.readonly, flags)
        self._views += 1
        return 0

    cdef int take_back(self) except -1:
        """Record that a view has gone, and carry out a release that waited for it."""
        self._views -= 1
        if self._views == 0 and self._dropped:
            self.give_back()
        return 0

    cpdef release(self):
        """Give the memory back to its lender, once no view of it is left. Idempotent."""
        self._dropped = True
        if self._views == 0:
            self.give_back()

    cdef int give_back(self) except -1:
        cdef DLManagedTensor* tensor = self._tensor
        cdef DLManagedTensorVersioned* versioned = self._versioned
        cdef bint viewed = self._viewed
        # Emptied first, because a lender's release hook runs foreign code, which may come back here.
        self._tensor = NULL
        self._versioned = NULL
        self._viewed = False
        self.address = 0
        self.nbytes = 0
        if tensor != NULL and tensor.deleter != NULL:
            tensor.deleter(tensor)
        if versioned != NULL and versioned.deleter != NULL:
            versioned.deleter(versioned)
        if viewed:
            PyBuffer_Release(&self._view)
        self._owner = None
        return 0


cpdef AcquiredBuffer acquire(object obj):
    """Borrow the memory of an object and return it as an AcquiredBuffer.

    The buffer owns what the protocol hands out and gives it back on release. It is writable where the lender can lend
    the memory so. Raises TypeError for an object that lends no memory, ValueError for an array that cannot be used as
    it is (it is empty, not contiguous, has a NumPy mask, or its elements are pointers or not whole bytes), BufferError
    for a lender that refuses, contradicts itself or has a mask on a GPU array.
    """
    cdef list refusals = []
    cdef AcquiredBuffer buffer = _from_cuda(obj, refusals)
    if buffer is None:
        buffer = _from_view(obj, refusals)
    if buffer is None:
        buffer = _from_dlpack(obj, refusals)
    if buffer is not None:
        return buffer
    if refusals:
        said = "; ".join([f"{protocol}: {type(error).__name__}: {error}" for protocol, error in refusals])
        raise BufferError(
            f"{_name(obj)} refuses to lend its memory ({said}); if its element type is the reason, view it as uint8"
        ) from refusals[0][1]
    raise TypeError(f"{_name(obj)} has no memory to lend: expected an object with {ACCEPTED}")


cpdef AcquiredBuffer section(AcquiredBuffer whole, uint64_t start, uint64_t stop):
    """Return bytes `start` to `stop` of an AcquiredBuffer as one of their own, which keeps the whole one alive. Raises
    ValueError for a range outside of it.
    """
    cdef AcquiredBuffer part = _blank(whole, whole.source)
    if not start <= stop <= whole.nbytes:
        raise ValueError(f"bytes {start} to {stop} leave a buffer of {whole.nbytes} bytes")
    part.address = whole.address + start
    part.nbytes = stop - start
    part.itemsize = 1
    part.readonly = whole.readonly
    part.device = whole.device
    part.device_id = whole.device_id
    part._owner = whole
    return part


cdef str _name(object obj):
    """Return the name of an object's type as people write it."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


cdef AcquiredBuffer _blank(object obj, str source):
    """Return an AcquiredBuffer that holds nothing yet."""
    cdef AcquiredBuffer buffer = AcquiredBuffer.__new__(AcquiredBuffer)
    buffer.source = source
    buffer._lender = _name(obj)
    return buffer


# -- shared by all protocols: shape, strides, size, address


cdef bint _is_dense(int ndim, const int64_t* shape, const int64_t* strides, int64_t unit, bint fortran) noexcept:
    """Return whether the strides (in multiples of `unit` for one element) leave no gap in C or in Fortran order."""
    cdef int64_t expected = unit
    cdef int step, axis
    for step in range(ndim):
        axis = step if fortran else ndim - 1 - step
        # The stride of an axis of one element is never used, and exporters put anything there.
        if shape[axis] != 1 and strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


cdef int64_t _measure(
    str what, int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize, int64_t unit
) except -1:
    """Check that an array is well-formed, not empty and contiguous, and return its length in bytes.

    `unit` is the stride of one element: `itemsize` where strides are in bytes, 1 where they are in elements. `strides`
    NULL means C order. Raises BufferError for a malformed array, ValueError for one that is empty or not contiguous.
    """
    cdef int64_t nbytes = itemsize
    cdef bint empty = False
    cdef int axis
    for axis in range(ndim):
        if shape[axis] < 0:
            raise BufferError(f"{what} is malformed: its shape {_listed(ndim, shape)} has a negative length")
        empty = empty or shape[axis] == 0
    if empty:
        raise ValueError(f"{what} is empty (shape {_listed(ndim, shape)}): there is no memory to use")
    for axis in range(ndim):
        if nbytes > INT64_MAX // shape[axis]:
            raise BufferError(
                f"{what} is malformed: shape {_listed(ndim, shape)} of {itemsize}-byte elements is more than 2**63-1 "
                "bytes"
            )
        nbytes *= shape[axis]
    if (strides == NULL or _is_dense(ndim, shape, strides, unit, fortran=False)
            or _is_dense(ndim, shape, strides, unit, fortran=True)):
        return nbytes
    raise ValueError(
        f"{what} is not contiguous: shape {_listed(ndim, shape)}, strides {_listed(ndim, strides)} in "
        f"{'elements' if unit != itemsize else 'bytes'} of {itemsize}-byte elements; "
        "call numpy.ascontiguousarray(array) or tensor.contiguous() and use what it returns"
    )


cdef tuple _listed(int ndim, const int64_t* values):
    """Return C integers as a tuple, to put it in an error message."""
    return tuple([values[axis] for axis in range(ndim)])


cdef int _locate(AcquiredBuffer buffer, str what, uint64_t data, uint64_t offset, int64_t nbytes) except -1:
    """Set the address and the length, after a check that they name memory. Raises BufferError."""
    if data == 0:
        raise BufferError(f"{what} is malformed: a null pointer for {nbytes} bytes")
    if offset > UINT64_MAX - data or <uint64_t> nbytes > UINT64_MAX - (data + offset):
        raise BufferError(
            f"{what} is malformed: {nbytes} bytes at {data:#x} + {offset} pass the end of the address space"
        )
    buffer.address = data + offset
    buffer.nbytes = nbytes
    return 0


# -- __cuda_array_interface__: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html


cdef AcquiredBuffer _from_cuda(object obj, list refusals):
    """Return an AcquiredBuffer over GPU memory, or None where the object has no such interface or refuses it."""
    cdef int64_t shape[MAX_NDIM]
    cdef int64_t strides[MAX_NDIM]
    cdef bint strided
    cdef int ndim
    try:
        interface = obj.__cuda_array_interface__
    except AttributeError:
        return None
    except Exception as error:
        refusals.append(("__cuda_array_interface__", error))
        return None
    cdef AcquiredBuffer buffer = _blank(obj, "cuda_array_interface")
    cdef str what = f"__cuda_array_interface__ of {buffer._lender}"
    cdef uint64_t pointer = _cuda_header(buffer, what, interface)
    ndim = _integers(f"{what}: shape", interface["shape"], shape)
    strided = interface.get("strides") is not None
    if strided and _integers(f"{what}: strides", interface["strides"], strides) != ndim:
        raise BufferError(f"{what} is malformed: strides {interface['strides']!r} for shape {interface['shape']!r}")
    nbytes = _measure(what, ndim, shape, strides if strided else NULL, buffer.itemsize, buffer.itemsize)
    _locate(buffer, what, pointer, 0, nbytes)
    _cuda_device(buffer, obj)
    buffer._owner = obj
    return buffer


cdef uint64_t _cuda_header(AcquiredBuffer buffer, str what, object interface) except? 0:
    """Check everything in the interface except its extent, set itemsize and readonly, and return the pointer."""
    if not isinstance(interface, dict):
        raise BufferError(f"{what} is malformed: it is {_name(interface)}, expected a dict")
    missing = [key for key in ("version", "shape", "typestr", "data") if key not in interface]
    if missing:
        raise BufferError(f"{what} is malformed: it lacks {', '.join(missing)}")
    if interface["version"] not in (2, 3):
        raise BufferError(f"{what} has version {interface['version']!r}, expected 2 or 3")
    if interface.get("mask") is not None:
        raise BufferError(f"{what} has a mask: the mask lies outside the elements; use the array without its mask")
    typestr = interface["typestr"]
    match = TYPESTR.fullmatch(typestr) if isinstance(typestr, str) else None
    if match is None or int(match[1]) == 0:
        raise BufferError(f"{what} is malformed: typestr {typestr!r}, expected a type of whole bytes such as '<f4'")
    buffer.itemsize = int(match[1])
    data = interface["data"]
    if not isinstance(data, tuple) or len(data) != 2:
        raise BufferError(f"{what} is malformed: data {data!r}, expected (pointer, readonly)")
    buffer.readonly = bool(data[1])
    try:
        pointer = 0 if data[0] is None else operator.index(data[0])
    except TypeError:
        raise BufferError(f"{what} is malformed: data {data!r}, expected an integer as the pointer") from None
    if not 0 <= pointer <= UINT64_MAX:
        raise BufferError(f"{what} is malformed: the pointer {pointer} is not a 64-bit address")
    return pointer


cdef int _integers(str what, object values, int64_t* out) except -1:
    """Copy a tuple of integers into an array of MAX_NDIM and return how many there are."""
    cdef int count = 0
    if not isinstance(values, (tuple, list)) or len(values) > MAX_NDIM:
        raise BufferError(f"{what} is {values!r}, expected a tuple of at most {MAX_NDIM} integers")
    for value in values:
        try:
            out[count] = operator.index(value)
        except (TypeError, OverflowError):
            raise BufferError(f"{what} is {values!r}, expected integers of 64 bits") from None
        count += 1
    return count


cdef int _cuda_device(AcquiredBuffer buffer, object obj) except -1:
    """Set the device. The interface does not say which it is, but most objects that have it also speak DLPack."""
    buffer.device_type = DL_CUDA
    buffer.device_id = -1
    try:
        kind, ident = obj.__dlpack_device__()
        if kind != DL_CPU and int(kind) in DEVICES:
            buffer.device_type, buffer.device_id = int(kind), int(ident)
    except Exception:  # without that hint the device stays "cuda" and -1
        pass
    buffer.device = DEVICES[buffer.device_type]
    return 0


# -- the buffer protocol


cdef AcquiredBuffer _from_view(object obj, list refusals):
    """Return an AcquiredBuffer over a Py_buffer, or None where the object has no such protocol or refuses it."""
    cdef AcquiredBuffer buffer
    cdef Py_buffer* view
    cdef str what
    if not PyObject_CheckBuffer(obj):
        return None
    buffer = _blank(obj, "buffer")
    view = &buffer._view
    try:
        get_view(obj, view)
    except Exception as error:
        refusals.append(("buffer protocol", error))
        return None
    buffer._viewed = True  # from here on the view goes back with the buffer, even if a check fails
    check_elements(obj, None if view.format == NULL else view.format.decode("utf-8", "replace"))
    what = f"the buffer of {buffer._lender}"
    if view.len < 0 or view.itemsize < 0 or view.ndim < 0 or view.ndim > MAX_NDIM:
        raise BufferError(f"{what} is malformed: {view.len} bytes, itemsize {view.itemsize}, {view.ndim} dimensions")
    if view.len == 0:
        raise ValueError(f"{what} is empty (0 bytes): there is no memory to use")
    if view.shape != NULL:
        nbytes = _measure(
            what, view.ndim, <const int64_t*> view.shape, <const int64_t*> view.strides, view.itemsize, view.itemsize
        )
        if nbytes != view.len:
            raise BufferError(f"{what} is malformed: its shape makes {nbytes} bytes, its length is {view.len}")
    _locate(buffer, what, <uintptr_t> view.buf, 0, view.len)
    buffer.itemsize = view.itemsize
    buffer.readonly = view.readonly
    buffer.device_type = DL_CPU
    buffer.device = DEVICES[DL_CPU]
    return buffer


# -- DLPack: https://dmlc.github.io/dlpack/latest/python_spec.html


cdef AcquiredBuffer _from_dlpack(object obj, list refusals):
    """Return an AcquiredBuffer over a managed tensor, or None where the object has no such protocol or refuses it.

    The buffer claims the tensor before anything of it is checked. If a check fails, the tensor goes back with the
    buffer, whose __dealloc__ calls the deleter with the exception put aside.
    """
    cdef AcquiredBuffer buffer
    cdef str what
    if not hasattr(obj, "__dlpack__"):
        return None
    buffer = _blank(obj, "dlpack")
    what = f"the DLPack tensor of {buffer._lender}"
    kind = _dlpack_device(what, obj)
    try:
        capsule = _dlpack_capsule(obj, kind)
    except Exception as error:
        refusals.append(("__dlpack__", error))
        return None
    said = repr(capsule)
    claimed = _claim(buffer, capsule)
    capsule = None  # dropped here, while no exception is set, because its destructor may be Python
    if not claimed:
        raise BufferError(
            f"{what} is malformed: __dlpack__ returned {said}, expected a fresh capsule named dltensor or "
            "dltensor_versioned"
        )
    if buffer._tensor != NULL:
        _take_tensor(buffer, what, &buffer._tensor.dl_tensor, 0)
        return buffer
    if buffer._versioned.version.major != 1:  # then only the deleter has a known place
        raise BufferError(f"{what} has DLPack version {buffer._versioned.version.major}, expected 1")
    _take_tensor(buffer, what, &buffer._versioned.dl_tensor, buffer._versioned.flags)
    return buffer


cdef bint _claim(AcquiredBuffer buffer, object capsule) except -1:
    """Take the capsule's tensor into the buffer and rename the capsule; return whether there was one to take."""
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        buffer._versioned = <DLManagedTensorVersioned*> PyCapsule_GetPointer(capsule, "dltensor_versioned")
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
    elif PyCapsule_IsValid(capsule, "dltensor"):
        buffer._tensor = <DLManagedTensor*> PyCapsule_GetPointer(capsule, "dltensor")
        PyCapsule_SetName(capsule, "used_dltensor")
    else:
        return False
    return True


cdef int _dlpack_device(str what, object obj) except -1:
    """Return the kind of device. Raises BufferError, before anything is exported, if memory of that kind has no
    address.
    """
    try:
        kind, _ = obj.__dlpack_device__()
        known = int(kind) in DEVICES
    except Exception as error:
        raise BufferError(f"{what} is malformed: __dlpack_device__ failed ({type(error).__name__}: {error})") from error
    if not known:
        raise BufferError(
            f"{what} is on DLPack device type {int(kind)}, expected one of "
            f"{', '.join([f'{number} ({name})' for number, name in DEVICES.items()])}; copy it to one of these"
        )
    return int(kind)


cdef object _dlpack_capsule(object obj, int kind):
    """Return the lender's capsule, versioned where the lender can do that.

    For memory that is not the host's, -1 asks for no order with any stream, because nothing is read here. Without an
    argument the lender would order it with the legacy default stream, which breaks the capture of a graph.
    """
    order = {} if kind == DL_CPU else {"stream": -1}
    try:
        return obj.__dlpack__(max_version=(1, 1), **order)
    except TypeError:  # exporters from before DLPack 1.0 do not know max_version
        return obj.__dlpack__(**order)


cdef int _take_tensor(AcquiredBuffer buffer, str what, DLTensor* tensor, uint64_t flags) except -1:
    """Check a tensor and describe it in the buffer that owns it."""
    cdef int64_t bits = <int64_t> tensor.dtype.bits * tensor.dtype.lanes
    if tensor.device.device_type not in DEVICES:
        raise BufferError(
            f"{what} is malformed: it is on device type {tensor.device.device_type}, unlike its __dlpack_device__ said")
    if flags & FLAG_IS_COPIED:
        raise BufferError(
            f"{what} is a copy, so writes would not reach the original; make the copy yourself and use that")
    if tensor.ndim < 0 or tensor.ndim > MAX_NDIM or (tensor.ndim > 0 and tensor.shape == NULL) or bits == 0:
        raise BufferError(
            f"{what} is malformed: {tensor.ndim} dimensions, {'no' if tensor.shape == NULL else 'a'} shape, "
            f"{tensor.dtype.lanes} lanes of {tensor.dtype.bits} bits"
        )
    if tensor.dtype.code == OPAQUE_HANDLE:
        raise ValueError(f"{what} has opaque handles as elements, which are pointers; use numbers or bytes")
    if bits % 8 or (tensor.dtype.bits % 8 and flags & FLAG_SUBBYTE_PADDED):
        raise ValueError(
            f"{what} has elements of {tensor.dtype.lanes} x {tensor.dtype.bits} bits, expected whole bytes; "
            "view it as uint8 first"
        )
    nbytes = _measure(what, tensor.ndim, tensor.shape, tensor.strides, bits // 8, 1)
    _locate(buffer, what, <uintptr_t> tensor.data, tensor.byte_offset, nbytes)
    buffer.itemsize = bits // 8
    buffer.readonly = (flags & FLAG_READ_ONLY) != 0
    buffer.device_type = tensor.device.device_type
    buffer.device_id = tensor.device.device_id
    buffer.device = DEVICES[buffer.device_type]
    return 0


# Estimate how much memory the values of a MessagePack text take as Python objects, without making any.
#
# One byte may become an object of 200 bytes: a text of 4 MiB can hold four million empty sets. The estimates are
# CPython's sizes on 64 bits, and the larger size where the text does not tell the type.

cdef enum:
    REFERENCE = 8
    ARRAY = 216  # a set's size; a list or a tuple takes 56
    MAP = 224
    ROOMY = 5  # entries of a map of that size
    ENTRY = 48  # for each further entry, beside its two references
    INTEGER = 32
    FLOAT = 24
    BINARY = 40
    ASCII = 56
    TEXT = 76


cdef inline uint64_t number(const unsigned char *at, int size) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(size):
        value = value << 8 | at[i]
    return value


cdef inline int64_t text(const unsigned char *at, uint64_t length) noexcept nogil:
    """Return the size of a string, in which the largest character decides how many bytes each of them takes."""
    cdef unsigned char largest = 0
    cdef uint64_t i
    for i in range(length):
        largest = max(largest, at[i])
    return ASCII + <int64_t> length if largest < 0x80 else TEXT + (4 if largest >= 0xF0 else 2) * <int64_t> length


cdef int64_t unfold(const unsigned char *at, const unsigned char *end) noexcept nogil:
    cdef int64_t total = 0
    cdef uint64_t length
    cdef unsigned char kind
    cdef int head
    while at < end:
        kind = at[0]
        at += 1
        total += REFERENCE
        if kind < 0x80 or kind >= 0xE0 or kind == 0xC0 or kind == 0xC2 or kind == 0xC3:
            continue
        head = 0
        length = kind & (0x1F if kind >= 0xA0 else 0x0F)
        if kind == 0xCA or kind == 0xCB:
            head = 4 << (kind - 0xCA)
            total += FLOAT
        elif 0xCC <= kind <= 0xD3:
            head = 1 << (kind & 3)
            total += INTEGER
        elif 0xD4 <= kind <= 0xD8:
            head = 1 + (1 << (kind - 0xD4))
            total += BINARY + head
        elif kind >= 0xC0:
            if kind == 0xC1:
                return total
            # The length of binary, extension, text, array and map follows, in 1, 2 or 4 bytes.
            if kind <= 0xC6:
                head = 1 << (kind - 0xC4)
            elif kind <= 0xC9:
                head = 1 << (kind - 0xC7)
            elif kind <= 0xDB:
                head = 1 << (kind - 0xD9)
            else:
                head = 2 << (kind & 1)
            if end - at < head:
                return total
            length = number(at, head)
            if 0xC7 <= kind <= 0xC9:
                head += 1
        if end - at < head:
            return total
        at += head
        if kind <= 0x8F or kind >= 0xDE:
            length = min(length, <uint64_t> (end - at))
            total += MAP if length <= ROOMY else MAP + ENTRY * <int64_t> (length - ROOMY)
        elif kind <= 0x9F or kind >= 0xDC:
            total += ARRAY
        elif kind <= 0xBF or 0xC4 <= kind <= 0xC9 or kind >= 0xD9:
            if <uint64_t> (end - at) < length:
                return total
            total += BINARY + <int64_t> length if 0xC4 <= kind <= 0xC9 else text(at, length)
            at += length
    return total


def unfolded_bytes(bytes data not None) -> int:
    """Return about how many bytes the objects of a MessagePack text take, up to where it is malformed, if it is."""
    cdef const unsigned char *start = data
    return unfold(start, start + len(data))
