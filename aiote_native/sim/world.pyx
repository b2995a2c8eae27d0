"""The simulated network as Python sees it: its time, its faults, and the record of what happened."""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close

from aiote_native.clocks cimport Clock, ClockOps
from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.sim.net cimport (
    Alarm, Fault, ITEM_ALARM, ITEM_FAULT, ITEM_WORK, Item, Net, Nic, Seen, Work, net_now, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, put, set_alarm_clock, take_out)
from aiote_native.sim.nics cimport SimDevice
from aiote_native.sim.traffic cimport change_nic, free_work, run_due
from aiote_native.status cimport check

cdef extern from "<sys/timerfd.h>" nogil:
    int timerfd_create(int, int)
    const int TFD_CLOEXEC, TFD_NONBLOCK

HAPPENINGS = ("post", "place", "deliver", "complete", "fail", "open", "close", "fault")


cdef void set_alarm(void* context, int fd, uint64_t ns) noexcept nogil:
    """Set an engine's timer in virtual time: `fd` becomes readable in `ns` nanoseconds."""
    cdef Net* net = <Net*> context
    cdef Alarm* alarm
    forget_alarm(context, fd)
    alarm = <Alarm*> calloc(1, sizeof(Alarm))
    if alarm == NULL:
        return
    pthread_mutex_lock(&net.lock)
    alarm.item.kind = ITEM_ALARM
    alarm.fd = fd
    alarm.next = net.alarms
    net.alarms = alarm
    put(net, &alarm.item, net_now(net) + ns)
    pthread_mutex_unlock(&net.lock)


cdef void forget_alarm(void* context, int fd) noexcept nogil:
    cdef Net* net = <Net*> context
    cdef Alarm** place
    cdef Alarm* alarm
    pthread_mutex_lock(&net.lock)
    place = &net.alarms
    while place[0] != NULL:
        alarm = place[0]
        if alarm.fd == fd:
            place[0] = alarm.next
            take_out(net, &alarm.item)
            free(alarm)
        else:
            place = &alarm.next
    pthread_mutex_unlock(&net.lock)


cdef ClockOps clock_operations
clock_operations.alarm = set_alarm
clock_operations.forget = forget_alarm


cdef class World(Clock):
    """A simulated network. If it is `virtual`, only `advance` moves its time; else its time is the system's.

    The first `remembered` events are kept in full, and all events go into `digest`. A virtual network is also the clock
    of the cores on it.
    """

    def __cinit__(self):
        self.net = NULL
        self.closed = True

    def __init__(self, uint64_t seed=0, bint virtual=False, uint64_t remembered=100_000):
        if self.net != NULL:
            raise RuntimeError("the network is open already")
        self.epoch = fork_epoch()
        self.net = <Net*> calloc(1, sizeof(Net))
        if self.net == NULL:
            raise MemoryError
        self.net.timer_fd = -1
        self.net.digest = 0xCBF29CE484222325ULL
        self.net.seen_limit = remembered
        self.net.random = seed
        self.net.is_virtual = virtual
        pthread_mutex_init(&self.net.lock, NULL)
        self.net.seen = <Seen*> calloc(remembered + 1, sizeof(Seen))
        if self.net.seen == NULL:
            raise MemoryError
        if virtual:
            self.clock_ops = &clock_operations
            self.clock_context = self.net
        else:
            self.net.origin = net_now(self.net)
            self.net.timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)
            check(-errno if self.net.timer_fd < 0 else 0, "timerfd_create")
        self.closed = False

    cpdef int usable(self) except -1:
        check_process(self.epoch)
        if self.closed:
            raise RuntimeError("the network is closed")
        return 0

    @property
    def virtual(self) -> bool:
        return self.net.is_virtual

    @property
    def clock(self) -> World | None:
        """The clock for a core on this network: the network itself if its time is virtual, else None."""
        return self if self.net.is_virtual else None

    @property
    def now(self) -> int:
        """Nanoseconds since the network was made."""
        return net_now(self.net)

    @property
    def events(self) -> int:
        """How many scheduled items have run: stages of operations, timed faults, timers, late reports."""
        return self.net.events

    @property
    def digest(self) -> int:
        """A 64-bit hash of everything that happened; it includes the times where time is virtual."""
        return self.net.digest

    @property
    def under_way(self) -> int:
        """How many items are scheduled."""
        return self.net.heap_count

    def next_time(self) -> int:
        """Return the time of the next scheduled item in nanoseconds, or -1 if there is none."""
        cdef int64_t first
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            first = <int64_t> self.net.heap[1].time if self.net.heap_count else -1
            pthread_mutex_unlock(&self.net.lock)
        return first

    def advance(self, uint64_t until) -> None:
        """Move virtual time on to `until` nanoseconds, and run everything that is due up to then."""
        self.usable()
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            run_due(self.net, until)
            pthread_mutex_unlock(&self.net.lock)

    def plan_fault(self, SimDevice device, int state, int64_t slow, at, after) -> None:
        """Change a NIC now, `at` a time in nanoseconds, or `after` that many more events.

        A negative `slow` changes its state to `state`; else `slow` nanoseconds are added to each arrival.
        """
        cdef Fault* fault
        cdef bint timed = at is not None
        cdef bint counted = after is not None
        cdef uint64_t time = at if timed else 0
        cdef uint64_t count = after if counted else 0
        cdef Nic* nic = device.nic
        self.usable()
        fault = <Fault*> calloc(1, sizeof(Fault))
        if fault == NULL:
            raise MemoryError
        fault.item.kind = ITEM_FAULT
        fault.nic = nic
        fault.state = state
        fault.slows = slow >= 0
        fault.slow = slow if slow >= 0 else 0
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            if timed:
                put(self.net, &fault.item, max(time, net_now(self.net)))
                set_alarm_clock(self.net)
            elif counted:
                fault.after = self.net.events + count
                fault.next = self.net.faults
                self.net.faults = fault
            elif fault.slows:
                nic.slow = fault.slow
                free(fault)
            else:
                change_nic(self.net, nic, state)
                set_alarm_clock(self.net)
                free(fault)
            pthread_mutex_unlock(&self.net.lock)

    def seen(self) -> list[tuple[int, str, int, int, int, int, int]]:
        """Return the first events, as many as are kept: (time, what, node, rail, number, length, status)."""
        cdef Seen* entry
        cdef uint64_t i, count
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            count = self.net.seen_count
            pthread_mutex_unlock(&self.net.lock)
        found = []
        # Recorded entries never change, because later ones are appended; so the lock is not needed here.
        for i in range(count):
            entry = &self.net.seen[i]
            found.append((entry.time, HAPPENINGS[entry.kind], entry.node, entry.rail, entry.number, entry.length,
                          entry.status))
        return found

    def close(self) -> None:
        """Close the network. Its NICs must be closed first: raises RuntimeError while one is open.

        Idempotent; does nothing in the child of a fork.
        """
        if self.closed or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} NICs of this network are still open")
        self.closed = True
        if self.net.timer_fd >= 0:
            close(self.net.timer_fd)
            self.net.timer_fd = -1

    cdef void free_net(self):
        cdef Net* net = self.net
        cdef Nic* nic
        cdef Fault* fault
        cdef Item* item
        if net.timer_fd >= 0:
            close(net.timer_fd)
        while net.heap_count:
            item = net.heap[1]
            take_out(net, item)
            if item.kind != ITEM_WORK:
                free(item)
            else:
                free_work(net, <Work*> item)
        while net.faults != NULL:
            fault = net.faults
            net.faults = fault.next
            free(fault)
        while net.nics != NULL:
            nic = net.nics
            net.nics = nic.next
            free(nic)
        free(net.heap)
        free(net.seen)
        pthread_mutex_destroy(&net.lock)
        free(net)

    def __dealloc__(self):
        # Devices and endpoints keep a reference to the network, so they are gone by now. A fork's child frees nothing.
        if self.net != NULL and self.epoch == fork_epoch():
            self.free_net()
            self.net = NULL
