"""One stream of frames: its work, and the GPU memory that its two ends lend, open and copy."""

from libc.errno cimport EACCES, EAGAIN, EINVAL, EIO, ENODEV, ENOMEM, ENOSPC, EPERM, EPROTO, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport close, usleep, write

import os

from aiote_native.cuda.descriptors cimport (
    BATCH, SOCKET_NAME, AioteBatch, AioteRequest, aiote_answer, aiote_hear, aiote_named_socket, aiote_next, aiote_offer)
from aiote_native.cuda.driver cimport (
    SLOT_BYTES, GpuQueues, queue_begin, queue_copy, queue_end, queue_give, queue_give_behind, queue_has_room,
    queue_in_hand, queue_look, queue_state, queue_take, queue_wait, slot_at)
from aiote_native.cuda.memory cimport (
    CLOSED, FAILED, OPEN, TOKEN_BYTES, WAITING, Export, Handle, Import, export_batch, import_close, import_end,
    import_lives, import_open, import_state, withdraw)
from aiote_native.engine.structs cimport ARM_LATER, MAX_SGE, MAY_READ, MAY_WRITE
from aiote_native.system.base cimport check

# The parts of a stream that both halves use: lists of frames, and the table of keys.


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


# Send bytes from a GPU to a GPU of another process by reference: the receiving process copies the bytes itself.
#
# The receiving process alone writes to its memory, so keys, leases and closing hold as for any other write.
#
# Before the first frame toward a device, the sender asks the peer to open the allocation that contains the bytes. The
# frame waits until the peer has opened it; if the peer cannot open it, the frame is staged. The owner keeps the memory
# until no peer uses it. A write by reference is over when the peer has copied the bytes, and an answer by reference
# when the peer has sent FRAME_PULLED. When the last registration in an allocation ends, every peer closes the
# allocation before the owner is told that the registration has ended.

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


# Receive bytes by reference: copy them out of another process's GPU memory, on a local queue of copies.
#
# A reference is only a number that a peer states, so it is not trusted. When the copies are posted, the receiver looks
# up the number among the allocations that this peer has exported, compares the offsets with the size that the driver
# tells, and checks the destination as for any write. A write is counted, and an answer is given back, when its copies
# are over.

cdef extern from * nogil:
    """
    #define aiote_say(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    """
    void aiote_say(uint64_t*, uint64_t)

cdef enum:
    MOST_IMPORTS = 4096
    MOST_REPLIES = 2 * MOST_IMPORTS


cdef bint may_copy(GpuQueues* gpu) noexcept nogil:
    """Return whether one more group can be posted to a device besides those of the slots that are being received."""
    return queue_has_room(&gpu.back, MAX_SGE, 1 + queue_in_hand(&gpu.back))


cdef bint is_full(const Stream* self, const Frame* frame) noexcept nogil:
    """Return whether a frame by reference has to wait until earlier copies are over."""
    cdef const Memory* memory
    cdef GpuQueues* gpu
    if frame.kind == FRAME_LENT:
        gpu = self.unread.head.gpu if self.unread.head != NULL else NULL
    else:
        memory = find_memory(self.registry, frame.key)
        gpu = memory.gpu if memory != NULL else NULL
    return gpu != NULL and not may_copy(gpu)


cdef int open_reference(Stream* self, const Frame* frame) noexcept nogil:
    """Receive a reference into its place; return -EPROTO without sharing, or for an answer that no read asked for."""
    cdef const Work* asked = self.unread.head
    if not self.shares or frame.iov_count == 0:
        return -EPROTO
    if frame.kind == FRAME_LENT and (
            asked == NULL or asked.gpu == NULL or asked.frame.imm == 0 or asked.pulled
            or asked.frame.length != frame.length or asked.frame.iov_count != frame.iov_count):
        return -EPROTO
    self.left = (1 + frame.iov_count) * sizeof(uint64_t)
    self.into[0].iov_base = self.reference
    self.into[0].iov_len = self.left
    self.into_count = 1
    return 0


cdef Import* find_import(const Stream* self, uint64_t number) noexcept nogil:
    cdef Import* shared = self.imports
    while shared != NULL and shared.number != number:
        shared = shared.next
    return shared


cdef int pull(Stream* self, GpuQueues* gpu, const Frame* frame, uint8_t** local) noexcept nogil:
    """Post the copies of a reference; return 0 or a negative error number. With -EIO some copies may be in flight."""
    cdef Import* shared = find_import(self, self.reference[0])
    cdef const uint64_t* offset = &self.reference[1]
    cdef int code = 0
    cdef int i
    if (shared == NULL or import_state(shared) != OPEN or shared.forgotten or shared.gpu != gpu
            or not import_lives(shared)):
        return -EINVAL
    for i in range(frame.iov_count):
        if offset[i] > shared.handle.size or frame.iov[i].length > shared.handle.size - offset[i]:
            return -EINVAL
    code = queue_begin(&gpu.back)
    if code:
        return code
    if self.pulling != NULL:
        # Set before the first copy and within the gate, so that the peer knows what to wait for when it shuts the gate.
        aiote_say(self.pulling, 1)
    for i in range(frame.iov_count):
        if code == 0 and frame.iov[i].length:
            code = queue_copy(&gpu.back, local[i], <const uint8_t*> shared.address + offset[i], frame.iov[i].length)
    shared.last = queue_end(&gpu.back)
    return code


cdef void pull_write(Stream* self, const Frame* frame) noexcept nogil:
    """Copy the bytes of a peer's write by reference into memory that its key opens; `status` tells of a failure."""
    cdef uint8_t* local[MAX_SGE]
    cdef const Memory* memory
    cdef int i
    if not is_open(self, frame, writes=True):
        self.status = -EACCES
        return
    memory = find_memory(self.registry, frame.key)
    if memory == NULL or memory.gpu == NULL:
        self.status = 0 if frame.length == 0 else -EINVAL
        return
    for i in range(frame.iov_count):
        local[i] = <uint8_t*> frame.iov[i].address
    self.gpu = memory.gpu
    self.slot = -1
    self.status = pull(self, memory.gpu, frame, local)
    self.number = memory.gpu.back.posted


cdef void pull_answer(Stream* self, Work* asked) noexcept nogil:
    """Copy the bytes of an answer by reference; the read ends after the copies, and then gives the bytes back."""
    asked.status = pull(self, asked.gpu, &asked.frame, asked.local)
    asked.copied = asked.pulled = True
    asked.number = asked.gpu.back.posted


cdef int take_export(Stream* self, const Frame* frame) noexcept nogil:
    """Queue the opening of a peer's export, or reply why it cannot be opened.

    Return -EPROTO for a number that is in use, or if the peer leaves too many replies unread.
    """
    cdef Import* shared
    if find_import(self, frame.key) != NULL or self.replies >= MOST_REPLIES:
        return -EPROTO
    if not self.shares or self.import_count >= MOST_IMPORTS:
        reply(self, FRAME_OPENED, frame.key, -EPERM if not self.shares else -ENOSPC)
        return 0
    shared = <Import*> calloc(1, sizeof(Import))
    if shared == NULL or frame.imm >= SHARED_DEVICES or self.registry.gpus[frame.imm] == NULL:
        free(shared)
        reply(self, FRAME_OPENED, frame.key, -ENODEV)
        return 0
    shared.number = frame.key
    shared.handle = self.handle
    shared.gpu = self.registry.gpus[frame.imm]
    shared.device = <int> frame.imm
    shared.last = shared.gpu.back.posted
    shared.socket = -1
    shared.next = self.imports
    self.imports = shared
    self.import_count += 1
    self.moving += 1
    return 0


cdef int take_forget(Stream* self, const Frame* frame) noexcept nogil:
    """Queue the closing of an import that the peer wants back.

    Return -EPROTO for an import that is not open or is being closed, or if the peer leaves too many replies unread.
    """
    cdef Import* shared = find_import(self, frame.key)
    if shared == NULL or shared.forgotten or import_state(shared) != OPEN or self.replies >= MOST_REPLIES:
        return -EPROTO
    shared.forgotten = True
    self.moving += 1
    return 0


cdef void drop_import(Stream* self, Import* shared) noexcept nogil:
    cdef Import** link = &self.imports
    while link[0] != shared:
        link = &link[0].next
    link[0] = shared.next
    self.import_count -= 1
    free(shared)


cdef void end_moving(Stream* self, Import* shared, int kind, int status) noexcept nogil:
    reply(self, kind, shared.number, status)
    self.moving -= 1
    self.opener = NULL


cdef void begin_moving(Stream* self) noexcept nogil:
    """Open or close the next import; one at a time, so that a peer cannot make this side start many threads."""
    cdef Import* shared = self.imports
    cdef int state
    while shared != NULL and self.opener == NULL:
        state = import_state(shared)
        if state == WAITING:
            self.opener = shared
            import_open(shared)
        elif shared.forgotten and state == OPEN and queue_state(&shared.gpu.back, shared.last):
            self.opener = shared
            import_close(shared)
        shared = shared.next


cdef void move_imports(Stream* self) noexcept nogil:
    """Go on opening and closing imports, and tell the peer of each result."""
    cdef Import* shared = self.opener
    cdef int state
    if self.moving == 0:
        return
    if shared == NULL:
        begin_moving(self)
        shared = self.opener
    if shared == NULL:
        return
    state = import_state(shared)
    if state == OPEN:
        end_moving(self, shared, FRAME_OPENED, 0)
    elif state == FAILED:
        end_moving(self, shared, FRAME_OPENED, shared.code)
        drop_import(self, shared)
    elif state == CLOSED:
        end_moving(self, shared, FRAME_FORGOTTEN, 0)
        drop_import(self, shared)


cdef void note_pulls(Stream* self) noexcept nogil:
    """Tell the peer when no copy out of its memory is in flight any more."""
    cdef const Import* shared = self.imports
    if self.pulling == NULL or self.pulling[0] == 0:
        return
    while shared != NULL:
        if queue_state(&shared.gpu.back, shared.last) == 0:
            return
        shared = shared.next
    aiote_say(self.pulling, 0)


cdef void leave_imports(Stream* self) noexcept nogil:
    """Close the imports of a stream that is shut. The caller holds the registry's lock."""
    cdef Import* shared = self.imports
    cdef Import* following
    self.imports = self.opener = NULL
    self.moving = self.import_count = 0
    while shared != NULL:
        following = shared.next
        queue_wait(&shared.gpu.back, shared.last)
        import_end(shared)
        free(shared)
        shared = following
    if self.pulling != NULL:
        aiote_say(self.pulling, 0)
        self.pulling = NULL


# A thread that gives peers the file descriptors of exported GPU memory (cuda/segments.pyx).
#
# The thread sleeps until a process connects. That process must be of the same user and must know an export's token,
# which only peers are told, over their channels. A device starts the thread with its first export of such memory, and
# ends it when the device is closed.

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <sys/socket.h>
    """
    int pthread_create(pthread_t*, const void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int shutdown(int, int)
    const int SHUT_RDWR

cdef enum:
    PAUSE_US = 10_000


cdef Export* export_for(Giver* self, const AioteRequest* request) noexcept nogil:
    """Return the export with a request's token, or NULL; its owner does not free it before `leave_export`."""
    cdef Export* made
    pthread_mutex_lock(&self.registry.lock)
    made = self.registry.exports
    while made != NULL and memcmp(made.handle.token, request.token, TOKEN_BYTES):
        made = made.next
    if made != NULL and (made.uses == 0 or request.first >= made.handle.segments):
        made = NULL
    if made != NULL:
        made.known += 1
    pthread_mutex_unlock(&self.registry.lock)
    return made


cdef void serve(Giver* self, int asking) noexcept nogil:
    """Answer the requests of one connection until it ends."""
    cdef int[BATCH] descriptors
    cdef AioteRequest request
    cdef AioteBatch batch
    cdef Export* made
    cdef uint64_t i
    cdef bint sent = True
    while sent and aiote_hear(asking, &request):
        made = export_for(self, &request)
        if made == NULL:
            batch.code, batch.count = -EACCES, 0
        else:
            export_batch(made, request.first, &batch, descriptors)
        sent = aiote_answer(asking, &batch, descriptors)
        for i in range(batch.count):
            close(descriptors[i])
        if made != NULL:
            pthread_mutex_lock(&self.registry.lock)
            leave_export(self.registry, made)
            pthread_mutex_unlock(&self.registry.lock)


cdef bint attend(Giver* self, int asking) noexcept nogil:
    """Record the connection being served, so that `stop_giving` can shut it; return False if the thread has to end."""
    cdef bint goes_on
    pthread_mutex_lock(&self.registry.lock)
    self.asking = asking
    goes_on = not self.ended
    pthread_mutex_unlock(&self.registry.lock)
    return goes_on


cdef void* run(void* argument) noexcept nogil:
    cdef Giver* self = <Giver*> argument
    cdef int asking
    while True:
        asking = aiote_next(self.listener)
        if asking >= 0 and attend(self, asking):
            serve(self, asking)
        if not attend(self, -1):
            break
        if asking >= 0:
            close(asking)
        else:
            usleep(PAUSE_US)
    if asking >= 0:
        close(asking)
    return NULL


cdef Giver* start_giving(Registry* registry) except NULL:
    """Start the thread. Raises StatusError and MemoryError."""
    cdef bytes name = os.urandom(SOCKET_NAME // 2).hex().encode()
    cdef Giver* self = <Giver*> calloc(1, sizeof(Giver))
    cdef int code
    if self == NULL:
        raise MemoryError
    self.registry = registry
    self.asking = -1
    memcpy(self.name, <const char*> name, SOCKET_NAME)
    self.listener = aiote_named_socket()
    code = -errno if self.listener < 0 else aiote_offer(self.listener, self.name)
    if code == 0 and pthread_create(&self.thread, NULL, run, self):
        code = -EAGAIN
    if code:
        if self.listener >= 0:
            close(self.listener)
        free(self)
        check(code, "offer descriptors of GPU memory")
    return self


cdef void stop_giving(Giver* self) noexcept:
    """End the thread, even while it waits for a connection or a request, and free it."""
    with nogil:
        pthread_mutex_lock(&self.registry.lock)
        self.ended = True
        shutdown(self.listener, SHUT_RDWR)
        if self.asking >= 0:
            shutdown(self.asking, SHUT_RDWR)
        pthread_mutex_unlock(&self.registry.lock)
    with nogil:
        pthread_join(self.thread, NULL)
    close(self.listener)
    free(self)


# Receive bytes for a GPU: they come into pinned slots, and each slot is copied to the GPU as soon as it is full.
#
# A frame is over when its last copy is over (rail.pyx). Until then the frame is neither counted nor acknowledged.


cdef int list_slot(Stream* self, iovec* vectors) noexcept nogil:
    """List the rest of a slot and, after a frame's last bytes, the next header.

    Return the number of vectors; 0 while no slot is free or too many copies are in flight.
    """
    cdef uint64_t room
    if self.slot < 0:
        self.slot = queue_take(&self.gpu.back) if may_copy(self.gpu) else -1
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
