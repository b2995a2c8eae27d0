"""Counts of immediates: tallies of channels, the table of counters, and the ranges that named peers may count on."""

from cpython.object cimport PyObject
from libc.errno cimport ENOMEM, ENOSPC, EOVERFLOW
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memmove, memset

from aiote_native.engine.structs cimport PeerState

# Tallies of immediates, which each side of a channel keeps so that a lost channel loses no count.
#
# The sender tallies the counted work requests that have ended well, the receiver tallies those that came, each by all
# 32 bits of the immediate. When a channel is lost, the difference of the two tells how many of the requests that never
# ended did arrive. `tests/reference/channel_counts.py` explains why the tables stay small; it is the plain reference.

cdef enum:
    FIRST_SIZE = 16
    # The sender acknowledges at a thousand immediates, and a few thousand may be in flight; a peer with more of them
    # never acknowledges.
    MAX_ENTRIES = 16384


cdef uint32_t slot_of(Tally* self, uint32_t imm_data) noexcept nogil:
    """Return where an immediate is, or would go. There is a free entry: the table is at most three quarters full."""
    cdef uint32_t at = (imm_data * <uint32_t> 0x9E3779B1) & (self.size - 1)
    while self.taken[at] and self.imm_data[at] != imm_data:
        at = (at + 1) & (self.size - 1)
    return at


cdef int resize(Tally* self) noexcept nogil:
    """Rebuild the table without the entries that are at zero, and enlarge it if those are few."""
    cdef Tally old = self[0]
    cdef uint32_t i, at, live = 0
    for i in range(old.size):
        live += old.taken[i] and old.counts[i] != 0
    if live >= MAX_ENTRIES:
        return -ENOSPC
    self.size = FIRST_SIZE
    while self.size < 2 * (live + 1):
        self.size *= 2
    self.imm_data = <uint32_t*> calloc(self.size, sizeof(uint32_t))
    self.counts = <int64_t*> calloc(self.size, sizeof(int64_t))
    self.taken = <bint*> calloc(self.size, sizeof(bint))
    if self.imm_data == NULL or self.counts == NULL or self.taken == NULL:
        free(self.imm_data)
        free(self.counts)
        free(self.taken)
        self[0] = old
        return -ENOMEM
    self.used = self.last = 0
    for i in range(old.size):
        if old.taken[i] and old.counts[i] != 0:
            at = slot_of(self, old.imm_data[i])
            self.imm_data[at] = old.imm_data[i]
            self.counts[at] = old.counts[i]
            self.taken[at] = True
            self.used += 1
    free(old.imm_data)
    free(old.counts)
    free(old.taken)
    return 0


cdef int tally_add(Tally* self, uint32_t imm_data, int64_t n) noexcept nogil:
    """Add n, which may be negative; -ENOSPC or -ENOMEM where there is no room for another immediate."""
    cdef uint32_t at
    cdef int code
    # Most immediates equal the last one: pages of one request, stripes of one write.
    if self.used and self.taken[self.last] and self.imm_data[self.last] == imm_data:
        self.counts[self.last] = <int64_t> (<uint64_t> self.counts[self.last] + <uint64_t> n)
        return 0
    if self.used * 4 >= self.size * 3:
        code = resize(self)
        if code != 0:
            return code
    at = slot_of(self, imm_data)
    if not self.taken[at]:
        self.taken[at] = True
        self.imm_data[at] = imm_data
        self.counts[at] = 0
        self.used += 1
    # Added without sign, because a peer may acknowledge anything, and a sum of signed numbers must not overflow.
    self.counts[at] = <int64_t> (<uint64_t> self.counts[at] + <uint64_t> n)
    self.last = at
    return 0


cdef int64_t tally_get(Tally* self, uint32_t imm_data) noexcept nogil:
    cdef uint32_t at
    if self.size == 0:
        return 0
    at = slot_of(self, imm_data)
    return self.counts[at] if self.taken[at] else 0


cdef int tally_copy(const Tally* self, Tally* out) noexcept nogil:
    """Make `out` a copy, which the caller frees; -ENOMEM without memory for it."""
    out[0] = self[0]
    if self.size == 0:
        return 0
    out.imm_data = <uint32_t*> calloc(self.size, sizeof(uint32_t))
    out.counts = <int64_t*> calloc(self.size, sizeof(int64_t))
    out.taken = <bint*> calloc(self.size, sizeof(bint))
    if out.imm_data == NULL or out.counts == NULL or out.taken == NULL:
        tally_free(out)
        return -ENOMEM
    memcpy(out.imm_data, self.imm_data, self.size * sizeof(uint32_t))
    memcpy(out.counts, self.counts, self.size * sizeof(int64_t))
    memcpy(out.taken, self.taken, self.size * sizeof(bint))
    return 0


cdef Tally tally_take(Tally* self) noexcept nogil:
    """Return the content of the tally, which the caller frees, and empty the tally."""
    cdef Tally taken = self[0]
    memset(self, 0, sizeof(Tally))
    return taken


cdef void tally_free(Tally* self) noexcept nogil:
    free(self.imm_data)
    free(self.counts)
    free(self.taken)
    self.imm_data = NULL
    self.counts = NULL
    self.taken = NULL
    self.size = self.used = self.last = 0


cdef list tally_items(const Tally* self):
    """Return (immediate, count) of every immediate that is not at zero. Only for a tally that needs no lock."""
    cdef uint32_t i
    return [(self.imm_data[i], self.counts[i]) for i in range(self.size) if self.taken[i] and self.counts[i] != 0]


cdef class ImmTally:
    """A tally of its own, to check it against a plain dictionary; channels use the same functions."""

    cdef Tally tally

    def __dealloc__(self):
        tally_free(&self.tally)

    def add(self, uint32_t imm_data, int64_t n) -> None:
        """Add n to an immediate. Raises MemoryError when too many are not at zero."""
        if tally_add(&self.tally, imm_data, n) != 0:
            raise MemoryError("the tally is full")

    def get(self, uint32_t imm_data) -> int:
        """Return an immediate's count."""
        return tally_get(&self.tally, imm_data)

    def items(self) -> list[tuple[int, int]]:
        """Return (immediate, count) of every immediate that is not at zero."""
        return tally_items(&self.tally)

    def __len__(self) -> int:
        return self.tally.used


# Counts of immediates.
#
# A write that was split into k stripes arrives as k immediates, each worth 1/k of a count. A counter holds an integer
# number of units of 1/720720 (720720 is the least common multiple of 1..16), so the sum is exact in any order. A
# counter exists while it has counts, handles or waiters, and an absent counter is zero: so immediates that arrive
# before anyone asks are kept, and counters that are not needed take no room. A counter knows the peer whose immediate
# created it, so when the table is full, the engine finds the peer that filled it (`table_greediest`). The caller holds
# the engine's lock around every function here.
#
# The plain Python reference is `tests/reference/imm_counters.py`.

# Half the range of 64 bits; the other half is room for the counts that withdrawn waits give back.
cdef uint64_t MAX_UNITS = 1ULL << 63


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


# Immediates in a row on which only some peers may count; immediates of other peers are only tallied.
#
# An engine grants immediates in blocks, which never overlap, so the blocks that have named their peers are an array
# sorted by first value. An arrival costs a binary search there, which ends at once if the array is empty, and one for
# its peer among the peers of the block. The caller holds the engine's lock around every function here.


cdef uint64_t place_of_range(const Table* table, uint32_t imm) noexcept nogil:
    """Return how many ranges begin at or before a value."""
    cdef uint64_t low = 0, high = table.range_count, middle
    while low < high:
        middle = (low + high) // 2
        if table.ranges[middle].first <= imm:
            low = middle + 1
        else:
            high = middle
    return low


cdef uint64_t place_of_peer(const Range* found, const PeerState* peer) noexcept nogil:
    """Return how many of a range's peers have a lower address than this one."""
    cdef uint64_t low = 0, high = found.count, middle
    while low < high:
        middle = (low + high) // 2
        if <uint64_t> found.peers[middle] < <uint64_t> peer:
            low = middle + 1
        else:
            high = middle
    return low


cdef bint may_count(const Table* table, uint32_t imm_data, const PeerState* peer) noexcept nogil:
    """Return whether a peer's immediate is to be counted."""
    cdef uint32_t imm = imm_data & ((1 << IMMEDIATE_BITS) - 1)
    cdef uint64_t place = place_of_range(table, imm)
    cdef const Range* found
    if place == 0:
        return True
    found = table.ranges[place - 1]
    if imm >= found.end:
        return True
    place = place_of_peer(found, peer)
    return place < found.count and found.peers[place] == peer


cdef void ranges_orphan(Table* table, const PeerState* peer) noexcept nogil:
    """Take a peer that is gone out of all ranges, because another peer may soon have its address."""
    cdef uint64_t i
    for i in range(table.range_count):
        remove_peer(table.ranges[i], peer)


cdef void remove_peer(Range* found, const PeerState* peer) noexcept nogil:
    cdef uint64_t place = place_of_peer(found, peer)
    if place < found.count and found.peers[place] == peer:
        found.count -= 1
        memmove(&found.peers[place], &found.peers[place + 1], (found.count - place) * sizeof(PeerState*))


cdef bint add_peer(Range* found, PeerState* peer) noexcept nogil:
    """Add a peer; return False if there is no memory for it."""
    cdef uint64_t place = place_of_peer(found, peer)
    cdef PeerState** peers
    if place < found.count and found.peers[place] == peer:
        return True
    if found.count == found.room:
        peers = <PeerState**> realloc(found.peers, (2 * found.room + 8) * sizeof(PeerState*))
        if peers == NULL:
            return False
        found.peers, found.room = peers, 2 * found.room + 8
    memmove(&found.peers[place + 1], &found.peers[place], (found.count - place) * sizeof(PeerState*))
    found.peers[place] = peer
    found.count += 1
    return True


cdef bint add_range(Table* table, Range* added) noexcept nogil:
    """Add a range that overlaps no other; return False if there is no memory for it."""
    cdef uint64_t place = place_of_range(table, added.first)
    cdef Range** ranges
    if table.range_count == table.range_room:
        ranges = <Range**> realloc(table.ranges, (2 * table.range_room + 8) * sizeof(Range*))
        if ranges == NULL:
            return False
        table.ranges, table.range_room = ranges, 2 * table.range_room + 8
    memmove(&table.ranges[place + 1], &table.ranges[place], (table.range_count - place) * sizeof(Range*))
    table.ranges[place] = added
    table.range_count += 1
    return True


cdef void remove_range(Table* table, const Range* removed) noexcept nogil:
    cdef uint64_t place = place_of_range(table, removed.first) - 1
    table.range_count -= 1
    memmove(&table.ranges[place], &table.ranges[place + 1], (table.range_count - place) * sizeof(Range*))


cdef class RangeTable:
    """Ranges in a table of their own, with numbers for peers, to check them against a reference."""

    cdef Table table
    cdef Range ranges[32]
    cdef PeerState peers[32]

    def __dealloc__(self):
        cdef int i
        free(self.table.ranges)
        for i in range(32):
            free(self.ranges[i].peers)

    def add(self, int number, uint32_t first, uint32_t count) -> None:
        """Add a range of `count` values, which overlaps no other. Raises MemoryError."""
        self.ranges[number].first, self.ranges[number].end = first, first + count
        self.ranges[number].count = 0
        if not add_range(&self.table, &self.ranges[number]):
            raise MemoryError

    def remove(self, int number) -> None:
        """Remove a range."""
        remove_range(&self.table, &self.ranges[number])

    def allow(self, int number, int peer) -> None:
        """Let a peer count on a range. Raises MemoryError."""
        if not add_peer(&self.ranges[number], &self.peers[peer]):
            raise MemoryError

    def orphan(self, int peer) -> None:
        """Take a lost peer out of all ranges."""
        ranges_orphan(&self.table, &self.peers[peer])

    def may_count(self, uint32_t imm_data, int peer) -> bool:
        """Return whether an immediate of a peer is counted."""
        return may_count(&self.table, imm_data, &self.peers[peer])
