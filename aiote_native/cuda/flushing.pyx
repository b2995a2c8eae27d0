"""Order a NIC's accesses to GPU memory: flush the NIC's writes, and make the driver's copies synchronous.

A NIC's write may reach the GPU's memory after its completion has reached the host's memory. Up to Ampere, a kernel that
is launched in between may miss the write. The driver says for each device whether that can happen (WRITES_ORDERING
below 100), and flushes the writes that have arrived when it is asked to.
"""

from libc.errno cimport EOPNOTSUPP
from libc.stdint cimport uint64_t

from aiote_native.cuda.driver cimport checked, cuda, enter, leave, retain, symbol
from aiote_native.cuda.driver import device_of
from aiote_native.status import StatusError

cdef enum:
    FLUSH_OPTIONS = 117     # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    WRITES_ORDERING = 118   # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    BY_HOST = 1             # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
    ORDERED = 100           # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    CURRENT_CONTEXT = 0     # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
    TO_OWNER = 100          # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    SYNC_MEMOPS = 6         # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS

ctypedef int (*attribute_function)(int* value, int attribute, int device) noexcept nogil
ctypedef int (*flush_function)(int target, int scope) noexcept nogil
ctypedef int (*set_function)(const void* value, int attribute, uint64_t address) noexcept nogil

cdef flush_function flush = NULL


def needs_flush(uint64_t address) -> bool:
    """Return whether NIC writes to a GPU's memory have to be flushed before kernels see them.

    Raises StatusError if they have to be flushed but cannot be, or if the driver cannot say whether they have to.
    """
    global flush
    cdef attribute_function attribute = <attribute_function> symbol(b"cuDeviceGetAttribute")
    cdef int device = device_of(address)
    cdef int ordering = 0
    cdef int options = 0
    if attribute == NULL:
        raise StatusError(EOPNOTSUPP, "order writes of a NIC", "the driver has no cuDeviceGetAttribute")
    checked(attribute(&ordering, WRITES_ORDERING, device), "cuDeviceGetAttribute(GPU_DIRECT_RDMA_WRITES_ORDERING)")
    if ordering >= ORDERED:
        return False
    checked(attribute(&options, FLUSH_OPTIONS, device), "cuDeviceGetAttribute(GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)")
    flush = <flush_function> symbol(b"cuFlushGPUDirectRDMAWrites")
    if flush == NULL or not options & BY_HOST:
        raise StatusError(EOPNOTSUPP, "order writes of a NIC", f"cuda:{device} neither orders nor flushes them")
    return True


def synchronize_copies(uint64_t address) -> None:
    """Make the driver's own copies to some memory synchronous, because NICs read it in no order with streams.

    The driver refuses this for segments. The refusal is ignored, because each transfer waits for its caller's stream.
    """
    cdef set_function set_attribute = <set_function> symbol(b"cuPointerSetAttribute")
    cdef unsigned int on = 1
    cdef bint primary = False
    cdef int device = device_of(address)
    cdef void* context = retain(device, address, &primary)
    cdef int mode
    if set_attribute != NULL and enter(context, &mode) == 0:
        set_attribute(&on, SYNC_MEMOPS, address)
        leave(mode)
    if primary:
        cuda.primary_release(device)


cdef int flush_writes(void* context) noexcept nogil:
    """Flush NIC writes, so that kernels launched from here on see what has arrived; return 0 or the driver's code.

    A failed call is repeated, because the failure may be transient.
    """
    cdef int mode
    cdef int code = 0
    for _attempt in range(2):
        code = enter(context, &mode)
        if code == 0:
            code = flush(CURRENT_CONTEXT, TO_OWNER)
            leave(mode)
        if code == 0:
            break
    return code
