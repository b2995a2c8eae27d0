from libc.stdint cimport uint64_t

from aiote_native.structs cimport Channel, Op, Post

cdef void gather(const Op* op, const Channel* channel, uint64_t most, uint64_t bytes_most, Post* args) noexcept nogil
cdef uint64_t room_of(const Channel* channel, const Post* args) noexcept nogil
