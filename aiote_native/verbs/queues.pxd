from libc.stdint cimport uint32_t, uint64_t

from aiote_native.structs cimport Completion, Post, RailOps, WorkRequest
from aiote_native.verbs.ibverbs cimport ibv_comp_channel, ibv_cq, ibv_qp, ibv_send_wr, ibv_sge, ibv_wc
from aiote_native.verbs.nic cimport Nic

from aiote_native.provider cimport NativeEndpoint
from aiote_native.structs cimport WorkRequest
from aiote_native.verbs.ibverbs cimport ibv_comp_channel, ibv_cq, ibv_qp, ibv_send_wr, ibv_sge, ibv_wc
from aiote_native.verbs.nic cimport Nic, VerbsDevice

cdef enum:
    CHAIN = 64        # work requests that are handed over at a time
    SIGNALLED = 16    # of those one in so many asks for a completion, so that not all of a window ends at once
    TAKEN = 32        # completions that are taken at a time
    DATA_DEPTH = 256  # power of two, as all depths
    TEXT_DEPTH = 64

ctypedef ibv_send_wr send_chain[CHAIN]
ctypedef ibv_sge sge_chain[CHAIN]
ctypedef ibv_wc taken_batch[TAKEN]
ctypedef WorkRequest* data_ring[DATA_DEPTH]

# The sends of one queue pair that are not over, oldest first: not every one tells of its end.
cdef struct Sends:
    ibv_qp* qp
    uint32_t depth
    uint32_t head
    uint32_t tail
    uint32_t largest_inline
    data_ring ring

cdef struct VerbsEndpoint:
    Nic* nic
    ibv_comp_channel* channel
    ibv_cq* cq
    Sends data           # writes and reads; what arrives takes the receives that all peers share
    Sends text           # messages, with receives of their own
    send_chain wrs
    sge_chain sges
    Sends* chained       # whose chain it is
    uint32_t links       # how many are in it
    taken_batch taken
    int taken_at
    int taken_count
    bint armed
    bint stirred         # something was taken since it was armed, so its event may have come
    bint dying           # disconnected: its own receives end without being reported
    int broken           # negative error number: nothing more can be posted

cdef RailOps operations
