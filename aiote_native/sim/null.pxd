from aiote_native.sim.ports cimport SimEndpoint

cdef class NullEndpoint(SimEndpoint):
    pass
