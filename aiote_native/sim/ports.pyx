"""An endpoint of the simulated network: posts, a completion queue of its own, and a descriptor to sleep on.

If time is virtual, the call that moves it on runs the events that are due. Else each `poll` and `arm` of an endpoint
runs those of the whole network, and the descriptor becomes readable when an event is due.
"""

cimport cython
from libc.errno cimport EAGAIN, EFAULT, EINVAL, ENETDOWN, ENOMEM, ENOTCONN, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport close, read

import struct

from aiote_native.forks cimport check_process
from aiote_native.provider cimport NativeDevice
from aiote_native.sim.net cimport (
    BUCKETS, Entry, ITEM_WORK, Memory, Model, NIC_BROKEN, Net, Receive, SAW_CLOSE, SAW_OPEN, SAW_POST, Work, draw,
    find_endpoint, net_now, pthread_mutex_lock, pthread_mutex_unlock, saw, set_alarm_clock)
from aiote_native.sim.nics cimport SimDevice
from aiote_native.sim.traffic cimport close_works, plan_work, run_due, serve_queue
from aiote_native.status cimport check
from aiote_native.structs cimport Completion, OP_READ, OP_RECV, Post, RailOps, WorkRequest

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
