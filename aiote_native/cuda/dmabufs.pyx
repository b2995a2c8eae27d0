"""Export a GPU's memory as a DMA-BUF, through the driver and in the memory's own context."""

from libc.errno cimport EOPNOTSUPP
from libc.stdint cimport uint64_t

from aiote_native.cuda.driver cimport checked, cuda, described, enter, leave, retain, symbol
from aiote_native.cuda.driver import device_of
from aiote_native.status import StatusError

cdef enum:
    DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

ctypedef int (*range_function)(void* handle, uint64_t address, size_t length, int kind,
                               unsigned long long flags) noexcept nogil


def export_range(uint64_t address, size_t length) -> int:
    """Return a DMA-BUF descriptor, owned by the caller, of whole pages of GPU memory.

    Raises StatusError with the driver's name of the error.
    """
    cdef range_function function = <range_function> symbol(b"cuMemGetHandleForAddressRange")
    cdef int number = device_of(address)
    cdef bint primary = False
    cdef void* context
    cdef int mode
    cdef int code
    cdef int fd = -1
    if function == NULL:
        raise StatusError(EOPNOTSUPP, "export memory of a GPU", "the driver has no cuMemGetHandleForAddressRange")
    context = retain(number, address, &primary)
    try:
        checked(enter(context, &mode), "cuCtxPushCurrent")
        code = function(&fd, address, length, DMA_BUF_FD, 0)
        leave(mode)
    finally:
        if primary:
            cuda.primary_release(number)
    if code:
        raise StatusError(EOPNOTSUPP, "cuMemGetHandleForAddressRange", described(code))
    return fd
