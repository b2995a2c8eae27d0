from aiote_native.cuda.events cimport EventPool, Hold
from aiote_native.posting cimport State
from aiote_native.progress cimport Progress
from aiote_native.structs cimport Op, PeerState

cdef class Order:
    cdef Hold hold
    cdef list pools
    cdef Progress* engine
    cdef Hold* begin(self, Progress* engine) noexcept
    cdef int leave(self) except -1
    cdef void give_events(self) noexcept

cdef Hold* hold_of(object order, Progress* engine) noexcept
cdef void start_behind(State* state, PeerState* peer, Op* op, Hold* hold) noexcept nogil
cdef void start_targets_behind(State* state, Op* parent, Hold* hold) noexcept nogil
cdef void look_at_holds(State* state) noexcept nogil
