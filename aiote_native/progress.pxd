from libc.stdint cimport uint32_t, uint64_t

from aiote_native.clocks cimport ClockOps
from aiote_native.peer_wakeups cimport WakeupPage
from aiote_native.posting cimport State
from aiote_native.structs cimport Channel, Completion, Done, PeerState, RailTimes, WorkRequest

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef unsigned long pthread_t
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_join(pthread_t, void**)
    ctypedef struct pthread_cond_t:
        pass
    int pthread_cond_init(pthread_cond_t*, void*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)

# A watched value: a word in memory whose change a coroutine awaits.
cdef struct Watched:
    Done done
    Watched* prev
    Watched* next
    const void* address
    int width
    uint64_t old
    uint64_t new
    bint linked

cdef enum:
    ROUNDS = 8  # rounds for which an engine that does not spin may keep its event loop

cdef struct Progress:
    State state
    pthread_mutex_t lock
    int epoll_fd
    int wake_fd
    uint32_t called       # the wake descriptor was written, and not read since
    int timer_fd
    int notify_fd
    int loop_fd           # contains notify_fd, and epoll_fd unless `relieved`; negative: no idle thread (threads.pyx)
    WakeupPage* wakeup_page
    int wakeup_fd
    uint64_t spin_ns
    uint64_t last_activity
    bint fresh            # something has happened since the clock was last read
    uint32_t idle         # rounds without progress
    uint64_t seen_events
    uint64_t tick_ns
    uint64_t left_ns
    bint timer_armed
    bint copying          # a GPU copies, and no descriptor will report the end of that
    uint64_t waits
    uint64_t receivers
    Watched* watches
    bint threaded
    bint asleep
    bint stop
    bint notified
    int wanted
    int cpu
    bint closed
    uint64_t epoch
    pthread_t thread
    bint relieved         # the idle thread makes progress in the event loop's place
    bint has_idle_thread
    pthread_cond_t handed_over
    uint64_t hand_overs
    uint64_t sleeps
    uint64_t rounds
    RailTimes* times      # of each rail (timing.pyx); NULL before the first `time_rails`
    uint32_t timed_every  # 0: no request is timed now
    const ClockOps* clock  # NULL: the system's clock; otherwise the engine never spins, and timer_fd is an eventfd
    void* clock_context

cdef void watch_link(Progress* self, Watched* watched) noexcept nogil
cdef void watch_unlink(Progress* self, Watched* watched) noexcept nogil
cdef int drain(State* state, Channel* channel) noexcept nogil
cdef void request_over(State* state, Channel* channel, WorkRequest* wr, const Completion* completion) noexcept nogil
cdef int progress_once(Progress* self) noexcept nogil
cdef int progress_until(Progress* self, uint64_t deadline) noexcept nogil
cdef uint64_t slice_end(Progress* self) noexcept nogil
cdef void call_loop(Progress* self) noexcept nogil
cdef void lock(Progress* self) noexcept nogil
cdef void unlock(Progress* self) noexcept nogil
cdef void notify(Progress* self) noexcept nogil
cdef void one_round(Progress* self, bint every) noexcept nogil
cdef void signal_wake(Progress* self) noexcept nogil
cdef void kick(Progress* self) noexcept nogil
cdef int usable(Progress* self) except -1
cdef bint alive(Progress* self) noexcept nogil
cdef void new_epoch(Progress* self) noexcept nogil
