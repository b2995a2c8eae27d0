"""Streams between the processes of one host: a ring of bytes in shared memory for each direction.

The sender copies from its memory into the ring, and the receiver copies from the ring into its own memory. Each side
uses a processor of its own and both copy at once, so together they take hardly longer than one copy. The ring is small
enough to stay in the cache that both processors share. Neither side accesses the other's memory, so that memory need
not be shared, or opened to others by the kernel. A peer that is stopped or faulty can write to the ring only.

`head` and `tail` count bytes and never go back. Each is written by one side, and the other side checks its value before
using it. The pages belong to a memfd, which each side sends to the other with its wake-up page. The memfd is sealed, so
that a peer cannot truncate it while the other side touches its pages. (A peer can give pages back, which come again as
zeros.) The memfd has no name, and ends with the processes that have it.

An engine may have a thousand peers and talk to a few of them, so a ring has one page until it is used. Before a side
touches further bytes for the first time, it asks the kernel for their pages. If there is no memory for them, the answer
is an error, which ends this stream alone, and not a signal, which would end the process. Linux before 5.14 cannot be
asked; there, all pages are made with the ring.
"""

from libc.errno cimport EAGAIN, EINTR, EINVAL, ENOMEM, EPROTO, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close, ftruncate

import fcntl
import os

from aiote_native.peer_wakeups import check_sealed
from aiote_native.clocks cimport clock_ns
from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.status cimport check
from aiote_native.streams.copying cimport aiote_copy_in, aiote_copy_out
from aiote_native.streams.memory cimport StreamDevice, StreamEndpoint, share_operations
from aiote_native.streams.sending cimport has_more
from aiote_native.streams.staging cimport leave_slots
from aiote_native.streams.stream cimport (
    Stream, Wire, armed, free_works, iovec, is_copying, pthread_mutex_lock, pthread_mutex_unlock)
from aiote_native.structs cimport RailOps

cdef extern from *:
    """
    #include <fcntl.h>
    #define aiote_take(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define aiote_give(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    """
    uint64_t aiote_take(const uint64_t*) noexcept nogil
    void aiote_give(uint64_t*, uint64_t) noexcept nogil
    int posix_fallocate(int, long, long) nogil

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void*, size_t, int)
    int memfd_create(const char*, unsigned int)
    const unsigned int MFD_CLOEXEC, MFD_ALLOW_SEALING

cdef enum:
    # All bytes that may be in flight on a channel (memory.pyx), and more than a core's second-level cache holds: the
    # other core took bytes from there at a third of the rate at which it takes them from the cache that both share. The
    # fastest size from 128 KiB to 4 MiB, with a second-level cache of 1 MiB (docs/streams.md).
    RING_BYTES = 2 << 20
    # The limits of the size, which a peer chooses: a power of two up to twice the bytes that it may have in flight
    # (memory.pyx).
    LEAST_BYTES = 128 * 1024
    MOST_BYTES = 4 << 20
    DATA = 4096              # where the bytes begin
    # Bytes after which a side publishes the new `head` or `tail`, so that both sides copy at the same time.
    STEP = 16 * 1024
    STREAMED = 4096
    # How long a side stays awake for the next bytes of a partial frame, because a wake-up would bring them later.
    WITHIN_NS = 50_000
    # The most bytes whose pages are asked for in one call; until then, each call doubles the bytes with pages. One call
    # for each page would cost as much as the copy. One call for all pages would give a ring that carried a few messages
    # the memory of a ring in full use.
    POPULATED = 64 * 1024
    MADV_POPULATE_WRITE = 23  # since Linux 5.14; older headers do not name it
    RING_MARK = 0x31676E6972206F61

SCHEME = b"aiote-ring://"


cdef inline uint8_t* data_of(Ring* ring) noexcept nogil:
    return <uint8_t*> ring + DATA


cdef int populate(Ring* ring, uint64_t nbytes, uint64_t* there, uint64_t end) noexcept nogil:
    """Get pages for a ring's bytes up to `end`, and count in `there` the bytes from the first one on that have pages.

    Return 0, or -ENOMEM if there is not enough memory.
    """
    cdef uint64_t needed = (end + DATA - 1) & ~(<uint64_t> DATA - 1)
    cdef uint64_t until = min(nbytes, max(needed, there[0] + min(there[0], <uint64_t> POPULATED)))
    while madvise(data_of(ring) + there[0], until - there[0], MADV_POPULATE_WRITE) != 0:
        if errno not in (EINTR, EAGAIN):
            return -ENOMEM
    there[0] = until
    return 0


cdef long ring_send(void* stream, const iovec* vectors, int count) noexcept nogil:
    """Copy into the peer's ring the bytes that have room there; return their number or -errno."""
    cdef RingStream* self = <RingStream*> stream
    cdef uint64_t head = self.peer_head
    cdef uint64_t given = head
    cdef const uint8_t* source
    cdef const uint8_t* following
    cdef uint64_t done, part, at
    cdef int i
    for i in range(count):
        done = 0
        while done < vectors[i].iov_len:
            if head - self.peer_tail == self.peer_bytes:
                self.peer_tail = aiote_take(&self.peer.tail)
                if head - self.peer_tail > self.peer_bytes:
                    return -EPROTO
            part = min(min(vectors[i].iov_len - done, self.peer_bytes - (head - self.peer_tail)),
                       min(self.peer_bytes - (head & (self.peer_bytes - 1)), <uint64_t> STEP))
            if part == 0:
                break
            at = head & (self.peer_bytes - 1)
            if at + part > self.peer_there and populate(self.peer, self.peer_bytes, &self.peer_there, at + part) != 0:
                return -ENOMEM
            source = <const uint8_t*> vectors[i].iov_base + done
            head += part
            done += part
            # The next bytes are only prefetched, and a prefetch does not fault if their memory is gone.
            following = source + part if done < vectors[i].iov_len else NULL
            if following == NULL and i + 1 < count:
                following = <const uint8_t*> vectors[i + 1].iov_base
            aiote_copy_in(data_of(self.peer) + at, source, part, following)
            if head - given >= STEP:
                aiote_give(&self.peer.head, head)
                given = head
        if done < vectors[i].iov_len:
            break
    if head != given:
        aiote_give(&self.peer.head, head)
    done = head - self.peer_head
    self.peer_head = head
    return <long> done


cdef long ring_receive(void* stream, const iovec* vectors, int count) noexcept nogil:
    """Copy the available bytes out of the own ring; return their number or -errno."""
    cdef RingStream* self = <RingStream*> stream
    cdef uint64_t tail = self.own_tail
    cdef uint64_t given = tail
    cdef size_t streamed = <size_t> -1 if self.stream.cached else STREAMED
    cdef uint64_t here = aiote_take(&self.own.head) - tail
    cdef uint64_t done, part, at
    cdef int i
    if here > self.own_bytes:
        return -EPROTO
    for i in range(count):
        done = 0
        while done < vectors[i].iov_len and here:
            at = tail & (self.own_bytes - 1)
            part = min(min(vectors[i].iov_len - done, here), min(self.own_bytes - at, <uint64_t> STEP))
            if at + part > self.own_there and populate(self.own, self.own_bytes, &self.own_there, at + part) != 0:
                return -ENOMEM
            aiote_copy_out(<uint8_t*> vectors[i].iov_base + done, data_of(self.own) + at, part, streamed)
            tail += part
            here -= part
            done += part
            if tail - given >= STEP:
                aiote_give(&self.own.tail, tail)
                given = tail
        if here == 0:
            break
    if tail != given:
        aiote_give(&self.own.tail, tail)
    done = tail - self.own_tail
    self.own_tail = tail
    return <long> done


cdef inline bint is_within(const Stream* self) noexcept nogil:
    """Return whether a frame is partly transferred, in either direction."""
    return (self.opened and self.left != 0) or self.begun.head != NULL


cdef int ring_arm(void* impl) noexcept nogil:
    """Return whether it is safe to sleep, as RailOps says.

    Wake-ups announce arriving bytes and room, but neither bytes that a push put off nor a push that failed. The next
    bytes of a partial frame come sooner than a wake-up would, so this side stays awake for them, up to WITHIN_NS.
    """
    cdef RingStream* self = <RingStream*> impl
    cdef Stream* stream = &self.stream
    cdef bint again = stream.paused or (stream.broken and not stream.reported_broken)
    if not again and is_within(stream):
        if self.seen_tail != self.own_tail or self.seen_head != self.peer_head:
            self.seen_tail, self.seen_head = self.own_tail, self.peer_head
            self.since = clock_ns()
        again = clock_ns() - self.since < WITHIN_NS
    return armed(stream, again)


cdef void unmap(Ring** ring, uint64_t nbytes) noexcept nogil:
    if ring[0] != NULL:
        munmap(ring[0], DATA + nbytes)
        ring[0] = NULL


cdef void ring_shut(void* impl) noexcept nogil:
    cdef RingStream* self = <RingStream*> impl
    pthread_mutex_lock(&self.stream.registry.lock)
    self.stream.closed = True
    leave_slots(&self.stream)
    unmap(&self.own, self.own_bytes)
    unmap(&self.peer, self.peer_bytes)
    pthread_mutex_unlock(&self.stream.registry.lock)


cdef void ring_release(void* impl) noexcept nogil:
    cdef RingStream* self = <RingStream*> impl
    ring_shut(impl)
    free_works(&self.stream)
    free(self)


cdef bint ring_reached(void* impl) noexcept nogil:
    """Return whether the peer's GPU still copies out of local memory.

    If the peer is stopped or killed while it copies, the answer stays True.
    """
    cdef RingStream* self = <RingStream*> impl
    return self.peer != NULL and aiote_take(&self.peer.pulling) != 0


cdef bint ring_stirred(void* impl) noexcept nogil:
    """Return whether bytes have come, or there is something to send, or something waits for a GPU."""
    cdef RingStream* self = <RingStream*> impl
    return (not self.stream.connected or self.own == NULL or aiote_take(&self.own.head) != self.own_tail
            or self.stream.broken or self.stream.paused or self.stream.stalled or has_more(&self.stream)
            or is_copying(&self.stream))


cdef uint64_t ring_moved(void* impl, bint* within) noexcept nogil:
    """Return how many bytes were taken out of the own ring and put into the peer's; set whether a frame is partial."""
    cdef RingStream* self = <RingStream*> impl
    within[0] = is_within(&self.stream)
    return self.own_tail + self.peer_head


cdef RailOps operations
share_operations(&operations)
operations.arm = ring_arm
operations.stirred = ring_stirred
operations.moved = ring_moved
operations.reached = ring_reached
operations.shut = ring_shut
operations.release = ring_release

cdef Wire wire
wire.send = ring_send
wire.receive = ring_receive


cdef bint may_be_ring(uint64_t nbytes) noexcept:
    return LEAST_BYTES <= nbytes <= MOST_BYTES and nbytes & (nbytes - 1) == 0


cdef Ring* map_ring(int fd, uint64_t nbytes, uint64_t* there) except NULL:
    """Map a ring, whose head has a page. `there` becomes the number of its bytes that have pages.

    That number is 0, or the whole size on a kernel that cannot be asked for pages. Raises StatusError.
    """
    cdef void* pages = mmap(NULL, DATA + nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if pages == MAP_FAILED:
        check(-errno, "mmap(ring)")
    there[0] = 0
    if madvise(pages, DATA, MADV_POPULATE_WRITE) != 0 and errno == EINVAL:
        there[0] = nbytes
    return <Ring*> pages


cdef class RingEndpoint(StreamEndpoint):
    """An endpoint with a ring to receive through. Its `memory_fd` is sent to the peer; `take` maps the peer's ring."""

    def __cinit__(self):
        self.impl = NULL

    def __init__(self, StreamDevice device, uint64_t ring_bytes=RING_BYTES):
        """Make the ring. Raises StatusError, OSError, and ValueError for a size that a ring cannot have."""
        if not may_be_ring(ring_bytes):
            raise ValueError(f"a ring of {ring_bytes} bytes: expected a power of 2 from {LEAST_BYTES} to {MOST_BYTES}")
        self.usable(device)
        self.impl = <RingStream*> calloc(1, sizeof(RingStream))
        if self.impl == NULL:
            raise MemoryError
        self.impl.own_bytes = ring_bytes
        self.begin(device, &self.impl.stream, &wire, &operations)
        self.impl.stream.eager = True
        try:
            self.make()
        except BaseException:
            self.close()
            raise

    cdef int make(self) except -1:
        cdef bytes number = os.urandom(8)
        cdef uint64_t nbytes = self.impl.own_bytes
        self.memory_fd = memfd_create(b"aiote-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        check(-errno if self.memory_fd < 0 else 0, "memfd_create(ring)")
        check(-errno if ftruncate(self.memory_fd, DATA + nbytes) else 0, "ftruncate(ring)")
        # This fails if there is no memory, while touching a page that the kernel cannot provide would kill the process.
        check(-posix_fallocate(self.memory_fd, 0, DATA), "posix_fallocate(ring)")
        fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.impl.own = map_ring(self.memory_fd, nbytes, &self.impl.own_there)
        if self.impl.own_there:
            check(-posix_fallocate(self.memory_fd, 0, DATA + nbytes), "posix_fallocate(ring)")
        self.impl.own.mark = RING_MARK
        self.impl.own.size = nbytes
        self.impl.stream.pulling = &self.impl.own.pulling
        self.impl.own.number = int.from_bytes(number, "big")
        self.address = SCHEME + number.hex().encode()
        return 0

    def take(self, int memory_fd) -> None:
        """Map the ring of the peer endpoint that this one talks to, and close the descriptor.

        Raises StatusError, OSError and ValueError, and RuntimeError if a ring was taken or the endpoint is closed.
        """
        cdef uint64_t nbytes
        try:
            if self.impl == NULL or self.impl.peer != NULL:
                raise RuntimeError("the endpoint already has its peer's ring, or is closed or owned by a channel")
            check_process(self.device.epoch)
            # The peer chooses the size of its ring, which cannot change once the memfd is sealed.
            nbytes = max(os.fstat(memory_fd).st_size - DATA, 0)
            nbytes = nbytes if may_be_ring(nbytes) else self.impl.own_bytes
            check_sealed(memory_fd, DATA + nbytes, "ring")
            self.impl.peer = map_ring(memory_fd, nbytes, &self.impl.peer_there)
            self.impl.peer_bytes = nbytes
        finally:
            close(memory_fd)

    def connect(self, bytes address) -> None:
        """Connect to the peer, whose ring must be the one that the address names.

        Raises StatusError for a ring of another layout, ValueError for another ring, and RuntimeError if no ring was
        taken or the endpoint is connected or closed.
        """
        cdef const Ring* peer
        if self.impl == NULL or self.impl.peer == NULL or self.impl.stream.connected:
            raise RuntimeError("the endpoint has no ring of its peer, or is connected, closed or owned by a channel")
        check_process(self.device.epoch)
        peer = self.impl.peer
        if peer.mark != RING_MARK or peer.size != self.impl.peer_bytes:
            check(-EINVAL, "connect to the peer's ring, which has another layout")
        if address != SCHEME + f"{peer.number:016x}".encode():
            raise ValueError(f"{address!r} is not the address of the ring that the peer sent")
        self.impl.stream.connected = True
        self.forget()

    cdef void forget(self) noexcept:
        """Close the descriptor, which was sent to the peer by now. Does nothing in the child of a fork."""
        if self.memory_fd >= 0 and self.device is not None and self.device.epoch == fork_epoch():
            close(self.memory_fd)
            self.memory_fd = -1

    def close(self) -> None:
        self.forget()
        StreamEndpoint.close(self)

    def __dealloc__(self):
        self.forget()

    cdef void** impl_slot(self) noexcept:
        return <void**> &self.impl
