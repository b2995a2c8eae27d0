"""Receive bytes for a GPU: they come into pinned slots, and each slot is copied to the GPU as soon as it is full.

A frame is over when its last copy is over (receiving.pyx). Until then the frame is neither counted nor acknowledged.
"""

from libc.errno cimport EIO
from libc.stdint cimport uint8_t, uint64_t

from aiote_native.cuda.copies cimport (
    SLOT_BYTES, queue_begin, queue_copy, queue_end, queue_give, queue_give_behind, queue_take, slot_at)
from aiote_native.streams.stream cimport Frame


cdef int list_slot(Stream* self, iovec* vectors) noexcept nogil:
    """List the rest of a slot and, after a frame's last bytes, the next header.

    Return the number of vectors; 0 while no slot is free.
    """
    cdef uint64_t room
    if self.slot < 0:
        self.slot = queue_take(&self.gpu.back)
        self.filled = 0
        self.starved = self.slot < 0
        if self.starved:
            return 0
    room = min(SLOT_BYTES - self.filled, self.left)
    vectors[0].iov_base = slot_at(&self.gpu.back, self.slot) + self.filled
    vectors[0].iov_len = room
    if room < self.left:
        return 1
    vectors[1].iov_base = &self.heads[1 - self.head]
    vectors[1].iov_len = sizeof(Frame)
    return 2


cdef int post_copies(Stream* self) noexcept nogil:
    """Post the copies of a slot to the places of its frame; return 0 or -EIO."""
    cdef uint8_t* source = slot_at(&self.gpu.back, self.slot)
    cdef uint64_t part
    cdef int code = queue_begin(&self.gpu.back)
    if code:
        return code
    while self.filled and code == 0:
        part = min(self.filled, self.into[self.into_first].iov_len)
        if part:
            code = queue_copy(&self.gpu.back, self.into[self.into_first].iov_base, source, part)
        self.into[self.into_first].iov_base = <uint8_t*> self.into[self.into_first].iov_base + part
        self.into[self.into_first].iov_len -= part
        source += part
        self.filled -= part
        if self.into[self.into_first].iov_len == 0:
            self.into_first += 1
    self.number = queue_end(&self.gpu.back)
    return code


cdef void land(Stream* self, uint64_t bytes) noexcept nogil:
    """Record the bytes that came into the slot, and copy it if it is full or has the frame's last bytes."""
    self.filled += bytes
    if self.filled < SLOT_BYTES and self.left:
        return
    if self.status == 0 and post_copies(self):
        self.status = -EIO
    queue_give_behind(&self.gpu.back, self.slot)
    self.slot = -1


cdef void drop_slot(Stream* self) noexcept nogil:
    """Give back the slot of a frame whose remaining bytes are discarded."""
    if self.gpu != NULL and self.slot >= 0:
        queue_give(&self.gpu.back, self.slot)
        self.slot = -1
    self.starved = False
