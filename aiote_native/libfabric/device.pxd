from libc.stdint cimport uint64_t

from aiote_native.libfabric.fabric cimport fi_info, fid_av, fid_domain, fid_fabric, fid_mr
from aiote_native.provider cimport NativeDevice, NicRegistration

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
