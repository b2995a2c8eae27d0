from libc.stdint cimport uint64_t

from aiote_native.streams.memory cimport StreamEndpoint
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
