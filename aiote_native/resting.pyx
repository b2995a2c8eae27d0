"""Channels at rest: most of many peers have nothing to say, and should not cost a poll each whenever the loop sleeps.

A channel of our own rails comes to rest when it is armed while nothing is outstanding on it and nothing is to be sent.
Then only two things change it: this side posts on it (`gate_post` ends its rest), or its peer does something. The
descriptor of a socket or of a simulated endpoint, which lies in the engine's epoll set, reports that: one call asks for
all of them. For a ring, a look at its head and at the peer's gate shows it, without passing the gate or taking a lock.
Until one of the two happens, the channel is neither polled nor armed again. A round looks at LOOKS rings, and at all of
them before the engine sleeps, so that a thousand of them do not delay the work of one. Channels of other kinds, whose
libraries have to be called, and those of engines with few channels never rest.
"""

from libc.stdint cimport uint32_t, uint64_t

from aiote_native.gates cimport channel_arm
from aiote_native.structs cimport RailOps
from aiote_native.worklists cimport rest, stir

cdef extern from *:
    """
    #include <sys/epoll.h>
    #include <string.h>
    #define aiote_gate(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_SEQ_CST)
    /* Make the set report, with events of a descriptor, the tag that belongs to it. */
    static int aiote_tag(int epoll_fd, int fd, void* tag) {
        struct epoll_event event;
        memset(&event, 0, sizeof(event));
        event.events = EPOLLIN;
        event.data.ptr = tag;
        return epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event);
    }
    /* Store the tags of the readable descriptors, NULL for those without; return how many there are. */
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


cdef enum:
    LOOKS = 16  # rings that a round looks at: no more than an engine had when each round looked at all of few


cdef int announce(int epoll_fd, Channel* channel) noexcept nogil:
    """Tag the channel's descriptor in the engine's set. The lock is held, so the set never reports a freed channel."""
    if channel.ops.announced and channel.wait_fd >= 0:
        return aiote_tag(epoll_fd, channel.wait_fd, channel)
    return 0


cdef void look_for_stirred(int epoll_fd) noexcept nogil:
    """End the rest of channels whose descriptors are readable: up to 64 of them, the others in the next round."""
    cdef void* tags[64]
    cdef int i
    for i in range(aiote_tags(epoll_fd, tags)):
        if tags[i] != NULL:
            stir(<Channel*> tags[i])


cdef bint is_stirred(Channel* channel) noexcept nogil:
    return channel.ops.stirred(channel.impl) or (
        channel.peer_gate != NULL and aiote_gate(channel.peer_gate) != channel.peer_generation)


cdef void look_at_rings(Worklists* lists, bint every) noexcept nogil:
    """End the rest of rings that something stirred: of the next few, or of all."""
    cdef Channel* channel = lists.looked_at if every or lists.next_look == NULL else lists.next_look
    cdef Channel* following
    cdef int left = LOOKS
    while channel != NULL and (every or left > 0):
        following = channel.next_listed
        if is_stirred(channel):
            stir(channel)
        channel = following
        left -= 1
    if not every:
        lists.next_look = channel


cdef int arm(Channel* channel, bint many) noexcept nogil:
    """Arm a channel that does not rest. If there are many, it rests from here on, unless it has something to do."""
    cdef int code = channel_arm(channel)
    if (code == 0 and many and channel.open and channel.outstanding == 0 and channel.ops.stirred != NULL
            and (not channel.ops.announced or channel.wait_fd >= 0) and not channel.ops.stirred(channel.impl)):
        rest(channel)
    return code


cdef bint goes_on(Channel* channel) noexcept nogil:
    """Return whether bytes of a request in flight have moved since the last look."""
    cdef const RailOps* ops = channel.ops if channel.endpoint_ops == NULL else channel.endpoint_ops
    cdef uint64_t before = channel.moved
    cdef bint within = False
    if ops.moved != NULL and channel.impl != NULL:
        channel.moved = ops.moved(channel.impl if channel.endpoint_ops == NULL else channel.endpoint, &within)
    return within and channel.moved != before
