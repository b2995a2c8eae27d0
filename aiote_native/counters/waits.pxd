from libc.stdint cimport uint32_t

from aiote_native.engine.progress cimport Progress, Watched
from aiote_native.engine.structs cimport Counter, Range, Wait
from aiote_native.requests.operations cimport Waitable
from aiote_native.system.base cimport OwnLoop

cdef class CounterHandle:
    cdef object core
    cdef OwnLoop own_loop
    cdef Progress* engine
    cdef Counter* counter
    cdef readonly uint32_t imm

cdef CounterHandle open_counter(object core, Progress* engine, uint32_t imm)

cdef class CounterWait(Waitable):
    cdef Wait wait
    cdef CounterHandle handle

cdef class ValueWatch(Waitable):
    cdef Watched watched
    cdef object core
    cdef Progress* engine
    cdef object buffer

cdef int start_watch(object core, Progress* engine, ValueWatch watch, object old) except -1

cdef class CountRow:
    cdef list handles
    cdef list waits
    cdef readonly int reached
    cdef int look(self) except -1

cdef class SourceRange:
    cdef object core
    cdef Progress* engine
    cdef Range range
    cdef void leave(self) noexcept

cdef SourceRange open_range(object core, Progress* engine, uint32_t first, uint32_t count)
