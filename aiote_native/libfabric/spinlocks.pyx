"""The spin lock in an endpoint's shared memory, for libfabric before 2.0.

Layout of `struct smr_region` in its version 4 (libfabric 1.17, util_shm.h): a byte of version, the owner's process
number at 4, the lock at 24. Nothing else of it is touched.
"""

from libc.errno cimport errno
from libc.stdint cimport int32_t, uint8_t
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


cdef class SpinLock:
    """The lock of one endpoint's memory, found by the file that it lies in; mapped, so that the file may go."""

    cdef uint8_t* memory

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, str path, int process):
        """Map the file. Raises OSError, and ValueError for memory of another layout or another process."""
        if self.memory != NULL:
            raise RuntimeError("the lock is open already")
        cdef int fd = open(path.encode(), O_RDWR)
        check(-errno if fd < 0 else 0, "open(spin lock)")
        cdef void* memory = mmap(NULL, MAPPED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        close(fd)
        if memory == MAP_FAILED:
            check(-errno, "mmap(spin lock)")
        self.memory = <uint8_t*> memory
        if self.memory[0] != VERSION or (<int32_t*> (self.memory + PROCESS_AT))[0] != process:
            raise ValueError(f"{path} is not the memory of process {process} in layout {VERSION}")

    @property
    def held(self) -> bool:
        """Whether somebody holds it now."""
        # What a free one looks like is the C library's own affair: 1 on x86-64, 0 on arm64.
        cdef pthread_spinlock_t free
        pthread_spin_init(&free, PTHREAD_PROCESS_SHARED)
        return self.memory != NULL and (<int32_t*> (self.memory + LOCK_AT))[0] != <int32_t> free

    def release(self) -> None:
        """Unlock it, whoever holds it: to be called once nobody but this process can want it."""
        if self.memory != NULL:
            pthread_spin_unlock(<pthread_spinlock_t*> (self.memory + LOCK_AT))

    def __dealloc__(self):
        if self.memory != NULL:
            munmap(self.memory, MAPPED)
