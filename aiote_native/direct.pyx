"""Transfers of threads other than the event loop's: the calling thread posts them, and waits for them itself.

A coroutine on the engine's loop costs a task and two hand-overs between threads, each of them a wake-up and a wait for
the GIL: 300 to 400 us with two cores. Here the thread that waits for a transfer makes progress itself, under the
engine's lock, as the loop does. If the loop finds that the transfer is over while the thread sleeps, it makes the
thread's eventfd readable. If a native thread makes progress, the waiting thread only sleeps. The loop is
notified in each case, because the Python objects of a finished transfer are for the loop to update.
"""

from cpython.ref cimport Py_INCREF
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t, uint64_t
from posix.unistd cimport close, read

from aiote_native.channelset cimport largest_of, widest_of
from aiote_native.clocks cimport clock_ns
from aiote_native.core cimport Core
from aiote_native.counters cimport IMMEDIATE_BITS
from aiote_native.gates cimport batch_flush
from aiote_native.peers cimport PeerLink
from aiote_native.posting cimport op_fail, split_op
from aiote_native.progress cimport Progress, alive, kick, lock, notify, progress_once, signal_wake, unlock
from aiote_native.requests cimport LocalSlice, PageSet, RemoteSlice, Request, make_request
from aiote_native.status cimport check
from aiote_native.stream_orders cimport start_behind
from aiote_native.structs cimport ECANCELED, OP_READ, OP_WRITE, Op

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
