"""Channels at rest: of many peers most have nothing to say, and are not to cost a poll each whenever the loop sleeps.

A channel of our own rails that was armed while nothing was outstanding on it, and nothing was to be sent, can change in
two ways: this side posts on it (`gate_post` ends its rest), or its peer does something. Of a socket the descriptor
tells that, which lies in the engine's epoll set: one call asks it for all. Of a ring a look at its head and at the
peer's gate does, without passing the gate or taking a lock. Until then it is neither polled nor armed again. Channels
of other kinds, whose libraries have to be called, and those of engines with few channels never rest.
"""

from libc.stdint cimport uint32_t, uint64_t

from aiote_native.gates cimport channel_arm
from aiote_native.structs cimport RailOps

cdef extern from *:
    """
    #include <sys/epoll.h>
    #include <string.h>
    #define aiote_gate(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_SEQ_CST)
    /* Have the set tell of a descriptor by what belongs to it, too. */
    static int aiote_tag(int epoll_fd, int fd, void* tag) {
        struct epoll_event event;
        memset(&event, 0, sizeof(event));
        event.events = EPOLLIN;
        event.data.ptr = tag;
        return epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event);
    }
    /* Store what belongs to those that are readable, NULL for those without; return how many. */
    static int aiote_tags(int epoll_fd, void** tags) {
        struct epoll_event events[64];
        int count = epoll_wait(epoll_fd, events, 64, 0);
        for (int i = 0; i < count; i++) tags[i] = events[i].data.ptr;
        return count;
    }
    """
    uint32_t aiote_gate(const uint32_t*) noexcept nogil
    int aiote_tag(int, int, void*) noexcept nogil
    int aiote_tags(int, void**) noexcept nogil


cdef int announce(int epoll_fd, Channel* channel) noexcept nogil:
    """Have the engine's set tell of this channel. The lock is held, so that nobody hears of one that is freed."""
    if channel.ops.announced and channel.wait_fd >= 0:
        return aiote_tag(epoll_fd, channel.wait_fd, channel)
    return 0


cdef void look_for_stirred(int epoll_fd) noexcept nogil:
    """End the rest of those whose descriptors are readable: 64 at a time, others in the next round."""
    cdef void* tags[64]
    cdef int i
    for i in range(aiote_tags(epoll_fd, tags)):
        if tags[i] != NULL:
            (<Channel*> tags[i]).resting = False


cdef bint rests(Channel* channel) noexcept nogil:
    """Whether a channel that came to rest is still to be left alone."""
    if not channel.resting:
        return False
    if not channel.ops.announced and (channel.ops.stirred(channel.impl) or (
            channel.peer_gate != NULL and aiote_gate(channel.peer_gate) != channel.peer_generation)):
        channel.resting = False
    return channel.resting


cdef int arm(Channel* channel, bint many) noexcept nogil:
    """Arm a channel that does not rest; of many it is left alone from here on, if there is nothing to do."""
    cdef int code
    if channel.resting:
        return 0
    code = channel_arm(channel)
    if (code == 0 and many and channel.open and channel.outstanding == 0 and channel.ops.stirred != NULL
            and (not channel.ops.announced or channel.wait_fd >= 0)):
        channel.resting = not channel.ops.stirred(channel.impl)
    return code


cdef bint goes_on(Channel* channel) noexcept nogil:
    """Tell whether bytes of a request that is under way have moved since the last look."""
    cdef const RailOps* ops = channel.ops if channel.endpoint_ops == NULL else channel.endpoint_ops
    cdef uint64_t before = channel.moved
    cdef bint within = False
    if ops.moved != NULL and channel.impl != NULL:
        channel.moved = ops.moved(channel.impl if channel.endpoint_ops == NULL else channel.endpoint, &within)
    return within and channel.moved != before
