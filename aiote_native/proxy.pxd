from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.core cimport Core
from aiote_native.prepared cimport Integers, Row, TargetRun
from aiote_native.progress cimport Progress, pthread_mutex_t, pthread_t
from aiote_native.structs cimport Op

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_cond_t:
        pass

# Numbers in memory that somebody else writes; zeros where `first` is NULL.
cdef struct Numbers:
    const char* first
    Py_ssize_t step

# A run as the thread has it. Its memory is the request's, which takes it out before it goes.
cdef struct Armed:
    Armed* next
    Armed* prev
    bint linked
    const uint32_t* flag
    uint32_t value
    uint32_t seen        # what the flag was when it was last looked at
    Op* parent
    const Row* rows
    const uint32_t* chosen
    Numbers lengths
    Numbers here
    Numbers there
    bint skips           # a length of 0 posts nothing, counted or not
    uint64_t smallest

# What a thread shares with those that arm runs. Guarded by its own mutex, within which the engine's lock may be taken.
cdef struct ProxyState:
    pthread_mutex_t mutex
    pthread_cond_t changed
    pthread_t thread
    Progress* engine
    Armed* first
    Armed* last
    bint running
    bint stop
    bint fresh           # something was armed since the thread has looked
    uint64_t looks

cdef class FlagWord:
    cdef Py_buffer view
    cdef bint held

cdef class Proxy:
    cdef Core core
    cdef ProxyState* state
    cdef int add(self, Armed* armed) except -1
    cdef int remove(self, Armed* armed) except -1

cdef class ArmedRun(TargetRun):
    cdef Armed armed
    cdef FlagWord word
    cdef Integers lengths
    cdef Integers here
    cdef Integers there
    cdef int take(self, Proxy proxy, FlagWord word, uint32_t value, bint skips) except -1
