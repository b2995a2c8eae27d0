"""The sending end of a stream: posts become frames, and copies of a GPU are staged before them."""

from libc.errno cimport EACCES, EAGAIN, EIO, EMSGSIZE, ENOMEM, ENOTCONN
from libc.stdint cimport uint8_t, uint64_t

from aiote_native.cuda.driver cimport (
    SLOT_BYTES, CopyQueue, queue_begin, queue_copy, queue_end, queue_give, queue_has_room, queue_state, queue_take,
    queue_wait, slot_at)
from aiote_native.engine.structs cimport MAX_SGE, OP_READ, OP_RECV, OP_SEND
from aiote_native.streams.stream cimport (
    FRAMES_BEGUN, FRAME_ANSWER, FRAME_ANSWERED, FRAME_DONE, FRAME_EXPORT, FRAME_FORGET, FRAME_FORGOTTEN, FRAME_LEND,
    FRAME_LENT, FRAME_OPENED, FRAME_PULLED, FRAME_READ, FRAME_SEND, FRAME_WRITE, MAX_VECTORS, STREAM_DEPTH, Frame,
    Memory, Work, WorkList, append, free_work, iovec, is_open, leave_imports, leave_lent, lend, new_work, note_offered,
    pthread_mutex_lock, pthread_mutex_unlock, take_first)

# Send bytes from a GPU: copy them to pinned slots first, and begin the frame when all of them are there.
#
# A frame that has begun cannot be taken back. A frame therefore begins only after its copies have ended well, and a
# frame whose copies fail is never sent. Held frames are copied in the order in which they came, all places and slots of
# a frame at once, and join the queue in that order. Frames from host memory pass them, except answers, because the peer
# matches answers to its reads by their order.


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
    if work.frame.kind == FRAME_ANSWER and not is_open(self, &work.frame, writes=False):
        # The memory was closed after the peer asked for it, so it must not be read.
        work.gpu = NULL
        return True
    shared = lend(self, work)
    if shared >= 0:
        return shared == 1
    if work.frame.length > <uint64_t> MAX_SGE * SLOT_BYTES:
        work.status = -EMSGSIZE
        return True
    # A stream takes a quarter of all slots at most, so that a peer that stops receiving leaves some for others.
    if self.staged + needed > work.gpu.out.slot_count // 4 or work.gpu.out.free_count < needed:
        return False
    if not queue_has_room(&work.gpu.out, 2 * MAX_SGE, 1):
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


# The sending half of a stream: it makes frames of posted requests, and hands the frames to the wire.
#
# A frame begins when it is handed to the wire for the first time. From then on its header does not change, and no other
# frame comes before its end. The next header that begins carries the acknowledgement of the peer's requests.

cdef enum:
    NOTHING = 4096
    # Bytes of one push: all that one side may have in flight toward the other (rail.pyx). Without this limit, a peer
    # that takes the answers to its reads as fast as they are sent would hold the event loop until the last answer.
    PUSH_BUDGET = 2 << 20

cdef uint8_t[NOTHING] nothing  # sent in place of memory that was closed


cdef inline uint64_t payload_of(const Work* work) noexcept nogil:
    """Return how many bytes follow the header."""
    cdef int kind = work.frame.kind
    if kind == FRAME_WRITE or kind == FRAME_SEND or kind == FRAME_ANSWER or kind == FRAME_EXPORT:
        return work.frame.length
    if kind == FRAME_LEND or kind == FRAME_LENT:
        return (1 + work.frame.iov_count) * sizeof(uint64_t)
    return 0


cdef inline uint64_t size_of(const Work* work) noexcept nogil:
    return sizeof(Frame) + payload_of(work)


cdef Work* next_work(Stream* self) noexcept nogil:
    """Take the next frame: an urgent one, a queued one, or else a standalone acknowledgement; NULL if there is none."""
    cdef Work* work = take_first(&self.urgent)
    if work != NULL:
        return work
    work = take_first(&self.queue)
    if work == NULL:
        if self.received == self.acknowledged:
            return NULL
        work = new_work(self)
        if work == NULL:
            return NULL
        work.frame.kind = FRAME_DONE
    work.frame.done = self.acknowledged = self.received
    return work


cdef void begin(Stream* self) noexcept nogil:
    cdef Work* work = self.begun.head
    cdef int count = 0
    while work != NULL:
        count += 1
        work = work.next
    while count < FRAMES_BEGUN:
        work = next_work(self)
        if work == NULL:
            return
        append(&self.begun, work)
        count += 1


cdef bint is_revoked(Stream* self, Work* work) noexcept nogil:
    """Return whether an answer's memory was closed. It must not be read then, and the trailer tells of the error."""
    if work.frame.kind != FRAME_ANSWER:
        return False
    if work.trailer.frame.status == 0 and work.epoch != self.registry.epoch:
        work.epoch = self.registry.epoch
        if not is_open(self, &work.frame, writes=False):
            work.trailer.frame.status = -EACCES
    return work.trailer.frame.status != 0


cdef int gather_frame(Stream* self, Work* work, iovec* vectors, bint* whole) noexcept nogil:
    """List the rest of a frame; `whole` says whether the list reaches its end. Return the number of vectors."""
    cdef uint64_t at = work.moved
    cdef uint64_t skipped
    cdef int count = 0
    cdef int i
    whole[0] = True
    if at < sizeof(Frame):
        vectors[0].iov_base = <uint8_t*> &work.frame + at
        vectors[0].iov_len = sizeof(Frame) - at
        count = 1
        at = sizeof(Frame)
    at -= sizeof(Frame)
    if at == payload_of(work):
        return count
    if is_revoked(self, work):
        vectors[count].iov_base = nothing
        vectors[count].iov_len = min(<uint64_t> NOTHING, payload_of(work) - at)
        whole[0] = vectors[count].iov_len == payload_of(work) - at
        return count + 1
    if work.frame.kind == FRAME_LEND or work.frame.kind == FRAME_LENT:
        vectors[count].iov_base = <uint8_t*> work.reference + at
        vectors[count].iov_len = payload_of(work) - at
        return count + 1
    if work.slot_count:
        return count + gather_slots(work, at, vectors + count)
    for i in range(work.frame.iov_count):
        skipped = min(at, work.frame.iov[i].length)
        at -= skipped
        if skipped < work.frame.iov[i].length:
            vectors[count].iov_base = work.local[i] + skipped
            vectors[count].iov_len = work.frame.iov[i].length - skipped
            count += 1
    return count


cdef int gather_frames(Stream* self, iovec* vectors, uint64_t* total) noexcept nogil:
    """List the next bytes to send, and set `total` to their number; return the number of vectors."""
    cdef Work* work
    cdef bint whole = True
    cdef int count = 0
    cdef int i
    total[0] = 0
    begin(self)
    work = self.begun.head
    while work != NULL and whole:
        count += gather_frame(self, work, vectors + count, &whole)
        work = work.next
    for i in range(count):
        total[0] += vectors[i].iov_len
    return count


cdef void advance_sent(Stream* self, uint64_t bytes) noexcept nogil:
    """Record how many bytes the wire has taken."""
    cdef Work* work
    cdef uint64_t part
    while bytes:
        work = self.begun.head
        part = min(bytes, size_of(work) - work.moved)
        work.moved += part
        bytes -= part
        if work.moved < size_of(work):
            return
        take_first(&self.begun)
        unstage(self, work)
        note_sent(self, work)


cdef void note_sent(Stream* self, Work* work) noexcept nogil:
    """Keep a sent frame until the peer acknowledges or answers it; free it if the peer does neither."""
    cdef int kind = work.frame.kind
    if kind == FRAME_WRITE or kind == FRAME_SEND or kind == FRAME_LEND:
        self.sent += 1
        append(&self.unacked, work)
    elif kind == FRAME_READ:
        append(&self.unread, work)
    elif kind == FRAME_LENT:
        self.registry.served += work.frame.length
        append(&self.lent, work)
    else:
        if kind == FRAME_ANSWER and work.trailer.frame.status == 0:
            self.registry.served += work.frame.length
        elif kind == FRAME_EXPORT:
            note_offered(self, work.frame.key)
        self.answers -= kind == FRAME_ANSWERED
        self.refusals -= kind == FRAME_DONE and work.frame.status != 0
        self.replies -= kind == FRAME_OPENED or kind == FRAME_FORGOTTEN or kind == FRAME_PULLED or kind == FRAME_FORGET
        free_work(self, work)


cdef bint has_more(const Stream* self) noexcept nogil:
    """Return whether there are bytes for the wire to take."""
    return (self.begun.head != NULL or self.queue.head != NULL or self.urgent.head != NULL
            or self.received != self.acknowledged)


cdef int trim(iovec* vectors, int count, uint64_t* total, uint64_t most) noexcept nogil:
    """Cut the listed vectors to their first `most` bytes; return how many vectors are left."""
    cdef int kept = 0
    if total[0] <= most:
        return count
    total[0] = most
    while vectors[kept].iov_len < most:
        most -= vectors[kept].iov_len
        kept += 1
    vectors[kept].iov_len = most
    return kept + 1


cdef void push(Stream* self) noexcept nogil:
    """Hand over as much as the wire takes, up to PUSH_BUDGET bytes. The caller holds the registry's lock."""
    cdef iovec vectors[MAX_VECTORS]
    cdef uint64_t left = PUSH_BUDGET
    cdef uint64_t total = 0
    cdef long moved
    cdef int count
    self.paused = False
    stage(self)
    while self.broken == 0 and self.connected and not self.closed:
        count = gather_frames(self, vectors, &total)
        if count == 0:
            return
        if left == 0:
            self.paused = True
            return
        count = trim(vectors, count, &total, left)
        moved = self.wire.send(self, vectors, count)
        if moved < 0:
            self.broken = <int> moved
            return
        advance_sent(self, <uint64_t> moved)
        if <uint64_t> moved < total:
            return
        left -= <uint64_t> moved


cdef void describe(Stream* self, Work* work, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Frame* frame = &work.frame
    cdef int i
    work.wr = wr
    frame.kind = FRAME_SEND if args.opcode == OP_SEND else FRAME_READ if args.opcode == OP_READ else FRAME_WRITE
    frame.iov_count = 1
    frame.length = args.length
    if args.desc != NULL:
        work.gpu = (<const Memory*> args.desc).gpu
        work.exported = (<const Memory*> args.desc).exported
        if self.shares and args.opcode == OP_READ:
            frame.imm = 1 + (<const Memory*> args.desc).device
    work.local[0] = <uint8_t*> args.local
    frame.iov[0].length = args.length
    if args.opcode == OP_SEND:
        return
    frame.key = args.key
    frame.iov[0].address = args.remote
    for i in range(args.more_sge):
        work.local[i + 1] = args.more[i].local
        frame.iov[i + 1].address = args.more[i].remote
        frame.iov[i + 1].length = args.more[i].length
        frame.length += args.more[i].length
    frame.iov_count += args.more_sge
    if args.with_imm:
        frame.imm = args.imm
        frame.counts_for = <unsigned int> args.parts


cdef int post_one(Stream* self, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Work* work
    if self.closed:
        return -ENOTCONN
    if self.broken and self.connected:
        return self.broken
    if args.opcode != OP_RECV and (not self.connected or self.outstanding >= STREAM_DEPTH):
        return -EAGAIN
    work = new_work(self)
    if work == NULL:
        return -ENOMEM
    if args.opcode == OP_RECV:
        work.wr = wr
        work.local[0] = <uint8_t*> args.local
        work.frame.length = args.length
        append(&self.receives, work)
        return 0
    describe(self, work, args, wr)
    if is_held(work):
        hold(self, work)
    else:
        append(&self.queue, work)
    self.outstanding += 1
    if self.eager:
        push(self)
    return 0


cdef int stream_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    """Post one operation; return -EAGAIN until the wire is connected, and while too many requests are outstanding."""
    cdef Stream* self = <Stream*> impl
    cdef int code
    pthread_mutex_lock(&self.registry.lock)
    code = post_one(self, args, wr)
    pthread_mutex_unlock(&self.registry.lock)
    return code


cdef int stream_flush(void* impl) noexcept nogil:
    """Hand the frames of this turn to the wire."""
    cdef Stream* self = <Stream*> impl
    pthread_mutex_lock(&self.registry.lock)
    push(self)
    pthread_mutex_unlock(&self.registry.lock)
    return 0
