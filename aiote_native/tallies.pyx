"""Tallies of immediates, which each side of a channel keeps so that a lost channel loses no count.

The sender tallies the counted work requests that have ended well, the receiver tallies those that came, each by all 32
bits of the immediate. When a channel is lost, the difference of the two tells how many of the requests that never ended
did arrive. `tests/reference/channel_counts.py` explains why the tables stay small; it is the plain reference.
"""

from libc.errno cimport ENOMEM, ENOSPC
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

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
