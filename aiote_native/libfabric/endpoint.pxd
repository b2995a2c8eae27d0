from libc.stdint cimport uint64_t

from aiote_native.libfabric.device cimport FabricMemory, LibfabricDevice
from aiote_native.libfabric.fabric cimport fi_addr_t, fid_av, fid_cq, fid_ep, fid_fabric
from aiote_native.libfabric.srd cimport Srd
from aiote_native.provider cimport NativeEndpoint

cdef enum:
    NAME_BYTES = 256

ctypedef char bytes_of_name[NAME_BYTES]

cdef struct FabricEndpoint:
    fid_ep* ep
    fid_av* av
    fid_cq* cq
    fid_fabric* fabric
    fi_addr_t peer
    bint inserted
    bint shared_av
    Srd* srd
    uint64_t write_flags
    uint64_t read_flags
    uint64_t send_flags
    bint waits
    bint disconnects
    bint counts  # the data of an immediate has room for the number of parts that it counts for
    bytes_of_name name
    size_t name_length
    bytes_of_name peer_name
    size_t peer_name_length
    FabricEndpoint* twin
    bint severed
    FabricEndpoint* next
    FabricEndpoint* prev

cdef class LibfabricEndpoint(NativeEndpoint):
    cdef LibfabricDevice device
    cdef FabricEndpoint* impl
    cdef bytes mark
    cdef bytes peer_address
    cdef bint tcp
    cdef FabricMemory pool
    cdef object pool_memory
    cdef int open_srd(self) except -1
    cdef void close_pool(self) noexcept
    cdef int open_endpoint(self, bint waits) except -1
    cdef int open(self, bint waits, size_t queue) except -1
