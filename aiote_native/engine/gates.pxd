# Gates: numbers in shared memory with which each side can keep the other from carrying out what was posted to it.
#
# Over shm the *target* of a write copies the bytes, whenever it next calls its library, and a queued write cannot be
# taken back: a process that was stopped and continues would still write. So each side looks at its peer's gate before
# every call into the library, and shows in its own page that it is within one:
#
#     caller:  busy + 1 (odd); fence; is the peer's gate open? then call; busy + 1 (even)
#     closer:  shut the gate; fence; is the peer busy? if not, it never carries out what was posted
#
# Both sides store, fence and load (Dekker): either the caller sees the gate shut, or the closer sees the caller busy. A
# peer that is stopped outside of the library cannot move a byte once the gate is shut; a peer that is stopped within it
# stays busy for as long as it is stopped. The numbers lie in the wake-up pages, each written by its owner alone. A
# gate's value is the generation of its slot, even while it is open, so that a reused slot opens nothing for its old
# peer.
#
# `busy` also paces a flood. One call into shm goes on until its queue is empty, and its completions let the poster post
# more, so a fast enough poster would hold the target's event loop for good. Hence at most one window is posted within
# one call of the peer's, or one piece where that is larger; the peer's epoch tells one call from the next. That call
# also copies what was posted before it began.
from libc.errno cimport ENOTCONN
from libc.stdint cimport uint32_t, uint64_t

from aiote_native.engine.structs cimport BROKEN, Batch, Channel, Completion, Post, WorkRequest
from aiote_native.engine.worklists cimport stir
from aiote_native.system.base cimport clock_ns

cdef extern from *:
    """
    #define aiote_enter(p) __atomic_store_n((p), *(p) + 1, __ATOMIC_SEQ_CST)
    #define aiote_leave(p) __atomic_store_n((p), *(p) + 1, __ATOMIC_RELEASE)
    #define aiote_set(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    #define aiote_get(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_SEQ_CST)
    """
    void aiote_enter(uint32_t*) noexcept nogil
    void aiote_leave(uint32_t*) noexcept nogil
    void aiote_set(uint32_t*, uint32_t) noexcept nogil
    uint32_t aiote_get(const uint32_t*) noexcept nogil

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    LEAVING_NS = 5_000_000  # a call copies at most a window, in 0.2 to 2 ms; a peer stopped within it is given up


cdef inline bint enter(Channel* channel) noexcept nogil:
    aiote_enter(channel.own_busy)
    if aiote_get(channel.peer_gate) == channel.peer_generation:
        return True
    aiote_leave(channel.own_busy)
    return False


cdef inline int gate_post(Channel* channel, const Post* args, WorkRequest* wr) noexcept nogil:
    """Post through the gate, because a post makes progress, too; -ENOTCONN when the peer has shut it.

    We stay within the gate until `gate_leave`: passing it costs a locked store, a twentieth of the time of a small
    page.
    """
    if channel.own_busy != NULL and not channel.within:
        if not enter(channel):
            return -ENOTCONN
        channel.within = True
    if channel.resting:
        stir(channel)
    return channel.ops.post(channel.impl, args, wr)


cdef inline void gate_leave(Channel* channel) noexcept nogil:
    """Hand over the last few posts, at once or with the batch, and leave the gate; a peer that shuts its gate waits."""
    if channel.impl != NULL and channel.ops.flush != NULL:
        if not channel.peer.batch.on:
            channel.ops.flush(channel.impl)
        elif not channel.unflushed:
            channel.unflushed = True
            channel.next_unflushed = channel.peer.batch.waiting
            channel.peer.batch.waiting = channel
    if channel.within:
        channel.within = False
        aiote_leave(channel.own_busy)


cdef inline void batch_end(Batch* batch) noexcept nogil:
    """Hand over the posts of all channels, and end the batch."""
    batch.on = False
    batch_flush(batch)


cdef inline void batch_flush(Batch* batch) noexcept nogil:
    """Hand over the posts of all channels so far."""
    cdef Channel* channel
    while batch.waiting != NULL:
        channel = batch.waiting
        batch.waiting = channel.next_unflushed
        channel.unflushed = False
        if channel.impl != NULL:
            channel.ops.flush(channel.impl)


cdef inline void batch_drop(Batch* batch, Channel* channel) noexcept nogil:
    """Forget a channel that is about to be freed; the posts that it kept went with its endpoint."""
    cdef Channel** link = &batch.waiting
    while channel.unflushed and link[0] != NULL:
        if link[0] == channel:
            link[0] = channel.next_unflushed
            channel.unflushed = False
        else:
            link = &link[0].next_unflushed


cdef inline int gate_poll(Channel* channel, Completion* out, int capacity) noexcept nogil:
    """Poll through the gate; -ENOTCONN when the peer has shut it."""
    cdef int got
    if channel.own_busy == NULL:
        return channel.ops.poll(channel.impl, out, capacity)
    if not enter(channel):
        return -ENOTCONN
    got = channel.ops.poll(channel.impl, out, capacity)
    aiote_leave(channel.own_busy)
    return got


cdef inline int channel_arm(Channel* channel) noexcept nogil:
    """Arm a channel; a closed or broken one has no events to wait for, and 0 is returned."""
    if not channel.open or channel.fault == BROKEN:
        return 0
    return channel.ops.arm(channel.impl)


cdef inline void gate_shut(Channel* channel) noexcept nogil:
    """Shut our gate: a peer that is not within its library now no longer carries out our posts."""
    if channel.own_gate != NULL:
        aiote_set(channel.own_gate, channel.own_gate[0] | 1)


cdef inline bint is_busy(Channel* channel) noexcept nogil:
    return aiote_get(channel.peer_busy) & 1 and (aiote_get(channel.peer_gate) | 1) == (channel.peer_generation | 1)


cdef inline bint is_reached(Channel* channel) noexcept nogil:
    """Return whether a GPU of the peer still copies out of our memory, which no gate prevents."""
    return channel.ops.reached != NULL and channel.ops.reached(channel.impl)


cdef inline bint gate_wait(Channel* channel) noexcept nogil:
    """Give a peer that is within its library time to leave it, and return whether it has; our gate is shut.

    The same holds for a GPU of the peer that still copies what the peer took in an earlier call. A peer whose slot has
    another generation has closed its end, and is busy for another link there. Without a gate the state is unknown:
    False.
    """
    cdef uint64_t end = 0
    if channel.own_gate == NULL:
        return False
    while is_busy(channel) or is_reached(channel):
        if end == 0:
            end = clock_ns() + LEAVING_NS
        elif clock_ns() > end:
            return False
        sched_yield()
    return True


cdef inline bint gate_paced(Channel* channel, uint64_t payload, uint64_t window) noexcept nogil:
    """Return whether this much more could exceed the window of the call that the peer is in now, if it is in one.

    The peer's epoch is read once for each half window that was posted, because the peer writes it twice a call, and
    reading it at every post would fetch its line from the peer's cache each time (a quarter of a microsecond a page).
    So half a window may be posted within the call before its beginning is seen, and half a window after that.
    """
    cdef uint32_t epoch
    if channel.peer_busy == NULL or channel.paced_bytes + payload <= window // 2:
        return False
    epoch = aiote_get(channel.peer_busy)
    if epoch != channel.paced_epoch:
        channel.paced_epoch = epoch
        channel.paced_bytes = 0
    return epoch & 1 and channel.paced_bytes
