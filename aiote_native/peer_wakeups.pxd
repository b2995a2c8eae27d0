from libc.stdint cimport uint32_t

from aiote_native.structs cimport Channel

cdef enum:
    WAKEUP_SLOTS = 1000
    SECRET_BYTES = 16

# The page that an engine shares with its peers on this host. `asleep` is an epoch: odd while the engine sleeps. `beats`
# starts at 1 and counts on while the engine's event loop lives (heartbeats.pyx); 0 means that the engine does not
# count. Each peer has a slot: `waiting` is how much of our work toward it is outstanding; gates.pyx owns `gate` and
# `busy`.
cdef struct WakeupPage:
    uint32_t asleep
    uint32_t beats
    uint32_t reserved[14]
    uint32_t waiting[WAKEUP_SLOTS]
    uint32_t gate[WAKEUP_SLOTS]
    uint32_t busy[WAKEUP_SLOTS]

cdef int wake_peer(Channel* channel, bint polled) noexcept nogil
cdef void drain_wakeups(int fd) noexcept nogil

cdef class WakeupEvent:
    cdef WakeupPage* page
    cdef readonly int memory_fd
    cdef readonly int socket_fd
    cdef readonly bytes address
    cdef object socket
    cdef object free_slots

cdef class PeerWakeup:
    cdef const WakeupPage* page
    cdef readonly int socket_fd
    cdef char[SECRET_BYTES] secret
