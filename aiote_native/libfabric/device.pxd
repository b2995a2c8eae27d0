from aiote_native.libfabric.fabric cimport fi_info, fid_domain, fid_fabric, fid_mr
from aiote_native.provider cimport NativeDevice, Registration

cdef class Device(NativeDevice):
    cdef fi_info* info
    cdef fid_fabric* fabric
    cdef fid_domain* domain

cdef class FabricMemory(Registration):
    cdef Device device
    cdef fid_mr* mr
