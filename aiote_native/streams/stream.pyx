"""The parts of a stream that both halves use: lists of frames, and the table of keys."""

from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset

from aiote_native.cuda.copies cimport queue_look
from aiote_native.structs cimport ARM_LATER, MAY_READ, MAY_WRITE


cdef Memory* find_memory(const Registry* registry, uint64_t key) noexcept nogil:
    cdef Memory* memory = <Memory*> registry.table[key % BUCKETS]
    while memory != NULL and memory.key != key:
        memory = memory.next
    return memory


cdef bint is_open(const Stream* self, const Frame* frame, bint writes) noexcept nogil:
    """Return whether the iov of a peer's frame lies in memory that its key opens to the peer; empty frames need no key.

    The numbers come from the peer, so they are compared without adding them, because a sum could overflow.
    """
    cdef const Memory* memory
    cdef const RmaIov* iov
    cdef uint16_t i
    if frame.length == 0:
        return True
    memory = find_memory(self.registry, frame.key)
    if memory == NULL or not memory.access & (MAY_WRITE if writes else MAY_READ) or (writes and not memory.writable):
        return False
    if memory.bound and not (self.named and memcmp(memory.holder, self.peer, NAME_BYTES) == 0):
        return False
    for i in range(frame.iov_count):
        iov = &frame.iov[i]
        if (iov.address < memory.address or iov.address - memory.address > memory.length
                or iov.length > memory.length - (iov.address - memory.address)):
            return False
    return True


cdef void append(WorkList* works, Work* work) noexcept nogil:
    work.next = NULL
    if works.tail == NULL:
        works.head = work
    else:
        works.tail.next = work
    works.tail = work


cdef Work* take_first(WorkList* works) noexcept nogil:
    cdef Work* work = works.head
    if work != NULL:
        works.head = work.next
        if works.head == NULL:
            works.tail = NULL
    return work


cdef Work* new_work(Stream* self) noexcept nogil:
    """Take a spare Work, or allocate one; NULL if there is no memory. Spare ones are kept until the stream is freed."""
    cdef Work* work = self.spare
    if work == NULL:
        return <Work*> calloc(1, sizeof(Work))
    self.spare = work.next
    memset(work, 0, sizeof(Work))
    return work


cdef void free_work(Stream* self, Work* work) noexcept nogil:
    work.next = self.spare
    self.spare = work


cdef void free_list(WorkList* works) noexcept nogil:
    cdef Work* work = take_first(works)
    while work != NULL:
        free(work)
        work = take_first(works)


cdef void free_works(Stream* self) noexcept nogil:
    cdef WorkList spare
    spare.head = self.spare
    spare.tail = NULL
    self.spare = NULL
    free_list(&spare)
    free_list(&self.held)
    free_list(&self.unsent)
    free_list(&self.landing)
    free_list(&self.urgent)
    free_list(&self.queue)
    free_list(&self.begun)
    free_list(&self.unacked)
    free_list(&self.unread)
    free_list(&self.lent)
    free_list(&self.receives)


cdef bint is_copying(const Stream* self) noexcept nogil:
    """Return whether a frame or an import waits for a GPU; no descriptor announces the end of that."""
    return self.held.head != NULL or self.landing.head != NULL or self.starved or self.moving != 0


cdef int armed(Stream* self, bint again) noexcept nogil:
    """Return the answer of `arm`, after checking the GPUs that frames wait for."""
    if self.held.head != NULL and self.held.head.gpu != NULL:
        queue_look(&self.held.head.gpu.out)
    if self.landing.head != NULL and self.landing.head.gpu != NULL:
        queue_look(&self.landing.head.gpu.back)
    if self.gpu != NULL:
        queue_look(&self.gpu.back)
    return 1 if again else ARM_LATER if is_copying(self) else 0
