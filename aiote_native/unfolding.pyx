"""Estimate how much memory the values of a MessagePack text take as Python objects, without making any.

One byte may become an object of 200 bytes: a text of 4 MiB can hold four million empty sets. The estimates are
CPython's sizes on 64 bits, and the larger size where the text does not tell the type.
"""

from libc.stdint cimport int64_t, uint64_t


cdef enum:
    REFERENCE = 8
    ARRAY = 216  # a set's size; a list or a tuple takes 56
    MAP = 224
    ROOMY = 5  # entries of a map of that size
    ENTRY = 48  # for each further entry, beside its two references
    INTEGER = 32
    FLOAT = 24
    BINARY = 40
    ASCII = 56
    TEXT = 76


cdef inline uint64_t number(const unsigned char *at, int size) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(size):
        value = value << 8 | at[i]
    return value


cdef inline int64_t text(const unsigned char *at, uint64_t length) noexcept nogil:
    """Return the size of a string, in which the largest character decides how many bytes each of them takes."""
    cdef unsigned char largest = 0
    cdef uint64_t i
    for i in range(length):
        largest = max(largest, at[i])
    return ASCII + <int64_t> length if largest < 0x80 else TEXT + (4 if largest >= 0xF0 else 2) * <int64_t> length


cdef int64_t unfold(const unsigned char *at, const unsigned char *end) noexcept nogil:
    cdef int64_t total = 0
    cdef uint64_t length
    cdef unsigned char kind
    cdef int head
    while at < end:
        kind = at[0]
        at += 1
        total += REFERENCE
        if kind < 0x80 or kind >= 0xE0 or kind == 0xC0 or kind == 0xC2 or kind == 0xC3:
            continue
        head = 0
        length = kind & (0x1F if kind >= 0xA0 else 0x0F)
        if kind == 0xCA or kind == 0xCB:
            head = 4 << (kind - 0xCA)
            total += FLOAT
        elif 0xCC <= kind <= 0xD3:
            head = 1 << (kind & 3)
            total += INTEGER
        elif 0xD4 <= kind <= 0xD8:
            head = 1 + (1 << (kind - 0xD4))
            total += BINARY + head
        elif kind >= 0xC0:
            if kind == 0xC1:
                return total
            # The length of binary, extension, text, array and map follows, in 1, 2 or 4 bytes.
            if kind <= 0xC6:
                head = 1 << (kind - 0xC4)
            elif kind <= 0xC9:
                head = 1 << (kind - 0xC7)
            elif kind <= 0xDB:
                head = 1 << (kind - 0xD9)
            else:
                head = 2 << (kind & 1)
            if end - at < head:
                return total
            length = number(at, head)
            if 0xC7 <= kind <= 0xC9:
                head += 1
        if end - at < head:
            return total
        at += head
        if kind <= 0x8F or kind >= 0xDE:
            length = min(length, <uint64_t> (end - at))
            total += MAP if length <= ROOMY else MAP + ENTRY * <int64_t> (length - ROOMY)
        elif kind <= 0x9F or kind >= 0xDC:
            total += ARRAY
        elif kind <= 0xBF or 0xC4 <= kind <= 0xC9 or kind >= 0xD9:
            if <uint64_t> (end - at) < length:
                return total
            total += BINARY + <int64_t> length if 0xC4 <= kind <= 0xC9 else text(at, length)
            at += length
    return total


def unfolded_bytes(bytes data not None) -> int:
    """Return about how many bytes the objects of a MessagePack text take, up to where it is malformed, if it is."""
    cdef const unsigned char *start = data
    return unfold(start, start + len(data))
