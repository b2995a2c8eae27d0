from cpython.buffer cimport Py_buffer
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.core cimport Core
from aiote_native.cuda.events cimport Hold
from aiote_native.posting cimport State
from aiote_native.requests cimport Request
from aiote_native.scatter cimport TargetOps
from aiote_native.structs cimport Op

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

cdef class Integers:
    cdef Py_buffer view
    cdef bint present
    cdef bint signed
    cdef uint64_t count
    cdef Py_ssize_t step
    cdef str name
    cdef uint64_t at(self, uint64_t i) noexcept nogil
    cdef object value(self, uint64_t i)

cdef class PreparedTargets:
    cdef readonly Core core
    cdef Row* rows
    cdef readonly uint32_t count
    cdef uint32_t capacity
    cdef list kept
    cdef readonly uint64_t page_bytes
    cdef public object peers
    cdef object write_fault(self, Integers length, Integers here, Integers there, Integers to, Integers imms,
                            uint64_t i)
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

cdef bint number(Op* op, Integers imms, uint64_t i) noexcept nogil
cdef void start_child(State* state, Op* op, uint64_t smallest) noexcept nogil
