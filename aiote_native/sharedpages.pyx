# cython: auto_pickle=False
"""Pages that processes of one host share: a memfd, mapped by its owner and by the peers that get its descriptor.

The file is sealed against shrinking and growing before anybody else has it, so no access to the mapping can raise
SIGBUS because it lies behind the end. The file has no name: the kernel frees it with the last process that has it open
or mapped. The owner allocates all pages at once, so that touching one later allocates nothing, unless it asks for pages
on demand. No seal of writable memory keeps a peer from punching holes: the next touch there allocates a page again, and
where there is none left, the kernel ends the process, under strict overcommit (vm.overcommit_memory=2) with SIGBUS.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint64_t, uintptr_t
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close, ftruncate

import fcntl
import os

from aiote_native.status cimport check

cdef extern from "<fcntl.h>" nogil:
    int posix_fallocate(int, long, long)

cdef extern from "<sys/mman.h>" nogil:
    int memfd_create(const char*, unsigned int)
    const unsigned int MFD_CLOEXEC, MFD_ALLOW_SEALING

cdef extern from "<sys/vfs.h>" nogil:
    struct statfs_info "statfs":
        long f_type
    int fstatfs(int, statfs_info*)

cdef enum:
    HUGETLBFS_MAGIC = 0x958458f6
    F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1; Python has the name since 3.13
    # Bytes allocated by one call. A signal makes the kernel undo the call, so with a large piece the signals of a
    # profiler could keep it from ever ending.
    PIECE = 1 << 20

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
cdef int KEPT_LENGTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
cdef int NOT_WRITTEN = fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE


cdef int allocate(int fd, uint64_t nbytes) noexcept nogil:
    """Allocate the pages of a file; return 0 or an error number."""
    cdef uint64_t at = 0
    cdef int code
    while at < nbytes:
        code = posix_fallocate(fd, at, min(<uint64_t> PIECE, nbytes - at))
        if code == 0:
            at += PIECE
        elif code != EINTR:
            return code
    return 0


cdef class SharedPages:
    """A mapping of shared pages. It shows its bytes through the buffer protocol.

    A view keeps the pages mapped until it is released, even after `close`.
    """

    cdef void* pages
    cdef readonly size_t nbytes
    cdef int memory_fd
    cdef Py_ssize_t views
    cdef readonly bint closed

    def __cinit__(self):
        self.pages = NULL
        self.memory_fd = -1
        self.closed = True

    def __init__(self, size_t nbytes, bint reserve=True):
        """Allocate pages of zeros; without `reserve`, each when it is first touched. Raises StatusError, and ValueError
        for no bytes.
        """
        cdef int fd, code = 0
        if self.pages != NULL or self.memory_fd >= 0:
            raise RuntimeError("the pages are mapped already")
        if nbytes == 0:
            raise ValueError("shared pages have at least one byte")
        fd = memfd_create(b"aiote-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        check(-errno if fd < 0 else 0, "memfd_create(shared)")
        self.memory_fd = fd
        try:
            check(-errno if ftruncate(fd, nbytes) else 0, "ftruncate(shared)")
            if reserve:
                with nogil:
                    code = allocate(fd, nbytes)
            check(-code, "posix_fallocate(shared)")
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            self.map(fd, nbytes)
        except BaseException:
            self.forget()
            raise

    @classmethod
    def taken(cls, int memory_fd, size_t nbytes) -> SharedPages:
        """Map the pages that a peer's descriptor names, and close the descriptor; where this raises, it stays open.

        Raises StatusError and OSError, and ValueError for a descriptor that is not sealed, cannot be written, is of
        another size or another user, or has huge pages, of which none may be left when one is touched.
        """
        cdef SharedPages made = SharedPages.__new__(SharedPages)
        check_pages(memory_fd, nbytes)
        made.map(memory_fd, nbytes)
        close(memory_fd)
        return made

    cdef int map(self, int fd, size_t nbytes) except -1:
        cdef void* pages = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if pages == MAP_FAILED:
            check(-errno, "mmap(shared)")
        self.pages, self.nbytes, self.closed = pages, nbytes, False
        return 0

    @property
    def address(self) -> int:
        """The address of the first byte; 0 once the pages are unmapped."""
        return <uintptr_t> self.pages

    @property
    def descriptor(self) -> int:
        """The descriptor of the owner's memory, which belongs to this object; -1 if closed, or of a peer."""
        return self.memory_fd

    def close(self) -> None:
        """Close the descriptor, and unmap the pages once no view of them is left. Idempotent."""
        self.closed = True
        self.forget()
        if not self.views:
            self.unmap()

    cdef void forget(self) noexcept:
        if self.memory_fd >= 0:
            close(self.memory_fd)
            self.memory_fd = -1

    cdef void unmap(self) noexcept:
        cdef void* pages = self.pages
        self.pages = NULL
        if pages != NULL:
            # The kernel frees the pages here, if this is the last mapping: a GiB has 262,144 of them.
            with nogil:
                munmap(pages, self.nbytes)

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.closed:
            raise BufferError("the shared memory is closed")
        PyBuffer_FillInfo(view, self, self.pages, self.nbytes, False, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.views -= 1
        if self.closed and not self.views:
            self.unmap()

    def __dealloc__(self):
        # A view holds a reference, so there is none any more.
        self.forget()
        self.unmap()


cdef int check_pages(int fd, size_t nbytes) except -1:
    """Raise ValueError unless a peer's descriptor is what `share_memory` makes. The length is read after the seals."""
    cdef statfs_info system
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & KEPT_LENGTH != KEPT_LENGTH:
        raise ValueError("the shared memory of the peer is not sealed against shrinking and growing")
    if seals & NOT_WRITTEN or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise ValueError("the shared memory of the peer cannot be written")
    check(-errno if fstatfs(fd, &system) else 0, "fstatfs(shared)")
    # The kernel's number has 32 bits, which a field of 64 bits may hold with or without a sign.
    if <unsigned int> system.f_type == <unsigned int> HUGETLBFS_MAGIC:
        raise ValueError("the shared memory of the peer has huge pages")
    found = os.fstat(fd)
    if found.st_size != nbytes:
        raise ValueError(f"the shared memory of the peer has {found.st_size} bytes, expected {nbytes}")
    if found.st_uid != os.geteuid():
        raise ValueError(f"the shared memory of the peer belongs to user {found.st_uid}, expected {os.geteuid()}")
    return 0
