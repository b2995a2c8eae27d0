"""Send bytes from a GPU to a GPU of another process by reference: the receiving process copies the bytes itself.

The receiving process alone writes to its memory, so keys, leases and closing hold as for any other write.

Before the first frame toward a device, the sender asks the peer to open the allocation that contains the bytes. The
frame waits until the peer has opened it; if the peer cannot open it, the frame is staged. The owner keeps the memory
until no peer uses it. A write by reference is over when the peer has copied the bytes, and an answer by reference when
the peer has sent FRAME_PULLED. When the last registration in an allocation ends, every peer closes the allocation
before the owner is told that the registration has ended.
"""

from libc.errno cimport ENOMEM, EPROTO
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport write

from aiote_native.cuda.sharing cimport Handle, withdraw
from aiote_native.streams.stream cimport (
    DEVICE_SHIFT, FRAME_ANSWER, FRAME_EXPORT, FRAME_FORGET, FRAME_LEND, FRAME_LENT, STREAM_DEPTH, ExportOffer, append,
    find_memory, free_work, new_work, pthread_mutex_lock, pthread_mutex_unlock, take_first)

cdef enum:
    # The most bytes in flight by reference: the peer has to copy them before a cancellation is confirmed. With only two
    # frames in flight, as over the ring, an H200 copied only 75 GiB/s, because each frame waited until an earlier one
    # was copied, seen to be copied, and acknowledged.
    LENT_WINDOW = 16 << 20
    # The state of an ExportOffer.
    UNSENT = 0
    ASKED = 1       # FRAME_EXPORT was sent
    OPENED = 2      # the peer has opened the allocation
    REFUSED = 3     # the peer could not open it
    FORGETTING = 4  # the peer was asked to close it


cdef int device_of(const Work* work) noexcept nogil:
    """Return the peer's device that a frame's bytes go to, or -1 for host memory."""
    if work.frame.kind == FRAME_ANSWER:
        return <int> work.frame.imm - 1
    return <int> (work.frame.key >> DEVICE_SHIFT) - 1


cdef void reply(Stream* self, int kind, uint64_t number, int status) noexcept nogil:
    """Queue a frame without a payload about a shared allocation. If there is no memory for it, the stream breaks."""
    cdef Work* work = new_work(self)
    if work == NULL:
        self.broken = -ENOMEM
        return
    work.frame.kind = kind
    work.frame.key = number
    work.frame.status = status
    self.replies += 1
    append(&self.queue, work)


cdef ExportOffer* find_offer(Stream* self, const Export* exported, int device) noexcept nogil:
    cdef ExportOffer* offer = self.offers
    while offer != NULL and not (offer.exported == exported and offer.device == device and offer.state != FORGETTING):
        offer = offer.next
    return offer


cdef ExportOffer* offer_export(Stream* self, Export* exported, int device) noexcept nogil:
    """Queue a frame that asks the peer to open an allocation on one of its devices; return NULL if memory is short."""
    cdef ExportOffer* offer = <ExportOffer*> calloc(1, sizeof(ExportOffer))
    cdef Work* work = new_work(self)
    if offer == NULL or work == NULL:
        free(offer)
        if work != NULL:
            free_work(self, work)
        return NULL
    self.numbers += 1
    offer.number = self.numbers
    offer.exported = exported
    offer.device = device
    offer.handle = exported.handle
    offer.next = self.offers
    self.offers = offer
    exported.known += 1
    work.frame.kind = FRAME_EXPORT
    work.frame.key = offer.number
    work.frame.imm = device
    work.frame.iov_count = 1
    work.frame.length = work.frame.iov[0].length = sizeof(Handle)
    work.local[0] = <uint8_t*> &offer.handle
    append(&self.queue, work)
    return offer


cdef void refer(Stream* self, Work* work, const ExportOffer* offer) noexcept nogil:
    """Turn a frame into a frame by reference."""
    cdef int i
    work.reference[0] = offer.number
    for i in range(work.frame.iov_count):
        work.reference[1 + i] = <uint64_t> work.local[i] - offer.exported.base
    if work.frame.kind != FRAME_ANSWER:
        work.frame.kind = FRAME_LEND
        return
    work.frame.kind = FRAME_LENT
    work.lender = self
    work.next_lent = self.registry.lent
    self.registry.lent = work
    self.lent_count += 1


cdef int lend(Stream* self, Work* work) noexcept nogil:
    """Turn a held frame into a frame by reference.

    Return 1 if that is done, 0 while the peer opens the memory, and -1 if the frame has to be staged.
    """
    cdef int device = device_of(work)
    cdef ExportOffer* offer
    if work.frame.kind == FRAME_ANSWER:
        work.exported = find_memory(self.registry, work.frame.key).exported
    if not self.shares or work.exported == NULL or device < 0 or self.lent_count >= STREAM_DEPTH:
        return -1
    if work.gpu.out.error:
        return -1  # the contents of a broken device's memory are unknown; staging the frame fails
    offer = find_offer(self, work.exported, device)
    if offer == NULL:
        offer = offer_export(self, work.exported, device)
    if offer == NULL or offer.state == REFUSED:
        return -1
    if offer.state != OPENED:
        return 0
    refer(self, work, offer)
    return 1


cdef uint64_t lent_room(void* impl, const void* desc, uint64_t key) noexcept nogil:
    """Return how many bytes may be in flight by reference; 0 if the peer has not opened the memory."""
    cdef Stream* self = <Stream*> impl
    cdef const Memory* memory = <const Memory*> desc
    cdef ExportOffer* offer
    cdef bint lent
    if memory == NULL or memory.exported == NULL or not self.shares or not key >> DEVICE_SHIFT:
        return 0
    pthread_mutex_lock(&self.registry.lock)
    offer = find_offer(self, memory.exported, <int> (key >> DEVICE_SHIFT) - 1)
    lent = offer != NULL and offer.state == OPENED
    pthread_mutex_unlock(&self.registry.lock)
    return LENT_WINDOW if lent else 0


cdef ExportOffer* offer_by_number(Stream* self, uint64_t number) noexcept nogil:
    cdef ExportOffer* offer = self.offers
    while offer != NULL and offer.number != number:
        offer = offer.next
    return offer


cdef void note_offered(Stream* self, uint64_t number) noexcept nogil:
    """Record that a FRAME_EXPORT was sent, so that the peer can answer. Until then, its handle must not be freed."""
    cdef ExportOffer* offer = offer_by_number(self, number)
    if offer != NULL:
        offer.state = ASKED


cdef int note_opened(Stream* self, const Frame* frame) noexcept nogil:
    """Record whether the peer has opened an allocation; return -EPROTO if the peer was not asked to open it."""
    cdef ExportOffer* offer = offer_by_number(self, frame.key)
    cdef uint64_t one = 1
    if offer == NULL or offer.state != ASKED:
        return -EPROTO
    offer.state = REFUSED if frame.status else OPENED
    if frame.status:
        self.registry.refused = frame.status
        self.registry.refusals += 1
        write(self.registry.notify_fd, &one, sizeof(one))
    # The export may have ended meanwhile, so make the next poll look for ended exports.
    self.withdrawn = 0
    return 0


cdef int note_forgotten(Stream* self, const Frame* frame) noexcept nogil:
    """Record that the peer has closed an allocation; return -EPROTO if the peer was not asked to close it."""
    cdef ExportOffer** link = &self.offers
    cdef ExportOffer* offer
    while link[0] != NULL and link[0].number != frame.key:
        link = &link[0].next
    offer = link[0]
    if offer == NULL or offer.state != FORGETTING:
        return -EPROTO
    link[0] = offer.next
    leave_export(self.registry, offer.exported)
    free(offer)
    return 0


cdef void unlink_lent(Registry* registry, Work* work) noexcept nogil:
    cdef Work** link = &registry.lent
    while link[0] != NULL and link[0] != work:
        link = &link[0].next_lent
    if link[0] != NULL:
        link[0] = work.next_lent


cdef int note_pulled(Stream* self) noexcept nogil:
    """Record that the peer has copied the oldest answer by reference; return -EPROTO if there is no such answer."""
    cdef Work* work = take_first(&self.lent)
    if work == NULL:
        return -EPROTO
    unlink_lent(self.registry, work)
    self.lent_count -= 1
    free_work(self, work)
    return 0


cdef void withdraw_ended(Stream* self) noexcept nogil:
    """Ask the peer to close the allocations without registrations, and drop those that it could not open."""
    cdef ExportOffer** link = &self.offers
    cdef ExportOffer* offer
    if self.withdrawn == self.registry.withdrawn:
        return
    self.withdrawn = self.registry.withdrawn
    while link[0] != NULL:
        offer = link[0]
        if offer.exported.uses == 0 and offer.state == OPENED:
            offer.state = FORGETTING
            reply(self, FRAME_FORGET, offer.number, 0)
        elif offer.exported.uses == 0 and offer.state == REFUSED:
            link[0] = offer.next
            leave_export(self.registry, offer.exported)
            free(offer)
            continue
        link = &offer.next


cdef bint is_lent(const Registry* registry, const Memory* memory) noexcept nogil:
    """Return whether a peer may still be copying out of some memory."""
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
    """Free an export if no registration and no peer uses it any more."""
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
    """Record that one channel's peer, or the thread that gives descriptors, does not use an export any more."""
    exported.known -= 1
    end_export(registry, exported)


cdef void let_go(Registry* registry, Export* exported) noexcept nogil:
    """Record that a registration in an export is closed."""
    exported.holds -= 1
    end_export(registry, exported)


cdef void leave_lent(Stream* self) noexcept nogil:
    """Drop all references and exports of a stream that is shut. The caller holds the registry's lock."""
    cdef Work** link = &self.registry.lent
    cdef ExportOffer* offer = self.offers
    cdef ExportOffer* following
    while link[0] != NULL:
        if link[0].lender == self:
            link[0] = link[0].next_lent
        else:
            link = &link[0].next_lent
    self.lent_count = 0
    self.offers = NULL
    while offer != NULL:
        following = offer.next
        leave_export(self.registry, offer.exported)
        free(offer)
        offer = following
