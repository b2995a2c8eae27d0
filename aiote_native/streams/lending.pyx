"""What is sent from a GPU to another process's by reference: that process copies the bytes, and nobody writes to its
memory but itself, so keys, leases and closing hold as for any other write.

The first frame toward a device tells the peer of the allocation that its bytes lie in, and waits until the peer has
opened it, or cannot: then it is staged. Whose memory is given away keeps it until nobody has it any more: a write by
reference is over when the peer has copied it, an answer when the peer says so, and an allocation without a registration
is closed by all who have opened it before its owner hears that the last registration has ended.
"""

from libc.errno cimport ENOMEM, EPROTO
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport write

from aiote_native.cuda.sharing cimport Handle, withdraw
from aiote_native.streams.stream cimport (
    DEVICE_SHIFT, FRAME_ANSWER, FRAME_EXPORT, FRAME_FORGET, FRAME_LEND, FRAME_LENT, STREAM_DEPTH, Told, append,
    find_memory, free_work, new_work, pthread_mutex_lock, pthread_mutex_unlock, take_first)

cdef enum:
    # Bytes that a peer has to copy before a cancellation is confirmed. With two frames at a time, as over the ring, an
    # H200 copied 75 GiB/s: each waited for a copy, its end and its acknowledgement.
    LENT_WINDOW = 16 << 20
    UNSENT = 0
    ASKED = 1
    GIVEN = 2
    REFUSED = 3
    FORGETTING = 4


cdef int device_of(const Work* work) noexcept nogil:
    """The device at the peer that a frame's bytes go to; -1: memory of the host."""
    if work.frame.kind == FRAME_ANSWER:
        return <int> work.frame.imm - 1
    return <int> (work.frame.key >> DEVICE_SHIFT) - 1


cdef void reply(Stream* self, int kind, uint64_t number, int status) noexcept nogil:
    """Queue a frame of sharing that is nothing but its header. Without memory for it the stream breaks."""
    cdef Work* work = new_work(self)
    if work == NULL:
        self.broken = -ENOMEM
        return
    work.frame.kind = kind
    work.frame.key = number
    work.frame.status = status
    self.replies += 1
    append(&self.queue, work)


cdef Told* find_told(Stream* self, const Export* exported, int device) noexcept nogil:
    cdef Told* told = self.told
    while told != NULL and not (told.exported == exported and told.device == device and told.state != FORGETTING):
        told = told.next
    return told


cdef Told* tell(Stream* self, Export* exported, int device) noexcept nogil:
    """Have the peer open an allocation on a device of its own; NULL where there is no memory to do it."""
    cdef Told* told = <Told*> calloc(1, sizeof(Told))
    cdef Work* work = new_work(self)
    if told == NULL or work == NULL:
        free(told)
        if work != NULL:
            free_work(self, work)
        return NULL
    self.numbers += 1
    told.number = self.numbers
    told.exported = exported
    told.device = device
    told.handle = exported.handle
    told.next = self.told
    self.told = told
    exported.known += 1
    work.frame.kind = FRAME_EXPORT
    work.frame.key = told.number
    work.frame.imm = device
    work.frame.iov_count = 1
    work.frame.length = work.frame.iov[0].length = sizeof(Handle)
    work.local[0] = <uint8_t*> &told.handle
    append(&self.queue, work)
    return told


cdef void refer(Stream* self, Work* work, const Told* told) noexcept nogil:
    """Make a frame one by reference."""
    cdef int i
    work.reference[0] = told.number
    for i in range(work.frame.iov_count):
        work.reference[1 + i] = <uint64_t> work.local[i] - told.exported.base
    if work.frame.kind != FRAME_ANSWER:
        work.frame.kind = FRAME_LEND
        return
    work.frame.kind = FRAME_LENT
    work.lender = self
    work.next_lent = self.registry.lent
    self.registry.lent = work
    self.lent_count += 1


cdef int lend(Stream* self, Work* work) noexcept nogil:
    """Make a frame that is held one by reference: 1; 0 while the peer opens its memory; -1 where it is to be staged."""
    cdef int device = device_of(work)
    cdef Told* told
    if work.frame.kind == FRAME_ANSWER:
        work.exported = find_memory(self.registry, work.frame.key).exported
    if not self.shares or work.exported == NULL or device < 0 or self.lent_count >= STREAM_DEPTH:
        return -1
    if work.gpu.out.error:
        return -1  # what is in memory of a device that broke nobody knows; to stage it fails
    told = find_told(self, work.exported, device)
    if told == NULL:
        told = tell(self, work.exported, device)
    if told == NULL or told.state == REFUSED:
        return -1
    if told.state != GIVEN:
        return 0
    refer(self, work, told)
    return 1


cdef uint64_t lent_room(void* impl, const void* desc, uint64_t key) noexcept nogil:
    """Return how many bytes may be under way by reference; 0 where the peer has not opened the memory."""
    cdef Stream* self = <Stream*> impl
    cdef const Memory* memory = <const Memory*> desc
    cdef Told* told
    cdef bint lent
    if memory == NULL or memory.exported == NULL or not self.shares or not key >> DEVICE_SHIFT:
        return 0
    pthread_mutex_lock(&self.registry.lock)
    told = find_told(self, memory.exported, <int> (key >> DEVICE_SHIFT) - 1)
    lent = told != NULL and told.state == GIVEN
    pthread_mutex_unlock(&self.registry.lock)
    return LENT_WINDOW if lent else 0


cdef Told* told_by_number(Stream* self, uint64_t number) noexcept nogil:
    cdef Told* told = self.told
    while told != NULL and told.number != number:
        told = told.next
    return told


cdef void note_told(Stream* self, uint64_t number) noexcept nogil:
    """Note that the peer can answer: before that nobody lets go of what the frame is sent from."""
    cdef Told* told = told_by_number(self, number)
    if told != NULL:
        told.state = ASKED


cdef int note_opened(Stream* self, const Frame* frame) noexcept nogil:
    """Note what became of an allocation that the peer was told of; -EPROTO where it was told of none such."""
    cdef Told* told = told_by_number(self, frame.key)
    cdef uint64_t one = 1
    if told == NULL or told.state != ASKED:
        return -EPROTO
    told.state = REFUSED if frame.status else GIVEN
    if frame.status:
        self.registry.refused = frame.status
        self.registry.refusals += 1
        write(self.registry.notify_fd, &one, sizeof(one))
    # If the allocation has ended meanwhile, it is withdrawn now.
    self.withdrawn = 0
    return 0


cdef int note_forgotten(Stream* self, const Frame* frame) noexcept nogil:
    cdef Told** link = &self.told
    cdef Told* told
    while link[0] != NULL and link[0].number != frame.key:
        link = &link[0].next
    told = link[0]
    if told == NULL or told.state != FORGETTING:
        return -EPROTO
    link[0] = told.next
    leave_export(self.registry, told.exported)
    free(told)
    return 0


cdef void unlink_lent(Registry* registry, Work* work) noexcept nogil:
    cdef Work** link = &registry.lent
    while link[0] != NULL and link[0] != work:
        link = &link[0].next_lent
    if link[0] != NULL:
        link[0] = work.next_lent


cdef int note_pulled(Stream* self) noexcept nogil:
    """Note that the bytes of our oldest answer by reference are ours again; -EPROTO where there is none."""
    cdef Work* work = take_first(&self.lent)
    if work == NULL:
        return -EPROTO
    unlink_lent(self.registry, work)
    self.lent_count -= 1
    free_work(self, work)
    return 0


cdef void withdraw_ended(Stream* self) noexcept nogil:
    """Have the peer close what it has of allocations in which nothing of ours is registered any more."""
    cdef Told** link = &self.told
    cdef Told* told
    if self.withdrawn == self.registry.withdrawn:
        return
    self.withdrawn = self.registry.withdrawn
    while link[0] != NULL:
        told = link[0]
        if told.exported.uses == 0 and told.state == GIVEN:
            told.state = FORGETTING
            reply(self, FRAME_FORGET, told.number, 0)
        elif told.exported.uses == 0 and told.state == REFUSED:
            link[0] = told.next
            leave_export(self.registry, told.exported)
            free(told)
            continue
        link = &told.next


cdef bint is_lent(const Registry* registry, const Memory* memory) noexcept nogil:
    """Whether a peer may still be copying out of some memory."""
    cdef const Work* work = registry.lent
    cdef int i
    while work != NULL:
        for i in range(work.frame.iov_count):
            if (<uint64_t> work.local[i] < memory.address + memory.length
                    and <uint64_t> work.local[i] + work.frame.iov[i].length > memory.address):
                return True
        work = work.next_lent
    return False


cdef void end_export(Registry* registry, Export* exported) noexcept nogil:
    """Let go of an export that nobody uses or knows any more."""
    cdef Export** link = &registry.exports
    if exported.holds or exported.known:
        return
    while link[0] != exported:
        link = &link[0].next
    link[0] = exported.next
    withdraw(exported)
    free(exported.parts)
    free(exported)


cdef void leave_export(Registry* registry, Export* exported) noexcept nogil:
    """Note that one channel's peer has it no longer."""
    exported.known -= 1
    end_export(registry, exported)


cdef void let_go(Registry* registry, Export* exported) noexcept nogil:
    """Note that a registration in it, which has ended, is gone."""
    exported.holds -= 1
    end_export(registry, exported)


cdef void leave_lent(Stream* self) noexcept nogil:
    """Forget what was given away over a stream that is shut. The registry's lock is held."""
    cdef Work** link = &self.registry.lent
    cdef Told* told = self.told
    cdef Told* following
    while link[0] != NULL:
        if link[0].lender == self:
            link[0] = link[0].next_lent
        else:
            link = &link[0].next_lent
    self.lent_count = 0
    self.told = NULL
    while told != NULL:
        following = told.next
        leave_export(self.registry, told.exported)
        free(told)
        told = following
