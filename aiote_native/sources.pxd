from libc.stdint cimport uint32_t

from aiote_native.counters cimport Range
from aiote_native.progress cimport Progress

cdef class SourceRange:
    cdef object core
    cdef Progress* engine
    cdef Range range
    cdef void leave(self) noexcept

cdef SourceRange open_range(object core, Progress* engine, uint32_t first, uint32_t count)
