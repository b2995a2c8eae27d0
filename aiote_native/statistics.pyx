"""The counts of an engine, as a dictionary: taken together, so that the numbers fit each other."""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from aiote_native.posting cimport State
from aiote_native.progress cimport Progress, alive, lock, unlock
from aiote_native.structs cimport MAX_RAILS, PeerState, RailTimes
from aiote_native.timing cimport times_of


cdef struct Counts:
    State state
    uint64_t sleeps
    uint64_t rounds
    uint64_t waits
    uint64_t depth[MAX_RAILS]  # work requests that a rail's channels hold now, without receives
    bint timed
    RailTimes times[MAX_RAILS]


cdef void copy(Progress* engine, Counts* counts) noexcept nogil:
    cdef PeerState* peer = engine.state.peers
    cdef int i
    counts.state, counts.sleeps, counts.rounds = engine.state, engine.sleeps, engine.rounds
    counts.waits = engine.waits
    memset(counts.depth, 0, sizeof(counts.depth))
    counts.timed = engine.times != NULL
    if counts.timed:
        memcpy(counts.times, engine.times, sizeof(counts.times))
    while peer != NULL:
        for i in range(peer.channel_count):
            counts.depth[peer.channels[i].rail] += peer.channels[i].outstanding
            counts.state.ended[peer.channels[i].rail] += peer.channels[i].ended
        peer = peer.next_peer


cdef dict statistics_of(Progress* engine):
    """Return the counts; those of a closed engine stay as they were."""
    cdef Counts counts
    cdef State* state = &counts.state
    cdef int rail
    if not ((engine.threaded or engine.has_idle_thread) and alive(engine)):
        copy(engine, &counts)
    else:
        with nogil:  # a native thread changes these counts, most of them under the lock
            lock(engine)
            copy(engine, &counts)
            unlock(engine)
    return {
        "posted": state.posted, "completed": state.completed,
        "refused": sum([state.refused[rail] for rail in range(MAX_RAILS)]),
        "immediates": state.immediates, "uninvited": state.counters.uninvited,
        "outstanding": state.outstanding, "queued": state.queued,
        "peer_wakeups": state.wakeups, "sleeps": counts.sleeps, "rounds": counts.rounds, "inbox": state.inbox,
        "counters": state.counters.used, "waits": counts.waits,
        "times": times_of(counts.times) if counts.timed else [],
        "refused_by": tuple([state.refused[rail] for rail in range(MAX_RAILS)]),
        "carried": tuple([state.carried[rail] for rail in range(MAX_RAILS)]),
        "ended": tuple([state.ended[rail] for rail in range(MAX_RAILS)]),
        "depth": tuple([counts.depth[rail] for rail in range(MAX_RAILS)]),
    }
