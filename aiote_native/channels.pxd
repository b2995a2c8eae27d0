from libc.stdint cimport uint64_t

from aiote_native.progress cimport Progress
from aiote_native.structs cimport Channel

cdef Channel* new_channel(uint64_t depth, int channels) except NULL
cdef void greet(Progress* engine, Channel* channel) noexcept nogil
cdef void shut_channel(Progress* self, Channel* channel) noexcept nogil
cdef void close_channel(Progress* self, Channel* channel) noexcept nogil
cdef void free_channel(Channel* channel) noexcept nogil
