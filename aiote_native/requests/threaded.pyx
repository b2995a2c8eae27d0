"""Requests that the event loop does not start: other threads do, or a flag in memory."""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport Py_INCREF
from libc.errno cimport EINTR, EPROTO, ERANGE, ESTALE, errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec
from posix.unistd cimport close, read

from aiote_native.channels.failover cimport largest_of, widest_of
from aiote_native.channels.peers cimport PeerLink
from aiote_native.counters.table cimport IMMEDIATE_BITS
from aiote_native.engine.core cimport Core
from aiote_native.engine.gates cimport batch_flush
from aiote_native.engine.posting cimport link_tail, op_cancel, op_end, op_fail, split_op, unlink
from aiote_native.engine.progress cimport (
    Progress, alive, kick, lock, notify, progress_once, pthread_join, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_unlock, pthread_t, signal_wake, unlock, usable)
from aiote_native.engine.structs cimport ECANCELED, OP_READ, OP_WRITE, Op, State
from aiote_native.requests.operations cimport start_behind
from aiote_native.requests.pages cimport Integers
from aiote_native.requests.prepared cimport PreparedTargets, Row, TargetRun, Writes, bring, copy_rows, start_child
from aiote_native.requests.request cimport LocalSlice, PageSet, RemoteSlice, Request, make_request
from aiote_native.system.base cimport check, clock_ns

# Transfers of threads other than the event loop's: the calling thread posts them, and waits for them itself.
#
# A coroutine on the engine's loop costs a task and two hand-overs between threads, each of them a wake-up and a wait
# for the GIL: 300 to 400 us with two cores. Here the thread that waits for a transfer makes progress itself, under the
# engine's lock, as the loop does. If the loop finds that the transfer is over while the thread sleeps, it makes the
# thread's eventfd readable. If a native thread makes progress, the waiting thread only sleeps. The loop is notified in
# each case, because the Python objects of a finished transfer are for the loop to update.

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd*, unsigned long, int)
    const short POLLIN

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK

cdef enum:
    LOOP_MS = 1  # how long a notified loop has to make progress before the waiting thread makes progress itself


cdef class ThreadEventfd:
    """An eventfd that one thread sleeps on."""

    cdef int fd

    def __cinit__(self):
        self.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)


cdef ThreadEventfd take_eventfd(list spare):
    """Return an unused eventfd, or a new one."""
    cdef ThreadEventfd eventfd
    if spare:
        return <ThreadEventfd?> spare.pop()
    eventfd = ThreadEventfd()
    check(-errno if eventfd.fd < 0 else 0, "eventfd")
    return eventfd


cdef bint look(Progress* self, Op* op, int eventfd, bint last, int* again) noexcept nogil:
    """Run a round of progress, unless a native thread does that, and return whether the transfer is over.

    If it is not, either `again` is set, and the caller has to call this again soon, or the eventfd becomes
    readable when the transfer is over. `last`: the caller stops waiting, whatever this returns.
    """
    cdef bint over
    cdef uint64_t inbox
    again[0] = 0
    if not alive(self):
        return True  # closing an engine ends everything
    lock(self)
    if not op.over and not self.threaded:
        inbox = self.state.inbox
        batch_flush(&self.state.batch)
        again[0] = progress_once(self)
        # The loop keeps posts back while its woken tasks run; the posts of this round have to go now.
        batch_flush(&self.state.batch)
        # The loop collects the transfers that are over, this one included, and the messages that this round received.
        # It was notified of earlier messages before.
        if self.state.done.head != NULL or self.state.failures or self.state.inbox > inbox:
            notify(self)
    over = op.over
    if again[0] and (over or last):
        signal_wake(self)  # this round told the peers that the engine is awake, so the loop has to go on in its place
    op.done.eventfd = 0 if over or again[0] else eventfd + 1
    unlock(self)
    return over


cdef bint wait_over(Progress* self, Op* op, int eventfd, uint64_t deadline) noexcept nogil:
    """Wait until a transfer is over; return False at the deadline, or when a signal comes."""
    cdef pollfd fds[2]
    cdef uint64_t now, value
    cdef int again, notified, left
    while True:
        now = clock_ns()
        if look(self, op, eventfd, now >= deadline, &again):
            return True
        if now >= deadline:
            return False
        if again:
            # A mutex is not fair: without this the loop could wait for as long as this thread spins.
            while self.wanted > 0:
                sched_yield()
            continue
        # The engine's descriptor stays readable until the notified loop has run, so poll only the eventfd until then.
        notified = self.notified or self.threaded
        left = <int> min((deadline - now) // 1_000_000 + 1, 1000)
        fds[0].fd = eventfd
        fds[1].fd = self.epoll_fd
        fds[0].events = fds[1].events = POLLIN
        if poll(fds, 1 if notified else 2, left if self.threaded or not notified else LOOP_MS) < 0 and errno == EINTR:
            return False
        read(eventfd, &value, sizeof(value))


cdef bint is_over(Progress* self, Op* op) noexcept nogil:
    """Return whether a transfer is over. Taking the lock makes the bytes that another thread wrote visible here."""
    cdef bint over
    if not alive(self):
        return op.over
    lock(self)
    over = op.over
    unlock(self)
    return over


cdef void hush(Progress* self, Op* op) noexcept nogil:
    """Detach the thread's eventfd from a transfer, so that its end no longer writes to it."""
    if not alive(self):
        return
    lock(self)
    op.done.eventfd = 0
    unlock(self)


cdef bint are_alike(PageSet mine, PageSet theirs) except -1:
    """Tell whether page i of one can be written to page i of the other, and all lie within their slices."""
    cdef PageSet pages
    if mine.index.count != theirs.index.count or mine.index.count == 0 or mine.page_bytes != theirs.page_bytes:
        return False
    for pages in (mine, theirs):
        if pages.index.first_outside(pages.page_bytes, pages.stride, pages.offset, pages.region.nbytes) >= 0:
            return False
    return True


cdef class Direct:
    """One write or read of a thread's own.

    `request` is the transfer, once it was handed over. `unposted`: it ended at once, because the loop had closed the
    connection, or had added a rail to it. `eventfds` holds unused eventfds, which all transfers of an engine share; the
    owner of the list frees them.
    """

    cdef Core core
    cdef list eventfds
    cdef readonly Request request
    cdef readonly bint unposted

    def __init__(self, Core core not None, list eventfds not None):
        self.core, self.eventfds = core, eventfds

    def post(self, type kind, local, remote, bint reads, imm) -> bool:
        """Start it, from any thread, and return True; return False, without any effect, if the loop has to start it.

        local, remote: slices, or pages of slices.
        """
        cdef PageSet mine = None
        cdef PageSet theirs = None
        cdef LocalSlice here
        cdef RemoteSlice there
        cdef PeerLink link
        cdef Request request
        cdef Core core = self.core
        if self.request is not None:
            raise RuntimeError("the transfer was already posted")
        if isinstance(local, PageSet) and isinstance(remote, PageSet):
            mine = <PageSet> local
            theirs = <PageSet> remote
            if not are_alike(mine, theirs):
                return False
            local, remote = mine.region, theirs.region
        if not isinstance(local, LocalSlice) or not isinstance(remote, RemoteSlice):
            return False
        here = <LocalSlice> local
        there = <RemoteSlice> remote
        if imm is not None and (type(imm) is not int or imm >> IMMEDIATE_BITS):
            return False
        # Only the loop orders transfers behind GPU work, tracks those that use a lease, and drives a clock other than
        # the system's.
        if (mine is None and here.nbytes != there.nbytes) or here.memory.events is not None or there.memory.lease:
            return False
        if there.memory.link is None or core.clock is not None or here.memory.owner is not core:
            return False
        link = <PeerLink?> there.memory.link
        if link.core is not core or not (here.memory.writable and there.memory.readable if reads
                                         else there.memory.writable):
            return False
        request = make_request(kind, link.peer)
        if mine is None:
            request.take(here.memory, here.start, there.memory, there.start, here.nbytes, here.nbytes, reads)
            request.op.part_bytes = request.op.total = here.nbytes
            request.op.parts = 1
        else:
            request.take_pages(here.memory, here.start + mine.offset, mine.index, mine.stride, there.memory,
                               there.start + theirs.offset, theirs.index, theirs.stride, mine.page_bytes, reads)
            request.op.total = request.op.part_bytes * request.op.parts
        request.op.opcode = OP_READ if reads else OP_WRITE
        request.op.counted = imm is not None
        request.op.imm = <uint32_t> (imm if imm is not None else 0)
        return self.launch(link, request)

    cdef bint launch(self, PeerLink link, Request request) except -1:
        """Hand the transfer to the engine. This calls no Python code; the loop may run while this takes the lock."""
        cdef Core core = self.core
        cdef Progress* engine = &core.engine
        cdef uint64_t smallest = core.smallest
        cdef int rails = request.remote.rails
        cdef bint fits
        if core.closing or not alive(engine) or request.local.closing or not request.local.registrations:
            return False
        if link.closed or not link.ready or link.unfinished >= link.limit:
            return False
        self.request = request
        request.local.in_flight += 1
        request.link = link
        link.unfinished += 1
        Py_INCREF(request)
        with nogil:
            lock(engine)
            # Set only now, so that it cannot be cancelled before it has begun.
            request.submitted = True
            # A closed link has no channels any more, and a link with a new rail may need a key that the memory lacks.
            fits = not link.closed and not link.state.failed and rails > widest_of(&link.state)
            if fits:
                split_op(&request.op, &link.state, largest_of(&link.state), smallest)
                start_behind(&engine.state, &link.state, &request.op, NULL)
            else:
                request.op.peer = &link.state
                op_fail(&engine.state, &request.op, -ECANCELED, -1)
            kick(engine)
            # The transfer may be over already.
            notify(engine)
            unlock(engine)
        self.unposted = not fits
        return True

    def wait(self, double seconds) -> bool:
        """Wait until no NIC uses its memory any more; return False after `seconds`, or when a signal comes. Raises
        RuntimeError before `post`.
        """
        cdef ThreadEventfd eventfd
        cdef Request request = self.request
        cdef uint64_t value, deadline
        cdef bint over
        if request is None:
            raise RuntimeError("the transfer was not posted yet: call post first")
        if self.over:
            return True
        eventfd = take_eventfd(self.eventfds)
        deadline = clock_ns() + <uint64_t> (max(seconds, 0.0) * 1e9)
        with nogil:
            over = wait_over(&self.core.engine, &request.op, eventfd.fd, deadline)
            hush(&self.core.engine, &request.op)
            read(eventfd.fd, &value, sizeof(value))
        self.eventfds.append(eventfd)
        return over

    @property
    def posted(self) -> bool:
        """Whether the transfer was handed over, and so can be cancelled."""
        return self.request is not None and self.request.submitted

    @property
    def over(self) -> bool:
        """Whether no NIC uses its memory any more."""
        cdef bint over
        if self.request is None:
            return False
        with nogil:
            over = is_over(&self.core.engine, &self.request.op)
        return over

    @property
    def went_well(self) -> bool:
        """Whether the transfer is over and every byte has arrived."""
        return self.request is not None and self.request.op.over and not (
            self.request.op.status or self.request.op.cancelled)


# A native thread that posts prepared scatters when a flag in memory is raised; it never takes the GIL.
#
# A GPU, or any other thread, writes lengths and offsets into memory of the host, and then raises the flag: a word that
# only grows. A request that waits for its flag is *armed*: it was checked, it counts as in flight with its peers,
# memories and leases, and its native transfers stand in a queue of their peers that the engine does not post from. So
# everything that ends a request (a cancellation, a lost peer, a revoked lease, a closed engine) ends an armed one as
# well, whether or not the thread runs. The thread reads the numbers once, checks what it has read, and posts.
#
# An engine has one such thread, from the first request that is armed on. While requests are armed, the thread looks at
# their flags: without a pause for SPIN_NS after the last flag was raised or request was armed, then after naps of up to
# NAP_LAST_NS, because a process is not told when a GPU has written a word. While no request is armed it sleeps.

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <time.h>
    #define aiote_load_flag(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define aiote_load_number(p) __atomic_load_n((const uint64_t*)(p), __ATOMIC_RELAXED)
    static int aiote_open_condition(pthread_cond_t* condition) {
        pthread_condattr_t attributes;
        int status = pthread_condattr_init(&attributes);
        if (status != 0) return status;
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        status = pthread_cond_init(condition, &attributes);
        pthread_condattr_destroy(&attributes);
        return status;
    }
    """
    uint32_t aiote_load_flag(const uint32_t*) noexcept nogil
    uint64_t aiote_load_number(const char*) noexcept nogil
    int aiote_open_condition(pthread_cond_t*) noexcept nogil
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*) noexcept nogil
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*) noexcept nogil
    int pthread_cond_timedwait(pthread_cond_t*, pthread_mutex_t*, const timespec*) noexcept nogil
    int pthread_cond_signal(pthread_cond_t*) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t*) noexcept nogil

cdef enum:
    SPIN_NS = 50_000
    NAP_FIRST_NS = 50_000
    NAP_LAST_NS = 1_000_000


cdef class FlagWord:
    """A 32-bit word in another owner's memory, through the buffer protocol. Raises TypeError for anything else."""

    def __cinit__(self, word):
        try:
            PyObject_GetBuffer(word, &self.view, PyBUF_SIMPLE | PyBUF_FORMAT)
        except TypeError:
            raise TypeError(f"flag: expected one uint32 in memory, got {type(word).__name__}") from None
        self.acquired = True
        if self.view.len != 4 or self.view.itemsize != 4 or <uint64_t> self.view.buf % 4:
            raise TypeError(
                f"flag: expected one uint32 at a multiple of 4 bytes, got {self.view.len} bytes in items of "
                f"{self.view.itemsize}")

    def __dealloc__(self):
        if self.acquired:
            PyBuffer_Release(&self.view)


cdef class ArmedRun(TargetRun):
    """The targets of one request that is posted once a flag is raised."""

    cdef int take(self, Proxy proxy, FlagWord word, uint32_t value, bint skips) except -1:
        self.word = word
        self.armed.flag = <const uint32_t*> word.view.buf
        self.armed.value = value
        self.armed.seen = aiote_load_flag(self.armed.flag)
        self.armed.rows, self.armed.chosen = self.prepared.rows, self.chosen
        self.armed.lengths = numbers_of(self.writes.length)
        self.armed.here = numbers_of(self.writes.here)
        self.armed.there = numbers_of(self.writes.there)
        self.armed.skips = skips
        return 0

    cdef void begin(self, State* state, Op* parent, int64_t imm, uint64_t smallest) noexcept nogil:
        """Put the writes in the `armed` queues of their peers, where whatever ends a peer finds them."""
        cdef uint32_t i
        cdef Op* op
        self.armed.parent, self.armed.smallest = parent, smallest
        parent.posted_all = True
        parent.outstanding = parent.child_count
        for i in range(parent.child_count):
            op = &parent.children[i]
            op.parent = parent
            self.count_on(op, imm)
            op.armed = True
            if op.peer.failed:
                op_fail(state, op, op.peer.error, op.peer.error_rail)
            else:
                link_tail(state, op.peer, op)

    cdef int begun(self) except -1:
        return (<Proxy> self.prepared.core.proxy).add(&self.armed)

    def leave(self, request) -> None:
        """Count the request as over; the request calls this."""
        (<Proxy> self.prepared.core.proxy).remove(&self.armed)
        TargetRun.leave(self, request)


cdef Numbers numbers_of(Integers values):
    cdef Numbers numbers
    numbers.first = <const char*> values.view.buf if values.present else NULL
    numbers.step = values.step
    return numbers


def arm(PreparedTargets prepared not None, flag, uint32_t value, lengths, local_offsets, remote_offsets, *, to,
        bint skips, immediates=None) -> ArmedRun:
    """Make a run of one write to each target, or to those that `to` lists, to be posted when the flag is `value`.

    With `immediates`, write i counts on number i of them. The thread reads lengths and offsets when the flag is raised,
    and not before; with `skips`, a length of 0 posts nothing. Raises TypeError and ValueError as
    `PreparedTargets.scatter` does, and OSError where no thread can be started.
    """
    cdef ArmedRun run = ArmedRun.__new__(ArmedRun)
    cdef FlagWord word = FlagWord(flag)
    cdef Integers given
    cdef int64_t bad
    run.writes = Writes(prepared.count, lengths, local_offsets, remote_offsets, to, immediates)
    for given in (run.writes.length, run.writes.here, run.writes.there):
        if given.present and (<uint64_t> given.view.buf | <uint64_t> given.step) % 8:
            raise ValueError(f"{given.name}: expected numbers at multiples of 8, because another thread writes them")
    run.allocate(prepared, run.writes.count, 0)
    bad = copy_rows(prepared, run, run.writes)
    if bad >= 0:
        raise ValueError(prepared.write_fault(run.writes, bad))
    if prepared.core.proxy is None:
        prepared.core.proxy = Proxy(prepared.core)
    run.take(prepared.core.proxy, word, value, skips)
    return run


cdef class Proxy:
    """The thread of one engine. `close` ends it, and cancels the armed requests."""

    def __cinit__(self, Core core not None):
        usable(&core.engine)
        self.core = core
        self.state = <ProxyState*> calloc(1, sizeof(ProxyState))
        if self.state == NULL:
            raise MemoryError
        self.state.engine = &core.engine
        pthread_mutex_init(&self.state.mutex, NULL)
        check(-aiote_open_condition(&self.state.changed), "open a condition")
        check(-pthread_create(&self.state.thread, NULL, run_proxy, self.state), "start the thread of a proxy")
        self.state.running = True

    def __dealloc__(self):
        # A running thread uses this memory. After a fork the child leaves it alone, too.
        if self.state != NULL and not self.state.running:
            pthread_cond_destroy(&self.state.changed)
            pthread_mutex_destroy(&self.state.mutex)
            free(self.state)

    @property
    def looks(self) -> int:
        """How often the thread has looked at flags."""
        cdef uint64_t looks = 0
        if alive(self.state.engine):
            with nogil:
                pthread_mutex_lock(&self.state.mutex)
                looks = self.state.looks
                pthread_mutex_unlock(&self.state.mutex)
        return looks

    @property
    def armed(self) -> int:
        """How many requests wait for their flags."""
        cdef uint64_t count = 0
        cdef Armed* one
        if not alive(self.state.engine):
            return 0
        with nogil:
            pthread_mutex_lock(&self.state.mutex)
            one = self.state.first
            while one != NULL:
                count += 1
                one = one.next
            pthread_mutex_unlock(&self.state.mutex)
        return count

    cdef int add(self, Armed* armed) except -1:
        """Make the thread look at a flag."""
        with nogil:
            pthread_mutex_lock(&self.state.mutex)
            entry_link(self.state, armed)
            self.state.fresh = True
            pthread_cond_signal(&self.state.changed)
            pthread_mutex_unlock(&self.state.mutex)
        return 0

    cdef int remove(self, Armed* armed) except -1:
        """Make the thread forget a request, which is over: once this returns, the thread does not touch it any more."""
        if alive(self.state.engine):
            with nogil:
                pthread_mutex_lock(&self.state.mutex)
                entry_unlink(self.state, armed)
                pthread_mutex_unlock(&self.state.mutex)
        return 0

    def close(self) -> None:
        """End the thread, and cancel the armed requests. Idempotent; to be called while the engine is open."""
        if not self.state.running or not alive(self.state.engine):
            return
        with nogil:
            pthread_mutex_lock(&self.state.mutex)
            self.state.stop = True
            pthread_cond_signal(&self.state.changed)
            pthread_mutex_unlock(&self.state.mutex)
        with nogil:
            pthread_join(self.state.thread, NULL)
        self.state.running = False
        with nogil:
            lock(self.state.engine)
            while self.state.first != NULL:
                op_cancel(&self.state.engine.state, self.state.first.parent)
                entry_unlink(self.state, self.state.first)
            unlock(self.state.engine)


cdef void entry_link(ProxyState* self, Armed* armed) noexcept nogil:
    armed.linked = True
    armed.next = NULL
    armed.prev = self.last
    if self.last != NULL:
        self.last.next = armed
    else:
        self.first = armed
    self.last = armed


cdef void entry_unlink(ProxyState* self, Armed* armed) noexcept nogil:
    if not armed.linked:
        return
    armed.linked = False
    if armed.prev != NULL:
        armed.prev.next = armed.next
    else:
        self.first = armed.next
    if armed.next != NULL:
        armed.next.prev = armed.prev
    else:
        self.last = armed.prev


cdef void* run_proxy(void* argument) noexcept nogil:
    """Run the thread. It ends when it is told to, and with the engine."""
    cdef ProxyState* self = <ProxyState*> argument
    cdef uint64_t busy = clock_ns()
    cdef uint64_t nap = NAP_FIRST_NS
    cdef bint ended = False
    pthread_mutex_lock(&self.mutex)
    while not self.stop and not ended:
        if self.first == NULL:
            pthread_cond_wait(&self.changed, &self.mutex)
        ended = not alive(self.engine)
        if ended:
            break
        self.looks += 1
        if look_at_flags(self) or self.fresh:
            self.fresh = False
            busy, nap = clock_ns(), NAP_FIRST_NS
        if self.first == NULL or self.stop:
            continue
        if clock_ns() - busy < SPIN_NS:
            pthread_mutex_unlock(&self.mutex)
            sched_yield()
            pthread_mutex_lock(&self.mutex)
            continue
        doze(self, nap)
        nap = nap * 2 if nap * 2 <= NAP_LAST_NS else NAP_LAST_NS
    pthread_mutex_unlock(&self.mutex)
    return NULL


cdef void doze(ProxyState* self, uint64_t ns) noexcept nogil:
    """Sleep for `ns`, or until a request is armed or the thread has to end."""
    cdef timespec end
    cdef uint64_t until = clock_ns() + ns
    if self.fresh:
        return
    end.tv_sec = <int64_t> (until // 1_000_000_000)
    end.tv_nsec = <int64_t> (until % 1_000_000_000)
    pthread_cond_timedwait(&self.changed, &self.mutex, &end)


cdef bint look_at_flags(ProxyState* self) noexcept nogil:
    """Look at every flag, and post what is due, in the order of arming; return whether anything was."""
    cdef Armed* armed = self.first
    cdef Armed* following
    cdef uint32_t now
    cdef bint any = False
    while armed != NULL:
        following = armed.next
        now = aiote_load_flag(armed.flag)
        # Compared as distances, because flags wrap.
        if <int32_t> (now - armed.seen) < 0 or <int32_t> (now - armed.value) > 0:
            entry_unlink(self, armed)
            post(self, armed, -EPROTO)
            any = True
        elif now == armed.value:
            entry_unlink(self, armed)
            post(self, armed, 0)
            any = True
        armed.seen = now
        armed = following
    return any


cdef void post(ProxyState* self, Armed* armed, int error) noexcept nogil:
    """Post an armed request, or end it with an error, and make the event loop look."""
    if not alive(self.engine):
        return
    lock(self.engine)
    post_all(&self.engine.state, armed, error)
    # The event loop may keep the posts of its woken tasks until its turn ends; these have to go now.
    batch_flush(&self.engine.state.batch)
    kick(self.engine)
    unlock(self.engine)
    if not self.engine.threaded:
        signal_wake(self.engine)


cdef void post_all(State* state, Armed* armed, int error) noexcept nogil:
    cdef Op* parent = armed.parent
    cdef Op* op
    cdef uint32_t i
    if parent.over:
        return
    if error == 0:
        error = read_numbers(armed)
    if parent.child_count == 0:
        if error:
            op_fail(state, parent, error, -1)
        else:
            op_end(state, parent)
        return
    for i in range(parent.child_count):
        op = &parent.children[i]
        if op.over:
            # Its peer was lost before.
            continue
        unlink(state, op.peer, op)
        op.armed = False
        if error:
            op_fail(state, op, error, -1)
            continue
        if op.part_bytes == 0 and (armed.skips or not op.counted):
            op.parts = 0
        start_child(state, op, armed.smallest)


cdef uint64_t number_at(const Numbers* numbers, uint64_t i) noexcept nogil:
    """Return a number as it is now. A number below 0 becomes larger than any bound."""
    return aiote_load_number(numbers.first + <Py_ssize_t> i * numbers.step) if numbers.first != NULL else 0


cdef int read_numbers(Armed* armed) noexcept nogil:
    """Read the numbers of each write, and check what was read. Return 0, or the error for all of them."""
    cdef const Row* row
    cdef Op* op
    cdef uint32_t i
    for i in range(armed.parent.child_count):
        op = &armed.parent.children[i]
        row = &armed.rows[armed.chosen[i]]
        if not bring(op, row, number_at(&armed.lengths, i), number_at(&armed.here, i), number_at(&armed.there, i)):
            return -ERANGE
        if not op.over and row.rails <= widest_of(op.peer):
            return -ESTALE
    return 0
