from libc.stdint cimport uint32_t, uint64_t

from aiote_native.structs cimport Done, DoneList, PeerState

cdef enum:
    UNITS = 720720  # the least common multiple of 1..16
    IMMEDIATE_BITS = 28

cdef enum WaitState:
    WAIT_PENDING = 0
    WAIT_SATISFIED = 1
    WAIT_OVER = 2

cdef struct Counter:
    Counter* chain
    uint32_t imm
    uint32_t handles     # everything that keeps the counter alive: handles of users, and waits
    uint32_t opened      # handles of users
    bint dropped         # the last user closed its handle with `discard`: only pending waits still use the counts
    uint64_t units
    PeerState* maker     # the peer whose immediate created it; NULL: a user created it, or the peer is gone
    Wait* head
    Wait* tail

cdef struct Wait:
    Done done
    Wait* prev
    Wait* next
    Counter* counter
    uint64_t need
    int state

# Consecutive immediates on which only some peers may count (ranges.pyx); a SourceRange owns it.
cdef struct Range:
    uint32_t first
    uint32_t end
    PeerState** peers    # sorted by address
    uint64_t count
    uint64_t room

cdef struct Table:
    Counter** buckets
    uint64_t size
    uint64_t used
    uint64_t limit
    Range** ranges       # sorted by their first values
    uint64_t range_count
    uint64_t range_room
    uint64_t uninvited   # immediates that were not counted, because their peer may not count on their values

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
cdef void done_push(DoneList* done, Done* item) noexcept nogil
