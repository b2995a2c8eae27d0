# cython: language_level=3, boundscheck=False
"""The native recovery of one dead channel, driven step by step: its lost work requests, an account, a live channel.

Nothing of an endpoint is here. What the engine posts on the live channel is kept until the caller ends it.
"""

from libc.errno cimport ECONNRESET
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from array import array

from aiote_native.channels.failover cimport Account, contradiction, redo_all
from aiote_native.counters.table cimport tally_add, tally_free
from aiote_native.engine.core cimport Core
from aiote_native.engine.posting cimport give_back, op_completed
from aiote_native.engine.structs cimport (
    MAX_CHANNELS, MAX_PARTS, OP_WRITE, Channel, Completion, Op, PeerState, Post, RailOps, State, WorkRequest)

PARTS = MAX_PARTS

cdef enum:
    DEPTH = 128
    SPACE = 1 << 20  # between the local addresses of two requests

cdef struct Entry:
    WorkRequest* wr
    bint counted
    uint64_t what  # the immediate, or the number of the request whose bytes these are

cdef struct Posted:
    Entry entries[DEPTH]
    int count


cdef int rail_post(void* impl, const Post* args, WorkRequest* wr) noexcept nogil:
    cdef Posted* posted = <Posted*> impl
    cdef Entry* entry = &posted.entries[posted.count]
    entry.wr = wr
    entry.counted = args.with_imm
    entry.what = args.imm if args.with_imm else <uint64_t> args.local // SPACE - 1
    posted.count += 1
    return 0


cdef int rail_poll(void* impl, Completion* out, int capacity) noexcept nogil:
    return 0


cdef RailOps operations
operations.post = rail_post
operations.poll = rail_poll


cdef class Dead:
    """A channel that both sides have shut, and the one that is left."""

    cdef Core core
    cdef State* state
    cdef Channel dead
    cdef Channel live
    cdef PeerState peer
    cdef Posted posted
    cdef Op* ops
    cdef int count
    cdef uint64_t base[MAX_CHANNELS]
    cdef uint64_t keys[MAX_CHANNELS]
    cdef void* descs[MAX_CHANNELS]

    def __cinit__(self, list posts, dict confirmed, uint64_t ended, bint forgets):
        """posts: (immediate or None, bytes, whether it was cancelled) of each request without an end."""
        cdef int i
        cdef Op* op
        self.core = Core(spin_us=0)
        self.state = &self.core.engine.state
        self.count = len(posts)
        self.ops = <Op*> calloc(self.count + 1, sizeof(Op))
        self.dead.requests = <WorkRequest*> calloc(self.count + 1, sizeof(WorkRequest))
        self.live.requests = <WorkRequest*> calloc(DEPTH, sizeof(WorkRequest))
        if self.ops == NULL or self.dead.requests == NULL or self.live.requests == NULL:
            raise MemoryError
        self.peer.channels[0] = &self.live
        self.peer.channel_count = 1
        self.peer.survivable = True
        self.peer.lists = &self.state.lists
        self.dead.peer = self.live.peer = &self.peer
        self.dead.depth = self.dead.fresh = self.count
        self.dead.ended = ended
        self.dead.forgets = forgets
        self.live.ops = &operations
        self.live.impl = &self.posted
        self.live.open = True
        self.live.depth = DEPTH
        self.live.max_sge = 1
        self.live.largest = self.live.window = 1 << 40
        for i in range(MAX_CHANNELS):
            self.keys[i] = 1
        for i in range(self.count):
            self.lose(i, posts[i][0], posts[i][1], posts[i][2])
        for imm_data, times in confirmed.items():
            if tally_add(&self.dead.confirmed, imm_data, times) != 0:
                raise MemoryError

    def close(self):
        """Close the engine, which has descriptors; it is to end none of the requests, which are not its own."""
        self.state.done.head = self.state.done.tail = NULL
        self.state.lists.pending = NULL
        self.core.close()

    cdef int lose(self, int i, object imm_data, uint64_t length, bint cancelled) except -1:
        """Have a transfer of one work request, which the dead channel has lost."""
        cdef Op* op = &self.ops[i]
        cdef WorkRequest* wr = &self.dead.requests[i]
        op.peer = &self.peer
        op.opcode = wr.opcode = OP_WRITE
        op.pin = op.rail = -1
        op.parts = wr.parts = op.outstanding = 1
        op.posted_all = True
        op.cancelled = cancelled
        op.part_bytes = op.stripe_bytes = op.total = wr.length = length
        op.local_address = (i + 1) * SPACE
        op.local_desc = self.descs
        op.remote_base = self.base
        op.remote_key = self.keys
        op.counted = wr.counted = imm_data is not None
        if op.counted:
            op.imm = wr.imm_data = imm_data
            op.split.tail_bytes = length
            op.split.tail_count = wr.phase = 1
        else:
            op.split.head_bytes = length
            op.split.head_count = 1
        wr.channel = &self.dead
        wr.owner = op
        wr.busy = wr.lost = True
        wr.status = -ECONNRESET
        return 0

    def take_over(self, dict arrived) -> bool:
        """Do again what was lost, by this account; return False where it cannot be true, with nothing done."""
        cdef Account account
        cdef uint32_t[::1] immediates = array("I", [*arrived, 0])
        cdef int64_t[::1] counts = array("q", [*arrived.values(), 0])
        account.imm_data = &immediates[0]
        account.counts = &counts[0]
        account.count = len(arrived)
        account.unknown = NULL
        account.unknown_count = 0
        if contradiction(&self.dead, &account) >= 0:
            return False
        if redo_all(self.state, &self.dead, &account) != 0:
            raise MemoryError
        return True

    def under_way(self) -> list:
        """Return the posts that have no end yet: ("counts", immediate) or ("bytes", number of the request)."""
        return sorted([("counts" if self.posted.entries[i].counted else "bytes", self.posted.entries[i].what)
                       for i in range(self.posted.count)])

    def end(self, tuple post) -> None:
        """End one of the posts."""
        cdef int i
        cdef Entry entry
        cdef Op* op
        cdef uint64_t length
        for i in range(self.posted.count):
            entry = self.posted.entries[i]
            if ("counts" if entry.counted else "bytes", entry.what) == post:
                self.posted.count -= 1
                self.posted.entries[i] = self.posted.entries[self.posted.count]
                op, length = <Op*> entry.wr.owner, entry.wr.length
                self.live.outstanding -= 1
                self.live.in_flight -= length
                self.state.outstanding -= 1
                give_back(&self.live, entry.wr)
                op_completed(self.state, op, 0, 0, 0, length)
                return
        raise KeyError(post)

    def cancel(self, int i) -> None:
        self.ops[i].cancelled = True

    def over(self) -> list:
        """Return the numbers of the requests whose transfers are over."""
        return [i for i in range(self.count) if self.ops[i].over]

    def __dealloc__(self):
        if self.state != NULL:
            self.state.done.head = self.state.done.tail = NULL
            self.state.lists.pending = NULL
        tally_free(&self.dead.confirmed)
        free(self.ops)
        free(self.dead.requests)
        free(self.live.requests)
