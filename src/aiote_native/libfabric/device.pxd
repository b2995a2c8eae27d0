from libc.stdint cimport uint64_t

from aiote_native.libfabric.fabric cimport fi_info, fid_domain, fid_fabric, fid_mr

cdef class Device:
    cdef fi_info* info
    cdef fid_fabric* fabric
    cdef fid_domain* domain
    cdef public int children
    cdef uint64_t epoch

cdef class FabricMemory:
    cdef Device device
    cdef fid_mr* mr
    cdef void* desc
    cdef readonly uint64_t key
    cdef readonly uint64_t base
    cdef readonly size_t length
