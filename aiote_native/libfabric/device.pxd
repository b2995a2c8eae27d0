from libc.stdint cimport uint32_t, uint64_t

from aiote_native.engine.provider cimport NativeDevice, NicRegistration
from aiote_native.libfabric.fabric cimport fi_fabric_attr, fi_info, fid_av, fid_domain, fid_fabric, fid_mr

ctypedef int (*getinfo_function)(uint32_t, const char*, const char*, uint64_t, const fi_info*,
                                 fi_info**) noexcept nogil

cdef struct Symbols:
    getinfo_function getinfo
    void (*freeinfo)(fi_info*) noexcept nogil
    fi_info* (*dupinfo)(const fi_info*) noexcept nogil
    int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) noexcept nogil
    uint32_t (*version)() noexcept nogil

cdef Symbols* symbols() except NULL

# The differences of providers that matter here, read when a device is opened.
cdef struct Quirks:
    bint receives_for_immediates  # each immediate consumes a posted receive
    bint forgets                  # a close drops unread completions
    bint shared_av                # one address vector for all endpoints
    uint64_t message_limit        # the most bytes of a message; 0: as many as of a write

cdef class LibfabricDevice(NativeDevice):
    cdef Quirks quirks
    cdef fid_av* av
    cdef fi_info* info
    cdef fid_fabric* fabric
    cdef fid_domain* domain
    cdef int read_quirks(self) except -1

cdef class FabricMemory(NicRegistration):
    cdef LibfabricDevice device
    cdef fid_mr* mr
