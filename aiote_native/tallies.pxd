from libc.stdint cimport int64_t, uint32_t

# How often each immediate was counted. Open addressing; the next growth may drop an entry whose count is 0.
cdef struct Tally:
    uint32_t* imm_data
    int64_t* counts
    bint* taken
    uint32_t size
    uint32_t used
    uint32_t last

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
