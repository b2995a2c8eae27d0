"""The receiving half of a stream: frames are checked, their bytes go where they belong, and what is over is told.

Nothing that a peer says is believed. A header is copied before it is looked at, a write goes nowhere but into memory
that its key opens, which is looked up again whenever a registration has ended since; and what is refused is read and
dropped, so that what follows it is served. What is no frame breaks the stream.
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
    # Bytes of one call: at 15 GB/s a fiftieth of a millisecond, after which the event loop may have its turn.
    BUDGET = 256 * 1024
    DROPPED = 16384
    # A quarter of the cache that the cores of a server's processor share: memory that is longer is not expected there.
    # Into 2 and 8 MiB pages were copied 2 times as fast by ordinary stores, into 16 MiB no faster (docs/streams.md).
    CACHED = 8 * 1024 * 1024

cdef uint8_t[DROPPED] dropped


cdef bint is_frame(const Frame* frame) noexcept nogil:
    """Whether a header is one that a peer could have sent at any time."""
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
    """Have what follows go to a GPU, if there is one."""
    self.gpu = gpu
    self.slot = -1
    if gpu != NULL:
        self.number = gpu.back.posted


cdef void open_write(Stream* self, const Frame* frame) noexcept nogil:
    """Have what follows go to the iov of a write; dropped where they are not open to the peer."""
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
    """Take the oldest receive: 1 where none was posted yet."""
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
    """Find out where the bytes of a frame go: 0, 1 where it has to wait, or -errno for what is no frame of a peer's."""
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
    """Tell the peer that the request that was just over did not end well.

    No peer has more than STREAM_DEPTH requests of which it was not told that they are over: one that floods us with
    bad ones and takes no answer is broken.
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
    """Queue the bytes that were asked for, if they are open to the peer, and what ends the read."""
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
    """Tell of a write or a message of the peer's, whose bytes are all in memory or were dropped."""
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
    """Have the peer know that its oldest request is over."""
    self.received += 1
    return refuse(self, status) if status else 0


cdef int defer(Stream* self, Work* work, int status) noexcept nogil:
    """Have the end of a request wait for its copies; or that of a peer's be told behind such ones: requests are
    acknowledged in their order. No peer has more than STREAM_DEPTH that were not acknowledged.
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
    """End the requests whose copies are over, and tell of those behind them; -errno where that cannot be done."""
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
    """End a write or a message of the peer's, behind its copies where there are some."""
    cdef WorkRequest* wr = self.receiving
    self.receiving = NULL
    if self.gpu != NULL:
        return defer(self, NULL, self.status)
    deliver(self, frame, wr, self.status, out, got)
    return defer(self, NULL, self.status) if self.landing.head != NULL else acknowledge(self, self.status)


cdef int end_answer(Stream* self, const Frame* frame, Completion* out, int* got) noexcept nogil:
    """End the oldest of our reads, behind its copies where there are some; -EPROTO where there is none."""
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
    """Have the read whose bytes have come end behind their copies."""
    if self.gpu != NULL:
        self.unread.head.copied = True
        self.unread.head.number = self.number
        self.unread.head.status = self.status


cdef int finish_sharing(Stream* self, const Frame* frame) noexcept nogil:
    """End a frame of shared memory; -EPROTO where it comes out of turn."""
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
    """End the frame under way, with at most one completion; -errno where it comes out of turn."""
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
    """Report the writes and sends of which the peer has said that they are over, and those that were never sent."""
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
    """List where what comes next goes: the rest of the header; or the rest of its bytes, and the header after that."""
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
    """Note what the wire has brought to the iov that was listed."""
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
    """Do the next thing: 1, 0 where there is nothing to be done now, or -errno."""
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
        # Not after: who is told now may have something to say, which acknowledges in the same system call.
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
    # Of a wire that ends, or never came about, with nothing under way the control connection tells, and why: the peer
    # has closed, or has given way to another connection of ours. It cannot tell of a lie, nor of what we lack.
    if got or self.broken == 0:
        return got
    self.reported_broken = True
    told = self.broken in (-EPROTO, -EMFILE, -ENFILE, -ENOBUFS, -ENOMEM)
    return self.broken if told or self.outstanding else 0


cdef int stream_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    """Take what has come, up to BUDGET bytes, and send what waits; return the number of completions or -errno."""
    cdef Stream* self = <Stream*> impl
    cdef int got
    pthread_mutex_lock(&self.registry.lock)
    got = receive(self, out, capacity)
    note_pulls(self)
    pthread_mutex_unlock(&self.registry.lock)
    return got
