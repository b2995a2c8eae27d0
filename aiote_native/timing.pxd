from libc.stdint cimport uint32_t

from aiote_native.progress cimport Progress
from aiote_native.structs cimport Channel, RailTimes

cdef int time_rails(Progress* engine, uint32_t every) except -1
cdef void time_channel(Progress* engine, Channel* channel) noexcept nogil
cdef list times_of(const RailTimes* times)
