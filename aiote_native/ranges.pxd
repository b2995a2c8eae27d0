from libc.stdint cimport uint32_t

from aiote_native.counters cimport Range, Table
from aiote_native.structs cimport PeerState

cdef bint may_count(const Table* table, uint32_t imm_data, const PeerState* peer) noexcept nogil
cdef void ranges_orphan(Table* table, const PeerState* peer) noexcept nogil
cdef bint add_peer(Range* found, PeerState* peer) noexcept nogil
cdef bint add_range(Table* table, Range* added) noexcept nogil
cdef void remove_range(Table* table, const Range* removed) noexcept nogil
