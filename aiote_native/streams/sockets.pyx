"""Streams over TCP: one connection for each pair of endpoints, through the kernel's sockets only.

Each endpoint listens on a port of its own. The endpoint with the greater address connects, and first sends the other's
token, which it knows from the control connection. The listening endpoint refuses connections that send anything else or
nothing, and answers with the token of the connecting one. No frame is sent before that answer, because the port may
belong to another process by then, which would get the keys of memory with the frames.

One system call sends the iov of several frames. Bytes are received into place, together with the header that follows.
"""

from libc.errno cimport (
    EAGAIN, ECONNRESET, EINPROGRESS, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM, EPROTO, errno)
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport close

import os
import socket

from aiote_native.forks cimport check_process
from aiote_native.status cimport check
from aiote_native.streams.memory cimport StreamDevice, StreamEndpoint, share_operations
from aiote_native.streams.sending cimport has_more, push
from aiote_native.streams.staging cimport leave_slots
from aiote_native.streams.stream cimport (
    Wire, armed, free_works, iovec, is_copying, pthread_mutex_lock, pthread_mutex_unlock)
from aiote_native.structs cimport RailOps

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

SCHEME = b"aiote-tcp://"


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


cdef RailOps operations
share_operations(&operations)
operations.arm = socket_arm
operations.stirred = socket_stirred
operations.announced = True
operations.shut = socket_shut
operations.release = socket_release

cdef Wire wire
wire.send = socket_send
wire.receive = socket_receive


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
    text, _, token = address.removeprefix(SCHEME).partition(b"/")
    host, _, port = text.rpartition(b":")
    try:
        if not address.startswith(SCHEME) or len(token) != 2 * TOKEN_BYTES or not 0 < int(port) < 1 << 16:
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
        self.begin(device, &self.impl.stream, &wire, &operations)
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
        self.address = SCHEME + f"{shown}:{port}/{token.hex()}".encode()
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
