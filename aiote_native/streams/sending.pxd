from libc.stdint cimport uint64_t

from aiote_native.engine.structs cimport Post, WorkRequest
from aiote_native.streams.stream cimport Stream, Work, iovec

cdef bint is_held(const Work* work) noexcept nogil
cdef void hold(Stream* self, Work* work) noexcept nogil
cdef void stage(Stream* self) noexcept nogil
cdef int gather_slots(const Work* work, uint64_t at, iovec* vectors) noexcept nogil
cdef void unstage(Stream* self, Work* work) noexcept nogil
cdef void leave_slots(Stream* self) noexcept nogil

cdef void push(Stream* self) noexcept nogil
cdef int stream_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil
cdef int stream_flush(void* impl) noexcept nogil
cdef bint has_more(const Stream* self) noexcept nogil
