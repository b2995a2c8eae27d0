from libc.stdint cimport uint32_t

from aiote_native.counters cimport Counter, Wait
from aiote_native.loops cimport OwnLoop
from aiote_native.progress cimport Progress, Watched
from aiote_native.workrequests cimport Waitable

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
