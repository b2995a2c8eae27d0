"""Counts of immediates.

A write that was split into k stripes arrives as k immediates, each worth 1/k of a count. A counter holds an integer
number of units of 1/720720 (720720 is the least common multiple of 1..16), so the sum is exact in any order. A counter
exists while it has counts, handles or waiters, and an absent counter is zero: so immediates that arrive before anyone
asks are kept, and counters that are not needed take no room. A counter knows the peer whose immediate created it, so
when the table is full, the engine finds the peer that filled it (`table_greediest`). The caller holds the engine's lock
around every function here.

The plain Python reference is `tests/reference/imm_counters.py`.
"""

from cpython.object cimport PyObject
from libc.errno cimport ENOSPC, EOVERFLOW
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport write

from aiote_native.ranges cimport may_count
from aiote_native.structs cimport PeerState


# Half the range of 64 bits; the other half is room for the counts that withdrawn waits give back.
cdef uint64_t MAX_UNITS = 1ULL << 63


cdef void done_push(DoneList* done, Done* item) noexcept nogil:
    cdef uint64_t one = 1
    item.next = NULL
    if done.tail == NULL:
        done.head = item
    else:
        done.tail.next = item
    done.tail = item
    if item.eventfd:
        write(item.eventfd - 1, &one, sizeof(one))


cdef inline uint64_t bucket_of(uint32_t imm, uint64_t size) noexcept nogil:
    return ((<uint64_t> imm * 0x9E3779B97F4A7C15ULL) >> 32) & (size - 1)


cdef enum:
    FIRST_BUCKETS = 1024


cdef int table_init(Table* table, uint64_t limit) except -1:
    # The size is zero until the buckets are allocated, because a table whose start failed is closed like any other.
    table.size = 0
    table.used = 0
    table.limit = limit
    table.ranges = NULL
    table.range_count = table.range_room = table.uninvited = 0
    table.buckets = <Counter**> calloc(FIRST_BUCKETS, sizeof(Counter*))
    if table.buckets == NULL:
        raise MemoryError
    table.size = FIRST_BUCKETS
    return 0


cdef void table_free(Table* table) noexcept nogil:
    cdef Counter* counter
    cdef Counter* following
    cdef uint64_t i
    if table.buckets == NULL:
        return
    for i in range(table.size):
        counter = table.buckets[i]
        while counter != NULL:
            following = counter.chain
            free(counter)
            counter = following
    free(table.buckets)
    table.buckets = NULL
    free(table.ranges)
    table.ranges = NULL
    table.range_count = 0


cdef Counter* table_find(Table* table, uint32_t imm) noexcept nogil:
    cdef Counter* counter = table.buckets[bucket_of(imm, table.size)]
    while counter != NULL and counter.imm != imm:
        counter = counter.chain
    return counter


cdef void grow(Table* table) noexcept nogil:
    """Double the buckets; without memory for that, the chains just grow longer."""
    cdef uint64_t size = table.size * 2
    cdef Counter** buckets = <Counter**> calloc(size, sizeof(Counter*))
    cdef Counter* counter
    cdef Counter* following
    cdef uint64_t i, at
    if buckets == NULL:
        return
    for i in range(table.size):
        counter = table.buckets[i]
        while counter != NULL:
            following = counter.chain
            at = bucket_of(counter.imm, size)
            counter.chain = buckets[at]
            buckets[at] = counter
            counter = following
    free(table.buckets)
    table.buckets = buckets
    table.size = size


cdef Counter* table_get(Table* table, uint32_t imm) noexcept nogil:
    """Find or create a counter; NULL at the table's limit or without memory."""
    cdef Counter* counter = table_find(table, imm)
    cdef uint64_t at
    if counter != NULL or table.used >= table.limit:
        return counter
    counter = <Counter*> calloc(1, sizeof(Counter))
    if counter == NULL:
        return NULL
    if table.used >= table.size:
        grow(table)
    at = bucket_of(imm, table.size)
    counter.imm = imm
    counter.chain = table.buckets[at]
    table.buckets[at] = counter
    table.used += 1
    return counter


cdef void drop_if_empty(Table* table, Counter* counter) noexcept nogil:
    cdef Counter** link
    if counter.units != 0 or counter.handles != 0 or counter.head != NULL:
        return
    link = &table.buckets[bucket_of(counter.imm, table.size)]
    while link[0] != counter:
        link = &link[0].chain
    link[0] = counter.chain
    table.used -= 1
    free(counter)


cdef void commit(Counter* counter, DoneList* done) noexcept nogil:
    """Satisfy waiters from the head of the queue while there are enough counts."""
    cdef Wait* wait = counter.head
    while wait != NULL and counter.units >= wait.need:
        counter.units -= wait.need
        counter.head = wait.next
        if wait.next != NULL:
            wait.next.prev = NULL
        else:
            counter.tail = NULL
        wait.next = NULL
        wait.state = WAIT_SATISFIED
        done_push(done, &wait.done)
        wait = counter.head


cdef int arrive(Table* table, uint32_t imm_data, uint32_t times, PeerState* maker, DoneList* done) noexcept nogil:
    """Count `times` immediates of one value that arrived from a peer, if the peer may count on that value.

    Return -ENOSPC when the table is full, and -EOVERFLOW for more than can be counted: a count never wraps around.
    """
    cdef uint64_t units = <uint64_t> times * (UNITS // ((imm_data >> IMMEDIATE_BITS) + 1))
    cdef uint64_t before = table.used
    cdef Counter* counter
    if maker != NULL and not may_count(table, imm_data, maker):
        table.uninvited += times
        return 0
    counter = table_get(table, imm_data & ((1 << IMMEDIATE_BITS) - 1))
    if counter == NULL:
        return -ENOSPC
    if table.used != before and maker != NULL:
        counter.maker = maker
        maker.counted = True
    if counter.units > MAX_UNITS - units:
        return -EOVERFLOW
    counter.units += units
    commit(counter, done)
    drop_if_empty(table, counter)
    return 0


cdef void table_orphan(Table* table, PeerState* maker) noexcept nogil:
    """Record that a peer is gone; its counts stay."""
    cdef Counter* counter
    cdef uint64_t i
    for i in range(table.size if maker.counted else 0):
        counter = table.buckets[i]
        while counter != NULL:
            if counter.maker == maker:
                counter.maker = NULL
            counter = counter.chain
    maker.counted = False


cdef uint64_t table_forget(Table* table, const PeerState* maker) noexcept nogil:
    """Drop the counters without a handle that `maker` created (NULL: a user or a lost peer); return how many."""
    cdef uint64_t before = table.used
    cdef Counter* counter
    cdef Counter* following
    cdef uint64_t i
    for i in range(table.size):
        counter = table.buckets[i]
        while counter != NULL:
            following = counter.chain
            if counter.maker == maker and counter.handles == 0:
                counter.units = 0
                drop_if_empty(table, counter)
            counter = following
    return before - table.used


cdef PeerState* table_greediest(Table* table, PeerState* peers) noexcept nogil:
    """Return the peer that has created the most counters without a handle; NULL when there are none."""
    cdef PeerState* greediest = NULL
    cdef PeerState* peer = peers
    cdef Counter* counter
    cdef uint64_t i
    while peer != NULL:
        peer.unasked = 0
        peer = peer.next_peer
    for i in range(table.size):
        counter = table.buckets[i]
        while counter != NULL:
            if counter.maker != NULL and counter.handles == 0:
                counter.maker.unasked += 1
                if greediest == NULL or counter.maker.unasked > greediest.unasked:
                    greediest = counter.maker
            counter = counter.chain
    return greediest


cdef void enqueue(Counter* counter, Wait* wait, uint64_t need, DoneList* done) noexcept nogil:
    wait.counter = counter
    wait.need = need
    wait.state = WAIT_PENDING
    wait.next = NULL
    wait.prev = counter.tail
    if counter.tail == NULL:
        counter.head = wait
    else:
        counter.tail.next = wait
    counter.tail = wait
    commit(counter, done)


cdef void withdraw(Table* table, Wait* wait, DoneList* done) noexcept nogil:
    """End a wait: a pending one leaves the queue; a satisfied one whose owner has not seen it gives its counts back."""
    cdef Counter* counter = wait.counter
    if wait.state == WAIT_PENDING:
        if wait.prev == NULL:
            counter.head = wait.next
        else:
            wait.prev.next = wait.next
        if wait.next == NULL:
            counter.tail = wait.prev
        else:
            wait.next.prev = wait.prev
    elif wait.state == WAIT_SATISFIED:
        if not counter.dropped:
            counter.units += wait.need
    else:
        return
    wait.state = WAIT_OVER
    if counter.dropped and counter.head == NULL:
        counter.units = 0
    commit(counter, done)
    drop_if_empty(table, counter)


cdef Wait* table_pop_wait(Table* table, uint64_t* bucket) noexcept nogil:
    """Take a pending wait out of its queue. The search begins at `bucket` and advances it; NULL: no wait is left."""
    cdef Counter* counter
    cdef Wait* wait
    while bucket[0] < table.size:
        counter = table.buckets[bucket[0]]
        while counter != NULL:
            wait = counter.head
            if wait != NULL:
                counter.head = wait.next
                if wait.next == NULL:
                    counter.tail = NULL
                else:
                    wait.next.prev = NULL
                wait.state = WAIT_OVER
                return wait
            counter = counter.chain
        bucket[0] += 1
    return NULL


cdef class ImmCounters:
    """A table without an engine: tests compare its counts with the Python reference. Engines use the same functions."""

    cdef Table table
    cdef dict waits

    def __cinit__(self, uint64_t limit=1 << 20):
        table_init(&self.table, limit)
        self.waits = {}

    def __dealloc__(self):
        table_free(&self.table)

    def __len__(self):
        return self.table.used

    def arrive(self, uint32_t imm_data, uint32_t times=1) -> list[Ticket]:
        """Count `times` immediates of one value, and return the tickets that they satisfied.

        Raises MemoryError when the table is full, and for more than can be counted.
        """
        cdef DoneList done
        done.head = done.tail = NULL
        cdef int code = arrive(&self.table, imm_data, times, NULL, &done)
        if code != 0:
            raise MemoryError("the table of immediates is full" if code == -ENOSPC else "the immediate's count is full")
        return self.collect(&done)

    def value(self, uint32_t imm) -> int:
        """Return the whole writes that were counted and not consumed."""
        cdef Counter* counter = table_find(&self.table, imm)
        return 0 if counter == NULL else counter.units // UNITS

    def wait(self, uint32_t imm, uint64_t n) -> tuple[Ticket, list[Ticket]]:
        """Queue a wait for n counts; return its ticket, and the tickets that are satisfied now. Raises ValueError for
        more than 2**40 counts, MemoryError when the table is full.
        """
        cdef DoneList done
        cdef Ticket ticket = Ticket()
        if n > 1 << 40 or imm >> IMMEDIATE_BITS:
            raise ValueError(f"a wait for {n} counts of immediate {imm:#x}: expected at most 2**40 counts and 28 bits")
        cdef Counter* counter = table_get(&self.table, imm)
        if counter == NULL:
            raise MemoryError("the table of immediates is full")
        done.head = done.tail = NULL
        # The counter must stay while a ticket may give counts back to it.
        counter.handles += 1
        ticket.wait.done.owner = <PyObject*> ticket
        enqueue(counter, &ticket.wait, n * UNITS, &done)
        self.waits[id(ticket)] = ticket
        return ticket, self.collect(&done)

    def cancel(self, Ticket ticket) -> list[Ticket]:
        """Withdraw a ticket; return the tickets that this satisfies."""
        cdef DoneList done
        done.head = done.tail = NULL
        if self.waits.pop(id(ticket), None) is not None:
            ticket.wait.counter.handles -= 1
            withdraw(&self.table, &ticket.wait, &done)
        return self.collect(&done)

    def deliver(self, Ticket ticket) -> None:
        """Record that a satisfied ticket was seen: its counts are gone for good. Raises ValueError for a pending one.
        """
        if ticket.wait.state == WAIT_PENDING:
            raise ValueError("the ticket is not satisfied yet")
        if self.waits.pop(id(ticket), None) is not None:
            ticket.wait.state = WAIT_OVER
            ticket.wait.counter.handles -= 1
            drop_if_empty(&self.table, ticket.wait.counter)

    cdef list collect(self, DoneList* done):
        cdef Done* item = done.head
        out = []
        while item != NULL:
            out.append(<object> item.owner)
            item = item.next
        return out


cdef class Ticket:
    """A wait in an `ImmCounters`."""

    cdef Wait wait

    @property
    def satisfied(self) -> bool:
        return self.wait.state == WAIT_SATISFIED
