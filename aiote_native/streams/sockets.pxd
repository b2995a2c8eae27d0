from libc.stdint cimport uint64_t

from aiote_native.streams.memory cimport StreamEndpoint
from aiote_native.streams.stream cimport Stream

cdef enum:
    TOKEN_BYTES = 16
    STAGE_BYTES = 8192     # what is received together where no more than a header is expected
    CANDIDATES = 4         # connections that were accepted and have not said who they are

cdef struct SocketStream:
    Stream stream
    int epoll_fd
    int listener
    int fd
    bint asked             # we have connected and said the peer's token
    bint dry               # the last receive took all that there was
    char[STAGE_BYTES] stage
    int staged             # bytes of it
    int unstaged           # of these those that were taken out
    unsigned int watched   # what epoll looks for on `fd`
    int candidates[CANDIDATES]
    int token_bytes[CANDIDATES]  # that each has sent of its token
    char tokens[CANDIDATES][TOKEN_BYTES]
    int next_candidate
    char own_token[TOKEN_BYTES]
    char peer_token[TOKEN_BYTES]

cdef class SocketEndpoint(StreamEndpoint):
    cdef SocketStream* impl
    cdef SocketStream* lent
    cdef str host
    cdef int listen(self) except -1
