from libc.stdint cimport uint64_t

from aiote_native.streams.rail cimport StreamEndpoint
from aiote_native.streams.stream cimport Stream

cdef enum:
    TOKEN_BYTES = 16
    STAGE_BYTES = 8192     # the most bytes received together when only a few are expected
    CANDIDATES = 4         # accepted connections that have not sent their tokens

cdef struct SocketStream:
    Stream stream
    int epoll_fd
    int listener
    int fd
    bint asked             # this side has connected and sent the peer's token
    bint dry               # the last receive took all bytes that had arrived
    char[STAGE_BYTES] stage
    int staged             # bytes that were received into the stage
    int unstaged           # bytes that were copied out of it
    unsigned int watched   # the events that epoll watches `fd` for
    int candidates[CANDIDATES]
    int token_bytes[CANDIDATES]  # how much of its token each has sent
    char tokens[CANDIDATES][TOKEN_BYTES]
    int next_candidate
    char own_token[TOKEN_BYTES]
    char peer_token[TOKEN_BYTES]

cdef class SocketEndpoint(StreamEndpoint):
    cdef SocketStream* impl
    cdef SocketStream* channel_impl
    cdef str host
    cdef int listen(self) except -1

# The head of the pages that one side receives through; the peer maps them too. Each cache line has one writer.
cdef struct Ring:
    uint64_t mark
    uint64_t size
    uint64_t number      # a random number, which is in the endpoint's address
    uint64_t[5] first_gap
    uint64_t head        # bytes that were ever put in; written by the sender
    uint64_t[7] second_gap
    uint64_t tail        # bytes that were ever taken out; written by the receiver
    uint64_t[7] third_gap
    uint64_t pulling     # whether the receiver's GPU copies out of the sender's memory; written by the receiver

cdef struct RingStream:
    Stream stream
    Ring* own
    Ring* peer
    uint64_t own_bytes   # the rings' sizes, powers of two, as they were mapped; later values from the peer are ignored
    uint64_t peer_bytes
    uint64_t own_there   # the number of bytes, from the first one on, that have pages
    uint64_t peer_there
    uint64_t own_tail
    uint64_t peer_head
    uint64_t peer_tail   # the value when it was last read
    uint64_t seen_tail   # `own_tail` and `peer_head` when `arm` last found them changed, at the time `since`
    uint64_t seen_head
    uint64_t since

cdef class RingEndpoint(StreamEndpoint):
    cdef RingStream* impl
    cdef int make(self) except -1
    cdef void forget(self) noexcept
