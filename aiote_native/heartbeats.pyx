"""Heartbeats of many peers in one pass.

`Pulse` is the native twin of `aiote.core.heartbeat_clock.HeartbeatClock`, whose module explains the rule. It keeps the
times of one peer and reads no clock. `check_pulses` goes over the pulses of an engine, in C, and returns the peers that
need their session: a heartbeat is due that only the session can send, the peer has been silent for too long, or work is
in flight whose movement has to be watched. A thousand idle peers on this host then cost a thousand loads.

Peers that have each other's wake-up page (peer_wakeups.pyx) send no heartbeats: each engine counts its passes in its
own page, and a peer whose count goes on is alive. The event loop does this counting, as it sends heartbeats, so a
process whose loop stands still is as silent as a stopped one. The exact time of an increment is unknown. The peer is
taken to have been heard at the look before, when the count was still the old one, so it is found dead no later than by
heartbeats.
"""

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport uint32_t, uint64_t

from aiote_native.peer_wakeups cimport PeerWakeup
from aiote_native.peers cimport PeerLink
from aiote_native.progress cimport alive, lock, unlock
from aiote_native.structs cimport MAX_CHANNELS

cdef extern from *:
    """
    #define aiote_beats(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_ACQUIRE)
    """
    uint32_t aiote_beats(const uint32_t*) noexcept nogil


cdef class Pulse:
    """The times of one peer: `interval` and `limit` in seconds, `limit` the larger. See `HeartbeatClock`."""

    cdef public double send_every
    cdef double interval, limit, now, sent_at, heard_at, grace_end
    cdef long graces
    cdef PeerWakeup page
    cdef uint32_t beats
    cdef PeerLink link
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


def check_pulses(dict beats, double now, double early) -> tuple[list[object], float]:
    """Look at all pulses, the values of `beats`. Return the keys whose sessions have something to do, which include all
    keys without a pulse, and when to look again for the others.
    """
    cdef Pulse pulse
    cdef double before, soonest = INFINITY
    cdef list wanted = []
    for beat, value in beats.items():
        if value is None:
            wanted.append(beat)
            continue
        pulse = value
        before = pulse.now
        pulse.observe(now)
        pulse.check_count(before)
        if pulse.every_check or pulse.now >= pulse.expiry() or pulse.has_work() or pulse.is_due_at(pulse.now, early):
            wanted.append(beat)
        else:
            soonest = min(soonest, pulse.deadline(pulse.now))
    return wanted, soonest
