from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.cuda.driver cimport Hold
from aiote_native.engine.core cimport Core
from aiote_native.engine.structs cimport Op, State
from aiote_native.requests.operations cimport PageIndex
from aiote_native.requests.pages cimport Integers
from aiote_native.requests.request cimport Request, TargetOps

# A checked target: an Op without the numbers that each request brings, and the bounds of those numbers.
cdef struct Row:
    PyObject* link       # PreparedTargets.kept owns this reference and the next two
    PyObject* local      # NULL: an immediate alone
    PyObject* flight     # the requests that go through its lease; NULL: it has no lease
    uint64_t local_bytes
    uint64_t remote_bytes
    uint64_t local_pages
    uint64_t remote_pages
    int rails            # the number of rails that the remote memory was registered with
    Op op

cdef class Writes:
    cdef Integers length
    cdef Integers here
    cdef Integers there
    cdef Integers to
    cdef Integers imm
    cdef uint64_t count
    cdef uint64_t target(self, uint64_t i) noexcept nogil

cdef class PreparedTargets:
    cdef readonly Core core
    cdef Row* rows
    cdef readonly uint32_t count
    cdef uint32_t capacity
    cdef list kept
    cdef readonly uint64_t page_bytes
    cdef public object peers
    cdef object write_fault(self, Writes writes, uint64_t i)
    cdef object page_fault(self, Integers here, Integers there, Integers shares, uint64_t i)

cdef class TargetRun(TargetOps):
    cdef readonly PreparedTargets prepared
    cdef uint32_t* chosen
    cdef int64_t* pages
    cdef bint started
    cdef bint numbered   # each target has an immediate of its own
    cdef Hold* hold      # the stream points that it waits behind; NULL: none
    cdef int allocate(self, PreparedTargets prepared, uint64_t count, uint64_t pages) except -1
    cdef bint is_open(self, bint admitted) except -1
    cdef int retain(self, Request request) except -1
    cdef void begin(self, State* state, Op* parent, int64_t imm, uint64_t smallest) noexcept nogil
    cdef void count_on(self, Op* op, int64_t imm) noexcept nogil
    cdef int begun(self) except -1

cdef int64_t copy_rows(PreparedTargets prepared, TargetRun run, Writes writes) noexcept nogil
cdef bint bring(Op* op, const Row* row, uint64_t size, uint64_t near, uint64_t far) noexcept nogil
cdef void start_child(State* state, Op* op, uint64_t smallest) noexcept nogil

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
    cdef bint add_move(self, LayerRun run, uint32_t row, PageIndex here, PageIndex there, uint32_t imm) except -1

cdef class LayerRun(TargetRun):
    cdef object kept
    cdef readonly uint32_t layers
    cdef readonly uint64_t pieces
