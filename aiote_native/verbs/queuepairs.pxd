from libc.stdint cimport uint32_t

from aiote_native.provider cimport NativeEndpoint
from aiote_native.verbs.nic cimport VerbsDevice
from aiote_native.verbs.queues cimport Sends, VerbsQueues

cdef class VerbsEndpoint(NativeEndpoint):
    cdef VerbsDevice device
    cdef VerbsQueues* impl
    cdef readonly tuple numbers
    cdef readonly tuple psns
    cdef int path_mtu(self) except -1
    cdef int open(self) except -1
    cdef int make(self, Sends* sends, bint shared, uint32_t depth, uint32_t receives) except -1
    cdef int bring_up(self, Sends* sends, PeerAddress peer, uint32_t remote, uint32_t remote_psn,
                      uint32_t own_psn) except -1

cdef class PeerAddress:
    cdef readonly int mtu
    cdef readonly int reads
    cdef readonly bint ethernet
    cdef readonly int lid
    cdef readonly bytes gid
    cdef readonly tuple numbers
    cdef readonly tuple psns
