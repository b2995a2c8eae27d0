from libc.stdint cimport uint32_t, uint64_t
from posix.unistd cimport write

from aiote_native.engine.structs cimport Channel, Completion, Done, PeerState, RailTimes, State, WorkRequest, Worklists
from aiote_native.system.base cimport ClockOps
from aiote_native.system.wakeups cimport WakeupPage

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

cdef extern from *:
    """
    #define aiote_store_word(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    #define aiote_add(p, v) __atomic_add_fetch((p), (v), __ATOMIC_SEQ_CST)
    """
    void aiote_store_word(uint32_t*, uint32_t) noexcept nogil
    int aiote_add(int*, int) noexcept nogil

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
    int loop_fd           # contains notify_fd, and epoll_fd unless `relieved`; negative: no idle thread (core.pyx)
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
    RailTimes* times      # of each rail (progress.pyx); NULL before the first `time_rails`
    uint32_t timed_every  # 0: no request is timed now
    const ClockOps* clock  # NULL: the system's clock; otherwise the engine never spins, and timer_fd is an eventfd
    void* clock_context


cdef inline void lock(Progress* self) noexcept nogil:
    """Take the engine's lock; a native thread that holds it is asked to step aside.

    It begins a `with nogil:` block that ends with `unlock` (tests/lint/test_locks.py). So no code can make a Python
    object, raise or wait for the GIL while it holds the lock: the garbage collector would take the lock once more, an
    exception would leave it taken for good, and the native thread would stand still while Python computes.
    """
    if pthread_mutex_trylock(&self.lock) == 0:
        return
    aiote_add(&self.wanted, 1)
    pthread_mutex_lock(&self.lock)
    aiote_add(&self.wanted, -1)


cdef inline void unlock(Progress* self) noexcept nogil:
    pthread_mutex_unlock(&self.lock)


cdef inline void signal_wake(Progress* self) noexcept nogil:
    """Make the wake descriptor readable; callable from any thread."""
    cdef uint64_t one = 1
    write(self.wake_fd, &one, sizeof(one))
    # Set only now: a thread that cleared it before the descriptor is readable would never read the descriptor.
    aiote_store_word(&self.called, 1)


cdef inline void kick(Progress* self) noexcept nogil:
    """Count this moment as activity, and wake the native thread if it sleeps. The lock is held."""
    self.fresh = True
    if self.threaded and self.asleep:
        self.asleep = False
        signal_wake(self)

cdef void watch_link(Progress* self, Watched* watched) noexcept nogil
cdef void watch_unlink(Progress* self, Watched* watched) noexcept nogil
cdef int drain(State* state, Channel* channel) noexcept nogil
cdef void request_over(State* state, Channel* channel, WorkRequest* wr, const Completion* completion) noexcept nogil
cdef void clear_wakeups(Progress* self) noexcept nogil
cdef int progress_once(Progress* self) noexcept nogil
cdef int progress_until(Progress* self, uint64_t deadline) noexcept nogil
cdef uint64_t slice_end(Progress* self) noexcept nogil
cdef void call_loop(Progress* self) noexcept nogil
cdef void notify(Progress* self) noexcept nogil
cdef void one_round(Progress* self, bint every) noexcept nogil
cdef int usable(Progress* self) except -1
cdef bint alive(Progress* self) noexcept nogil
cdef void new_epoch(Progress* self) noexcept nogil

cdef int announce(int epoll_fd, Channel* channel) noexcept nogil
cdef void look_for_stirred(int epoll_fd) noexcept nogil
cdef void look_at_rings(Worklists* lists, bint every) noexcept nogil
cdef int arm(Channel* channel, bint many) noexcept nogil
cdef bint goes_on(Channel* channel) noexcept nogil

cdef int time_rails(Progress* engine, uint32_t every) except -1
cdef void time_channel(Progress* engine, Channel* channel) noexcept nogil
cdef list times_of(const RailTimes* times)

cdef void forget_descriptors(Progress* self) noexcept nogil
cdef int open_descriptors(Progress* self, bint idle_thread) except -1
cdef void close_descriptors(Progress* self) noexcept
cdef int descriptor_of_loop(const Progress* self) noexcept nogil
cdef int add_descriptor(int epoll_fd, int fd) noexcept nogil
cdef int watch_descriptor(int epoll_fd, int fd) except -1
cdef void unwatch_descriptor(int epoll_fd, int fd) noexcept nogil
cdef void sleep_on(int epoll_fd) noexcept nogil
