from libc.stdint cimport uint64_t

from aiote_native.cuda.descriptors cimport AioteBatch
from aiote_native.cuda.sharing cimport Export, Import

cdef enum:
    MOST_SEGMENTS = 65536

cdef bint find_segment_functions()
cdef int list_segments(uint64_t address, size_t length, Export* made) except -1
cdef void export_batch(const Export* made, uint64_t first, AioteBatch* batch, int* descriptors) noexcept nogil
cdef int map_segments(Import* self) noexcept nogil
cdef void unmap_segments(Import* self) noexcept nogil
