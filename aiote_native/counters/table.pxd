from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.unistd cimport write

from aiote_native.engine.structs cimport Counter, Done, DoneList, PeerState, Range, Table, Tally, Wait


cdef inline void done_push(DoneList* done, Done* item) noexcept nogil:
    """Append to the list of finished requests and waits."""
    cdef uint64_t one = 1
    item.next = NULL
    if done.tail == NULL:
        done.head = item
    else:
        done.tail.next = item
    done.tail = item
    if item.eventfd:
        write(item.eventfd - 1, &one, sizeof(one))


cdef inline bint tally_again(Tally* self, uint32_t imm_data, int64_t n) noexcept nogil:
    """Count an immediate n more times if it is the last one again: pages of one request, stripes of one write. Return
    whether it was.
    """
    if self.used and self.taken[self.last] and self.imm_data[self.last] == imm_data:
        self.counts[self.last] += n
        return True
    return False

cdef int tally_add(Tally* self, uint32_t imm_data, int64_t n) noexcept nogil
cdef int64_t tally_get(Tally* self, uint32_t imm_data) noexcept nogil
cdef int tally_copy(const Tally* self, Tally* out) noexcept nogil
cdef Tally tally_take(Tally* self) noexcept nogil
cdef void tally_free(Tally* self) noexcept nogil
cdef list tally_items(const Tally* self)

cdef enum:
    UNITS = 720720  # the least common multiple of 1..16
    IMMEDIATE_BITS = 28

cdef inline bint is_immediate(uint64_t number) noexcept nogil:
    """Return whether a number can be a write's immediate."""
    return not number >> IMMEDIATE_BITS

cdef enum WaitState:
    WAIT_PENDING = 0
    WAIT_SATISFIED = 1
    WAIT_OVER = 2

cdef int table_init(Table* table, uint64_t limit) except -1
cdef void table_free(Table* table) noexcept nogil
cdef Counter* table_find(Table* table, uint32_t imm) noexcept nogil
cdef Counter* table_get(Table* table, uint32_t imm) noexcept nogil
cdef int arrive(Table* table, uint32_t imm_data, uint32_t times, PeerState* maker, DoneList* done) noexcept nogil
cdef void table_orphan(Table* table, PeerState* maker) noexcept nogil
cdef uint64_t table_forget(Table* table, const PeerState* maker) noexcept nogil
cdef PeerState* table_greediest(Table* table, PeerState* peers) noexcept nogil
cdef void commit(Counter* counter, DoneList* done) noexcept nogil
cdef void enqueue(Counter* counter, Wait* wait, uint64_t need, DoneList* done) noexcept nogil
cdef void withdraw(Table* table, Wait* wait, DoneList* done) noexcept nogil
cdef void drop_if_empty(Table* table, Counter* counter) noexcept nogil
cdef Wait* table_pop_wait(Table* table, uint64_t* bucket) noexcept nogil

cdef bint may_count(const Table* table, uint32_t imm_data, const PeerState* peer) noexcept nogil
cdef void ranges_orphan(Table* table, const PeerState* peer) noexcept nogil
cdef bint add_peer(Range* found, PeerState* peer) noexcept nogil
cdef bint add_range(Table* table, Range* added) noexcept nogil
cdef void remove_range(Table* table, const Range* removed) noexcept nogil
