# cython: auto_pickle=False
"""Memory that processes of one host share, and the wake-ups that peers send each other through it."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EINTR, EINVAL, ENOBUFS, ENOMEM, errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close, ftruncate

import fcntl
import os
import socket
from collections import deque

from aiote_native.system.base cimport check

# Pages that processes of one host share: a memfd, mapped by its owner and by the peers that get its descriptor.
#
# The file is sealed against shrinking and growing before anybody else has it, so no access to the mapping can raise
# SIGBUS because it lies behind the end. The file has no name: the kernel frees it with the last process that has it
# open or mapped. The owner allocates all pages at once, so that touching one later allocates nothing, unless it asks
# for pages on demand. No seal of writable memory keeps a peer from punching holes: the next touch there allocates a
# page again, and where there is none left, the kernel ends the process, under strict overcommit
# (vm.overcommit_memory=2) with SIGBUS.

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
        PyBuffer_FillInfo(view, self, self.pages, self.nbytes, readonly=False, flags=flags)
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


# Wake a sleeping peer on this host, for rails without a wait descriptor: `shm` moves no data while its target makes
# no call into the library.
#
# Each engine owns one page of shared memory, which its peers on this host may read, and a datagram socket. (The page is
# a memfd, so nothing is left behind when the process dies.) Before the engine sleeps it makes `asleep` odd, polls once
# more, and then sleeps. After a post its peers load `asleep`, and send a datagram when it is odd. One side stores,
# fences and polls; the other posts, fences and loads: one of the two always sees the other (Dekker). `waiting[slot]`
# says how much of the engine's own work toward one peer is outstanding. A peer that made progress on that work, without
# a completion of its own, reads this number and sends a wake-up as well, once for each sleep. A peer that has work of
# its own outstanding does the same.
#
# No peer can harm another through what they share. The page is sealed: peers cannot write it. There is no common
# eventfd, because one peer could take the others' wake-ups by reading it, or block them by making it blocking. Each
# peer sends through a socket of its own. Any process on the host can read the sockets' names (/proc/net/unix) and write
# to them, but a filter in the kernel drops every datagram that does not begin with the socket's secret, before it is
# queued.

cdef extern from *:
    """
    #define aiote_store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    """
    void aiote_store(uint32_t*, uint32_t) noexcept nogil

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int, void*, size_t, int)
    ssize_t send(int, const void*, size_t, int)
    int setsockopt(int, int, int, const void*, unsigned int)
    const int MSG_DONTWAIT, MSG_NOSIGNAL, SOL_SOCKET, SO_ATTACH_FILTER

cdef extern from "<linux/filter.h>" nogil:
    struct sock_filter:
        unsigned short code
        unsigned char jt
        unsigned char jf
        uint32_t k
    struct sock_fprog:
        unsigned short len
        sock_filter* filter
    const int BPF_LD, BPF_W, BPF_ABS, BPF_JMP, BPF_JEQ, BPF_K, BPF_RET

cdef enum:
    SECRET_WORDS = SECRET_BYTES // 4
    SO_PASSRIGHTS = 83
    MAX_WAKEUPS = 64  # wake-ups taken at once; a queue holds about ten by default (net.unix.max_dgram_qlen)

cdef bytes NAME = b"\0aiote-"


def guarded_socket(bint rights) -> tuple[socket.socket, bytes]:
    """Open a datagram socket at a name of its own, which takes only datagrams that begin with a secret of 16 bytes.

    Return it with its address for peers: the secret, then the name. `rights` lets descriptors come with datagrams.
    Raises OSError.
    """
    cdef bytes secret = os.urandom(SECRET_BYTES)
    cdef sock_filter[2 * SECRET_WORDS + 2] program
    cdef sock_fprog whole
    cdef int i, off = 0
    for i in range(SECRET_WORDS):
        program[2 * i] = sock_filter(BPF_LD | BPF_W | BPF_ABS, 0, 0, 4 * i)
        word = int.from_bytes(secret[4 * i:4 * i + 4], "big")
        program[2 * i + 1] = sock_filter(BPF_JMP | BPF_JEQ | BPF_K, 0, 2 * (SECRET_WORDS - i) - 1, word)
    program[2 * SECRET_WORDS] = sock_filter(BPF_RET | BPF_K, 0, 0, 0xFFFFFFFF)
    program[2 * SECRET_WORDS + 1] = sock_filter(BPF_RET | BPF_K, 0, 0, 0)
    whole.len = 2 * SECRET_WORDS + 2
    whole.filter = program
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        # Attached before the socket has a name, so that no other datagram is ever in its queue.
        check(-errno if setsockopt(made.fileno(), SOL_SOCKET, SO_ATTACH_FILTER, &whole, sizeof(whole)) else 0,
              "setsockopt(SO_ATTACH_FILTER)")
        if not rights:
            # Receiving a wake-up would close a descriptor that came with it, and closing a descriptor of the peer's
            # choice, such as a socket that lingers, takes as long as the peer likes. Before Linux 6.16 no option keeps
            # it out.
            setsockopt(made.fileno(), SOL_SOCKET, SO_PASSRIGHTS, &off, sizeof(off))
        name = NAME + os.urandom(16).hex().encode()
        made.bind(name)
    except BaseException:
        made.close()
        raise
    return made, secret + name


def parse_address(bytes address) -> tuple[bytes, bytes]:
    """Return the secret and the name of a peer's socket. Raises ValueError for any other address."""
    secret, name = address[:SECRET_BYTES], address[SECRET_BYTES:]
    if len(secret) != SECRET_BYTES or len(name) != len(NAME) + 32 or not name.startswith(NAME):
        raise ValueError(f"{address!r} is not the address of a wake-up socket")
    return secret, name


def check_sealed(int fd, size_t length, str what) -> None:
    """Check that a peer's memory cannot shrink while it is mapped. Raises OSError and ValueError."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"the {what} of the peer is not sealed against shrinking")
    # Exact to the byte, which excludes huge pages: none of those may be left when the memory is touched.
    if os.fstat(fd).st_size != length:
        raise ValueError(f"the {what} of the peer has {os.fstat(fd).st_size} bytes, expected {length}")


cdef int send_wakeup(Channel* channel, uint32_t epoch, bint polled) noexcept nogil:
    """Send a wake-up for a sleep of the peer's that has had none; return how many were sent."""
    cdef const WakeupPage* page = <const WakeupPage*> channel.peer_page
    # One wake-up is enough for a sleep: the peer had drained the earlier ones when it announced this sleep.
    if channel.woken_epoch == epoch or (
            polled and channel.outstanding == 0 and aiote_load(&page.waiting[channel.peer_slot]) == 0):
        return 0
    # A full queue (EAGAIN) is readable already, so the peer wakes all the same. A send that fails for want of memory is
    # tried again after the next poll, which the timer causes while anything is outstanding.
    if (send(channel.peer_wakeup_fd, channel.peer_wakeup_secret, SECRET_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL) < 0
            and errno in (ENOBUFS, ENOMEM)):
        return 0
    channel.woken_epoch = epoch
    return 1


cdef void drain_wakeups(int fd) noexcept nogil:
    """Take the wake-ups that came to a socket."""
    cdef char[SECRET_BYTES] taken
    for _i in range(MAX_WAKEUPS):
        if recv(fd, taken, SECRET_BYTES, MSG_DONTWAIT) < 0:
            return


cdef class WakeupEvent:
    """This engine's own page and socket; peers send their wake-ups to `address`."""

    def __cinit__(self):
        self.page = NULL
        self.memory_fd = self.socket_fd = -1

    def __init__(self):
        if self.page != NULL:
            raise RuntimeError("the wake-up event is open already")
        self.free_slots = deque(range(WAKEUP_SLOTS))
        try:
            self.memory_fd = memfd_create(b"aiote-wakeup", MFD_CLOEXEC | MFD_ALLOW_SEALING)
            check(-errno if self.memory_fd < 0 else 0, "memfd_create")
            check(-errno if ftruncate(self.memory_fd, sizeof(WakeupPage)) else 0, "ftruncate(wake-up page)")
            self.page = <WakeupPage*> map_page(self.memory_fd, PROT_READ | PROT_WRITE)
            self.page.beats = 1
            # A peer that maps the page must not fault because the file shrinks. After our own map, no writable one can
            # be made.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            try:
                fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, seals)
            except OSError as error:
                if error.errno != EINVAL:
                    raise
                # Linux before 5.1 lacks that seal, so there a peer could make us look awake or asleep to others.
                fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, seals & ~F_SEAL_FUTURE_WRITE)
            self.socket, self.address = guarded_socket(rights=False)
            self.socket_fd = self.socket.fileno()
        except BaseException:
            self.close()
            raise

    def beat(self) -> None:
        """Show the peers that this engine's event loop lives. Does nothing once the event is closed."""
        if self.page != NULL:
            aiote_store(&self.page.beats, self.page.beats + 1 if self.page.beats + 1 else 1)

    def take_slot(self) -> tuple[int, int]:
        """Take a free slot for one peer and open its gate; return it with its generation.

        (-1, 0) when all are taken: then only posts wake the peer, and there is no gate.
        """
        cdef int slot
        if not self.free_slots:
            return -1, 0
        # The slot that was freed first, because its old peer has most likely left. If not, it knows another generation.
        slot = self.free_slots.popleft()
        aiote_store(&self.page.gate[slot], (self.page.gate[slot] | 1) + 1)
        return slot, self.page.gate[slot]

    def free_slot(self, int slot) -> None:
        """Give a slot back. Does nothing once the event is closed.

        Its gate stays as it is, because through an open gate the peer still takes the messages that were sent to it.
        """
        if self.page != NULL and 0 <= slot < WAKEUP_SLOTS and slot not in self.free_slots:
            self.page.waiting[slot] = 0
            self.free_slots.append(slot)

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        if self.page != NULL:
            munmap(self.page, sizeof(WakeupPage))
            self.page = NULL
        if self.memory_fd >= 0:
            close(self.memory_fd)
            self.memory_fd = -1
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            self.socket_fd = -1


cdef void* map_page(int fd, int protection) except NULL:
    cdef void* page = mmap(NULL, sizeof(WakeupPage), protection, MAP_SHARED, fd, 0)
    if page == MAP_FAILED:
        check(-errno, "mmap(wake-up page)")
    return page


cdef class PeerWakeup:
    """Wakes one peer. It is made from the descriptor of the peer's page, which it closes, and its socket's address."""

    def __cinit__(self):
        self.page = NULL
        self.socket_fd = -1

    def __init__(self, int memory_fd, bytes address):
        """Map the page and open a socket to the peer's. Raises OSError, and ValueError if they could harm us."""
        try:
            if self.page != NULL:
                raise RuntimeError("the wake-up event is open already")
            secret, name = parse_address(address)
            memcpy(self.secret, <const char*> (<bytes> secret), SECRET_BYTES)
            check_sealed(memory_fd, sizeof(WakeupPage), "wake-up page")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to:
                to.connect(name)
                self.page = <const WakeupPage*> map_page(memory_fd, PROT_READ)
                self.socket_fd = to.detach()
        finally:
            os.close(memory_fd)

    def busy(self, int slot) -> bool:
        """Return whether the peer is within a call into its library, by slot `slot` of its own page."""
        return self.page != NULL and 0 <= slot < WAKEUP_SLOTS and aiote_load(&self.page.busy[slot]) & 1 != 0

    def close_socket(self) -> None:
        """Close the socket, so that it wakes the peer no more, and keep the page. Idempotent."""
        if self.socket_fd >= 0:
            close(self.socket_fd)
            self.socket_fd = -1

    def __dealloc__(self):
        self.close_socket()
        if self.page != NULL:
            munmap(<void*> self.page, sizeof(WakeupPage))

    def close(self) -> None:
        """Unmap and close. Idempotent; no channel may use it any more."""
        self.close_socket()
        if self.page != NULL:
            munmap(<void*> self.page, sizeof(WakeupPage))
            self.page = NULL
