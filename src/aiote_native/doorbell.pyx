"""A doorbell for rails without a wait descriptor: shared memory moves no data while the target makes no call.

Each engine owns one page of shared memory (a memfd, so nothing is left behind when the process dies) and one eventfd,
and hands both to its peers on this host. Before it sleeps it makes `asleep` odd, looks once more, and sleeps; after a
post its peers look at `asleep` and ring the eventfd when it is odd. Store, fence, look on one side and post, fence,
load on the other: one of the two always sees the other (Dekker). `waiting[slot]` says how much of its own work toward
one peer is outstanding, so that a peer that made progress for it without seeing a completion of its own rings as
well, once for each sleep; and so does whoever has work outstanding itself.
"""

from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close, ftruncate, write

import fcntl
import os
from collections import deque

from aiote_native.status cimport check

cdef extern from *:
    """
    #define aiote_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
    #define aiote_load(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_ACQUIRE)
    #define aiote_store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    """
    void aiote_fence() noexcept nogil
    uint32_t aiote_load(const uint32_t*) noexcept nogil
    void aiote_store(uint32_t*, uint32_t) noexcept nogil

cdef extern from "<sys/mman.h>" nogil:
    int memfd_create(const char*, unsigned int)
    const unsigned int MFD_CLOEXEC
    const unsigned int MFD_ALLOW_SEALING

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC
    const int EFD_NONBLOCK


cdef int ring(Channel* channel, bint polled) noexcept nogil:
    """Wake the peer if it sleeps; after a mere poll only when it or we wait for work of our own, and once a sleep.

    shm hands a large message over in pieces: a poll takes one, or puts the next one there, without any completion.
    """
    cdef const BellPage* page = <const BellPage*> channel.peer_bell
    cdef uint32_t epoch
    cdef uint64_t one = 1
    aiote_fence()
    epoch = aiote_load(&page.asleep)
    if not epoch & 1:
        return 0
    if polled and (channel.rung_epoch == epoch or (
            channel.outstanding == 0 and aiote_load(&page.waiting[channel.peer_slot]) == 0)):
        return 0
    channel.rung_epoch = epoch
    # A full eventfd (EAGAIN) is readable already: the peer wakes all the same.
    write(channel.peer_bell_fd, &one, sizeof(one))
    return 1


cdef class Doorbell:
    """This engine's own page and eventfd."""

    def __cinit__(self):
        self.page = NULL
        self.memory_fd = self.event_fd = -1

    def __init__(self):
        if self.page != NULL:
            raise RuntimeError("the doorbell is open already")
        self.free_slots = deque(range(BELL_SLOTS))
        try:
            self.memory_fd = memfd_create(b"aiote-doorbell", MFD_CLOEXEC | MFD_ALLOW_SEALING)
            check(-errno if self.memory_fd < 0 else 0, "memfd_create")
            check(-errno if ftruncate(self.memory_fd, sizeof(BellPage)) else 0, "ftruncate(doorbell)")
            # Sealed, so that no one who maps it can be made to fault by a shrinking file.
            fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.page = <BellPage*> map_page(self.memory_fd, PROT_READ | PROT_WRITE)
            self.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            check(-errno if self.event_fd < 0 else 0, "eventfd")
        except BaseException:
            self.close()
            raise

    cdef void sleep(self) noexcept nogil:
        aiote_store(&self.page.asleep, self.page.asleep | 1)
        aiote_fence()

    cdef void wake(self) noexcept nogil:
        if self.page.asleep & 1:
            aiote_store(&self.page.asleep, self.page.asleep + 1)

    def take_slot(self) -> tuple[int, int]:
        """Take a free slot for one peer and open its gate; return it with its generation.

        (-1, 0) when all are taken: then posts alone ring the peer, and there is no gate.
        """
        cdef int slot
        if not self.free_slots:
            return -1, 0
        # The one that was freed first: its old peer has most likely left. If not, it knows another generation.
        slot = self.free_slots.popleft()
        aiote_store(&self.page.gate[slot], (self.page.gate[slot] | 1) + 1)
        return slot, self.page.gate[slot]

    def free_slot(self, int slot) -> None:
        """Give a slot back. Nothing once the doorbell is closed.

        Its gate stays as it is: through an open one the peer still takes the messages that were sent to it.
        """
        if self.page != NULL and 0 <= slot < BELL_SLOTS and slot not in self.free_slots:
            self.page.waiting[slot] = 0
            self.free_slots.append(slot)

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        if self.page != NULL:
            munmap(self.page, sizeof(BellPage))
            self.page = NULL
        if self.memory_fd >= 0:
            close(self.memory_fd)
            self.memory_fd = -1
        if self.event_fd >= 0:
            close(self.event_fd)
            self.event_fd = -1


cdef void* map_page(int fd, int protection) except NULL:
    cdef void* page = mmap(NULL, sizeof(BellPage), protection, MAP_SHARED, fd, 0)
    if page == MAP_FAILED:
        check(-errno, "mmap(doorbell)")
    return page


cdef class PeerBell:
    """A peer's doorbell, from the two descriptors that it sent; both are owned by this object from here on."""

    def __cinit__(self):
        self.page = NULL
        self.event_fd = -1

    def __init__(self, int memory_fd, int event_fd):
        """Map the page and keep the eventfd. Raises ValueError when the page could shrink under us."""
        if self.page != NULL:
            raise RuntimeError("the doorbell is open already")
        self.event_fd = event_fd
        try:
            if not fcntl.fcntl(memory_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the doorbell page of the peer is not sealed against shrinking")
            if os.fstat(memory_fd).st_size < sizeof(BellPage):
                raise ValueError("the doorbell page of the peer is too short")
            # Ringing must never block the engine, whatever the peer made of its descriptor.
            os.set_blocking(event_fd, False)
            self.page = <const BellPage*> map_page(memory_fd, PROT_READ)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory_fd)

    def busy(self, int slot) -> bool:
        """Tell whether the peer is within a call into its library for that slot of its own."""
        return self.page != NULL and 0 <= slot < BELL_SLOTS and aiote_load(&self.page.busy[slot]) & 1 != 0

    def silence(self) -> None:
        """Close the eventfd and keep the page. Idempotent; nobody rings it any more."""
        if self.event_fd >= 0:
            close(self.event_fd)
            self.event_fd = -1

    def __dealloc__(self):
        if self.page != NULL:
            munmap(<void*> self.page, sizeof(BellPage))

    def close(self) -> None:
        """Unmap and close. Idempotent; no channel may use the bell any more."""
        self.silence()
        if self.page != NULL:
            munmap(<void*> self.page, sizeof(BellPage))
            self.page = NULL
