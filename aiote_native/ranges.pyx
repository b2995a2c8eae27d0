"""Immediates in a row on which only some peers may count; immediates of other peers are only tallied.

An engine grants immediates in blocks, which never overlap, so the blocks that have named their peers are an array
sorted by first value. An arrival costs a binary search there, which ends at once if the array is empty, and one for its
peer among the peers of the block. The caller holds the engine's lock around every function here.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

from aiote_native.counters cimport IMMEDIATE_BITS, Range, Table
from aiote_native.structs cimport PeerState


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
