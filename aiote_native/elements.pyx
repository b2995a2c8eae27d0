# cython: auto_pickle=False
"""Refuse arrays that must not be used as the bytes of their elements: those of pointers, and those with a mask.

Bytes of a peer must not become a pointer that this process follows. So an array is refused if its elements, or fields
of them, are Python objects or ctypes pointers. A mask lies beside the elements, which would travel without it.
"""
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDED, PyBUF_STRIDED_RO, PyObject_GetBuffer

import re
import sys

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
