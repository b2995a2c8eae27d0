from aiote_native.posting cimport State
from aiote_native.structs cimport PeerState

cdef bint has_work(const PeerState* peer) noexcept nogil
cdef void pump_pending(State* state) noexcept nogil
