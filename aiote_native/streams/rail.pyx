"""The rail of streams: its device, its registered memory, its endpoint, and the receiving half of each stream."""

cimport cython
from libc.errno cimport EACCES, EIO, EMFILE, EMSGSIZE, ENFILE, ENOBUFS, ENOMEM, EPROTO, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport close, read

import os

from aiote_native.cuda.descriptors cimport SOCKET_NAME
from aiote_native.cuda.driver cimport CopyQueues, GpuQueues, queue_look, queue_state, queue_wait
from aiote_native.cuda.memory cimport Export, Handle, export_memory, find_functions, publish
from aiote_native.engine.structs cimport MAX_PARTS, MAX_SGE, MAY_ALL, WorkRequest
from aiote_native.streams.sending cimport hold, push, stream_flush, stream_post
from aiote_native.streams.stream cimport (
    BUCKETS, DEVICE_SHIFT, FRAME_ANSWER, FRAME_ANSWERED, FRAME_DONE, FRAME_EXPORT, FRAME_FORGET, FRAME_FORGOTTEN,
    FRAME_LEND, FRAME_LENT, FRAME_OPENED, FRAME_PULLED, FRAME_READ, FRAME_SEND, FRAME_WRITE, NAME_BYTES, SHARED_DEVICES,
    STREAM_DEPTH, Frame, Memory, Stream, Work, append, drop_slot, find_memory, free_work, iovec, is_full, is_lent,
    is_open, land, lent_room, let_go, list_slot, move_imports, new_work, note_forgotten, note_opened, note_pulled,
    note_pulls, open_reference, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, pull_answer, pull_write,
    reply, start_giving, stop_giving, take_export, take_first, take_forget, withdraw_ended)
from aiote_native.system.base cimport check, check_process, fork_epoch
from aiote_native.cuda.driver import device_of as ordinal_at, error_of
from aiote_native.system.base import StatusError

# The receiving half of a stream: it checks frames, puts their bytes into place, and reports requests that are over.
#
# The values that a peer sends are not trusted. A header is copied before it is read. A write goes only into memory that
# its key opens, and the key is looked up again whenever a registration has ended meanwhile. The bytes of a refused
# frame are read and dropped, so that the next frames are served. A malformed frame breaks the stream.

cdef enum:
    # Bytes of one call: at 15 GB/s they take 70 us, over loopback's TCP 0.3 ms, and then the event loop has its turn.
    # A turn of asyncio costs about 40 us, so with 256 KiB a third of the time over TCP went into turns.
    BUDGET = 1 << 20
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
    if not is_open(self, frame, writes=True):
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
    cdef bint good = is_open(self, frame, writes=False)
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
        if not is_open(self, head, writes=True):
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


# A device of streams: it consists only of the memory that its peers may reach, and the keys of that memory.

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK

cdef enum:
    # Bytes in flight at once, which have to be copied before a cancellation is confirmed. With 4 MiB a cancellation
    # takes half a millisecond longer over TCP, with 1 MiB it takes no less time, and neither makes a transfer faster.
    WINDOW = 2 << 20
    LARGEST = WINDOW // 2  # bytes of one frame: the next one is there while one is copied

cdef str NOT_SHARED = "sharing is switched off, or the rail reaches other hosts"


cdef class StreamDevice(NativeDevice):
    """The memory of one rail. With `shares`, processes of this host open each other's GPU memory.

    `staging_bytes` of pinned memory are allocated for each GPU and direction.
    """

    def __cinit__(self):
        self.registry = NULL
        self.gpus = {}
        self.stages = True
        self.notify_fd = -1

    def __init__(self, bint shares=False, uint64_t staging_bytes=8 << 20):
        if self.registry != NULL:
            raise RuntimeError("this device is open already")
        self.epoch = fork_epoch()
        self.registry = <Registry*> calloc(1, sizeof(Registry))
        if self.registry == NULL:
            raise MemoryError
        pthread_mutex_init(&self.registry.lock, NULL)
        self.shares = self.registry.shares = shares
        self.staging_bytes = staging_bytes
        if shares:
            self.notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            check(-errno if self.notify_fd < 0 else 0, "eventfd")
        self.registry.notify_fd = self.notify_fd

    @property
    def closed(self) -> bool:
        return self.registry == NULL

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> StreamMemory:
        return StreamMemory(self, address, length, writable, access)

    def register_gpu(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> StreamMemory:
        """Register memory of a GPU; its bytes go through pinned memory, or by reference.

        Raises StatusError with the driver's error.
        """
        cdef int number = ordinal_at(address)
        cdef CopyQueues gpu
        if number not in self.gpus:
            gpu = CopyQueues(number, address, self.staging_bytes)
            self.gpus[number] = gpu
            if number < SHARED_DEVICES:
                with nogil:
                    pthread_mutex_lock(&self.registry.lock)
                    self.registry.gpus[number] = gpu.queues
                    pthread_mutex_unlock(&self.registry.lock)
        self.gpus[number].require_sound()
        return StreamMemory(self, address, length, writable, access, self.gpus[number])

    @property
    def served(self) -> int | None:
        return 0 if self.registry == NULL else self.registry.served

    @property
    def async_fd(self) -> int:
        return self.notify_fd

    def events(self) -> list[tuple[str, int]]:
        """Return ("unshared", code) if peers have failed to open exports since the last call.

        The code is that of the last failure: the driver's, or -errno.
        """
        cdef uint64_t value, refusals
        if self.registry == NULL or self.notify_fd < 0:
            return []
        read(self.notify_fd, &value, sizeof(value))
        with nogil:
            pthread_mutex_lock(&self.registry.lock)
            refusals = self.registry.refusals
            pthread_mutex_unlock(&self.registry.lock)
        news = [("unshared", self.registry.refused)] if refusals != self.reported_refusals else []
        self.reported_refusals = refusals
        return news

    def close(self) -> None:
        if self.registry == NULL or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        self.stop_threads()
        for gpu in self.gpus.values():
            gpu.close()
        self.gpus.clear()
        free(self.registry)
        self.registry = NULL
        self.close_descriptor()

    cdef int give(self, Export* made) except -1:
        """Let peers get the descriptors of an export's segments; start the thread for that if needed.

        Raises StatusError and MemoryError.
        """
        if self.giver == NULL:
            self.giver = start_giving(self.registry)
        memcpy(made.handle.bytes, self.giver.name, SOCKET_NAME)
        return 0

    cdef void stop_threads(self) noexcept:
        if self.giver != NULL:
            stop_giving(self.giver)
            self.giver = NULL

    cdef void close_descriptor(self) noexcept:
        if self.notify_fd >= 0:
            close(self.notify_fd)
            self.notify_fd = -1

    def __dealloc__(self):
        # If an engine was never closed, its channels still use the registry, so it is not freed then.
        if self.children == 0 and self.epoch == fork_epoch():
            self.stop_threads()
            free(self.registry)
            self.close_descriptor()


cdef bint is_same(const Export* one, const Export* other) noexcept nogil:
    """Return whether an earlier export is in use and of the same memory as a new one."""
    return (one.uses != 0 and one.base == other.base and one.buffer == other.buffer
            and one.handle.size == other.handle.size)


@cython.no_gc_clear
cdef class StreamMemory(NicRegistration):
    """A memory registration under a random key, which peers cannot guess."""

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, StreamDevice device, uint64_t address, size_t length, bint writable, int access,
                 CopyQueues gpu=None):
        check_process(device.epoch)
        if device.registry == NULL or self.memory != NULL:
            raise RuntimeError("the device is closed, or the memory registered already")
        self.memory = <Memory*> calloc(1, sizeof(Memory))
        if self.memory == NULL:
            raise MemoryError
        self.memory.address = address
        self.memory.length = length
        self.memory.writable = writable
        self.memory.access = access
        self.memory.device = -1
        if gpu is not None:
            self.memory.gpu = gpu.queues
            self.gpu = gpu
            self.ordinal = gpu.device
            self.memory.device = gpu.device if gpu.device < SHARED_DEVICES else -1
        self.device = device
        device.children += 1
        if gpu is not None:
            self.export()
        self.enlist()
        self.desc = self.memory
        self.key = self.memory.key
        self.base = address
        self.length = length

    @property
    def failure(self) -> str:
        """The error that broke the device of the memory; empty for a sound one."""
        return error_of(self.gpu.error) if self.gpu is not None and self.gpu.error else ""

    cdef int export(self) except -1:
        """Find or make the export that other processes open, or record in `unshared` why there cannot be one."""
        cdef Registry* registry = self.device.registry
        cdef Export* made = NULL
        cdef Export* same
        self.unshared = NOT_SHARED
        if registry.shares:
            find_functions()  # needed to open the peers' exports, even if this memory cannot be exported
        if not registry.shares or self.memory.length == 0:
            return 0
        made = <Export*> calloc(1, sizeof(Export))
        if made == NULL:
            raise MemoryError
        try:
            export_memory(self.gpu.queues.out.context, self.memory.address, self.memory.length, made)
            if made.handle.segments:
                self.device.give(made)
        except StatusError as error:
            free(made.parts)
            free(made)
            self.unshared = f"{error.operation}: {error.strerror}"
            return 0
        self.unshared = ""
        with nogil:
            pthread_mutex_lock(&registry.lock)
            same = registry.exports
            while same != NULL and not is_same(same, made):
                same = same.next
            if same == NULL:
                made.next = registry.exports
                registry.exports = made
                publish(made)
            else:
                free(made.parts)
                free(made)
                made = same
            made.uses += 1
            made.holds += 1
            self.memory.exported = made
            pthread_mutex_unlock(&registry.lock)
        return 0

    def enlist(self) -> None:
        """Draw an unused random key and enter the memory under it; its highest bits tell the memory's device."""
        cdef Registry* registry = self.device.registry
        cdef uint64_t key
        cdef bint taken = True
        while taken:
            key = (int.from_bytes(os.urandom(8), "little") >> (64 - DEVICE_SHIFT)
                   | <uint64_t> (1 + self.memory.device) << DEVICE_SHIFT)
            with nogil:
                pthread_mutex_lock(&registry.lock)
                taken = find_memory(registry, key) != NULL
                if not taken:
                    self.memory.key = key
                    self.memory.next = registry.table[key % BUCKETS]
                    registry.table[key % BUCKETS] = self.memory
                pthread_mutex_unlock(&registry.lock)

    def bind(self, bytes holder) -> None:
        """Make the key serve only the peer of that name.

        Raises ValueError for a malformed name, and RuntimeError after the end of the registration.
        """
        cdef const char* name = holder
        checked(holder)
        if self.memory == NULL:
            raise RuntimeError("the registration has ended")
        with nogil:
            pthread_mutex_lock(&self.device.registry.lock)
            memcpy(self.memory.holder, name, NAME_BYTES)
            self.memory.bound = True
            pthread_mutex_unlock(&self.device.registry.lock)

    def retire(self) -> bool:
        if self.memory == NULL or self.device.epoch != fork_epoch():
            return False
        self.unlist()
        if self.gpu is None:
            return False
        queue_look(&self.memory.gpu.out)
        queue_look(&self.memory.gpu.back)
        return (self.is_shared() or queue_state(&self.memory.gpu.out, self.last_out) == 0
                or queue_state(&self.memory.gpu.back, self.last_back) == 0)

    cdef bint is_shared(self) noexcept:
        """Return whether peers copy from the memory, or have its allocation open after its last registration ended."""
        cdef Registry* registry = self.device.registry
        cdef bint shared
        with nogil:
            pthread_mutex_lock(&registry.lock)
            shared = is_lent(registry, self.memory) or (
                self.memory.exported != NULL and self.memory.exported.uses == 0 and self.memory.exported.known != 0)
            pthread_mutex_unlock(&registry.lock)
        return shared

    def close(self) -> None:
        """End the registration. After this returns, no peer's bytes go to the memory any more. Idempotent."""
        self.drop()

    def __dealloc__(self):
        self.drop()

    cdef void unlist(self) noexcept:
        """Remove the key from the table, if it is there."""
        cdef Registry* registry = self.device.registry
        cdef Memory** link
        # Wait without the GIL: a native thread holds the lock while one call copies, some twenty microseconds.
        with nogil:
            pthread_mutex_lock(&registry.lock)
            link = &registry.table[self.memory.key % BUCKETS]
            while link[0] != NULL and link[0] != self.memory:
                link = &link[0].next
            if link[0] != NULL:
                link[0] = self.memory.next
                registry.epoch += 1
                if self.memory.exported != NULL:
                    self.memory.exported.uses -= 1
                    registry.withdrawn += self.memory.exported.uses == 0
                if self.memory.gpu != NULL:
                    self.last_out = self.memory.gpu.out.posted
                    self.last_back = self.memory.gpu.back.posted
            pthread_mutex_unlock(&registry.lock)

    cdef void drop(self) noexcept:
        if self.memory == NULL or self.device is None or self.device.epoch != fork_epoch():
            return
        self.unlist()
        if self.gpu is not None:
            # The copies posted while the key was valid have to end before the owner may use the memory again.
            with nogil:
                queue_wait(&self.memory.gpu.out, self.last_out)
                queue_wait(&self.memory.gpu.back, self.last_back)
            self.gpu = None
        if self.memory.exported != NULL:
            with nogil:
                pthread_mutex_lock(&self.device.registry.lock)
                let_go(self.device.registry, self.memory.exported)
                pthread_mutex_unlock(&self.device.registry.lock)
        free(self.memory)
        self.memory = NULL
        self.desc = NULL
        self.device.children -= 1


cdef int checked(bytes name) except -1:
    if len(name) != NAME_BYTES:
        raise ValueError(f"the peer's name has {len(name)} bytes, expected {NAME_BYTES}")
    return 0


cdef bint stream_disconnect(void* impl) noexcept nogil:
    return False


cdef void share_operations(RailOps* operations):
    """Set the operations that are the same over all wires."""
    operations.post = stream_post
    operations.flush = stream_flush
    operations.poll = stream_poll
    operations.disconnect = stream_disconnect
    operations.room = lent_room


@cython.no_gc_clear
cdef class StreamEndpoint(NativeEndpoint):
    """The common part of the endpoints of all wires. A base class: each kind has its own native half."""

    def __dealloc__(self):
        self.drop(self.device)

    cdef int usable(self, StreamDevice device) except -1:
        """Raise RuntimeError unless the endpoint may be opened on a device."""
        if self.impl_slot()[0] != NULL or device.closed:
            raise RuntimeError("the endpoint is open already, or its device is closed")
        return check_process(device.epoch)

    cdef void begin(self, StreamDevice device, Stream* stream, const Wire* wire, const RailOps* ops):
        """Set up the endpoint on a device, over a wire."""
        self.device = device
        device.children += 1
        self.ops = ops
        self.largest = LARGEST
        self.depth = STREAM_DEPTH
        self.window = WINDOW
        self.max_sge = MAX_SGE
        stream.wire = wire
        stream.registry = device.registry
        stream.shares = device.shares

    def name(self, bytes peer) -> None:
        """Set the peer's name, before the endpoint is handed to a channel.

        Raises ValueError for a malformed name, and RuntimeError after the endpoint was closed or handed over.
        """
        cdef Stream* stream = <Stream*> self.impl_slot()[0]
        checked(peer)
        if stream == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        memcpy(stream.peer, <const char*> peer, NAME_BYTES)
        stream.named = True

    cdef NativeDevice device_of(self):
        return self.device
