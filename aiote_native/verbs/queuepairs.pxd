from libc.stdint cimport uint32_t, uint64_t

from aiote_native.engine.provider cimport NativeEndpoint
from aiote_native.engine.structs cimport Completion, Post, RailOps, WorkRequest
from aiote_native.verbs.ibverbs cimport ibv_comp_channel, ibv_cq, ibv_qp, ibv_send_wr, ibv_sge, ibv_wc
from aiote_native.verbs.nic cimport Nic, VerbsDevice

cdef enum:
    CHAIN = 64        # work requests posted at a time
    SIGNALLED = 16    # one in 16 of them asks for a completion, so that a full window does not end all at once
    TAKEN = 32        # completions taken at a time
    DATA_DEPTH = 256  # a power of two, as all depths are
    TEXT_DEPTH = 64

ctypedef ibv_send_wr send_chain[CHAIN]
ctypedef ibv_sge sge_chain[CHAIN]
ctypedef ibv_wc taken_batch[TAKEN]
ctypedef WorkRequest* data_ring[DATA_DEPTH]

# The outstanding sends of one queue pair, oldest first. The ring is needed because not every send has a completion.
cdef struct Sends:
    ibv_qp* qp
    uint32_t depth
    uint32_t head
    uint32_t tail
    uint32_t largest_inline
    data_ring ring

cdef struct VerbsQueues:
    Nic* nic
    ibv_comp_channel* channel
    ibv_cq* cq
    Sends data           # writes and reads; arriving immediates use up the receives that all peers share
    Sends text           # messages, with receives of their own
    send_chain wrs
    sge_chain sges
    Sends* chained       # the queue pair that the chain is for
    uint32_t links       # work requests in the chain
    taken_batch taken
    int taken_at
    int taken_count
    bint armed
    bint stirred         # completions were taken since it was armed, so its event may have come
    bint dying           # disconnected: the ends of its own receives are not reported
    int broken           # a negative error number; nothing more can be posted then

cdef RailOps operations

cdef class VerbsEndpoint(NativeEndpoint):
    cdef VerbsDevice device
    cdef VerbsQueues* impl
    cdef readonly tuple numbers
    cdef readonly tuple psns
    cdef int path_mtu(self) except -1
    cdef int open(self) except -1
    cdef int make(self, Sends* sends, uint32_t depth, uint32_t receives, bint shared) except -1
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
