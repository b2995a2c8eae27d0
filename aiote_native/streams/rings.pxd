from libc.stdint cimport uint64_t

from aiote_native.streams.memory cimport StreamEndpoint
from aiote_native.streams.stream cimport Stream

# The pages that one side receives through; the peer maps them too. Each line of cache has one writer.
cdef struct Ring:
    uint64_t mark
    uint64_t size
    uint64_t number      # drawn by lot: the address names it
    uint64_t[5] first_gap
    uint64_t head        # bytes that were ever put in; the sender's
    uint64_t[7] second_gap
    uint64_t tail        # bytes that were ever taken out; the receiver's
    uint64_t[7] third_gap
    uint64_t pulling     # whether the receiver's GPU copies out of the sender's memory; the receiver's

cdef struct RingStream:
    Stream stream
    Ring* own
    Ring* peer
    uint64_t own_bytes   # of each, a power of two: as it was when it was mapped, whatever the peer says now
    uint64_t peer_bytes
    uint64_t own_there   # from the first byte on so many have pages that are mapped
    uint64_t peer_there
    uint64_t own_tail
    uint64_t peer_head
    uint64_t peer_tail   # as it was when it was last looked at
    uint64_t seen_tail   # where both were when it was last asked whether to sleep, and since when
    uint64_t seen_head
    uint64_t since

cdef class RingEndpoint(StreamEndpoint):
    cdef RingStream* impl
    cdef int make(self) except -1
    cdef void forget(self) noexcept
