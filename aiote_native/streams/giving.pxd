from libc.stdint cimport uint8_t

from aiote_native.streams.stream cimport Registry

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t

cdef struct Giver:
    Registry* registry
    int listener
    int asking           # the connection being served; -1: none
    bint ended
    uint8_t[64] name
    pthread_t thread

cdef Giver* start_giving(Registry* registry) except NULL
cdef void stop_giving(Giver* self) noexcept
