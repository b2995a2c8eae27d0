"""Histograms of how long work requests take on each rail, from the post until the completion is polled.

The functions here stand between a channel and its endpoint: the channel calls them, with itself as the endpoint, and
they call the endpoint. A channel that is not timed has its endpoint's own functions, so timing costs nothing unless
someone asks for it. A channel times one work request at once, every `every`-th, so work requests need no room for a
time. Receives are left out, because they wait for the peer.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc

from aiote_native.clocks cimport clock_ns
from aiote_native.progress cimport Progress, lock, unlock, usable
from aiote_native.structs cimport (
    Channel, Completion, MAX_RAILS, OP_RECV, PeerState, Post, RailOps, RailTimes, TIME_BUCKETS, WorkRequest)
from aiote_native.worklists cimport stir


cdef int bucket_of(uint64_t ns) noexcept nogil:
    """Return the first bucket whose bound, 2 ** n microseconds, is not less; the last one has no bound."""
    cdef uint64_t us = (ns - 1) // 1000 if ns else 0
    cdef int bucket = 0
    while us and bucket < TIME_BUCKETS - 1:
        us >>= 1
        bucket += 1
    return bucket


def bucket(uint64_t ns) -> int:
    """Return the bucket that counts a time, to check it against the plain reference."""
    return bucket_of(ns)


cdef int timed_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    cdef int code
    if channel.timed_wr != NULL or args.opcode == OP_RECV:
        return channel.endpoint_ops.post(channel.endpoint, args, wr)
    if channel.untimed:
        code = channel.endpoint_ops.post(channel.endpoint, args, wr)
        channel.untimed -= code == 0
        return code
    channel.timed_ns = clock_ns()
    code = channel.endpoint_ops.post(channel.endpoint, args, wr)
    if code == 0:
        channel.timed_wr = wr
        channel.untimed = channel.timed_every - 1
    return code


cdef int timed_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    cdef int got = channel.endpoint_ops.poll(channel.endpoint, out, capacity)
    cdef int i
    if channel.timed_wr != NULL:
        for i in range(got):
            if out[i].wr == channel.timed_wr:
                take_time(channel, out[i].status)
                break
    return got


cdef void take_time(Channel* channel, int status) noexcept nogil:
    cdef uint64_t ns = clock_ns() - channel.timed_ns
    channel.timed_wr = NULL
    if status == 0:
        channel.times.buckets[bucket_of(ns)] += 1
        channel.times.sum_ns += ns


cdef int timed_flush(void* impl) noexcept nogil:
    return (<Channel*> impl).endpoint_ops.flush((<Channel*> impl).endpoint)


cdef int timed_arm(void* impl) noexcept nogil:
    return (<Channel*> impl).endpoint_ops.arm((<Channel*> impl).endpoint)


cdef bint timed_disconnect(void* impl) noexcept nogil:
    return (<Channel*> impl).endpoint_ops.disconnect((<Channel*> impl).endpoint)


cdef bint timed_reached(void* impl) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    return channel.endpoint_ops.reached != NULL and channel.endpoint_ops.reached(channel.endpoint)


cdef uint64_t timed_room(void* impl, const void* desc, uint64_t key) noexcept nogil:
    cdef Channel* channel = <Channel*> impl
    return 0 if channel.endpoint_ops.room == NULL else channel.endpoint_ops.room(channel.endpoint, desc, key)


cdef void timed_shut(void* impl) noexcept nogil:
    (<Channel*> impl).endpoint_ops.shut((<Channel*> impl).endpoint)


cdef void timed_release(void* impl) noexcept nogil:
    (<Channel*> impl).endpoint_ops.release((<Channel*> impl).endpoint)


cdef RailOps timed
timed.post = timed_post
timed.flush = NULL
timed.poll = timed_poll
timed.arm = timed_arm
timed.disconnect = timed_disconnect
timed.reached = timed_reached
timed.room = timed_room
timed.shut = timed_shut
timed.release = timed_release

# For kinds that keep posts until the end of a turn.
cdef RailOps timed_keeping = timed
timed_keeping.flush = timed_flush


cdef void time_channel(Progress* engine, Channel* channel) noexcept nogil:
    """Time an open channel, or time it no longer, as the engine is set."""
    # Only the endpoint's own functions tell what stirs a channel (resting.pyx), so a resting one is looked at once
    # more.
    stir(channel)
    if channel.endpoint_ops != NULL and engine.timed_every == 0:
        channel.ops = channel.endpoint_ops
        channel.impl = channel.endpoint
        channel.endpoint_ops = NULL
    elif channel.endpoint_ops == NULL and engine.timed_every != 0:
        channel.endpoint_ops = channel.ops
        channel.endpoint = channel.impl
        channel.ops = &timed if channel.ops.flush == NULL else &timed_keeping
        channel.impl = channel
    channel.timed_wr = NULL
    channel.untimed = 0
    channel.timed_every = engine.timed_every
    channel.times = &engine.times[channel.rail] if engine.times != NULL else NULL


cdef int time_rails(Progress* engine, uint32_t every) except -1:
    """Time one work request in `every` on each rail from now on; 0 ends that, and keeps the times."""
    cdef PeerState* peer
    cdef int i
    usable(engine)
    if engine.times == NULL:
        engine.times = <RailTimes*> calloc(MAX_RAILS, sizeof(RailTimes))
        if engine.times == NULL:
            raise MemoryError
    with nogil:
        lock(engine)
        engine.timed_every = every
        peer = engine.state.peers
        while peer != NULL:
            for i in range(peer.channel_count):
                if peer.channels[i].open:
                    time_channel(engine, peer.channels[i])
            peer = peer.next_peer
        unlock(engine)
    return 0


cdef list times_of(const RailTimes* times):
    """Return the buckets of each rail and the sum of its times in nanoseconds."""
    cdef int rail, i
    return [(tuple([times[rail].buckets[i] for i in range(TIME_BUCKETS)]), times[rail].sum_ns)
            for rail in range(MAX_RAILS)]
