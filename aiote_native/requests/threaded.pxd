from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.engine.core cimport Core
from aiote_native.engine.progress cimport Progress, pthread_mutex_t, pthread_t
from aiote_native.engine.structs cimport Op
from aiote_native.requests.pages cimport Integers
from aiote_native.requests.prepared cimport Row, TargetRun, Writes

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_cond_t:
        pass

# Numbers in memory that another thread or a GPU writes; zeros where `first` is NULL.
cdef struct Numbers:
    const char* first
    Py_ssize_t step

# An armed run as the thread sees it. The request owns this memory, and unlinks it before it frees it.
cdef struct Armed:
    Armed* next
    Armed* prev
    bint linked
    const uint32_t* flag
    uint32_t value
    uint32_t seen        # the flag's value at the last look
    Op* parent
    const Row* rows
    const uint32_t* chosen
    Numbers lengths
    Numbers here
    Numbers there
    bint skips           # a length of 0 posts nothing, even where the write counts
    uint64_t smallest

# The state that the thread shares with those that arm runs. Its own mutex guards it; a thread may take the engine's
# lock while it holds that mutex.
cdef struct ProxyState:
    pthread_mutex_t mutex
    pthread_cond_t changed
    pthread_t thread
    Progress* engine
    Armed* first
    Armed* last
    bint running
    bint stop
    bint fresh           # a run was armed since the thread last looked
    uint64_t looks

cdef class FlagWord:
    cdef Py_buffer view
    cdef bint acquired

cdef class Proxy:
    cdef Core core
    cdef ProxyState* state
    cdef int add(self, Armed* armed) except -1
    cdef int remove(self, Armed* armed) except -1

cdef class ArmedRun(TargetRun):
    cdef Armed armed
    cdef FlagWord word
    cdef Writes writes
    cdef int take(self, Proxy proxy, FlagWord word, uint32_t value, bint skips) except -1
