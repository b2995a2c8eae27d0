"""The receiving half of a stream: it checks frames, puts their bytes into place, and reports requests that are over.

The values that a peer sends are not trusted. A header is copied before it is read. A write goes only into memory that
its key opens, and the key is looked up again whenever a registration has ended meanwhile. The bytes of a refused frame
are read and dropped, so that the next frames are served. A malformed frame breaks the stream.
"""

from libc.errno cimport EACCES, EIO, EMFILE, EMSGSIZE, ENFILE, ENOBUFS, ENOMEM, EPROTO
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from aiote_native.cuda.copies cimport GpuQueues, queue_state
from aiote_native.cuda.sharing cimport Handle
from aiote_native.streams.landing cimport drop_slot, land, list_slot
from aiote_native.streams.lending cimport note_forgotten, note_opened, note_pulled, reply, withdraw_ended
from aiote_native.streams.pulling cimport (
    is_full, move_imports, note_pulls, open_reference, pull_answer, pull_write, take_export, take_forget)
from aiote_native.streams.sending cimport push
from aiote_native.streams.staging cimport hold
from aiote_native.streams.stream cimport (
    FRAME_ANSWER, FRAME_ANSWERED, FRAME_DONE, FRAME_EXPORT, FRAME_FORGET, FRAME_FORGOTTEN, FRAME_LEND, FRAME_LENT,
    FRAME_OPENED, FRAME_PULLED, FRAME_READ, FRAME_SEND, FRAME_WRITE, Frame, Memory, STREAM_DEPTH, Stream, Work, append,
    find_memory, free_work, iovec, is_open, new_work, pthread_mutex_lock, pthread_mutex_unlock,
    take_first)
from aiote_native.structs cimport MAX_SGE, MAX_PARTS, WorkRequest

cdef enum:
    # Bytes of one call: at 15 GB/s they take a fiftieth of a millisecond, and then the event loop may have its turn.
    BUDGET = 256 * 1024
    DROPPED = 16384
    # A quarter of the cache that the cores of a server's processor share; longer memory is not expected in that cache.
    # Ordinary stores copied pages into 2 and 8 MiB 2 times as fast, into 16 MiB no faster (docs/streams.md).
    CACHED = 8 * 1024 * 1024

cdef uint8_t[DROPPED] dropped


cdef bint is_frame(const Frame* frame) noexcept nogil:
    """Return whether a header is well formed, whatever came before it."""
    cdef uint64_t sum = 0
    cdef uint16_t i
    if not FRAME_WRITE <= frame.kind <= FRAME_FORGOTTEN or frame.iov_count > MAX_SGE or frame.counts_for > MAX_PARTS:
        return False
    if frame.kind > FRAME_READ and frame.kind not in (FRAME_LEND, FRAME_LENT):
        return True
    for i in range(frame.iov_count):
        if frame.iov[i].length > frame.length - sum:
            return False
        sum += frame.iov[i].length
    return sum == frame.length


cdef void begin_landing(Stream* self, GpuQueues* gpu) noexcept nogil:
    """Direct the payload to a GPU; NULL: to the host."""
    self.gpu = gpu
    self.slot = -1
    if gpu != NULL:
        self.number = gpu.back.posted


cdef void open_write(Stream* self, const Frame* frame) noexcept nogil:
    """Direct the payload to the iov of a write; drop it if the iov is not open to the peer."""
    cdef const Memory* memory
    cdef uint16_t i
    self.epoch = self.registry.epoch
    if not is_open(self, frame, True):
        self.status = -EACCES
        self.discards = True
        return
    memory = find_memory(self.registry, frame.key)
    self.cached = memory != NULL and memory.length <= CACHED
    begin_landing(self, NULL if memory == NULL else memory.gpu)
    for i in range(frame.iov_count):
        self.into[i].iov_base = <void*> frame.iov[i].address
        self.into[i].iov_len = frame.iov[i].length
    self.into_count = frame.iov_count


cdef int open_answer(Stream* self, const Frame* frame) noexcept nogil:
    cdef const Work* asked = self.unread.head
    cdef uint16_t i
    if asked == NULL or asked.frame.length != frame.length:
        return -EPROTO
    for i in range(asked.frame.iov_count):
        self.into[i].iov_base = asked.local[i]
        self.into[i].iov_len = asked.frame.iov[i].length
    self.into_count = asked.frame.iov_count
    begin_landing(self, asked.gpu)
    return 0


cdef int open_message(Stream* self, const Frame* frame) noexcept nogil:
    """Direct the payload to the oldest receive; return 0, or 1 if there is no receive yet."""
    cdef Work* receive = take_first(&self.receives)
    if receive == NULL:
        return 1
    self.receiving = receive.wr
    self.into[0].iov_base = receive.local[0]
    self.into[0].iov_len = frame.length
    self.into_count = 1
    if frame.length > receive.frame.length:
        self.status = -EMSGSIZE
        self.discards = True
    free_work(self, receive)
    return 0


cdef int open_export(Stream* self, const Frame* frame) noexcept nogil:
    if frame.length != sizeof(Handle):
        return -EPROTO
    self.left = sizeof(Handle)
    self.into[0].iov_base = &self.handle
    self.into[0].iov_len = sizeof(Handle)
    self.into_count = 1
    return 0


cdef int open_frame(Stream* self) noexcept nogil:
    """Decide where a frame's payload goes; return 0, 1 if the frame has to wait, or -errno for an invalid frame."""
    cdef const Frame* frame = &self.heads[self.head]
    cdef int code = 0
    if not is_frame(frame) or frame.done < self.confirmed or frame.done > self.sent:
        return -EPROTO
    self.status = 0
    self.discards = self.cached = False
    self.gpu = NULL
    self.into_first = self.into_count = 0
    self.left = frame.length if frame.kind in (FRAME_WRITE, FRAME_SEND, FRAME_ANSWER) else 0
    if frame.kind == FRAME_WRITE:
        open_write(self, frame)
    elif frame.kind == FRAME_SEND:
        code = open_message(self, frame)
    elif frame.kind == FRAME_ANSWER:
        code = open_answer(self, frame)
    elif frame.kind == FRAME_LEND or frame.kind == FRAME_LENT:
        self.starved = is_full(self, frame)
        code = 1 if self.starved else open_reference(self, frame)
    elif frame.kind == FRAME_EXPORT:
        code = open_export(self, frame)
    self.opened = code == 0
    self.stalled = code == 1
    return code


cdef int refuse(Stream* self, int status) noexcept nogil:
    """Tell the peer that its request that is now over has failed.

    A peer has at most STREAM_DEPTH unacknowledged requests. If it sends more bad requests without reading the answers,
    return -EPROTO, which breaks the stream.
    """
    cdef Work* work
    if self.refusals >= STREAM_DEPTH:
        return -EPROTO
    work = new_work(self)
    if work == NULL:
        return -ENOMEM
    self.refusals += 1
    work.frame.kind = FRAME_DONE
    work.frame.status = status
    work.frame.done = self.acknowledged = self.received
    append(&self.urgent, work)
    return 0


cdef int answer(Stream* self, const Frame* frame) noexcept nogil:
    """Queue the bytes that a read asks for, if they are open to the peer, and the end of the read."""
    cdef bint good = is_open(self, frame, False)
    cdef Work* work
    cdef Work* trailer = new_work(self)
    cdef uint16_t i
    if trailer == NULL:
        return -ENOMEM
    self.answers += 1
    trailer.frame.kind = FRAME_ANSWERED
    trailer.frame.status = 0 if good else -EACCES
    if good and frame.length:
        work = new_work(self)
        if work == NULL:
            free_work(self, trailer)
            return -ENOMEM
        work.frame = frame[0]
        work.frame.kind = FRAME_ANSWER
        work.frame.counts_for = 0
        for i in range(frame.iov_count):
            work.local[i] = <uint8_t*> frame.iov[i].address
        work.trailer = trailer
        work.epoch = self.registry.epoch
        work.gpu = find_memory(self.registry, frame.key).gpu
        if work.gpu != NULL or self.held.head != NULL:
            hold(self, work)
            return 0
        append(&self.queue, work)
    if self.held.head != NULL:
        hold(self, trailer)
    else:
        append(&self.queue, trailer)
    return 0


cdef void end_read(Stream* self, Work* asked, int status, Completion* out) noexcept nogil:
    out.wr = asked.wr
    out.status = status
    out.provider_errno = 0
    out.length = asked.frame.length
    self.outstanding -= 1
    free_work(self, asked)


cdef void deliver(
        Stream* self, const Frame* frame, WorkRequest* wr, int status, Completion* out, int* got) noexcept nogil:
    """Report a write or a message of the peer, whose bytes are all in memory or were dropped."""
    out.status = status
    out.provider_errno = 0
    out.length = frame.length
    if frame.kind == FRAME_WRITE and status == 0:
        self.registry.served += frame.length
    if frame.kind == FRAME_SEND:
        out.wr = wr
        got[0] += 1
    elif frame.counts_for and status == 0:
        out.wr = NULL
        out.imm = frame.imm
        out.times = frame.counts_for
        got[0] += 1


cdef int acknowledge(Stream* self, int status) noexcept nogil:
    """Acknowledge the peer's oldest request, which is over."""
    self.received += 1
    return refuse(self, status) if status else 0


cdef int defer(Stream* self, Work* work, int status) noexcept nogil:
    """Make a request's end wait for its copies, or for earlier requests, because acknowledgements are in order. Return
    -EPROTO if a peer exceeds its STREAM_DEPTH unacknowledged requests.
    """
    if self.landings >= 2 * STREAM_DEPTH:
        return -EPROTO
    if work == NULL:
        work = new_work(self)
        if work == NULL:
            return -ENOMEM
        work.frame = self.heads[self.head]
        work.gpu = self.gpu
        work.number = self.number
        work.copied = self.gpu != NULL
    work.status = status
    append(&self.landing, work)
    self.landings += 1
    return 0


cdef int settle(Stream* self, Completion* out, int capacity, int* got) noexcept nogil:
    """End the requests whose copies are over, and those that wait behind them; return 0 or -errno."""
    cdef Work* work
    cdef int state
    cdef int code = 0
    while code == 0 and self.landing.head != NULL and got[0] < capacity:
        work = self.landing.head
        state = queue_state(&work.gpu.back, work.number) if work.copied else 1
        if state == 0:
            return 0
        take_first(&self.landing)
        self.landings -= 1
        state = work.status if work.status else min(state, 0)
        if work.pulled:
            reply(self, FRAME_PULLED, 0, 0)
        if work.frame.kind == FRAME_ANSWERED:
            end_read(self, work, state, out + got[0])
            got[0] += 1
            continue
        if work.copied:
            deliver(self, &work.frame, work.wr, state, out + got[0], got)
        code = acknowledge(self, state)
        free_work(self, work)
    return code


cdef int end_bytes(Stream* self, const Frame* frame, Completion* out, int* got) noexcept nogil:
    """End a write or a message of the peer, after its copies if there are some."""
    cdef WorkRequest* wr = self.receiving
    self.receiving = NULL
    if self.gpu != NULL:
        return defer(self, NULL, self.status)
    deliver(self, frame, wr, self.status, out, got)
    return defer(self, NULL, self.status) if self.landing.head != NULL else acknowledge(self, self.status)


cdef int end_answer(Stream* self, const Frame* frame, Completion* out, int* got) noexcept nogil:
    """End the oldest local read, after its copies if there are some; return -EPROTO if there is no read."""
    cdef Work* asked = take_first(&self.unread)
    if asked == NULL:
        return -EPROTO
    if asked.copied:
        asked.frame.kind = FRAME_ANSWERED
        return defer(self, asked, frame.status if frame.status else asked.status)
    end_read(self, asked, frame.status, out)
    got[0] += 1
    return 0


cdef void note_answer(Stream* self) noexcept nogil:
    """Make a read, whose bytes have come, end after their copies to the GPU."""
    if self.gpu != NULL:
        self.unread.head.copied = True
        self.unread.head.number = self.number
        self.unread.head.status = self.status


cdef int finish_sharing(Stream* self, const Frame* frame) noexcept nogil:
    """End a frame of shared memory; return -EPROTO if it comes out of order."""
    if frame.kind == FRAME_LENT:
        pull_answer(self, self.unread.head)
    elif frame.kind == FRAME_EXPORT:
        return take_export(self, frame)
    elif frame.kind == FRAME_OPENED:
        return note_opened(self, frame)
    elif frame.kind == FRAME_FORGET:
        return take_forget(self, frame)
    elif frame.kind == FRAME_FORGOTTEN:
        return note_forgotten(self, frame)
    elif frame.kind == FRAME_PULLED:
        return note_pulled(self)
    return 0


cdef int finish(Stream* self, Completion* out, int* got) noexcept nogil:
    """End the current frame, with at most one completion; return -errno if it comes out of order."""
    cdef Frame* frame = &self.heads[self.head]
    cdef int code = 0
    if frame.kind == FRAME_LEND:
        pull_write(self, frame)
        frame.kind = FRAME_WRITE
    if frame.kind == FRAME_WRITE or frame.kind == FRAME_SEND:
        code = end_bytes(self, frame, out, got)
    elif frame.kind == FRAME_ANSWERED:
        code = end_answer(self, frame, out, got)
        if code:
            return code
    elif frame.kind == FRAME_ANSWER:
        note_answer(self)
    elif frame.kind == FRAME_READ:
        code = answer(self, frame) if self.answers < STREAM_DEPTH else -EPROTO
    elif frame.kind == FRAME_DONE and frame.status:
        if frame.done == self.confirmed:
            return -EPROTO
        self.bad = frame.done
        self.bad_status = frame.status
    elif frame.kind > FRAME_DONE:
        code = finish_sharing(self, frame)
    self.confirmed = frame.done
    self.head = 1 - self.head
    self.head_got = self.next_got
    self.next_got = 0
    self.opened = False
    return code


cdef int report_confirmed(Stream* self, Completion* out, int capacity) noexcept nogil:
    """Report the writes and sends that the peer has acknowledged, and those never sent; return how many."""
    cdef Work* work
    cdef int got = 0
    while got < capacity and self.unsent.head != NULL:
        work = take_first(&self.unsent)
        end_read(self, work, work.status, &out[got])
        got += 1
    while got < capacity and self.ended < self.confirmed:
        work = take_first(&self.unacked)
        self.ended += 1
        out[got].wr = work.wr
        out[got].status = self.bad_status if self.ended == self.bad else 0
        out[got].provider_errno = 0
        out[got].length = work.frame.length
        self.outstanding -= 1
        free_work(self, work)
        got += 1
    return got


cdef int list_iov(Stream* self, iovec* vectors) noexcept nogil:
    """List the places of the next bytes: the rest of the header; or the rest of the payload, and the next header."""
    cdef Frame* head = &self.heads[self.head]
    cdef int count = 0
    cdef int i
    if not self.opened:
        vectors[0].iov_base = <uint8_t*> head + self.head_got
        vectors[0].iov_len = sizeof(Frame) - self.head_got
        return 1
    if head.kind == FRAME_WRITE and not self.discards and self.epoch != self.registry.epoch:
        self.epoch = self.registry.epoch
        if not is_open(self, head, True):
            self.status = -EACCES
            self.discards = True
    if self.gpu != NULL and self.gpu.back.error:
        self.status = -EIO
        self.discards = True
    if self.discards:
        drop_slot(self)
        vectors[0].iov_base = dropped
        vectors[0].iov_len = min(<uint64_t> DROPPED, self.left)
        return 1
    if self.gpu != NULL:
        return list_slot(self, vectors)
    for i in range(self.into_first, self.into_count):
        vectors[count] = self.into[i]
        count += 1
    vectors[count].iov_base = &self.heads[1 - self.head]
    vectors[count].iov_len = sizeof(Frame)
    return count + 1


cdef void advance_received(Stream* self, uint64_t bytes) noexcept nogil:
    """Record the bytes that the wire has put into the listed vectors."""
    cdef uint64_t part
    if not self.opened:
        self.head_got += <uint32_t> bytes
        return
    part = min(bytes, self.left)
    self.left -= part
    self.next_got += <uint32_t> (bytes - part)
    if self.gpu != NULL:
        if not self.discards:
            land(self, part)
        return
    while part and not self.discards:
        bytes = min(part, self.into[self.into_first].iov_len)
        self.into[self.into_first].iov_base = <uint8_t*> self.into[self.into_first].iov_base + bytes
        self.into[self.into_first].iov_len -= bytes
        part -= bytes
        if self.into[self.into_first].iov_len == 0:
            self.into_first += 1


cdef int step(Stream* self, Completion* out, int* got, uint64_t* moved) noexcept nogil:
    """Do the next step; return 1, 0 if no step is possible now, or -errno."""
    cdef iovec vectors[MAX_SGE + 1]
    cdef long bytes
    cdef int code, count
    if self.opened and self.left == 0:
        code = finish(self, out, got)
        return code if code < 0 else 1
    if not self.opened and self.head_got == sizeof(Frame):
        code = open_frame(self)
        return 1 - code if code >= 0 else code
    if moved[0] >= BUDGET:
        return 0
    count = list_iov(self, vectors)
    if count == 0:
        return 0
    bytes = self.wire.receive(self, vectors, count)
    if bytes <= 0:
        return <int> bytes
    advance_received(self, <uint64_t> bytes)
    moved[0] += <uint64_t> bytes
    return 1


cdef int receive(Stream* self, Completion* out, int capacity) noexcept nogil:
    cdef uint64_t moved = 0
    cdef int got = 0
    cdef int code = 1
    cdef bint told
    move_imports(self)
    withdraw_ended(self)
    if not self.eager:
        # Push before receiving: the acknowledgements then share a system call with posts that the completions cause.
        push(self)
    while code > 0 and got < capacity and self.broken == 0 and not self.closed:
        got += report_confirmed(self, out + got, capacity - got)
        code = settle(self, out, capacity, &got)
        if code == 0 and got < capacity:
            code = step(self, out + got, &got, &moved)
    if code < 0:
        self.broken = code
    if self.eager:
        push(self)
    # If a wire ends or fails to connect without outstanding requests, the control connection tells why: the peer closed
    # or gave way to another connection. It cannot tell of invalid frames or missing resources, so these are reported.
    if got or self.broken == 0:
        return got
    self.reported_broken = True
    told = self.broken in (-EPROTO, -EMFILE, -ENFILE, -ENOBUFS, -ENOMEM)
    return self.broken if told or self.outstanding else 0


cdef int stream_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    """Receive up to BUDGET bytes, and send waiting frames; return the number of completions or -errno."""
    cdef Stream* self = <Stream*> impl
    cdef int got
    pthread_mutex_lock(&self.registry.lock)
    got = receive(self, out, capacity)
    note_pulls(self)
    pthread_mutex_unlock(&self.registry.lock)
    return got
