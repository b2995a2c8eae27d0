from aiote_native.streams.stream cimport Stream, Work
from aiote_native.structs cimport Post, WorkRequest

cdef void push(Stream* self) noexcept nogil
cdef int stream_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil
cdef int stream_flush(void* impl) noexcept nogil
cdef bint has_more(const Stream* self) noexcept nogil
