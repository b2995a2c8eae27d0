from libc.stdint cimport int64_t, uint64_t

from aiote_native.channels.peers cimport PeerLink
from aiote_native.engine.progress cimport Progress
from aiote_native.requests.operations cimport LocalMemory, Operation, PageIndex, RemoteMemory
from aiote_native.system.base cimport Clock, OwnLoop

cdef class Core:
    cdef Progress engine
    cdef readonly object wakeup_event
    cdef public object proxy
    cdef Clock clock
    cdef readonly dict peers
    cdef uint64_t smallest
    cdef public OwnLoop own_loop
    cdef public object on_submit
    cdef public object on_messages
    cdef public bint awake
    cdef public bint closing
    cdef public bint shares
    cdef bint woke
    cdef int recent_wakes
    cdef int turns_in_vain
    cdef uint64_t sleeps_cleared  # the sleeps until the last `take_wakeups`
    cdef void end_turn(self) noexcept
    cdef list rooms
    cdef list collect(self, bint direct, on_round)
    cdef object report_failures(self, list failed, list woken, on_round, bint untold)
    cdef object run_woken(self, list woken, bint direct, listener)
    cpdef object submit_pages(self, PeerLink peer, Operation operation, LocalMemory local, uint64_t local_offset,
                              PageIndex source, uint64_t source_stride, RemoteMemory remote, uint64_t remote_offset,
                              PageIndex target, uint64_t target_stride, uint64_t page_bytes, int64_t imm,
                              bint reads=*)
    cpdef bint is_at_home(self) except -1
    cdef int begin(self, PeerLink peer, Operation operation, bint reads, int64_t imm) except -1
    cdef int launch(self, PeerLink peer, Operation operation) except -1

cdef dict statistics_of(Progress* engine)

cdef int start_thread(Progress* self) noexcept nogil
cdef void end_threads(Progress* self) noexcept nogil
cdef void hand_over(Progress* self) noexcept nogil
cdef void take_back(Progress* self) noexcept nogil
