from libc.stdint cimport uint32_t

from aiote_native.engine.structs cimport Channel

cdef extern from *:
    """
    #define aiote_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
    #define aiote_load(p) __atomic_load_n((const uint32_t*)(p), __ATOMIC_SEQ_CST)
    """
    void aiote_fence() noexcept nogil
    uint32_t aiote_load(const uint32_t*) noexcept nogil

cdef enum:
    WAKEUP_SLOTS = 1000
    SECRET_BYTES = 16

# The page that an engine shares with its peers on this host. `asleep` is an epoch: odd while the engine sleeps. `beats`
# starts at 1 and counts on while the engine's event loop lives (channels/heartbeats.pyx); 0 means that the engine does
# not count. Each peer has a slot: `waiting` is how much of our work toward it is outstanding; engine/gates.pxd owns
# `gate` and `busy`.
cdef struct WakeupPage:
    uint32_t asleep
    uint32_t beats
    uint32_t reserved[14]
    uint32_t waiting[WAKEUP_SLOTS]
    uint32_t gate[WAKEUP_SLOTS]
    uint32_t busy[WAKEUP_SLOTS]

cdef int send_wakeup(Channel* channel, uint32_t epoch, bint polled) noexcept nogil


cdef inline int wake_peer(Channel* channel, bint polled) noexcept nogil:
    """Wake the peer if it sleeps, once for each sleep; after a mere poll only when either side has work outstanding.
    Return how many wake-ups were sent.

    shm hands a large message over in pieces: a poll takes one piece, or puts the next one there, without a completion.
    """
    cdef const WakeupPage* page = <const WakeupPage*> channel.peer_page
    cdef uint32_t epoch
    aiote_fence()
    epoch = aiote_load(&page.asleep)
    if not epoch & 1:
        return 0
    return send_wakeup(channel, epoch, polled)

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
