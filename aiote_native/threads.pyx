"""Native threads that make progress. They never take the GIL, so they run while Python computes.

With the setting `progress="thread"` an engine has one for its whole life. The *idle thread* makes progress while the
engine has no news for its event loop. A loop that sleeps in its selector wakes up in Python, and most turns of an
engine whose memory others write end without anything for a task. So after a few such turns in a row the loop leaves the
engine's descriptors to the idle thread and sleeps on, until there is news for it. Then it makes progress itself again,
as it does when a task starts something.

`loop_fd`, which the event loop watches, is an epoll set of the eventfd of notifications and, except while the idle
thread makes progress, of the engine's own set. So nothing changes for the loop itself.
"""

from aiote_native.descriptors cimport add_descriptor, sleep_on, unwatch_descriptor
from aiote_native.gates cimport batch_flush
from aiote_native.progress cimport (
    notify, progress_once, pthread_cond_signal, pthread_cond_wait, pthread_join, pthread_mutex_lock,
    pthread_mutex_unlock, pthread_t, signal_wake)

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #define aiote_load_int(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
    /* Start a thread that runs on processor `cpu` from its first instruction; on any processor if that is negative. */
    static int aiote_start(pthread_t* thread, int cpu, void* (*function)(void*), void* argument) {
        pthread_attr_t attributes;
        cpu_set_t set;
        int status = pthread_attr_init(&attributes);
        if (status != 0) return status;
        CPU_ZERO(&set);
        if (cpu >= 0) {
            if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
            status = pthread_attr_setaffinity_np(&attributes, sizeof(set), &set);
        }
        if (status == 0) status = pthread_create(thread, &attributes, function, argument);
        pthread_attr_destroy(&attributes);
        return status;
    }
    """
    int aiote_load_int(const int*) noexcept nogil
    int aiote_start(pthread_t*, int, void* (*)(void*) noexcept nogil, void*) noexcept nogil
    int sched_yield() noexcept nogil
    int pthread_setname_np(pthread_t, const char*) noexcept nogil


cdef int start_thread(Progress* self) noexcept nogil:
    """Start the native thread; return 0 or an error number (EINVAL where it may not run on the processor asked for)."""
    return aiote_start(&self.thread, self.cpu, run_thread, self)


cdef void end_threads(Progress* self) noexcept nogil:
    """End those that run, and wait for their ends. Takes the lock."""
    if not self.threaded and not self.has_idle_thread:
        return
    pthread_mutex_lock(&self.lock)
    self.stop = True
    pthread_cond_signal(&self.handed_over)
    pthread_mutex_unlock(&self.lock)
    signal_wake(self)
    pthread_join(self.thread, NULL)
    self.threaded = self.has_idle_thread = self.relieved = False


cdef void hand_over(Progress* self) noexcept nogil:
    """Leave progress to the idle thread, and start it if this is the first time. The lock is held.

    The caller may sleep now. Where the system has no thread for this, the loop goes on as before.
    """
    if self.loop_fd < 0 or self.relieved or self.stop:
        return
    if not self.has_idle_thread:
        if aiote_start(&self.thread, -1, run_idle_thread, self) != 0:
            return
        self.has_idle_thread = True
        pthread_setname_np(self.thread, "aiote-idle")
    unwatch_descriptor(self.loop_fd, self.epoll_fd)
    self.relieved = True
    self.hand_overs += 1
    pthread_cond_signal(&self.handed_over)


cdef void take_back(Progress* self) noexcept nogil:
    """Let the event loop make progress itself. The lock is held.

    If the kernel has no memory to watch the descriptor, the idle thread goes on, and notifies the loop of all news.
    """
    if self.relieved and add_descriptor(self.loop_fd, self.epoll_fd) == 0:
        self.relieved = False


cdef bint make_progress(Progress* self) noexcept nogil:
    """Do a round on a thread; return whether to do another one at once. The lock is held."""
    cdef int again
    # A woken task that has posted may compute for a long time before its turn ends.
    batch_flush(&self.state.batch)
    again = progress_once(self)
    notify(self)
    return again


cdef void pause(Progress* self, bint again) noexcept nogil:
    """Sleep unless there is more to do, and let the event loop have the lock first.

    A mutex is not fair: without that the loop could wait for as long as the thread spins.
    """
    if not again:
        sleep_on(self.epoll_fd)
    while aiote_load_int(&self.wanted) > 0:
        sched_yield()


cdef void* run_thread(void* argument) noexcept nogil:
    cdef Progress* self = <Progress*> argument
    cdef bint again
    pthread_mutex_lock(&self.lock)
    while not self.stop:
        self.asleep = False
        again = make_progress(self)
        self.asleep = not again
        pthread_mutex_unlock(&self.lock)
        pause(self, again)
        pthread_mutex_lock(&self.lock)
    pthread_mutex_unlock(&self.lock)
    return NULL


cdef void* run_idle_thread(void* argument) noexcept nogil:
    cdef Progress* self = <Progress*> argument
    cdef bint again
    pthread_mutex_lock(&self.lock)
    while not self.stop:
        if not self.relieved:
            pthread_cond_wait(&self.handed_over, &self.lock)
            continue
        again = make_progress(self)
        pthread_mutex_unlock(&self.lock)
        pause(self, again)
        pthread_mutex_lock(&self.lock)
    pthread_mutex_unlock(&self.lock)
    return NULL
