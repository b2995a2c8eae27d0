"""Heartbeats of many peers in one pass.

`Pulse` is the native twin of `aiote.core.heartbeat_clock.HeartbeatClock`, whose module explains the rule. It keeps the
times of one peer and reads no clock. `check_pulses` goes over the pulses of an engine, in C, and returns the peers that
need their session: a heartbeat is due that only the session can send, the peer has been silent for too long, or work is
in flight whose movement has to be watched. A thousand idle peers on this host then cost a thousand loads. The same
pass sends and takes the heartbeats that go over the network, those of at most `MOST_PEERS`, so that the event loop
does not stand still meanwhile.

Peers that have each other's wake-up page (system/wakeups.pyx) send no heartbeats: each engine counts its passes in its
own page, and a peer whose count goes on is alive. The event loop does this counting, as it sends heartbeats, so a
process whose loop stands still is as silent as a stopped one. The exact time of an increment is unknown. The peer is
taken to have been heard at the look before, when the count was still the old one, so it is found dead no later than by
heartbeats.
"""

from libc.errno cimport EAGAIN, EBADF, EINTR, errno
from libc.math cimport INFINITY, isfinite
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from hmac import compare_digest

from aiote_native.channels.peers cimport PeerLink
from aiote_native.engine.progress cimport alive, lock, unlock
from aiote_native.engine.structs cimport MAX_CHANNELS
from aiote_native.system.base cimport check
from aiote_native.system.wakeups cimport PeerWakeup

# The socket of a control connection: heartbeats go through it in C.
#
# Through the streams and tasks of an event loop a heartbeat each way takes about 150 us of CPU; the kernel takes a
# tenth of that. So an engine with a thousand peers on other hosts sends and takes its heartbeats here, all in one pass
# (`check_pulses`). An event loop goes on reading the stream; all writing goes through this object, in order.
#
# `hear_heartbeat` takes from the socket only bytes that are certainly the next frame and a heartbeat. The bytes that
# wait are exactly one frame, and the tag is right for the number of the frame that comes next. If the loop had read
# another frame and not processed it yet, the number would differ. Everything else is left to the loop.
#
# The kernel reports the socket as readable (SO_RCVLOWAT) only if more bytes wait than one heartbeat has, or at its
# end. So a heartbeat wakes no process. Of the other frames only Mapped and Ready are as short, and both come before
# heartbeats are carried. When the loop has read a part of a frame, or `hear_heartbeat` finds bytes that it does not
# take, the kernel reports every byte.

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int, void*, size_t, int)
    ssize_t send(int, const void*, size_t, int)
    int setsockopt(int, int, int, const void*, unsigned int)
    const int MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, SOL_SOCKET, SO_RCVLOWAT

cdef extern from "<unistd.h>" nogil:
    int close(int)

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int, int, ...)
    const int F_DUPFD_CLOEXEC

cdef extern from *:
    """
    #include <netinet/in.h>
    #include <linux/tcp.h>
    #include <stddef.h>
    #include <sys/socket.h>

    /* How many ms ago the last byte came; 0 if the kernel does not say. */
    static unsigned int aiote_last_byte_ms(int fd) {
        struct tcp_info info;
        socklen_t length = offsetof(struct tcp_info, tcpi_last_data_recv) + sizeof(info.tcpi_last_data_recv);
        socklen_t wanted = length;
        if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || length < wanted) return 0;
        return info.tcpi_last_data_recv;
    }
    """
    unsigned int aiote_last_byte_ms(int) nogil

cdef enum:
    MOST_FRAME = 64  # a heartbeat of this version of the protocol has 21 bytes


cdef class ControlSocket:
    """Writes to a socket that an event loop reads from. Nothing here waits.

    The loop may close the socket by itself. `socket.fileno()` is then -1; for a socket that does not say so,
    `duplicate` has this object use a descriptor of its own.
    """

    cdef object socket, queue, sealed_out, sealed_in
    cdef bytes body
    cdef int duplicate, wake_bytes, frame_bytes
    cdef public bint busy

    def __cinit__(self):
        self.duplicate = -1

    def __init__(self, socket not None, *, bint duplicate):
        if self.socket is not None:
            raise RuntimeError("the socket is open already")
        if duplicate:
            self.duplicate = fcntl(socket.fileno(), F_DUPFD_CLOEXEC, 0)
            check(-errno if self.duplicate < 0 else 0, "fcntl")
        self.socket = socket
        self.wake_bytes = 1

    def fileno(self) -> int:
        """Return the number of the descriptor, or -1 if it is closed."""
        if self.duplicate >= 0 or self.socket is None:
            return self.duplicate
        return self.socket.fileno()

    def send(self, const uint8_t[::1] data not None) -> int:
        """Send what the socket takes now, and return how many bytes; raises StatusError."""
        cdef int fd = self.fileno()
        cdef ssize_t sent
        if fd < 0:
            check(-EBADF, "send")
        if data.shape[0] == 0:
            return 0
        sent = send(fd, &data[0], data.shape[0], MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < 0 and errno in (EAGAIN, EINTR):
            return 0
        check(-errno if sent < 0 else 0, "send")
        return sent

    def carry(self, bytes body not None, out, heard, queue) -> None:
        """Carry heartbeats with this body from now on, sealed by the seals of both directions.

        `queue` is given the rest of a frame of which the kernel took only a part. The caller sets `busy` while other
        bytes wait to be sent. Raises ValueError for a body that is too long.
        """
        cdef int frame_bytes = <int> len(out.next_frame(body))
        if frame_bytes > MOST_FRAME:
            raise ValueError(f"expected a frame of at most {MOST_FRAME} bytes, got {frame_bytes}")
        self.body, self.queue = body, queue
        self.sealed_out, self.sealed_in = out, heard
        self.frame_bytes = frame_bytes

    def carry_none(self) -> None:
        """Carry no heartbeats any longer. Idempotent."""
        self.queue = self.sealed_out = self.sealed_in = None
        self.set_wake_bytes(1)

    def wake_after_read(self, bint within_frame) -> None:
        """Record that the loop has read, and whether it holds a part of a frame."""
        if self.sealed_in is not None:
            self.set_wake_bytes(1 if within_frame else self.frame_bytes + 1)

    cdef int set_wake_bytes(self, int wanted) except -1:
        cdef int fd
        if wanted != self.wake_bytes:
            fd = self.fileno()
            # If the kernel refuses, heartbeats wake this process as other frames do.
            if fd >= 0 and setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(wanted)) == 0:
                self.wake_bytes = wanted
        return 0

    cpdef bint send_heartbeat(self) except -1:
        """Send a heartbeat; return False if the caller has to send it the ordinary way."""
        cdef int fd = -1 if self.busy or self.sealed_out is None else self.fileno()
        cdef bytes frame
        cdef const uint8_t* first
        cdef ssize_t sent
        if fd < 0:
            return False
        frame = self.sealed_out.next_frame(self.body)
        first = frame
        sent = send(fd, first, self.frame_bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent <= 0:
            return False
        self.sealed_out.sequence += 1
        if sent < self.frame_bytes:
            self.queue(frame[sent:])
        return True

    cpdef bint hear_heartbeat(self) except -1:
        """Take the heartbeat that waits; return whether there was one."""
        cdef uint8_t[MOST_FRAME + 1] found
        cdef int fd = -1 if self.sealed_in is None else self.fileno()
        cdef ssize_t got
        if fd < 0:
            return False
        got = recv(fd, found, self.frame_bytes + 1, MSG_PEEK | MSG_DONTWAIT)
        if got <= 0 or got > self.frame_bytes:
            return False  # nothing, the end, or more than a heartbeat, which has woken the loop
        if not compare_digest(<bytes> found[:got], self.sealed_in.next_frame(self.body)):
            self.set_wake_bytes(1)
            return False
        recv(fd, found, self.frame_bytes, MSG_DONTWAIT)
        self.sealed_in.sequence += 1
        return True

    cpdef double seconds_silent(self) except -1:
        """Return how many seconds ago the last byte came, or infinity if the kernel does not say."""
        cdef int fd = self.fileno()
        cdef unsigned int ms = aiote_last_byte_ms(fd) if fd >= 0 else 0
        return ms / 1e3 if ms else INFINITY

    def close(self) -> None:
        """Use the socket no longer. Idempotent."""
        self.carry_none()
        self.socket = None
        if self.duplicate >= 0:
            close(self.duplicate)
            self.duplicate = -1

    def __dealloc__(self):
        if self.duplicate >= 0:
            close(self.duplicate)


# The pulses.

cdef extern from *:
    """
    #define aiote_beats(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_ACQUIRE)
    """
    uint32_t aiote_beats(const uint32_t*) noexcept nogil

cdef enum:
    MOST_PEERS = 64  # whose sockets one pass uses: about 10 us each


cdef class BeatCounts:
    """How many heartbeats an engine has sent and heard over the network."""

    cdef public long sent, heard


cdef class Pulse:
    """The times of one peer: `interval` and `limit` in seconds, `limit` the larger. See `HeartbeatClock`."""

    cdef public double send_every
    cdef double interval, limit, now, sent_at, heard_at, grace_end, looked_at, taken_at
    cdef long graces
    cdef PeerWakeup page
    cdef uint32_t beats
    cdef PeerLink link
    cdef ControlSocket socket
    cdef bint watched
    cdef readonly bint shared
    cdef public bint every_check

    def __init__(self, double interval, double limit, send_every=None):
        """Begin. Raises ValueError unless both times are finite and 0 < `interval` < `limit`."""
        if not (isfinite(interval) and isfinite(limit) and 0 < interval < limit):
            raise ValueError(f"expected 0 < interval < limit, in seconds, got interval {interval} and limit {limit}")
        self.interval = interval
        self.limit = limit
        self.send_every = interval if send_every is None else send_every
        self.now = self.sent_at = self.heard_at = self.grace_end = -INFINITY
        self.looked_at = self.taken_at = -INFINITY

    def follow_link(self, PeerLink link, bint every_check=False) -> None:
        """Watch the work in flight over a link, and use its peer's page for heartbeats if that counts.

        `every_check`: `check_pulses` returns this peer at every look, because its session wants that.
        """
        self.link = link
        self.every_check = every_check
        for page, _slot in link.peer_wakeups:
            if (<PeerWakeup> page).page != NULL and aiote_beats(&(<PeerWakeup> page).page.beats) != 0:
                self.page = page
                self.beats = aiote_beats(&self.page.page.beats)
                self.shared = True
                return

    def follow_socket(self, ControlSocket socket) -> None:
        """Let `check_pulses` send and hear heartbeats through this socket, or no longer."""
        self.socket = socket

    def is_due(self, double now, double early=0.0) -> bool:
        """Return whether it is time to send a heartbeat, or will be within the fraction `early` of the interval."""
        return self.is_due_at(self.observe(now), early)

    def record_sent(self, double now) -> None:
        """Record that a heartbeat was sent."""
        self.sent_at = self.observe(now)

    def record_heard(self, double now) -> None:
        """Record a sign of life of the peer, of any kind."""
        self.record_heard_at(self.observe(now))

    def is_expired(self, double now) -> bool:
        """Return whether the peer has been silent for too long."""
        return self.observe(now) >= self.expiry()

    def next_deadline(self, double now) -> float:
        """Return when to call again at the latest: now, if a heartbeat is due or the peer has expired."""
        return self.deadline(self.observe(now))

    cdef bint is_due_at(self, double present, double early) noexcept:
        return present >= self.sent_at + self.send_every * (1 - early)

    cdef void record_heard_at(self, double when) noexcept:
        self.heard_at = max(self.heard_at, when)
        self.graces = 0

    cdef double expiry(self) noexcept:
        return max(self.heard_at + self.limit, self.grace_end)

    cdef double deadline(self, double present) noexcept:
        return max(present, min(min(self.sent_at + self.send_every, self.expiry()), present + self.interval / 2))

    cdef double observe(self, double now) noexcept:
        """Return the present time, and give grace if a stall has just ended."""
        cdef double last = self.now
        self.now = max(last, now)
        if last == -INFINITY:
            self.heard_at = self.now
        elif (self.now - last > self.interval and self.now + self.interval > self.expiry()
                and self.graces < <long> (self.limit // self.interval)):
            self.graces += 1
            self.grace_end = self.now + self.interval
        return self.now

    cdef void check_count(self, double before) noexcept:
        """Check whether the peer's count has gone on since the look before, which was at the time `before`."""
        cdef uint32_t beats
        if self.page is not None and self.page.page != NULL:
            beats = aiote_beats(&self.page.page.beats)
            if beats != self.beats:
                self.beats = beats
                self.record_heard_at(max(before, self.now - self.interval))
            # This engine has counted in its own page as well, which stands for a heartbeat.
            self.sent_at = self.now

    cdef bint uses_socket(self, double early) noexcept:
        """Return whether the socket is to be used at this look: read twice an interval, and before the peer expires."""
        if self.socket is None:
            return False
        return (self.now >= max(self.taken_at + self.interval / 2, self.looked_at + self.interval / 4)
                or self.now >= self.expiry() or self.is_due_at(self.now, early))

    cdef int use_socket(self, double early, BeatCounts counts) except -1:
        """Hear the heartbeat that waits, and send one that is due, if the socket allows both at once."""
        if self.socket.hear_heartbeat():
            counts.heard += 1
            # It came after the look before. If that makes the peer expire, the kernel says when exactly.
            self.record_heard_at(max(self.looked_at, self.now - self.interval))
            self.taken_at = self.now
        elif self.now >= self.expiry():
            self.record_heard_at(self.now - self.socket.seconds_silent())
        self.looked_at = self.now
        if self.is_due_at(self.now, early) and self.socket.send_heartbeat():
            counts.sent += 1
            self.sent_at = self.now
        return 0

    cdef bint has_work(self) noexcept:
        """Return whether work is in flight, or was at the last look: its end has to be seen as well."""
        cdef uint64_t[MAX_CHANNELS] ended
        cdef bint before = self.watched
        self.watched = False
        if self.link is not None and not self.link.closed and alive(self.link.engine):
            with nogil:
                lock(self.link.engine)
                self.watched = self.link.in_flight_channels(ended) != 0
                unlock(self.link.engine)
        return before or self.watched


def check_pulses(dict beats, double now, double early, BeatCounts counts not None) -> tuple[list[object], float]:
    """Look at all pulses, the values of `beats`. Return the keys whose sessions have something to do, which include all
    keys without a pulse, and when to look again for the others. `counts` grows by the heartbeats sent and heard here.
    """
    cdef Pulse pulse
    cdef double before, soonest = INFINITY
    cdef int used = 0
    cdef list wanted = []
    for beat, value in beats.items():
        if value is None:
            wanted.append(beat)
            continue
        pulse = value
        before = pulse.now
        pulse.observe(now)
        pulse.check_count(before)
        if pulse.uses_socket(early):
            if used == MOST_PEERS:
                soonest = pulse.now
                continue
            used += 1
            pulse.use_socket(early, counts)
        if pulse.every_check or pulse.now >= pulse.expiry() or pulse.has_work() or pulse.is_due_at(pulse.now, early):
            wanted.append(beat)
        else:
            soonest = min(soonest, pulse.deadline(pulse.now))
    return wanted, soonest
