"""An endpoint that completes every operation at once and moves no bytes, so a request takes only the engine's own time.

The peer receives nothing over it, so it can only measure the posting side.
"""

from libc.errno cimport EAGAIN

from aiote_native.sim.net cimport SimPort
from aiote_native.sim.ports cimport SimEndpoint, operations
from aiote_native.structs cimport Completion, OP_RECV, Post, RailOps, WorkRequest


cdef int post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
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


cdef int poll(void* impl, Completion* out, int capacity) noexcept nogil:
    """Return completions, the last posted first, because rails promise no order. The other fields of entries stay 0."""
    cdef SimPort* self = <SimPort*> impl
    cdef int got = 0
    while got < capacity and self.ring_count:
        self.ring_count -= 1
        out[got] = self.ring[self.ring_count].completion
        got += 1
    return got


cdef int arm(void* impl) noexcept nogil:
    return (<SimPort*> impl).ring_count != 0


cdef RailOps null_operations = operations
null_operations.post = post
null_operations.poll = poll
null_operations.arm = arm


cdef class NullEndpoint(SimEndpoint):
    """An open endpoint of a NIC that moves no bytes."""

    def __init__(self, device):
        SimEndpoint.__init__(self, device)
        self.ops = &null_operations
