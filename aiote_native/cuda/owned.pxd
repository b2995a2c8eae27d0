from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from aiote_native.buffers cimport DLDataType, DLManagedTensor, DLManagedTensorVersioned

# A tensor lent through DLPack, in the old or the versioned form, and the object that it keeps alive.
cdef struct Lent:
    PyObject* owner
    DLManagedTensor old
    DLManagedTensorVersioned versioned
    int64_t length

cdef class Owned:
    cdef readonly int ordinal
    cdef readonly uint64_t address   # on the device
    cdef readonly uint64_t nbytes
    cdef void* context
    cdef uint64_t epoch
    cdef bint retained
    cdef Lent* lent(self, DLDataType kind, int64_t count) except NULL
    cdef void release(self) noexcept
    cdef void free_memory(self) noexcept

cdef class PinnedValue(Owned):
    cdef void* pages
    cdef int exports

cdef class DeviceMemory(Owned):
    pass
