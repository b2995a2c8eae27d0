"""The targets of one scatter: one native transfer for each, and one Python object and one await for all of them.

The children are posted in one pass under one lock; each stands in its own peer's queue and ends by itself. The parent
is over when the last child is. A target that fails stops no other target, and the first error becomes the parent's.
"""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from aiote_native.core cimport Core
from aiote_native.cuda.events cimport Hold
from aiote_native.peers cimport PeerLink
from aiote_native.posting cimport split_op
from aiote_native.progress cimport kick, lock, unlock, usable
from aiote_native.requests cimport Request, leave_link
from aiote_native.stream_orders cimport hold_of, start_targets_behind
from aiote_native.structs cimport OP_WRITE
from aiote_native.workrequests cimport LocalMemory, RemoteMemory, fill


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
