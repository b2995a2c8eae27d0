from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.prepared cimport PreparedTargets, TargetRun
from aiote_native.workrequests cimport PageIndex

cdef class OfferedLayers:
    cdef readonly list layers
    cdef readonly int64_t tokens
    cdef dict places
    cdef int64_t* reached
    cdef list streams
    cdef readonly bint told

cdef class PushedLayers:
    cdef OfferedLayers offered
    cdef readonly uint32_t left  # layers that are not complete
    cdef uint32_t count
    cdef uint32_t groups
    cdef int64_t tokens
    cdef int64_t* starts
    cdef int64_t* stops
    cdef int64_t* units
    cdef int64_t* sent    # for each layer and group
    cdef uint32_t* place  # of each layer among those of the offer
    cdef char* uses       # for each layer and group: whether the layer has a move of that group
    cdef char* over
    cdef int64_t stop_of(self, uint32_t layer, uint32_t group, int64_t reached) noexcept nogil
    cdef bint grow(self, uint32_t layer, int64_t reached, int64_t* spans) noexcept nogil

# A move of a layer, beside its row in the prepared targets.
cdef struct Move:
    uint32_t pattern
    uint64_t page_bytes

cdef class LayerRun

cdef class LayerMoves(PreparedTargets):
    cdef Move* moves
    cdef list first       # the first row of each layer, and one more number behind the last layer
    cdef list immediates  # of each layer, counted from a request's first immediate
    cdef uint64_t count_writes(self, LayerRun run, list layers, list offsets, uint64_t most) except? 0
    cdef bint has_room(self, uint64_t writes) except -1
    cdef bint fill(self, LayerRun run, uint32_t row, PageIndex here, PageIndex there, uint32_t imm) except -1

cdef class LayerRun(TargetRun):
    cdef object kept
    cdef readonly uint32_t layers
    cdef readonly uint64_t pieces
