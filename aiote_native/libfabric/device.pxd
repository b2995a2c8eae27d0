from libc.stdint cimport uint64_t

from aiote_native.libfabric.fabric cimport fi_info, fid_av, fid_domain, fid_fabric, fid_mr
from aiote_native.provider cimport NativeDevice, Registration

# What is read of a device when it is opened, for what providers do differently.
cdef struct Quirks:
    bint receives_for_immediates  # each immediate consumes a posted receive
    bint forgets                  # a close drops completions that nobody has read
    bint shared_av                # one address vector for all endpoints
    uint64_t message_limit        # 0: as for writes

cdef class Device(NativeDevice):
    cdef Quirks quirks
    cdef fid_av* av
    cdef fi_info* info
    cdef fid_fabric* fabric
    cdef fid_domain* domain
    cdef int read_quirks(self) except -1

cdef class FabricMemory(Registration):
    cdef Device device
    cdef fid_mr* mr
