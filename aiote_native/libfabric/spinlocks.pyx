"""The spin lock and the command queue in an endpoint's shared memory, for libfabric before 2.0.

The layout of `struct smr_region` in version 4 (libfabric 1.17, ofi_shm.h): a byte of version, the owner's process
number at 4, the lock at 24, the offset of the command queue at 64. That queue (`ofi_rbuf.h`) is four words (size, mask,
commands read, commands written) and a ring of commands of 256 bytes. This module accesses no other fields.
"""

from libc.errno cimport errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from posix.fcntl cimport O_RDWR, open
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close

from aiote_native.status cimport check

cdef extern from "<pthread.h>" nogil:
    ctypedef int pthread_spinlock_t
    int pthread_spin_init(pthread_spinlock_t*, int)
    int pthread_spin_unlock(pthread_spinlock_t*)
    int PTHREAD_PROCESS_SHARED

cdef enum:
    MAPPED = 4096
    VERSION = 4
    PROCESS_AT = 4
    LOCK_AT = 24
    QUEUE_AT = 64
    QUEUE_HEAD = 32
    COMMAND = 256
    MOST_COMMANDS = 65536
    # The place of the operation in a command, and the operations of ofi_proto.h that a second command follows.
    OPERATION_AT = 16
    READ = 2
    WRITE = 4
    ATOMIC = 6
    ATOMIC_COMPARE = 8

cdef enum:  # the words of a queue
    SIZE, MASK, COMMANDS_READ, COMMANDS_WRITTEN


cdef class SpinLock:
    """The lock of one endpoint's memory, found by the memory's file. It is mapped, so the file may be removed."""

    cdef uint8_t* memory
    cdef size_t mapped
    cdef uint64_t* commands  # the owner's queue; NULL if there is no queue of this layout
    cdef uint64_t size  # of the queue when it was mapped; the peer can change the queue's own word, but not this bound

    def __cinit__(self):
        self.memory = NULL
        self.commands = NULL
        self.mapped = self.size = 0

    def __init__(self, str path, int process):
        """Map the file. Raises OSError, and ValueError for memory of another layout or another process."""
        if self.memory != NULL:
            raise RuntimeError("the lock is open already")
        cdef int fd = open(path.encode(), O_RDWR)
        cdef uint64_t queue
        check(-errno if fd < 0 else 0, "open(spin lock)")
        try:
            self.map(fd, MAPPED)
            if self.memory[0] != VERSION or (<int32_t*> (self.memory + PROCESS_AT))[0] != process:
                raise ValueError(f"{path} is not the memory of process {process} in layout {VERSION}")
            queue = (<uint64_t*> (self.memory + QUEUE_AT))[0]
            if 0 < queue <= MAPPED - QUEUE_HEAD and queue % 16 == 0:
                self.size = (<uint64_t*> (self.memory + queue))[SIZE]
                if 0 < self.size <= MOST_COMMANDS and (<uint64_t*> (self.memory + queue))[MASK] == self.size - 1:
                    self.map(fd, queue + QUEUE_HEAD + self.size * COMMAND)
                    self.commands = <uint64_t*> (self.memory + queue)
        finally:
            close(fd)

    cdef int map(self, int fd, size_t length) except -1:
        """Map the first `length` bytes of the file in place of the earlier mapping."""
        cdef void* memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if memory == MAP_FAILED:
            check(-errno, "mmap(spin lock)")
        self.unmap()
        self.memory = <uint8_t*> memory
        self.mapped = length
        return 0

    @property
    def held(self) -> bool:
        """Whether the lock is held now, by any process."""
        # The C library decides which value a free lock has: 1 on x86-64, 0 on arm64.
        cdef pthread_spinlock_t free
        pthread_spin_init(&free, PTHREAD_PROCESS_SHARED)
        return self.memory != NULL and (<int32_t*> (self.memory + LOCK_AT))[0] != <int32_t> free

    @property
    def commands_read(self) -> int:
        """How many commands the memory's owner has taken out of its queue."""
        return self.commands[COMMANDS_READ] if self.commands != NULL else 0

    def release(self) -> None:
        """Unlock the lock, whoever holds it. Call it once no other process can want the lock."""
        if self.memory != NULL:
            pthread_spin_unlock(<pthread_spinlock_t*> (self.memory + LOCK_AT))

    def drop_half(self) -> bool:
        """Take back the first of two commands if their sender ended between the two; return whether there was one.

        A write is two commands, which the sender commits one after the other while it holds the lock. The owner of the
        queue reads both without checking the count. If the second command is missing, the owner reads past the end of
        its queue, takes the ring's old contents for commands, and then never stops or crashes. Call this while the lock
        is still held by the process that has ended.
        """
        cdef uint64_t* queue = self.commands
        cdef uint64_t at, written
        if queue == NULL or not self.held:
            return False
        at, written = queue[COMMANDS_READ], queue[COMMANDS_WRITTEN]
        if written - at > self.size:
            return False
        while at < written:
            at += 1 + is_double((<uint8_t*> queue) + QUEUE_HEAD + (at & (self.size - 1)) * COMMAND)
        if at == written:
            return False
        queue[COMMANDS_WRITTEN] = written - 1
        return True

    cdef void unmap(self) noexcept:
        if self.memory != NULL:
            munmap(self.memory, self.mapped)
            self.memory = NULL

    def __dealloc__(self):
        self.unmap()


cdef bint is_double(uint8_t* command) noexcept nogil:
    """Return whether a second command follows, which names the memory that is written or read."""
    cdef uint32_t operation = (<uint32_t*> (command + OPERATION_AT))[0]
    return operation == READ or operation == WRITE or ATOMIC <= operation <= ATOMIC_COMPARE
