"""The simulated world as Python sees it: networks, NICs, and endpoints."""

cimport cython
from libc.errno cimport EAGAIN, EFAULT, EINVAL, ENETDOWN, ENOMEM, ENOTCONN, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close, read

import os
import struct

from aiote_native.engine.provider cimport NativeDevice
from aiote_native.engine.structs cimport MAX_SGE, MAY_ALL, OP_READ, OP_RECV, Completion, Post, RailOps, WorkRequest
from aiote_native.sim.traffic cimport (
    BUCKETS, ITEM_ALARM, ITEM_FAULT, ITEM_WORK, MAX_PIECES, NIC_BROKEN, NIC_SILENT, NIC_UP, SAW_CLOSE, SAW_OPEN,
    SAW_POST, Alarm, Entry, Fault, Item, Memory, Model, Net, Nic, Receive, Seen, SimPort, Work, change_nic, close_works,
    draw, find_endpoint, find_memory, free_work, net_now, plan_work, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_unlock, put, run_due, saw, serve_queue, set_alarm_clock, take_out)
from aiote_native.system.base cimport Clock, ClockOps, check, check_process, fork_epoch

# The simulated network as Python sees it: its time, its faults, and the record of what happened.

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


# A NIC of the simulated network, and the memory registered with it.


cdef int read_model(dict given, Model* model) except -1:
    """Fill in a model from numbers by name, or else defaults. Raises ValueError for numbers out of range."""
    model.latency = given.get("latency", 0)
    model.answer = given.get("answer", 0)
    model.jitter = given.get("jitter", 0)
    model.operation = given.get("operation", 0)
    model.per_byte = given.get("per_byte", 0.0)
    model.overlap = given.get("overlap", 0.0)
    model.depth = given.get("depth", 256)
    model.receives = given.get("receives", 4100)
    model.events = given.get("events", 256)
    model.pieces = given.get("pieces", 1)
    model.max_sge = given.get("max_sge", 1)
    model.refusals = given.get("refusals", 0)
    model.null = given.get("null", False)
    model.packet = given.get("packet", 0)
    model.lingers = given.get("lingers", False)
    model.forgets = given.get("forgets", 0)
    model.largest = given.get("largest", 1 << 30)
    if not (model.depth and model.receives and model.events and model.largest and 1 <= model.pieces <= MAX_PIECES):
        raise ValueError(f"expected depth, receives, events and largest from 1, and pieces from 1 to {MAX_PIECES}")
    if not 1 <= model.max_sge <= MAX_SGE:
        raise ValueError(f"max_sge is {model.max_sge}, expected 1 to {MAX_SGE}")
    return 0


@cython.no_gc_clear
cdef class SimDevice(NativeDevice):
    """NIC number `rail` of node `node`. With `offsets`, peers address its memory from 0, as with some real NICs."""

    def __cinit__(self):
        self.nic = NULL

    def __init__(self, World world, uint32_t node, uint32_t rail, dict model, bint offsets=False):
        """Add the NIC to the network. Raises ValueError for a model with numbers out of range."""
        if self.nic != NULL:
            raise RuntimeError("this device is open already")
        world.usable()
        self.epoch = fork_epoch()
        self.world = world
        self.offsets = offsets
        self.nic = <Nic*> calloc(1, sizeof(Nic))
        if self.nic == NULL:
            raise MemoryError
        self.nic.node = node
        self.nic.rail = rail
        try:
            read_model(model, &self.nic.model)
        except BaseException:
            free(self.nic)
            self.nic = NULL
            raise
        # Operations in flight point to their NIC, so the network owns the structure and keeps it until its own end.
        with nogil:
            pthread_mutex_lock(&world.net.lock)
            self.nic.next = world.net.nics
            world.net.nics = self.nic
            pthread_mutex_unlock(&world.net.lock)
        world.children += 1
        self.opened = True

    @property
    def closed(self) -> bool:
        return not self.opened

    @property
    def state(self) -> str:
        """The state of the NIC: up, silent or broken."""
        return {NIC_UP: "up", NIC_SILENT: "silent", NIC_BROKEN: "broken"}[self.nic.state]

    def change(self, str state, at=None, after=None) -> None:
        """Make the NIC up, silent or broken: now, `at` a time in nanoseconds, or `after` that many more events."""
        states = {"up": NIC_UP, "silent": NIC_SILENT, "broken": NIC_BROKEN}
        self.world.plan_fault(self, states[state], -1, at, after)

    def slow(self, uint64_t ns, at=None, after=None) -> None:
        """Delay each arrival by `ns` nanoseconds: from now, from the time `at` on, or `after` that many more events."""
        self.world.plan_fault(self, 0, ns, at, after)

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> SimMemory:
        return SimMemory(self, address, length, writable, access)

    def close(self) -> None:
        if not self.opened or self.epoch != fork_epoch():
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        self.opened = False
        self.world.children -= 1

    def __dealloc__(self):
        # The network owns the native half.
        if self.opened and self.children == 0 and self.epoch == fork_epoch():
            self.world.children -= 1


@cython.no_gc_clear
cdef class SimMemory(NicRegistration):
    """A memory registration under a random key, which is valid on its own NIC only."""

    def __cinit__(self):
        self.memory = NULL

    def __init__(self, SimDevice device, uint64_t address, size_t length, bint writable, int access):
        check_process(device.epoch)
        if not device.opened or self.memory != NULL:
            raise RuntimeError("the device is closed, or the memory registered already")
        self.memory = <Memory*> calloc(1, sizeof(Memory))
        if self.memory == NULL:
            raise MemoryError
        self.memory.nic = device.nic
        self.memory.address = address
        self.memory.length = length
        self.memory.base = 0 if device.offsets else address
        self.memory.writable = writable
        self.memory.access = access
        self.device = device
        device.children += 1
        self.enlist()
        self.desc = self.memory
        self.key = self.memory.key
        self.base = self.memory.base
        self.length = length

    def enlist(self) -> None:
        """Draw an unused random key and enter the memory under it."""
        cdef Net* net = self.device.world.net
        cdef uint64_t key
        cdef bint taken = True
        while taken:
            key = int.from_bytes(os.urandom(8), "little")
            with nogil:
                pthread_mutex_lock(&net.lock)
                taken = find_memory(net, key) != NULL
                if not taken:
                    self.memory.key = key
                    self.memory.next = net.memory_table[key % BUCKETS]
                    net.memory_table[key % BUCKETS] = self.memory
                pthread_mutex_unlock(&net.lock)

    def close(self) -> None:
        self.drop()

    def __dealloc__(self):
        self.drop()

    cdef void drop(self) noexcept:
        cdef Memory** link
        cdef Net* net
        if self.memory == NULL or self.device is None or self.device.epoch != fork_epoch():
            return
        net = self.device.world.net
        with nogil:
            pthread_mutex_lock(&net.lock)
            link = &net.memory_table[self.memory.key % BUCKETS]
            while link[0] != NULL and link[0] != self.memory:
                link = &link[0].next
            if link[0] != NULL:
                link[0] = self.memory.next
            pthread_mutex_unlock(&net.lock)
        free(self.memory)
        self.memory = NULL
        self.desc = NULL
        self.device.children -= 1


# An endpoint of the simulated network: posts, a completion queue of its own, and a descriptor to sleep on.
#
# If time is virtual, the call that moves it on runs the events that are due. Else each `poll` and `arm` of an endpoint
# runs those of the whole network, and the descriptor becomes readable when an event is due.

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK

cdef extern from "<sys/epoll.h>" nogil:
    struct epoll_event:
        unsigned int events
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event*)
    const int EPOLL_CLOEXEC, EPOLL_CTL_ADD
    const unsigned int EPOLLIN

ADDRESS = struct.Struct("<8sQ")
MARK = b"aiotesim"


cdef int post_receive(SimPort* self, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Receive* receive
    if self.receive_count == self.nic.model.receives:
        return -EAGAIN
    if self.receive_count == 0:
        self.receive_first = 0
    receive = &self.receives[(self.receive_first + self.receive_count) % self.nic.model.receives]
    receive.wr = wr
    receive.memory = <uint8_t*> args.local
    receive.length = args.length
    self.receive_count += 1
    if self.queue != NULL:
        serve_queue(self.net, self)
    return 0


cdef bint registered(SimPort* self, const Work* work, const Memory* memory) noexcept nogil:
    """Return whether the local SGEs of a work lie within the memory that their descriptor names, on this NIC."""
    cdef uint64_t address
    cdef int i
    if work.length == 0:
        return True
    if memory == NULL or memory.nic != self.nic or (work.opcode == OP_READ and not memory.writable):
        return False
    for i in range(work.sge_count):
        address = <uint64_t> work.sges[i].local
        if (address < memory.address or address - memory.address > memory.length
                or work.sges[i].length > memory.length - (address - memory.address)):
            return False
    return True


cdef int post_work(SimPort* self, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef const Model* model = &self.nic.model
    cdef SimPort* target
    cdef Work* work
    cdef int code
    if self.outstanding >= model.depth or (model.refusals and draw(self.net, 65536) < model.refusals):
        return -EAGAIN
    work = <Work*> calloc(1, sizeof(Work))
    if work == NULL:
        return -ENOMEM
    describe(work, args)
    if work.length > model.largest or not registered(self, work, <const Memory*> args.desc):
        code = -EINVAL if work.length > model.largest else -EFAULT
        free(work)
        return code
    target = find_endpoint(self.net, self.peer)
    self.net.works += 1
    work.item.kind = ITEM_WORK
    work.source = self
    work.nic = self.nic
    work.far = NULL if target == NULL else target.nic
    work.target = self.peer
    work.number = self.net.works
    work.wr = wr
    if work.length:
        work.local_key = (<const Memory*> args.desc).key
    work.next = self.works
    if self.works != NULL:
        self.works.prev = work
    self.works = work
    self.outstanding += 1
    saw(self.net, SAW_POST, self.nic, work.number, work.length, args.opcode)
    plan_work(self.net, work)
    return 0


cdef void describe(Work* work, const Post* args) noexcept nogil:
    """Copy the arguments of a post into a work. A message has one local SGE and no remote address."""
    cdef int i
    work.opcode = args.opcode
    work.sges[0].local = <uint8_t*> args.local
    work.sges[0].length = work.length = args.length
    work.sge_count = 1
    if args.opcode <= OP_READ:
        work.sges[0].remote = args.remote
        for i in range(args.more_sge):
            work.sges[i + 1] = args.more[i]
            work.length += args.more[i].length
        work.sge_count += args.more_sge
        work.counts_for = <uint32_t> args.parts
        work.key = args.key
        work.with_imm = args.with_imm
        work.imm = args.imm


cdef int post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef SimPort* self = <SimPort*> impl
    cdef int code
    pthread_mutex_lock(&self.net.lock)
    if self.closed or self.peer == 0:
        code = -ENOTCONN
    elif self.broken or self.nic.state == NIC_BROKEN:
        code = -ENETDOWN
    elif args.opcode == OP_RECV:
        code = post_receive(self, args, wr)
    else:
        code = post_work(self, args, wr)
    set_alarm_clock(self.net)
    pthread_mutex_unlock(&self.net.lock)
    return code


cdef void look(SimPort* self) noexcept nogil:
    if not self.net.is_virtual:
        run_due(self.net, net_now(self.net))


cdef int poll(void* impl, Completion* out, int capacity) noexcept nogil:
    cdef SimPort* self = <SimPort*> impl
    cdef Entry* entry
    cdef int got = 0
    pthread_mutex_lock(&self.net.lock)
    look(self)
    while got < capacity and self.ring_count:
        entry = &self.ring[self.ring_first]
        out[got] = entry.completion
        if entry.own:
            self.outstanding -= 1
        else:
            self.arrivals -= 1
        self.ring_first = (self.ring_first + 1) % self.ring_size
        self.ring_count -= 1
        got += 1
    if self.ring_count == 0:
        self.ring_first = 0
    if got and self.queue != NULL:
        serve_queue(self.net, self)
        set_alarm_clock(self.net)
    pthread_mutex_unlock(&self.net.lock)
    return got


cdef int arm(void* impl) noexcept nogil:
    cdef SimPort* self = <SimPort*> impl
    cdef uint64_t value
    cdef bint armed
    pthread_mutex_lock(&self.net.lock)
    look(self)
    if self.raised:
        self.raised = False
        read(self.event_fd, &value, sizeof(value))
    armed = self.armed = self.ring_count == 0
    pthread_mutex_unlock(&self.net.lock)
    return 0 if armed else 1


cdef bint stirred(void* impl) noexcept nogil:
    """Return whether there are completions to poll for. Works that wait for a receive go on when one is posted."""
    return (<SimPort*> impl).ring_count != 0


cdef bint disconnect(void* impl) noexcept nogil:
    return False


cdef void shut(void* impl) noexcept nogil:
    cdef SimPort* self = <SimPort*> impl
    cdef SimPort** link
    if self.closed:
        return
    pthread_mutex_lock(&self.net.lock)
    self.closed = True
    link = &self.net.endpoint_table[self.number % BUCKETS]
    while link[0] != self:
        link = &link[0].next
    link[0] = self.next
    close_works(self.net, self)
    saw(self.net, SAW_CLOSE, self.nic, self.number, 0, 0)
    set_alarm_clock(self.net)
    pthread_mutex_unlock(&self.net.lock)


cdef void release(void* impl) noexcept nogil:
    cdef SimPort* self = <SimPort*> impl
    shut(impl)
    if self.wait_fd >= 0 and self.wait_fd != self.event_fd:
        close(self.wait_fd)
    if self.event_fd >= 0:
        close(self.event_fd)
    free(self.ring)
    free(self.receives)
    free(self)


cdef RailOps operations
operations.post = post
operations.poll = poll
operations.arm = arm
operations.disconnect = disconnect
operations.shut = shut
operations.release = release

# If time is virtual, nothing but a completion makes the descriptor readable, so a quiet channel need not be polled.
cdef RailOps announced_operations = operations
announced_operations.stirred = stirred
announced_operations.announced = True


cdef int watched(int epoll_fd, int fd) except -1:
    cdef epoll_event event
    memset(&event, 0, sizeof(event))
    event.events = EPOLLIN
    return check(-errno if epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) else 0, "epoll_ctl")


@cython.no_gc_clear
cdef class SimEndpoint(NativeEndpoint):
    """An open endpoint. The caller sends its `address` to the peer and gives the peer's to `connect`."""

    def __cinit__(self):
        self.impl = NULL
        self.channel_impl = NULL

    def __dealloc__(self):
        self.drop(self.device)

    def __init__(self, SimDevice device):
        """Open an endpoint on a NIC. Raises StatusError if the NIC is broken."""
        cdef Net* net = device.world.net
        if self.impl != NULL or device.closed:
            raise RuntimeError("the endpoint is open already, or its device is closed")
        check_process(device.epoch)
        check(-ENETDOWN if device.nic.state == NIC_BROKEN else 0, "open endpoint")
        self.impl = <SimPort*> calloc(1, sizeof(SimPort))
        if self.impl == NULL:
            raise MemoryError
        self.impl.event_fd = self.impl.wait_fd = -1
        self.impl.closed = True
        self.device = device
        self.ops = &operations
        self.largest = device.nic.model.largest
        self.depth = device.nic.model.depth
        self.max_sge = device.nic.model.max_sge
        self.forgets = device.nic.model.forgets != 0
        device.children += 1
        self.impl.net = net
        self.impl.nic = device.nic
        try:
            self.open()
        except BaseException:
            self.close()
            raise

    cdef int open(self) except -1:
        cdef SimPort* impl = self.impl
        cdef Net* net = impl.net
        cdef const Model* model = &impl.nic.model
        impl.ring_size = model.depth + model.events + model.receives
        impl.ring = <Entry*> calloc(impl.ring_size, sizeof(Entry))
        impl.receives = <Receive*> calloc(model.receives, sizeof(Receive))
        if impl.ring == NULL or impl.receives == NULL:
            raise MemoryError
        impl.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        check(-errno if impl.event_fd < 0 else 0, "eventfd")
        impl.wait_fd = impl.event_fd
        # A null endpoint does not wait for time, so it does not watch the timer. That matters because the kernel lets
        # at most a hundred epoll descriptors, nested three deep, watch one timer.
        if not net.is_virtual and not model.null:
            impl.wait_fd = epoll_create1(EPOLL_CLOEXEC)
            check(-errno if impl.wait_fd < 0 else 0, "epoll_create1")
            watched(impl.wait_fd, impl.event_fd)
            watched(impl.wait_fd, net.timer_fd)
        self.wait_fd = impl.wait_fd
        if net.is_virtual:
            self.ops = &announced_operations
        with nogil:
            pthread_mutex_lock(&net.lock)
            net.endpoints += 1
            impl.number = net.endpoints
            impl.closed = False
            impl.next = net.endpoint_table[impl.number % BUCKETS]
            net.endpoint_table[impl.number % BUCKETS] = impl
            saw(net, SAW_OPEN, impl.nic, impl.number, 0, 0)
            pthread_mutex_unlock(&net.lock)
        self.address = ADDRESS.pack(MARK, impl.number)
        return 0

    def connect(self, bytes address) -> None:
        """Set the one peer endpoint that this one talks to. Raises ValueError for a malformed address."""
        if self.impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel")
        check_process(self.device.epoch)
        if len(address) != ADDRESS.size or not address.startswith(MARK):
            raise ValueError(f"{address!r} is not the address of a simulated endpoint")
        self.impl.peer = ADDRESS.unpack(address)[1]

    cdef void* release_to_channel(self) except NULL:
        self.channel_impl = <SimPort*> NativeEndpoint.release_to_channel(self)
        return self.channel_impl

    def moved(self) -> int:
        return self.channel_impl.moved if self.channel_impl != NULL else -1

    cdef void channel_closed(self):
        self.channel_impl = NULL
        NativeEndpoint.channel_closed(self)

    cdef void** impl_slot(self) noexcept:
        return <void**> &self.impl

    cdef NativeDevice device_of(self):
        return self.device


# An endpoint that completes every operation at once and moves no bytes, so a request takes only the engine's own time.
#
# The peer receives nothing over it, so it can only measure the posting side.


cdef int null_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    # The network's lock is not needed: only this endpoint's own operations use its ring.
    cdef SimPort* self = <SimPort*> impl
    cdef Completion* completion
    if args.opcode == OP_RECV:
        return 0
    if self.ring_count == self.ring_size:
        return -EAGAIN
    completion = &self.ring[self.ring_count].completion
    completion.wr = wr
    completion.length = args.length
    self.ring_count += 1
    return 0


cdef int null_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    """Return completions, the last posted first, because rails promise no order. The other fields of entries stay 0."""
    cdef SimPort* self = <SimPort*> impl
    cdef int got = 0
    while got < capacity and self.ring_count:
        self.ring_count -= 1
        out[got] = self.ring[self.ring_count].completion
        got += 1
    return got


cdef int null_arm(void* impl) noexcept nogil:
    return (<SimPort*> impl).ring_count != 0


cdef RailOps null_operations = operations
null_operations.post = null_post
null_operations.poll = null_poll
null_operations.arm = null_arm


cdef class NullEndpoint(SimEndpoint):
    """An open endpoint of a NIC that moves no bytes."""

    def __init__(self, device):
        SimEndpoint.__init__(self, device)
        self.ops = &null_operations
