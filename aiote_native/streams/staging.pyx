"""Send bytes from a GPU: copy them to pinned slots first, and begin the frame when all of them are there.

A frame that has begun cannot be taken back. A frame therefore begins only after its copies have ended well, and a frame
whose copies fail is never sent. Held frames are copied in the order in which they came, all places and slots of a frame
at once, and join the queue in that order. Frames from host memory pass them, except answers, because the peer matches
answers to its reads by their order.
"""

from libc.errno cimport EIO, EMSGSIZE
from libc.stdint cimport uint64_t

from aiote_native.cuda.copies cimport (
    CopyQueue, SLOT_BYTES, queue_begin, queue_copy, queue_end, queue_give, queue_state, queue_take, queue_wait, slot_at)
from aiote_native.streams.lending cimport leave_lent, lend
from aiote_native.streams.pulling cimport leave_imports
from aiote_native.streams.stream cimport (
    FRAME_ANSWER, FRAME_WRITE, Work, WorkList, append, free_work, is_open, take_first)
from aiote_native.structs cimport MAX_SGE

cdef enum:
    STAGED_MOST = 8  # slots of one stream, a quarter of all, so that a peer that stops receiving leaves some for others


cdef bint is_held(const Work* work) noexcept nogil:
    """Return whether a request is a write of bytes from a GPU."""
    return work.gpu != NULL and work.frame.kind == FRAME_WRITE and work.frame.length != 0


cdef void hold(Stream* self, Work* work) noexcept nogil:
    append(&self.held, work)
    if self.uncopied == NULL:
        self.uncopied = work


cdef int post_copies(Work* work) noexcept nogil:
    """Post the copies of all places of a frame to its slots; return 0 or -EIO."""
    cdef CopyQueue* queue = &work.gpu.out
    cdef uint64_t at = 0
    cdef uint64_t done, part
    cdef int code = queue_begin(queue)
    cdef int i
    if code:
        return code
    for i in range(work.frame.iov_count):
        done = 0
        while done < work.frame.iov[i].length and code == 0:
            part = min(work.frame.iov[i].length - done, SLOT_BYTES - at % SLOT_BYTES)
            code = queue_copy(queue, slot_at(queue, work.slots[at // SLOT_BYTES]) + at % SLOT_BYTES,
                              work.local[i] + done, part)
            done += part
            at += part
    work.number = queue_end(queue)
    return code


cdef bint copy_out(Stream* self, Work* work) noexcept nogil:
    """Post the copies of a held frame, or turn it into a frame by reference; return False while it has to wait."""
    cdef int shared
    cdef int needed = <int> ((work.frame.length + SLOT_BYTES - 1) // SLOT_BYTES)
    if work.gpu == NULL:
        return True
    if work.frame.kind == FRAME_ANSWER and not is_open(self, &work.frame, False):
        # The memory was closed after the peer asked for it, so it must not be read.
        work.gpu = NULL
        return True
    shared = lend(self, work)
    if shared >= 0:
        return shared == 1
    if work.frame.length > <uint64_t> MAX_SGE * SLOT_BYTES:
        work.status = -EMSGSIZE
        return True
    if self.staged + needed > STAGED_MOST or work.gpu.out.free_count < needed:
        return False
    while work.slot_count < needed:
        work.slots[work.slot_count] = queue_take(&work.gpu.out)
        work.slot_count += 1
    self.staged += needed
    work.copied = True
    work.number = work.gpu.out.posted
    work.status = post_copies(work)
    return True


cdef void release(Stream* self, Work* work) noexcept nogil:
    """Queue a frame whose copies are over, or report that they have failed."""
    cdef Work* trailer = work.trailer
    if work.status == 0:
        append(&self.queue, work)
    else:
        unstage(self, work)
        if trailer == NULL:
            append(&self.unsent, work)
        else:
            trailer.frame.status = -EIO
            free_work(self, work)
    if trailer != NULL:
        append(&self.queue, trailer)


cdef void stage(Stream* self) noexcept nogil:
    """Post the copies that there are slots for, and release copied frames. The caller holds the registry's lock."""
    cdef Work* work
    cdef int state
    if self.closed or self.held.head == NULL:
        return
    while self.uncopied != NULL and copy_out(self, self.uncopied):
        self.uncopied = self.uncopied.next
    while self.held.head != self.uncopied:
        work = self.held.head
        state = queue_state(&work.gpu.out, work.number) if work.copied else 1
        if state == 0:
            return
        if state < 0:
            work.status = state
        take_first(&self.held)
        release(self, work)


cdef int gather_slots(const Work* work, uint64_t at, iovec* vectors) noexcept nogil:
    """List the payload of a frame from byte `at` on, which lies in its slots; return the number of vectors."""
    cdef uint64_t part
    cdef int count = 0
    while at < work.frame.length:
        part = min(work.frame.length - at, SLOT_BYTES - at % SLOT_BYTES)
        vectors[count].iov_base = slot_at(&work.gpu.out, work.slots[at // SLOT_BYTES]) + at % SLOT_BYTES
        vectors[count].iov_len = part
        at += part
        count += 1
    return count


cdef void unstage(Stream* self, Work* work) noexcept nogil:
    """Give back the slots of a frame."""
    while work.slot_count:
        work.slot_count -= 1
        self.staged -= 1
        queue_give(&work.gpu.out, work.slots[work.slot_count])


cdef void leave_list(Stream* self, WorkList* works) noexcept nogil:
    cdef Work* work = works.head
    while work != NULL:
        if work.gpu != NULL:
            # Wait for all copies, because they must not read or write memory once the stream is shut.
            queue_wait(&work.gpu.out, work.gpu.out.posted)
            queue_wait(&work.gpu.back, work.gpu.back.posted)
        unstage(self, work)
        work = work.next


cdef void leave_slots(Stream* self) noexcept nogil:
    """Wait for the copies of a stream that is shut, and give back its slots. The caller holds the registry's lock."""
    leave_list(self, &self.held)
    leave_list(self, &self.queue)
    leave_list(self, &self.begun)
    leave_list(self, &self.landing)
    leave_list(self, &self.unread)
    if self.gpu != NULL:
        queue_wait(&self.gpu.back, self.gpu.back.posted)
        if self.slot >= 0:
            queue_give(&self.gpu.back, self.slot)
    self.gpu = NULL
    self.starved = False
    leave_imports(self)
    leave_lent(self)
