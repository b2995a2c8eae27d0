"""Requests to one target and to many: checked in C, submitted in one call, awaited as one object."""

from types import GenericAlias

cimport cython
from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from aiote_native.channels.peers cimport PeerLink
from aiote_native.counters.table cimport IMMEDIATE_BITS
from aiote_native.cuda.driver cimport Hold
from aiote_native.engine.core cimport Core
from aiote_native.engine.posting cimport split_op
from aiote_native.engine.progress cimport alive, kick, lock, unlock, usable
from aiote_native.engine.structs cimport OP_READ, OP_SEND, OP_WRITE
from aiote_native.requests.operations cimport (
    Flight, LocalMemory, NativeWaiter, Order, RemoteMemory, fill, hold_of, start_targets_behind, wake)
from aiote_native.system.buffers cimport AcquiredBuffer

# Requests as coroutines see them: started in one call, and awaited without a frame of Python.
#
# `RequestStarter` starts a request that needs no closer look: the memory of both sides is open and of one length, and
# the peer is connected and has room. At 100,000 awaited requests a second, each used to cost 7 us, most of it in a
# dozen Python calls that found nothing to do.

cdef extern from "Python.h":
    void* PyType_GetSlot(type, int) noexcept
    int Py_tp_new

ctypedef object (*MakeNew)(type, tuple, PyObject*)

WRITE, READ = False, True  # the direction of a request, for callers in Python
cdef tuple NOTHING = ()
cdef object MORE = object()  # stands for an item of an iterator that has no more items
cdef object LARGEST_IMMEDIATE = (1 << IMMEDIATE_BITS) - 1
cdef object LARGEST_OFFSET = 1 << 63
cdef object LARGEST_ADDRESS = (1 << 64) - 1

cdef enum:
    LEGACY = 1  # the default streams, as DLPack and the driver number them
    PER_THREAD = 2
    FIRST_ADDRESS = 4096
    NO_IMMEDIATE = -1


cdef int leave_link(PeerLink link) except -1:
    """Count one unfinished request less. A link that is not ready is called, once for all that ended together."""
    link.unfinished -= 1
    if not link.ready and not link.is_room_due:
        link.is_room_due = True
        (<Core> link.core).rooms.append(link)
    return 0


cdef class LocalSlice:
    """Bytes `start` to `start + nbytes` of registered memory."""

    def __cinit__(self, LocalMemory memory, uint64_t start, uint64_t nbytes, *args, **kwargs):
        self.memory = memory
        self.start = start
        self.nbytes = nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef AcquiredBuffer buffer = self.memory.buffer
        if self.memory.closing or len(self.memory.registrations) == 0:
            raise BufferError("the region is closed")
        buffer.lend(view, self, self.start, self.nbytes, flags)
        # The collector may clear this object before a view that is garbage, too, so the view holds the buffer itself.
        Py_INCREF(buffer)
        view.internal = <void*> buffer

    def __releasebuffer__(self, Py_buffer* view):
        cdef AcquiredBuffer buffer = <AcquiredBuffer> view.internal
        view.internal = NULL
        buffer.take_back()
        Py_DECREF(buffer)


cdef class RemoteSlice:
    """Bytes `start` to `start + nbytes` of a peer's memory."""

    def __cinit__(self, RemoteMemory memory, uint64_t start, uint64_t nbytes, *args, **kwargs):
        self.memory = memory
        self.start = start
        self.nbytes = nbytes


cdef class PageSet:
    """Pages of a slice: page i has `page_bytes` bytes from `offset + index[i] * stride`, all within the slice."""

    cdef int assign(self, region, PageIndex index, uint64_t page_bytes, uint64_t stride, uint64_t offset) except -1:
        self.region = region
        self.index = index
        self.page_bytes = page_bytes
        self.stride = stride
        self.offset = offset
        return 0

    def resolve(self, region, PageIndex index not None, uint64_t page_bytes, uint64_t stride, uint64_t offset) -> int:
        """Set which pages they are, once. Return the position of the first one that leaves the slice, -1 for none."""
        cdef int64_t bad
        if self.index is not None:
            raise RuntimeError("the page set is already filled")
        bad = index.first_outside(page_bytes, stride, offset, region.nbytes)
        if bad < 0:
            self.assign(region, index, page_bytes, stride, offset)
        return bad

    def moved(self, offset):
        """Return the same pages at another offset; None if that needs a closer look."""
        cdef PageSet other
        cdef type kind = type(self)
        if type(offset) is not int or not 0 <= offset < LARGEST_OFFSET:
            return None
        if self.index.first_outside(self.page_bytes, self.stride, offset, self.region.nbytes) >= 0:
            return None
        other = <PageSet> (<MakeNew> PyType_GetSlot(kind, Py_tp_new))(kind, NOTHING, NULL)
        other.assign(self.region, self.index, self.page_bytes, self.stride, offset)
        return other


cdef class Request(Operation):
    """A transfer that coroutines await. `refused`: it ended without having been submitted. `lease`: the lease that it
    goes through, or 0.

    A subclass says who may await it, how it is cancelled, what error it raises, and how an await continues that an
    exception has interrupted.
    """

    def require_here(self) -> None:
        """Raise UsageError if the caller runs in another event loop than the engine's."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Ask the transfer to end; an await of it that ends early calls this, from anywhere."""
        raise NotImplementedError

    def raise_failure(self) -> None:
        """Raise the transfer's error, if it failed."""
        raise NotImplementedError

    def interrupted(self, error):
        """Return a generator with which an interrupted await continues, and which raises the error in the end."""
        raise NotImplementedError

    @property
    def verb(self) -> str:
        """The verb of the transfer, which is known once it was submitted."""
        if self.op.opcode == OP_READ:
            return "read"
        if self.op.opcode == OP_SEND:
            return "send"
        return "write_imm" if self.op.counted else "write"

    @property
    def pages(self) -> int:
        """How many pages it writes or reads; 0 for a transfer without pages."""
        return self.op.parts if self.op.local_index != NULL else 0

    def refuse(self) -> None:
        """End the request, which the core does not have, and wake the coroutines that await it."""
        self.refused = True
        self.leave()
        self.land()
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            wake(waiter)

    cdef void leave(self):
        cdef PeerLink link = self.link
        if link is not None:
            self.link = None
            leave_link(link)

    def belong(self, PeerLink link) -> None:
        """Count as one of the link's unfinished requests until it is over."""
        self.link = link
        link.unfinished += 1

    def hold(self, Flight flight not None) -> None:
        """Enter the flight of its lease, until it is over."""
        if self.lease_flight is not None:
            self.lease_flight.drop(self)
        self.lease_flight = flight
        flight.enter(self)

    def join(self, Flight flight not None) -> None:
        """Enter a flight until it is over, which it may be already."""
        flight.enter(self)
        self.flight = flight
        if self.is_over or self.refused:
            self.land()

    cdef int land(self) except -1:
        """Leave its flights."""
        cdef bint failed = self.refused or self.op.status != 0 or self.op.cancelled
        cdef Flight lease_flight = self.lease_flight
        cdef Flight flight = self.flight
        self.lease_flight = self.flight = None
        if lease_flight is not None:
            lease_flight.leave(self, failed, self.op.total)
        if flight is not None:
            flight.leave(self, failed, self.op.total)
        return 0

    def done(self) -> bool:
        """Return whether it is over, well or not."""
        return self.is_over or self.refused

    cdef int resolved(self) except -1:
        self.leave()
        if self.targets is not None:
            self.targets.leave(self)
        Operation.resolved(self)
        return self.land()

    def __await__(self):
        cdef Awaiting awaiting = Awaiting.__new__(Awaiting)
        awaiting.request = self
        return awaiting


cdef object enlist(Request request):
    """Make a coroutine wait for the request; return the waiter for its event loop, or an iterator of such values."""
    cdef PeerLink link = request.link
    if link is None or not (<Core> link.core).is_at_home():
        request.require_here()
    waiter = request.peer.waiter()
    if request.waiter is None:
        request.waiter = waiter
    elif type(request.waiter) is list:
        request.waiter.append(waiter)
    else:
        request.waiter = [request.waiter, waiter]
    return waiter if type(waiter) is NativeWaiter else waiter.__await__()


@cython.freelist(64)
cdef class Awaiting:
    """One await of a request: the iterator that a coroutine delegates to."""

    def __iter__(self):
        return self

    def __next__(self):
        # Everything is in this one function, because Cython ends an iterator without an exception only where the
        # iterator itself says so, and a StopIteration that goes through a call costs a traceback each time.
        cdef Request request = self.request
        if self.inner is None:
            if not (request.is_over or request.refused):
                self.inner = enlist(request)
                if type(self.inner) is NativeWaiter:
                    (<NativeWaiter> self.inner)._asyncio_future_blocking = True
                    return self.inner
        if self.inner is not None and type(self.inner) is not NativeWaiter:
            try:
                item = next(self.inner, MORE)
            except BaseException as error:
                # trio raises a cancellation here; asyncio throws it in.
                return self.interrupt(error)
            if item is not MORE:
                return item
        if request.refused or request.op.status != 0:
            request.raise_failure()
        if not (request.is_over or request.refused):
            raise RuntimeError("the event loop resumed the await of a transfer before its end, a mistake of the loop")
        raise StopIteration

    def send(self, value):
        if value is None or self.inner is None or type(self.inner) is NativeWaiter:
            return next(self)
        try:
            return self.inner.send(value)
        except StopIteration:
            if self.request.refused or self.request.op.status != 0:
                self.request.raise_failure()
            raise
        except BaseException as error:
            return self.interrupt(error)

    def throw(self, kind, error=None, trace=None):
        if error is None:
            error = kind() if isinstance(kind, type) else kind
        if self.inner is None:
            raise error
        if type(self.inner) is NativeWaiter:
            return self.interrupt(error)
        try:
            return self.inner.throw(error)
        except BaseException as raised:
            return self.interrupt(raised)

    def close(self):
        if self.inner is not None:
            if type(self.inner) is not NativeWaiter:
                self.inner.close()
            if not self.interrupted:
                self.request.give_up()

    cdef object interrupt(self, error):
        """Hand an exception to the request's own way of ending, once."""
        if self.interrupted:
            raise error
        self.interrupted = True
        self.inner = self.request.interrupted(error)
        return next(self)

cdef bint is_open_for(Core core, PeerLink link):
    """Return whether one more request may start over a link without the caller's consent, on the engine's own loop."""
    return (core.is_at_home() and link.ready and link.core is core and not link.closed and not link.state.failed
            and link.unfinished < link.limit)


cdef Request make_request(type kind, object peer):
    """Make a request of a kind without its `__init__`."""
    cdef Request request = <Request> (<MakeNew> PyType_GetSlot(kind, Py_tp_new))(kind, NOTHING, NULL)
    request.peer = peer
    return request


cdef int64_t immediate_of(imm) except? -3:
    """Return the immediate of a request: NO_IMMEDIATE for None, less than NO_IMMEDIATE for an invalid one."""
    if imm is None:
        return NO_IMMEDIATE
    return imm if type(imm) is int and 0 <= imm <= LARGEST_IMMEDIATE else NO_IMMEDIATE - 1


cdef bint is_open_to(Core core, LocalSlice here, RemoteSlice there, bint reads):
    """Return whether one more request may start, without the caller's consent, between two slices over their link."""
    if not (here.memory.writable and there.memory.readable if reads else there.memory.writable):
        return False
    if there.memory.link is None or core.closing or core.on_submit is None:
        return False
    link = <PeerLink?> there.memory.link
    if not is_open_for(core, link) or there.memory.rails <= (<PeerLink> link).widest():
        return False
    if here.memory.owner is not core or here.memory.closing or not here.memory.registrations or not alive(&core.engine):
        return False
    cdef object flight = there.memory.lease_flight
    return not there.memory.lease or (flight is not None and not (<Flight?> flight).shut)


cdef bint is_ready(LocalSlice here, stream):
    """Return whether a transfer of that memory waits for no stream: the memory is the host's, or its owner says so."""
    return here.memory.events is None if stream is None else type(stream) is int and stream == -1


cpdef bint is_stream(object number):
    """Return whether a number names a default stream or can be a stream's address: the driver reads at that address."""
    return 0 < number <= PER_THREAD or FIRST_ADDRESS <= number <= LARGEST_ADDRESS


cdef Order order_behind(LocalSlice here, stream):
    """Note what a stream of the memory's device has to do now; None if the stream needs a closer look."""
    cdef Order order = Order()
    cdef uint64_t number = LEGACY
    if here.memory.events is None:
        return None
    if stream is not None:
        if type(stream) is not int:
            stream = getattr(stream, "__cuda_stream__", None)
            stream = stream() if callable(stream) else stream
            if type(stream) is not tuple or len(stream) != 2 or stream[0] != 0 or type(stream[1]) is not int:
                return None
            stream = stream[1] or LEGACY
        if not is_stream(stream):
            return None
        number = stream
    try:
        order.add(here.memory.events, number)
    except ValueError:
        return None  # `order_behind` tries once more, and says what is wrong
    return order


cdef class RequestStarter:
    """The verbs toward one peer. A request whose checks all pass starts here; a subclass handles every other request.

    The subclass has a method `check_and_<verb>` for each verb. It waits for a connection and for room, and raises the
    error for a mistake. `kind` is a subclass of `Request`, made here without its `__init__`.
    """

    __class_getitem__ = classmethod(GenericAlias)  # of the requests' class, for type checkers

    def __init__(self, Core core not None, type kind not None):
        if not issubclass(kind, Request):
            raise TypeError(f"kind: expected a class of Requests, got {kind.__name__}")
        self.core = core
        self.kind = kind

    def write(self, src, dst, imm=None, rail=None, stream=None, bint waits=False):
        """Start one write, with or without an immediate, or an immediate alone (`src` None); return its request.

        With `waits` it waits for room beyond the limit of unfinished requests, without it QueueFull is raised.
        """
        cdef Request request = self.start_slices(src, dst, False, imm, stream) if rail is None else None
        return self.check_and_write(src, dst, imm, rail, stream, waits) if request is None else request

    def read(self, src, dst, rail=None, stream=None, bint waits=False):
        """Start one read and return its request; `waits` is as in `write`."""
        cdef Request request = self.start_slices(dst, src, True, None, stream) if rail is None else None
        return self.check_and_read(src, dst, rail, stream, waits) if request is None else request

    def write_pages(self, src, dst, imm=None, rail=None, stream=None, bint waits=False):
        """Start paged writes and return their request; `waits` is as in `write`."""
        cdef Request request = self.start_pages(src, dst, False, imm, stream) if rail is None else None
        return self.check_and_write_pages(src, dst, imm, rail, stream, waits) if request is None else request

    def read_pages(self, src, dst, rail=None, stream=None, bint waits=False):
        """Start paged reads and return their request; `waits` is as in `write`."""
        cdef Request request = self.start_pages(dst, src, True, None, stream) if rail is None else None
        return self.check_and_read_pages(src, dst, rail, stream, waits) if request is None else request

    def send(self, to, payload, bint waits=False):
        """Start one message, of a copy of the payload, and return its request; `waits` is as in `write`."""
        cdef Request request = None
        if type(payload) is bytes:
            link = self.link_to(to)
            request = None if link is None else self.start_message(link, payload)
        return self.check_and_send(to, payload, waits) if request is None else request

    cdef Request make_between(self, LocalSlice here, RemoteSlice there, PeerLink link, bint reads, stream):
        """Make a request between two slices over their link, and do not start it; return None if a check does not pass.

        The caller reads the link before: `order_behind` runs code of the stream's library, which may change it.
        """
        cdef Request request
        cdef Order order = None
        if not is_open_to(self.core, here, there, reads):
            return None
        if not is_ready(here, stream):
            order = order_behind(here, stream)
            if order is None:
                return None
        request = make_request(self.kind, link.peer)
        request.order = order
        return request

    cdef Request start_slices(self, local, remote, bint reads, imm, stream):
        """Start one write (or read) between two slices; return None, without any effect, if a check does not pass."""
        cdef LocalSlice here
        cdef RemoteSlice there
        cdef PeerLink link
        cdef Request request
        cdef int64_t value = immediate_of(imm)
        if value < NO_IMMEDIATE or not isinstance(local, LocalSlice) or not isinstance(remote, RemoteSlice):
            return None
        here = <LocalSlice> local
        there = <RemoteSlice> remote
        link = there.memory.link
        request = self.make_between(here, there, link, reads, stream) if here.nbytes == there.nbytes else None
        if request is None:
            return None
        request.take(here.memory, here.start, there.memory, there.start, here.nbytes, here.nbytes, reads)
        request.op.part_bytes = here.nbytes
        request.op.parts = 1
        self.core.begin(link, request, reads, value)
        return self.record_start(request, link, there.memory)

    cdef Request start_pages(self, pages, onto, bint reads, imm, stream):
        """Start paged writes (or reads) between two sets of pages, as `start_slices` does."""
        cdef PageSet ours, theirs
        cdef LocalSlice here
        cdef RemoteSlice there
        cdef PeerLink link
        cdef Request request
        cdef int64_t value = immediate_of(imm)
        if value < NO_IMMEDIATE or not isinstance(pages, PageSet) or not isinstance(onto, PageSet):
            return None
        ours = <PageSet> pages
        theirs = <PageSet> onto
        if not isinstance(ours.region, LocalSlice) or not isinstance(theirs.region, RemoteSlice):
            return None
        if ours.index.count != theirs.index.count or ours.page_bytes != theirs.page_bytes:
            return None
        here = <LocalSlice> ours.region
        there = <RemoteSlice> theirs.region
        link = there.memory.link
        request = self.make_between(here, there, link, reads, stream)
        if request is None:
            return None
        self.core.submit_pages(link, request, here.memory, here.start + ours.offset, ours.index, ours.stride,
                               there.memory, there.start + theirs.offset, theirs.index, theirs.stride,
                               ours.page_bytes, value, reads)
        return self.record_start(request, link, there.memory)

    cdef Request start_message(self, PeerLink link, bytes payload):
        """Start one message; return None, without any effect, if a check does not pass."""
        cdef Core core = self.core
        cdef Request request
        if core.closing or core.on_submit is None or not is_open_for(core, link):
            return None
        if link.state.mailbox == NULL or len(payload) > link.message_limit or not alive(&core.engine):
            return None
        request = make_request(self.kind, link.peer)
        core.submit_send(link, request, payload)
        return self.record_start(request, link, None)

    cdef Request record_start(self, Request request, PeerLink link, RemoteMemory memory):
        """Count a started request as one of its link, and of its memory's lease if it has one; return it."""
        if memory is not None and memory.lease:
            request.lease = memory.lease
            request.hold(memory.lease_flight)
        request.link = link
        link.unfinished += 1
        if not self.core.awake:
            self.core.on_submit()
        return request


# The targets of one scatter: one native transfer for each, and one Python object and one await for all of them.
#
# The children are posted in one pass under one lock; each stands in its own peer's queue and ends by itself. The parent
# is over when the last child is. A target that fails stops no other target, and the first error becomes the parent's.


cdef class TargetOps:
    """The native transfers of one request, one a target. A base class: its subclasses know the peers and memories."""

    def __dealloc__(self):
        free(self.ops)

    def __len__(self):
        return self.count

    def failures(self) -> list[tuple[int, int, int]]:
        """Return (position, positive error number, rail) of each target that failed."""
        return [(i, -self.ops[i].status, self.ops[i].rail) for i in range(self.count) if self.ops[i].status != 0]

    def unfinished(self) -> list[int]:
        """Return the positions of the targets that are not over."""
        return [i for i in range(self.count) if not self.ops[i].over]


cdef class ScatterTargets(TargetOps):
    """Up to `capacity` targets, each with its peer's link, a source and a destination of one length."""

    def __cinit__(self, uint32_t capacity):
        self.links = []
        self.memories = []
        self.capacity = capacity
        self.ops = <Op*> calloc(capacity or 1, sizeof(Op))
        if self.ops == NULL:
            raise MemoryError

    def add(self, PeerLink link not None, LocalMemory local, uint64_t local_offset, RemoteMemory remote,
            uint64_t remote_offset, uint64_t length) -> None:
        """Add a write of `length` bytes to one peer; without memories it is an immediate alone. Raises ValueError for a
        range that leaves its region, and for bytes without memory on both sides.
        """
        cdef Op* op
        if self.count >= self.capacity:
            raise ValueError(f"the request was made for {self.capacity} targets, got another one")
        if length and (local is None or remote is None):
            raise ValueError(f"{length} bytes need both a local and a remote memory: only an empty write needs none")
        op = &self.ops[self.count]
        op.rail = op.pin = -1
        op.opcode = OP_WRITE
        op.peer = &link.state
        fill(op, local, local_offset, remote, remote_offset, length, length, False)
        op.part_bytes = length
        op.parts = 1
        op.total = length
        self.links.append(link)
        self.memories.append((local, remote))
        self.count += 1

    cdef int retain(self) except -1:
        """Count the request as in flight with every link and memory."""
        cdef PeerLink link
        cdef LocalMemory local
        for link in self.links:
            link.unfinished += 1
        for local, _remote in self.memories:
            if local is not None:
                local.in_flight += 1
        return 0

    def leave(self, request) -> None:
        """Count the request as over; the request calls this."""
        cdef PeerLink link
        cdef LocalMemory local
        for link in self.links:
            leave_link(link)
        for local, _remote in self.memories:
            if local is not None:
                local.leave()


def scatter(Core core, Request request, ScatterTargets targets, int64_t imm) -> None:
    """Start a write to each target, all or none; the request is over when all targets are. `imm` below 0 means none.

    Raises ValueError for memory that does not cover the rails in use, RuntimeError for a peer that is closed and for a
    request that was submitted before.
    """
    cdef PeerLink link
    cdef Op* op
    cdef Hold* hold = hold_of(request.order, &core.engine)
    cdef uint32_t i
    usable(&core.engine)
    if request.submitted:
        raise RuntimeError("the operation was already submitted")
    for i in range(targets.count):
        link = targets.links[i]
        op = &targets.ops[i]
        if link.closed:
            raise RuntimeError(f"the peer of target {i} is closed")
        remote = targets.memories[i][1]
        if remote is not None and (<RemoteMemory> remote).rails <= link.widest():
            raise ValueError(f"the memory of target {i} was registered with fewer rails than its owner has connected")
        op.parent = &request.op
        op.counted = imm >= 0
        op.imm = <uint32_t> imm if imm >= 0 else 0
        split_op(op, &link.state, link.largest(), core.smallest)
        request.op.total += op.total
    request.op.opcode = OP_WRITE
    request.op.counted = imm >= 0
    request.op.children = targets.ops
    request.op.child_count = targets.count
    request.targets = targets
    request.submitted = True
    targets.retain()
    Py_INCREF(request)
    with nogil:
        lock(&core.engine)
        start_targets_behind(&core.engine.state, &request.op, hold)
        kick(&core.engine)
        unlock(&core.engine)
    if not core.awake and core.on_submit is not None:
        core.on_submit()
