from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

cdef int get_view(object obj, Py_buffer* view) except -1
cdef int refuse_mask(object obj) except -1
cpdef int check_elements(object obj, str format) except -1

# Borrowed memory, for other native modules: they may read the numbers below without the GIL while the buffer is held.

# The structures of dlpack.h, with upstream's names: https://dmlc.github.io/dlpack/latest/c_api.html
ctypedef struct DLPackVersion:
    uint32_t major
    uint32_t minor

ctypedef struct DLDevice:
    int32_t device_type
    int32_t device_id

ctypedef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

ctypedef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

ctypedef struct DLManagedTensor:
    DLTensor dl_tensor
    void* manager_ctx
    void (*deleter)(DLManagedTensor*) noexcept

ctypedef struct DLManagedTensorVersioned:
    DLPackVersion version
    void* manager_ctx
    void (*deleter)(DLManagedTensorVersioned*) noexcept
    uint64_t flags
    DLTensor dl_tensor


cdef class AcquiredBuffer:
    cdef readonly uintptr_t address
    cdef readonly size_t nbytes
    cdef readonly size_t itemsize
    cdef readonly bint readonly
    cdef readonly int device_id
    cdef readonly str device
    cdef readonly str source
    cdef int device_type  # DLPack's number for `device`, for code that runs without the GIL
    cdef str _lender
    cdef object _owner
    cdef Py_buffer _view
    cdef bint _viewed
    cdef int _views
    cdef bint _dropped
    cdef DLManagedTensor* _tensor
    cdef DLManagedTensorVersioned* _versioned

    cpdef release(self)
    cdef int lend(self, Py_buffer* view, object exporter, uint64_t start, uint64_t nbytes, int flags) except -1
    cdef int take_back(self) except -1
    cdef int give_back(self) except -1


cpdef AcquiredBuffer acquire(object obj)
