"""The two kinds of stream between engines: TCP sockets, and rings in shared memory."""

from libc.errno cimport EAGAIN, ECONNRESET, EINPROGRESS, EINTR, EINVAL, EMFILE, ENFILE, ENOBUFS, ENOMEM, EPROTO, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close, ftruncate

import fcntl
import os
import socket

from aiote_native.engine.structs cimport RailOps
from aiote_native.streams.copying cimport aiote_copy_in, aiote_copy_out
from aiote_native.streams.rail cimport StreamDevice, StreamEndpoint, share_operations
from aiote_native.streams.sending cimport has_more, leave_slots, push
from aiote_native.streams.stream cimport (
    Stream, Wire, armed, free_works, iovec, is_copying, pthread_mutex_lock, pthread_mutex_unlock)
from aiote_native.system.base cimport check, check_process, clock_ns, fork_epoch
from aiote_native.system.wakeups import check_sealed

# Streams over TCP: one connection for each pair of endpoints, through the kernel's sockets only.
#
# Each endpoint listens on a port of its own. The endpoint with the greater address connects, and first sends the
# other's token, which it knows from the control connection. The listening endpoint refuses connections that send
# anything else or nothing, and answers with the token of the connecting one. No frame is sent before that answer,
# because the port may belong to another process by then, which would get the keys of memory with the frames.
#
# One system call sends the iov of several frames. Bytes are received into place, together with the header that follows.

cdef extern from *:
    """
    #include <errno.h>
    #include <netinet/in.h>
    #include <linux/tcp.h>
    #include <stddef.h>
    #include <stdint.h>
    #include <sys/socket.h>
    #include <sys/uio.h>
    static long aiote_send_vectors(int fd, const struct iovec* vectors, int count) {
        struct msghdr message = {.msg_iov = (struct iovec*)vectors, .msg_iovlen = (size_t)count};
        return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    static long aiote_receive_vectors(int fd, const struct iovec* vectors, int count) {
        struct msghdr message = {.msg_iov = (struct iovec*)vectors, .msg_iovlen = (size_t)count};
        return recvmsg(fd, &message, MSG_DONTWAIT);
    }
    /* Return the state of a connection that is being made: 0, EINPROGRESS or another error. */
    static int aiote_connected(int fd) {
        struct sockaddr_storage peer;
        int error = 0;
        socklen_t length = sizeof(error), peer_length = sizeof(peer);
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
        if (error) return error;
        return getpeername(fd, (struct sockaddr*)&peer, &peer_length) == 0 ? 0 : EINPROGRESS;
    }
    /* End the connection and drop the bytes that the kernel has not sent yet, even if a child of a fork has the socket,
       too. A close would not end the connection then, and the kernel would still send the rest. */
    static void aiote_disconnect(int fd) {
        struct linger off = {.l_onoff = 1, .l_linger = 0};
        struct sockaddr none = {.sa_family = AF_UNSPEC};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &off, sizeof(off));
        connect(fd, &none, sizeof(none));
    }
    static void aiote_no_delay(int fd) {
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
    static int64_t aiote_moved_over(int fd) {
        struct tcp_info info;
        socklen_t length = sizeof(info);
        if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return -1;
        if (length < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received)) return -1;
        return (int64_t)(info.tcpi_bytes_acked + info.tcpi_bytes_received);
    }
    """
    long aiote_send_vectors(int, const iovec*, int) noexcept nogil
    long aiote_receive_vectors(int, const iovec*, int) noexcept nogil
    int aiote_connected(int) noexcept nogil
    void aiote_disconnect(int) noexcept nogil
    void aiote_no_delay(int) noexcept nogil
    long aiote_moved_over(int) noexcept nogil

cdef extern from "<sys/socket.h>" nogil:
    int accept4(int, void*, void*, int)
    ssize_t recv(int, void*, size_t, int)
    ssize_t send(int, const void*, size_t, int)
    const int SOCK_CLOEXEC, SOCK_NONBLOCK, MSG_DONTWAIT, MSG_NOSIGNAL

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        unsigned int events
        epoll_data_t data
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event*)
    int epoll_wait(int, epoll_event*, int, int)
    const int EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD
    const unsigned int EPOLLIN, EPOLLOUT

SOCKET_SCHEME = b"aiote-tcp://"


cdef int watch(SocketStream* self, int operation, int fd, unsigned int events) noexcept nogil:
    cdef epoll_event event
    memset(&event, 0, sizeof(event))
    event.events = events
    event.data.fd = fd
    return -errno if epoll_ctl(self.epoll_fd, operation, fd, &event) else 0


cdef void shut_fd(SocketStream* self, int* fd) noexcept nogil:
    """Remove a descriptor from the epoll set and close it.

    If a child of a fork still had it open, it would otherwise stay in the set and wake this process again and again.
    """
    if fd[0] >= 0:
        epoll_ctl(self.epoll_fd, EPOLL_CTL_DEL, fd[0], NULL)
        close(fd[0])
        fd[0] = -1


cdef void adopt(SocketStream* self, int fd) noexcept nogil:
    """Make a connection the stream's, and close the listener and the other candidates."""
    cdef int i
    self.fd = fd
    aiote_no_delay(fd)
    shut_fd(self, &self.listener)
    for i in range(CANDIDATES):
        if self.candidates[i] == fd:
            self.candidates[i] = -1
        shut_fd(self, &self.candidates[i])


cdef int send_token(SocketStream* self) noexcept nogil:
    """Send the peer's token; return 0 or -errno. A new connection has room for sixteen bytes."""
    cdef ssize_t sent = send(self.fd, self.peer_token, TOKEN_BYTES, MSG_NOSIGNAL | MSG_DONTWAIT)
    return 0 if sent == TOKEN_BYTES else -ECONNRESET


cdef int receive_token(SocketStream* self, int fd, int i) noexcept nogil:
    """Receive a connection's token; return 1 for this endpoint's own token, 0 while it is incomplete, else -errno."""
    cdef ssize_t got = recv(fd, self.tokens[i] + self.token_bytes[i], TOKEN_BYTES - self.token_bytes[i], MSG_DONTWAIT)
    if got < 0:
        return 0 if errno in (EAGAIN, EINTR) else -errno
    if got == 0:
        return -ECONNRESET
    self.token_bytes[i] += <int> got
    if self.token_bytes[i] < TOKEN_BYTES:
        return 0
    return 1 if memcmp(self.tokens[i], self.own_token, TOKEN_BYTES) == 0 else -EPROTO


cdef int continue_connect(SocketStream* self) noexcept nogil:
    """Send the peer's token once the connection is made, and check the token that comes back; return 0 or -errno."""
    cdef int code
    if not self.asked:
        code = aiote_connected(self.fd)
        if code:
            return 0 if code == EINPROGRESS else -code
        code = send_token(self)
        if code:
            return code
        self.asked = True
    code = receive_token(self, self.fd, 0)
    if code > 0:
        adopt(self, self.fd)
        self.stream.connected = True
    return min(code, 0)


cdef int accept_candidates(SocketStream* self) noexcept nogil:
    """Accept connections, a few at a time; a silent one gives way to later ones. Return 0 or -errno.

    If the system lacks the resources to accept, return -errno and stop listening, because the listener would otherwise
    wake this process again and again.
    """
    cdef int code, fd, i
    for _turn in range(CANDIDATES):
        fd = accept4(self.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)
        if fd < 0:
            code = errno
            if code in (EMFILE, ENFILE, ENOBUFS, ENOMEM):
                shut_fd(self, &self.listener)
                return -code
            break
        i = self.next_candidate
        self.next_candidate = (i + 1) % CANDIDATES
        shut_fd(self, &self.candidates[i])
        self.candidates[i] = fd
        self.token_bytes[i] = 0
        if watch(self, EPOLL_CTL_ADD, fd, EPOLLIN) < 0:
            shut_fd(self, &self.candidates[i])
    for i in range(CANDIDATES):
        if self.candidates[i] >= 0 and self.fd < 0:
            code = receive_token(self, self.candidates[i], i)
            if code > 0:
                adopt(self, self.candidates[i])
            elif code < 0:
                shut_fd(self, &self.candidates[i])
    return 0


cdef int handshake(SocketStream* self) noexcept nogil:
    cdef int code = 0
    if self.fd >= 0:
        return continue_connect(self)
    if self.listener >= 0:
        code = accept_candidates(self)
    if self.fd < 0:
        return code
    code = send_token(self)
    self.stream.connected = code == 0
    return code


cdef long socket_send(void* stream, const iovec* vectors, int count) noexcept nogil:
    """Send the bytes that there is room for; return their number or -errno.

    The kernel copies them. If pages were lent to the kernel instead (vmsplice), the peer would get their contents at
    the time of its receive: over loopback, a stopped peer would receive bytes that were written there long after.
    """
    cdef SocketStream* self = <SocketStream*> stream
    cdef long moved = aiote_send_vectors(self.fd, vectors, count)
    if moved < 0:
        return 0 if errno in (EAGAIN, EINTR) else -errno
    return moved


cdef long unstage(SocketStream* self, const iovec* vectors, int count) noexcept nogil:
    """Copy bytes out of the stage, where they were received together with a header; return their number."""
    cdef long done = 0
    cdef size_t part
    cdef int i
    for i in range(count):
        part = min(vectors[i].iov_len, <size_t> (self.staged - self.unstaged))
        memcpy(vectors[i].iov_base, self.stage + self.unstaged, part)
        self.unstaged += <int> part
        done += <long> part
    return done


cdef long take(SocketStream* self, const iovec* vectors, int count) noexcept nogil:
    """Receive into the vectors; if they are small, take all that has arrived, so that many frames cost one call."""
    cdef uint64_t asked = 0
    cdef long moved
    cdef int i
    for i in range(count):
        asked += vectors[i].iov_len
    if asked > STAGE_BYTES // 8:
        moved = aiote_receive_vectors(self.fd, vectors, count)
        self.dry = moved < <long> asked
        return moved
    moved = recv(self.fd, self.stage, STAGE_BYTES, MSG_DONTWAIT)
    self.dry = moved < STAGE_BYTES
    if moved <= 0:
        return moved
    self.staged = <int> moved
    self.unstaged = 0
    return unstage(self, vectors, count)


cdef long socket_receive(void* stream, const iovec* vectors, int count) noexcept nogil:
    cdef SocketStream* self = <SocketStream*> stream
    cdef epoll_event event
    cdef long moved
    cdef int code
    if not self.stream.connected:
        code = handshake(self)
        if code or not self.stream.connected:
            return code
    if self.unstaged < self.staged:
        return unstage(self, vectors, count)
    # A receive call takes the socket's lock, which arriving bytes need, too, even if there are no bytes. Asking epoll
    # takes no lock.
    if self.dry and epoll_wait(self.epoll_fd, &event, 1, 0) == 0:
        return 0
    moved = take(self, vectors, count)
    if moved < 0:
        return 0 if errno in (EAGAIN, EINTR) else -errno
    return moved if moved else -ECONNRESET


cdef int socket_arm(void* impl) noexcept nogil:
    """Make the descriptor announce arriving bytes, and room if there are bytes to send; return as RailOps says."""
    cdef SocketStream* self = <SocketStream*> impl
    cdef unsigned int events
    cdef int code = 0
    cdef bint waits
    pthread_mutex_lock(&self.stream.registry.lock)
    push(&self.stream)
    waits = self.stream.stalled or self.stream.starved
    if self.fd >= 0 and not self.stream.broken:
        if not self.stream.connected:
            events = EPOLLIN if self.asked else EPOLLOUT
        else:
            events = (0 if waits else EPOLLIN) | (EPOLLOUT if has_more(&self.stream) else 0)
        # No descriptor announces bytes in the stage.
        code = self.unstaged < self.staged and not waits
        if events != self.watched:
            code |= watch(self, EPOLL_CTL_MOD, self.fd, events)
            self.watched = events
    elif self.stream.broken:
        # A connection that is over would wake the event loop again and again. If a push failed, a poll has to report
        # that first.
        shut_fd(self, &self.fd)
        code = not self.stream.reported_broken
    code = armed(&self.stream, code != 0)
    pthread_mutex_unlock(&self.stream.registry.lock)
    return code


cdef void socket_shut(void* impl) noexcept nogil:
    cdef SocketStream* self = <SocketStream*> impl
    cdef int i
    pthread_mutex_lock(&self.stream.registry.lock)
    self.stream.closed = True
    if self.fd >= 0:
        aiote_disconnect(self.fd)
    shut_fd(self, &self.fd)
    shut_fd(self, &self.listener)
    for i in range(CANDIDATES):
        shut_fd(self, &self.candidates[i])
    leave_slots(&self.stream)
    pthread_mutex_unlock(&self.stream.registry.lock)


cdef void socket_release(void* impl) noexcept nogil:
    cdef SocketStream* self = <SocketStream*> impl
    socket_shut(impl)
    if self.epoll_fd >= 0:
        close(self.epoll_fd)
    free_works(&self.stream)
    free(self)


cdef bint socket_stirred(void* impl) noexcept nogil:
    """Return whether there is work that the descriptor does not announce; at rest it announces arriving bytes only."""
    cdef SocketStream* self = <SocketStream*> impl
    return (not self.stream.connected or self.watched != EPOLLIN or self.unstaged < self.staged
            or self.stream.broken or has_more(&self.stream) or is_copying(&self.stream))


cdef RailOps socket_operations
share_operations(&socket_operations)
socket_operations.arm = socket_arm
socket_operations.stirred = socket_stirred
socket_operations.announced = True
socket_operations.shut = socket_shut
socket_operations.release = socket_release

cdef Wire socket_wire
socket_wire.send = socket_send
socket_wire.receive = socket_receive


def family_of(bare: str) -> int:
    """Return the family of an IP address without an interface. Raises OSError for anything else."""
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    socket.inet_pton(family, bare)
    return family


def scope_of(interface: str) -> tuple:
    """Return the elements after the port in a socket's address: for a link-local address, the interface of this host.

    Raises OSError if there is no interface of that name.
    """
    return (0, socket.if_nametoindex(interface)) if interface else ()


def parse(bytes address) -> tuple[str, int, bytes]:
    """Return host, port and token of an endpoint's address, IPv6 in brackets. Raises ValueError for anything else."""
    text, _, token = address.removeprefix(SOCKET_SCHEME).partition(b"/")
    host, _, port = text.rpartition(b":")
    try:
        if not address.startswith(SOCKET_SCHEME) or len(token) != 2 * TOKEN_BYTES or not 0 < int(port) < 1 << 16:
            raise ValueError
        name = host.decode("ascii")
        if name.startswith("[") != (":" in name) or name.startswith("[") != name.endswith("]"):
            raise ValueError
        name = name[1:-1] if name.startswith("[") else name
        # The name behind the % is that of an interface of the peer's host, so it is dropped.
        bare = name.partition("%")[0]
        family_of(bare)
        return bare, int(port), bytes.fromhex(token.decode("ascii"))
    except (ValueError, OSError):
        raise ValueError(f"{address!r} is not the address of a TCP endpoint") from None


cdef class SocketEndpoint(StreamEndpoint):
    """An endpoint that listens at an IP address of this host; `connect` makes the connection, or waits for it."""

    def __cinit__(self):
        self.impl = self.channel_impl = NULL

    def __init__(self, StreamDevice device, str host):
        """Listen at an IP address. Raises OSError if that is not possible."""
        cdef int i
        self.usable(device)
        self.impl = <SocketStream*> calloc(1, sizeof(SocketStream))
        if self.impl == NULL:
            raise MemoryError
        self.impl.fd = self.impl.listener = self.impl.epoll_fd = -1
        for i in range(CANDIDATES):
            self.impl.candidates[i] = -1
        self.host = host
        self.begin(device, &self.impl.stream, &socket_wire, &socket_operations)
        try:
            self.listen()
        except BaseException:
            self.close()
            raise

    cdef int listen(self) except -1:
        cdef bytes token = os.urandom(TOKEN_BYTES)
        self.impl.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
        check(-errno if self.impl.epoll_fd < 0 else 0, "epoll_create1")
        self.wait_fd = self.impl.epoll_fd
        bare, _, interface = self.host.partition("%")
        with socket.socket(family_of(bare), socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            listener.bind((bare, 0, *scope_of(interface)))
            listener.listen(CANDIDATES)
            port = listener.getsockname()[1]
            self.impl.listener = listener.detach()
        check(watch(self.impl, EPOLL_CTL_ADD, self.impl.listener, EPOLLIN), "epoll_ctl")
        memcpy(self.impl.own_token, <const char*> token, TOKEN_BYTES)
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.address = SOCKET_SCHEME + f"{shown}:{port}/{token.hex()}".encode()
        return 0

    def connect(self, bytes address) -> None:
        """Set the one peer endpoint that this one talks to, and begin to connect if this one has the greater address.

        Raises ValueError for a malformed address or another version of IP, and OSError.
        """
        if self.impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        check_process(self.device.epoch)
        host, port, token = parse(address)
        memcpy(self.impl.peer_token, <const char*> (<bytes> token), TOKEN_BYTES)
        if (":" in host) != (":" in self.host):
            raise ValueError(f"one rail is at {self.host}, the other at {host}, an address of another version of IP: "
                             "name rails or hosts of one version at both engines")
        if self.address <= address:
            return
        shut_fd(self.impl, &self.impl.listener)
        bare, _, interface = self.host.partition("%")
        scope = scope_of(interface)
        with socket.socket(family_of(bare), socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
            # Bind to the rail's own address, so that this NIC carries the connection.
            connection.bind((bare, 0, *scope))
            code = connection.connect_ex((host, port, *scope))
            check(-code if code not in (0, EINPROGRESS) else 0, "connect")
            self.impl.fd = connection.detach()
        self.impl.watched = EPOLLIN | EPOLLOUT
        check(watch(self.impl, EPOLL_CTL_ADD, self.impl.fd, self.impl.watched), "epoll_ctl")

    cdef void* release_to_channel(self) except NULL:
        self.channel_impl = <SocketStream*> StreamEndpoint.release_to_channel(self)
        return self.channel_impl

    cdef void channel_closed(self):
        self.channel_impl = NULL
        StreamEndpoint.channel_closed(self)

    def moved(self) -> int:
        """Return how many bytes the connection has received or seen acknowledged; -1 before it is made."""
        cdef SocketStream* impl = self.channel_impl
        return aiote_moved_over(impl.fd) if impl != NULL and impl.stream.connected else -1

    cdef void** impl_slot(self) noexcept:
        return <void**> &self.impl


# Streams between the processes of one host: a ring of bytes in shared memory for each direction.
#
# The sender copies from its memory into the ring, and the receiver copies from the ring into its own memory. Each side
# uses a processor of its own and both copy at once, so together they take hardly longer than one copy. The ring is
# small enough to stay in the cache that both processors share. Neither side accesses the other's memory, so that memory
# need not be shared, or opened to others by the kernel. A peer that is stopped or faulty can write to the ring only.
#
# `head` and `tail` count bytes and never go back. Each is written by one side, and the other side checks its value
# before using it. The pages belong to a memfd, which each side sends to the other with its wake-up page. The memfd is
# sealed, so that a peer cannot truncate it while the other side touches its pages. (A peer can give pages back, which
# come again as zeros.) The memfd has no name, and ends with the processes that have it.
#
# An engine may have a thousand peers and talk to a few of them, so a ring has one page until it is used. Before a side
# touches further bytes for the first time, it asks the kernel for their pages. If there is no memory for them, the
# answer is an error, which ends this stream alone, and not a signal, which would end the process. Linux before 5.14
# cannot be asked; there, all pages are made with the ring.

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
    # All bytes that may be in flight on a channel (rail.pyx), and more than a core's second-level cache holds: the
    # other core took bytes from there at a third of the rate at which it takes them from the cache that both share. The
    # fastest size from 128 KiB to 4 MiB, with a second-level cache of 1 MiB (docs/streams.md).
    RING_BYTES = 2 << 20
    # The limits of the size, which a peer chooses: a power of two up to twice the bytes that it may have in flight
    # (rail.pyx).
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

RING_SCHEME = b"aiote-ring://"


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


cdef RailOps ring_operations
share_operations(&ring_operations)
ring_operations.arm = ring_arm
ring_operations.stirred = ring_stirred
ring_operations.moved = ring_moved
ring_operations.reached = ring_reached
ring_operations.shut = ring_shut
ring_operations.release = ring_release

cdef Wire ring_wire
ring_wire.send = ring_send
ring_wire.receive = ring_receive


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
        self.begin(device, &self.impl.stream, &ring_wire, &ring_operations)
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
        self.address = RING_SCHEME + number.hex().encode()
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
        if address != RING_SCHEME + f"{peer.number:016x}".encode():
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
