from aiote_native.sim.ports cimport Endpoint

cdef class NullEndpoint(Endpoint):
    pass
