"""Requests that were checked once and start many times: prepared targets, and requests of a model's layers."""

from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from aiote_native.channels.failover cimport largest_of, widest_of
from aiote_native.channels.peers cimport PeerLink
from aiote_native.counters.table cimport IMMEDIATE_BITS, is_immediate
from aiote_native.engine.core cimport Core
from aiote_native.engine.posting cimport op_end, op_start, split_op
from aiote_native.engine.progress cimport alive, kick, lock, unlock
from aiote_native.engine.structs cimport MAX_CHANNELS, OP_WRITE, Op, State
from aiote_native.requests.operations cimport (
    Flight, LocalMemory, Order, PageIndex, RemoteMemory, fill, hold_of, start_targets_behind)
from aiote_native.requests.pages cimport Integers
from aiote_native.requests.request cimport Request, TargetOps, leave_link, make_request

# Targets that are checked once for many requests, which bring arrays of lengths and offsets, or of page numbers.
#
# A scatter that is built anew looks at each target in Python, which takes longer than to post it. Here a request copies
# a checked `Op` for each of its targets, fills in its own numbers, and posts all of them under one lock. Each start
# looks again at everything that may have changed: whether the peer is there and has room, the region is open, and the
# lease is valid.
#
# The caller's arrays are read once, when the run is made, and the copied numbers are the ones that are checked.

cdef uint64_t MOST_PAGES = 1 << 56
cdef uint64_t ANY_PAGE = 1 << 62  # with a stride of 0 every page is the same one


cdef class Writes:
    """The numbers that a request brings, for each of its writes: a length and offsets, and, if given, which of the
    `targets` it goes to and the immediate that it counts on. Raises ValueError for arrays of different lengths.
    """

    def __cinit__(self, uint32_t targets, lengths, local_offsets, remote_offsets, to, immediates):
        cdef Integers given
        self.length = Integers("lengths", lengths)
        self.here = Integers("local_offsets", local_offsets)
        self.there = Integers("remote_offsets", remote_offsets)
        self.to = Integers("to", to)
        self.imm = Integers("imm", immediates)
        self.count = self.to.count if self.to.present else targets
        for given in (self.length, self.here, self.there, self.imm):
            if (given.present or given is self.length) and given.count != self.count:
                raise ValueError(
                    f"{given.name} has {given.count} numbers: expected one for each of {self.count} targets")

    cdef uint64_t target(self, uint64_t i) noexcept nogil:
        """Return the position of the target of a write, which may be none of them."""
        return self.to.at(i) if self.to.present else i


cdef class PreparedTargets:
    """Up to `capacity` targets of one engine, written by pages where there are `page_bytes`.

    `peers` is for the caller, to note whose targets they are.
    """

    def __cinit__(self, Core core not None, uint32_t capacity, uint64_t page_bytes=0):
        self.core = core
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.kept = []
        self.rows = <Row*> calloc(capacity or 1, sizeof(Row))
        if self.rows == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.rows)

    def add(self, PeerLink link not None, LocalMemory local, uint64_t local_start, uint64_t local_bytes,
            RemoteMemory remote, uint64_t remote_start, uint64_t remote_bytes, uint64_t local_stride=0,
            uint64_t remote_stride=0, Flight flight=None) -> None:
        """Add a target: bytes of one range are written to another; without memories it is an immediate alone.

        Raises ValueError for a range that leaves its region, and for remote memory that is read-only.
        """
        cdef Row* row
        if self.count >= self.capacity:
            raise ValueError(f"the group was made for {self.capacity} targets, got another one")
        if (local is None) != (remote is None):
            raise ValueError("a target has one memory: expected both a local and a remote one, or neither")
        row = &self.rows[self.count]
        row.op.rail = row.op.pin = -1
        row.op.opcode = OP_WRITE
        row.op.peer = &link.state
        fill(&row.op, local, local_start, remote, remote_start, local_bytes, remote_bytes, False)
        row.op.local_stride, row.op.remote_stride = local_stride, remote_stride
        row.link = <PyObject*> link
        row.rails = MAX_CHANNELS
        if local is not None:
            row.local = <PyObject*> local
            row.local_bytes, row.remote_bytes = local_bytes, remote_bytes
            row.rails = remote.rails
        if flight is not None:
            row.flight = <PyObject*> flight
        if self.page_bytes:
            row.local_pages = pages_in(row.local_bytes, self.page_bytes, local_stride)
            row.remote_pages = pages_in(row.remote_bytes, self.page_bytes, remote_stride)
        self.kept.append((link, local, remote, flight))
        self.count += 1

    def scatter(self, lengths, local_offsets, remote_offsets, to, immediates=None) -> TargetRun:
        """Make a run of one write to each target, or to those whose positions `to` lists. With `immediates`, write i
        counts on number i of them.

        Raises TypeError for anything but arrays of 64-bit integers, ValueError for arrays of different lengths, a
        position without a target, a range that leaves the target's, and an immediate of over 28 bits.
        """
        cdef Writes writes = Writes(self.count, lengths, local_offsets, remote_offsets, to, immediates)
        cdef TargetRun run = TargetRun.__new__(TargetRun)
        cdef int64_t bad
        run.allocate(self, writes.count, 0)
        bad = fill_writes(self, run, writes)
        if bad >= 0:
            raise ValueError(self.write_fault(writes, bad))
        return run

    cdef object write_fault(self, Writes writes, uint64_t i):
        """Say what is wrong with write `i`."""
        cdef uint64_t at = writes.target(i)
        if at >= self.count:
            return f"to[{i}] is {writes.to.value(i)}, expected a target from 0 to {self.count - 1}"
        if not is_immediate(writes.imm.at(i)):
            return f"imm[{i}] is {writes.imm.value(i)}, expected from 0 to 2**{IMMEDIATE_BITS} - 1"
        sides = (
            ("local", writes.here, self.rows[at].local_bytes),
            ("remote", writes.there, self.rows[at].remote_bytes))
        for side, offset, limit in sides:
            start, size = (<Integers> offset).value(i), writes.length.value(i)
            if start < 0 or size < 0 or start + size > limit:
                return f"write {i}: {side} range {start}+{size} leaves target {at}'s {limit} bytes"
        return f"write {i} changed while it was read"

    def write_pages(self, local_pages, remote_pages, counts) -> TargetRun:
        """Make a run of page writes: the first `counts[0]` pages go to target 0, the next to target 1, and so on.

        Raises TypeError and ValueError as `scatter` does. `counts` None means a single target, and a count of 0 leaves
        a target out.
        """
        cdef Integers here = Integers("local_pages", local_pages)
        cdef Integers there = Integers("remote_pages", remote_pages)
        cdef Integers shares = Integers("counts", counts)
        cdef TargetRun run = TargetRun.__new__(TargetRun)
        cdef uint64_t total, i
        cdef int64_t bad
        if not here.present or not there.present or here.count != there.count:
            raise ValueError(f"{here.count} local pages, but {there.count} remote pages: expected as many of each")
        if (shares.count if shares.present else 1) != self.count:
            raise ValueError(f"{shares.count} counts: expected one for each of {self.count} targets")
        total = here.count if not shares.present else 0
        for i in range(shares.count):
            total = shared(total, shares.at(i))
        if total != here.count:
            raise ValueError(f"the sum of the counts is not {here.count}, the number of pages")
        run.allocate(self, self.count, here.count)
        with nogil:
            bad = fill_pages(self, run, here, there, shares)
        if bad >= 0:
            raise ValueError(self.page_fault(here, there, shares, bad))
        return run

    cdef object page_fault(self, Integers here, Integers there, Integers shares, uint64_t i):
        """Say what is wrong with page `i`."""
        cdef uint64_t at = 0, end = shares.at(0) if shares.present else here.count
        while end <= i and at + 1 < self.count:
            at += 1
            end += shares.at(at)
        sides = (("local", here, self.rows[at].local_pages), ("remote", there, self.rows[at].remote_pages))
        for side, given, limit in sides:
            number = (<Integers> given).value(i)
            if not 0 <= number < limit:
                return f"{side} page {i} is {number}, expected 0 to {limit - 1} in target {at}" if limit else \
                    f"{side} page {i} is {number}, but target {at} is too short for a page"
        return f"page {i} changed while it was read"


cdef uint64_t pages_in(uint64_t length, uint64_t page, uint64_t stride) noexcept nogil:
    """Return how many pages that begin at multiples of the stride lie completely within the length."""
    if page > length:
        return 0
    return (length - page) // stride + 1 if stride else ANY_PAGE


cdef uint64_t shared(uint64_t total, uint64_t count) noexcept nogil:
    """Add a count. An invalid count, or too large a sum, stays larger than any number of pages."""
    return total + count if total < ANY_PAGE and count < ANY_PAGE else ANY_PAGE


cdef int64_t copy_rows(PreparedTargets prepared, TargetRun run, Writes writes) noexcept nogil:
    """Copy the checked target of each write, with its immediate. Return the first write without either, or -1."""
    cdef uint64_t i, at, imm
    cdef Op* op
    run.numbered = writes.imm.present
    for i in range(run.count):
        at, imm = writes.target(i), writes.imm.at(i)
        if at >= prepared.count or not is_immediate(imm):
            return i
        op = &run.ops[i]
        memcpy(op, &prepared.rows[at].op, sizeof(Op))
        op.parts = 1
        op.counted = run.numbered
        op.imm = <uint32_t> imm
        run.chosen[i] = <uint32_t> at
    return -1


cdef bint bring(Op* op, const Row* row, uint64_t size, uint64_t near, uint64_t far) noexcept nogil:
    """Give a copy of a checked target its length and offsets; return False if they leave the target's ranges."""
    if (near > row.local_bytes or size > row.local_bytes - near
            or far > row.remote_bytes or size > row.remote_bytes - far):
        return False
    op.local_address = row.op.local_address + near
    op.remote_offset = row.op.remote_offset + far
    op.part_bytes = size
    return True


cdef int64_t fill_writes(PreparedTargets prepared, TargetRun run, Writes writes) noexcept nogil:
    """Copy the checked targets and fill in a request's numbers. Return the position of the first bad one, or -1."""
    cdef int64_t bad = copy_rows(prepared, run, writes)
    cdef uint64_t i
    if bad >= 0:
        return bad
    for i in range(run.count):
        if not bring(&run.ops[i], &prepared.rows[run.chosen[i]], writes.length.at(i), writes.here.at(i),
                     writes.there.at(i)):
            return i
    return -1


cdef int64_t fill_pages(PreparedTargets prepared, TargetRun run, Integers here, Integers there,
                        Integers shares) noexcept nogil:
    """Copy the targets that get pages, and their page numbers. Return the position of the first bad page, or -1."""
    cdef uint64_t at, near, far, end
    cdef uint64_t page = 0
    cdef int64_t* source = run.pages
    cdef int64_t* target = run.pages + here.count
    cdef const Row* row
    cdef Op* op
    run.count = 0
    for at in range(prepared.count):
        row = &prepared.rows[at]
        end = page + shares.at(at) if shares.present else here.count
        if end <= page or end > here.count:
            continue
        op = &run.ops[run.count]
        memcpy(op, &row.op, sizeof(Op))
        op.local_index = source + page
        op.remote_index = target + page
        op.part_bytes = prepared.page_bytes
        op.parts = end - page
        run.chosen[run.count] = <uint32_t> at
        run.count += 1
        while page < end:
            near, far = here.at(page), there.at(page)
            if near >= row.local_pages or far >= row.remote_pages:
                return page
            source[page], target[page] = <int64_t> near, <int64_t> far
            page += 1
    # The counts were summed before. If they make fewer pages now, another thread has changed them.
    return -1 if page == here.count else <int64_t> page


cdef class TargetRun(TargetOps):
    """The targets of one request, copied from prepared ones."""

    cdef int allocate(self, PreparedTargets prepared, uint64_t count, uint64_t pages) except -1:
        # An array without strides of its own may have any length. The size that malloc is given stays below 2 ** 63.
        if count > 0xFFFFFFFF or pages >= MOST_PAGES:
            raise ValueError(f"{count} targets and {pages} pages are too many for one request: make several requests")
        self.prepared = prepared
        # One piece of memory: the ops, the page numbers of both sides, and the number of each op's target.
        self.ops = <Op*> malloc(count * (sizeof(Op) + sizeof(uint32_t)) + 2 * pages * sizeof(int64_t) + 1)
        if self.ops == NULL:
            raise MemoryError
        self.pages = <int64_t*> (self.ops + count)
        self.chosen = <uint32_t*> (self.pages + 2 * pages)
        self.count = <uint32_t> count
        return 0

    def rows(self) -> list[int]:
        """Return the positions of its targets among the prepared ones."""
        return [self.chosen[i] for i in range(self.count)]

    cdef bint is_open(self, bint admitted) except -1:
        """Return whether every target may be written to now; `admitted`: the caller has room at their peers."""
        cdef const Row* row
        cdef PeerLink link
        cdef LocalMemory local
        cdef uint32_t i
        for i in range(self.count):
            row = &self.prepared.rows[self.chosen[i]]
            link = <PeerLink> row.link
            if link.closed or row.rails <= widest_of(&link.state):
                return False
            if not admitted and (not link.ready or link.unfinished >= link.limit):
                return False
            if row.local != NULL:
                local = <LocalMemory> row.local
                if local.closing or not local.registrations:
                    return False
            if row.flight != NULL and (<Flight> row.flight).shut:
                return False
        return True

    cdef int retain(self, Request request) except -1:
        """Count the request as in flight with every link, memory and lease."""
        cdef const Row* row
        cdef uint32_t i
        for i in range(self.count):
            row = &self.prepared.rows[self.chosen[i]]
            (<PeerLink> row.link).unfinished += 1
            if row.local != NULL:
                (<LocalMemory> row.local).in_flight += 1
            if row.flight != NULL:
                (<Flight> row.flight).enter(request)
        return 0

    def leave(self, request) -> None:
        """Count the request as over; the request calls this."""
        cdef const Row* row
        cdef uint32_t i
        for i in range(self.count):
            row = &self.prepared.rows[self.chosen[i]]
            leave_link(<PeerLink> row.link)
            if row.local != NULL:
                (<LocalMemory> row.local).leave()
            if row.flight != NULL:
                (<Flight> row.flight).drop(request)

    def start(self, type kind, owner, int64_t imm, bint admitted=False, Order order=None) -> Request | None:
        """Post all of it as one request of `kind`, made without its `__init__`, with `owner` as its peer.

        Return None, and post nothing, where something has changed that needs a closer look. `imm` is the immediate of
        every write, below 0 none; it is ignored where each write has its own. `admitted`: the caller has looked for
        room. `order`: the points that the request waits behind. Raises RuntimeError for a run that was started before.
        """
        cdef Core core = self.prepared.core
        cdef Request request
        if self.started:
            raise RuntimeError("the run was already started")
        if core.closing or core.on_submit is None or not alive(&core.engine) or not self.is_open(admitted):
            return None
        if not admitted and not core.is_at_home():
            return None
        request = make_request(kind, owner)
        request.op.opcode = OP_WRITE
        request.op.counted = imm >= 0 or self.numbered
        request.op.children = self.ops
        request.op.child_count = self.count
        request.targets = self
        request.submitted = self.started = True
        request.order = order
        self.hold = hold_of(order, &core.engine)
        self.retain(request)
        Py_INCREF(request)
        with nogil:
            lock(&core.engine)
            self.begin(&core.engine.state, &request.op, imm, core.smallest)
            kick(&core.engine)
            unlock(&core.engine)
        self.begun()
        if not core.awake:
            core.on_submit()
        return request

    cdef void begin(self, State* state, Op* parent, int64_t imm, uint64_t smallest) noexcept nogil:
        """Start every target. Each is split and posted in one go, while its peer is in the processor's cache."""
        cdef uint32_t i
        cdef Op* op
        parent.posted_all = True
        parent.outstanding = parent.child_count
        if parent.child_count == 0:
            op_end(state, parent)
        for i in range(parent.child_count):
            op = &parent.children[i]
            op.parent = parent
            self.count_on(op, imm)
            if op.part_bytes == 0 and not op.counted:
                # Neither bytes nor a count: there is nothing to post.
                op.parts = 0
            if self.hold == NULL:
                start_child(state, op, smallest)
            else:
                split_child(op, smallest)
        if self.hold != NULL:
            start_targets_behind(state, parent, self.hold)

    cdef void count_on(self, Op* op, int64_t imm) noexcept nogil:
        """Make a write count on the immediate of all, unless each has its own."""
        if not self.numbered:
            op.counted = imm >= 0
            op.imm = <uint32_t> imm if imm >= 0 else 0

    cdef int begun(self) except -1:
        """Continue without the lock after `begin`; a subclass adds its own step here."""
        return 0


cdef void split_child(Op* op, uint64_t smallest) noexcept nogil:
    op.total = op.part_bytes * op.parts
    op.parent.total += op.total
    split_op(op, op.peer, largest_of(op.peer), smallest)


cdef void start_child(State* state, Op* op, uint64_t smallest) noexcept nogil:
    """Split and post the write of one target."""
    split_child(op, smallest)
    op_start(state, op.peer, op)


# Requests that are computed layer by layer: what became full since the last look, and one request for many layers.
#
# A request of sixteen layers used to cost sixteen times what one layer costs: a call to note that it is computed, one
# to find what of it is full, and a transfer. Here a program notes a layer in one native call, a reader learns in one
# call what it may send of all layers, and layers that have the same pages are written by one request, each counting on
# an immediate of its own.
#
# The plain Python references are in `tests/native/test_layers.py`.

cdef object FARTHEST = 1 << 62  # further tokens count as so many: no request has more, and sums of these fit


cdef int64_t tokens_of(object number) except -1:
    return max(0, min(PyNumber_Index(number), FARTHEST))


cdef class OfferedLayers:
    """How far each layer of an offer is computed, in tokens, and behind which stream.

    A subclass has `on_computed()`, which is called for the first layer that is noted after `hear`, and `refuse_layer`,
    which raises for a layer that is not one of these. `told`: it was called since the last `hear`.
    """

    def __cinit__(self, *args, **kwargs):
        self.reached = NULL

    def __dealloc__(self):
        free(self.reached)

    def open_layers(self, layers, tokens, bint computed=False) -> None:
        """Set the layers and the number of tokens; with `computed` all layers are."""
        cdef uint32_t i
        if self.reached != NULL:
            raise RuntimeError("the layers are set already")
        self.layers = list(layers)
        self.places = {layer: place for place, layer in enumerate(self.layers)}
        self.streams = [None] * len(self.layers)
        self.tokens = tokens_of(tokens)
        self.reached = <int64_t*> calloc(len(self.layers) or 1, sizeof(int64_t))
        if self.reached == NULL:
            raise MemoryError
        for i in range(<uint32_t> len(self.layers)):
            self.reached[i] = self.tokens if computed else 0

    def computed(self, layer, tokens=None, *, stream=None) -> None:
        """Record that a layer is computed up to a token, by default to the last; its writes start soon after.

        Pages that are not full yet wait. If the layer is in GPU memory, it is written after the work of `stream` (as in
        `Engine.write`); for readers that pull (`reads=True`) its kernels must already be over. Raises UsageError for a
        layer that this rank does not have.
        """
        cdef int64_t reached = self.tokens if tokens is None else tokens_of(tokens)
        place = self.places.get(layer)
        if place is None:
            self.refuse_layer(layer)
            return
        if reached > self.reached[<uint32_t> place]:
            self.reached[<uint32_t> place] = reached
        self.streams[<uint32_t> place] = stream
        if not self.told:
            self.told = True
            self.on_computed()

    def hear(self) -> None:
        """Let `on_computed` be called for the next layer: the caller looks at all layers from now on."""
        self.told = False

    def take_back(self) -> None:
        """Make all layers count as not computed."""
        cdef uint32_t i
        for i in range(<uint32_t> len(self.layers)):
            self.reached[i] = 0

    @property
    def complete(self) -> bool:
        """Whether all layers are computed."""
        cdef uint32_t i
        for i in range(<uint32_t> len(self.layers)):
            if self.reached[i] < self.tokens:
                return False
        return bool(self.layers) or self.tokens == 0

    @property
    def computed_to(self) -> dict[int, int]:
        """For each layer the number of tokens that are computed."""
        cdef uint32_t i
        return {self.layers[i]: self.reached[i] for i in range(<uint32_t> len(self.layers))}


cdef class PushedLayers:
    """The units of each layer that were sent to one reader; a unit is sent once it is full.

    `spans` are the units of each group, `units` the tokens of one (0: it is full when all tokens are computed), and
    `groups[i]` says of which groups layer i has moves. A layer is complete at `tokens` tokens.
    """

    def __cinit__(self, OfferedLayers offered not None, list layers, list groups, list spans, list units, tokens):
        cdef uint32_t i, j
        self.offered = offered
        self.count = self.left = <uint32_t> len(layers)
        self.groups = <uint32_t> len(spans)
        self.tokens = tokens_of(tokens)
        self.starts = <int64_t*> calloc((3 + self.count) * self.groups + 1, sizeof(int64_t))
        self.place = <uint32_t*> calloc(self.count + 1, sizeof(uint32_t))
        self.uses = <char*> calloc(self.count * (self.groups + 1) + 1, 1)
        if self.starts == NULL or self.place == NULL or self.uses == NULL:
            raise MemoryError
        self.stops = self.starts + self.groups
        self.units = self.stops + self.groups
        self.sent = self.units + self.groups
        self.over = self.uses + self.count * self.groups
        for j in range(self.groups):
            self.starts[j], self.stops[j], self.units[j] = spans[j].start, spans[j].stop, units[j]
        for i in range(self.count):
            self.place[i] = offered.places[layers[i]]
            for j in range(self.groups):
                self.sent[i * self.groups + j] = self.starts[j]
            for group in groups[i]:
                self.uses[i * self.groups + <uint32_t> group] = True

    def __dealloc__(self):
        free(self.starts)
        free(self.place)
        free(self.uses)

    cdef int64_t stop_of(self, uint32_t layer, uint32_t group, int64_t reached) noexcept nogil:
        """Return up to where the units of a group are full in a layer that is computed up to `reached`."""
        cdef int64_t sent = self.sent[layer * self.groups + group]
        cdef int64_t full = reached // self.units[group] if self.units[group] else self.starts[group]
        if reached >= self.tokens:
            return self.stops[group]
        return min(max(full, sent), self.stops[group])

    cdef bint grow(self, uint32_t layer, int64_t reached, int64_t* spans) noexcept nogil:
        """Take the units of a layer that became full: put the bounds for each group in `spans`; return if any did."""
        cdef bint more = False
        cdef uint32_t j
        cdef int64_t stop
        cdef int64_t* sent = self.sent + layer * self.groups
        for j in range(self.groups):
            spans[2 * j] = spans[2 * j + 1] = 0
            stop = self.stop_of(layer, j, reached)
            if self.uses[layer * self.groups + j] and stop > sent[j]:
                spans[2 * j], spans[2 * j + 1] = sent[j], stop
                sent[j] = stop
                more = True
        if reached >= self.tokens:
            self.over[layer] = True
            self.left -= 1
        return more

    def take(self) -> list[tuple[list[range], list[int], object]]:
        """Return what became full since the last call: the units of each group, the positions of the layers in which
        these units did, and their stream. Layers with the same units and the same stream come together.
        """
        cdef list runs = []
        cdef dict known = {}
        cdef bytearray memory = bytearray(16 * self.groups)
        cdef int64_t* spans = <int64_t*> <char*> memory
        cdef uint32_t i, j
        for i in range(self.count):
            if self.over[i] or not self.grow(i, self.offered.reached[self.place[i]], spans):
                continue
            stream = self.offered.streams[self.place[i]]
            key = bytes(memory), id(stream)
            if key not in known:
                known[key] = []
                runs.append(([range(spans[2 * j], spans[2 * j + 1]) for j in range(self.groups)], known[key], stream))
            known[key].append(i)
        return runs


cdef class LayerMoves(PreparedTargets):
    """The moves of all layers of a session, in the order of the layers: `place` follows the `add` of each move."""

    def __cinit__(self, Core core not None, uint32_t capacity, uint64_t page_bytes=0):
        self.first = [0]
        self.immediates = []
        self.moves = <Move*> calloc(capacity or 1, sizeof(Move))
        if self.moves == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.moves)

    def place(self, uint32_t pattern, uint64_t page_bytes) -> None:
        """Say what the last move that was added has: the number of its pattern, and the length of a piece."""
        if not self.count:
            raise ValueError("there is no move")
        self.moves[self.count - 1] = Move(pattern, page_bytes)

    def end_layer(self, immediate) -> None:
        """End a layer, which counts on a request's first immediate plus `immediate`."""
        self.first.append(self.count)
        self.immediates.append(immediate)

    def run(self, list layers, list offsets, imm, uint64_t most) -> LayerRun | None:
        """Make a run of the first of these layers, as many as have up to `most` pieces together.

        `offsets[pattern]` are the offsets of a pattern's pieces on both sides, None for none. Return None if that needs
        a closer look: the first layer has more pieces, an offset leaves a memory, there is no room for so many writes,
        or an immediate is out of range.
        """
        cdef LayerRun run = LayerRun.__new__(LayerRun)
        cdef uint64_t writes = self.count_writes(run, layers, offsets, most)
        cdef uint32_t at, i, number
        if run.layers == 0 or not self.has_room(writes):
            return None
        run.allocate(self, writes, 0)
        run.numbered = True
        run.kept = offsets
        run.count = 0
        for at in range(run.layers):
            number = layers[at]
            if not 0 <= imm + self.immediates[number] < 1 << IMMEDIATE_BITS:
                return None
            for i in range(<uint32_t> self.first[number], <uint32_t> self.first[number + 1]):
                pair = offsets[self.moves[i].pattern]
                if pair is not None and not self.add_move(run, i, <PageIndex?> pair[0], <PageIndex?> pair[1],
                                                          <uint32_t> (imm + self.immediates[number])):
                    return None
        return run if run.is_open(admitted=False) else None

    cdef uint64_t count_writes(self, LayerRun run, list layers, list offsets, uint64_t most) except? 0:
        """Find how many layers have up to `most` pieces, and how many pieces; return how many writes that makes."""
        cdef uint64_t pieces, writes = 0, more
        cdef uint32_t i, number
        for number in layers:
            pieces = more = 0
            for i in range(<uint32_t> self.first[number], <uint32_t> self.first[number + 1]):
                pair = offsets[self.moves[i].pattern]
                if pair is not None:
                    pieces += (<PageIndex?> pair[0]).count
                    more += 1
            if run.pieces + pieces > most:
                break
            run.pieces += pieces
            run.layers += 1
            writes += more
        return writes

    cdef bint has_room(self, uint64_t writes) except -1:
        """Return whether the peer has room for so many writes at once; all moves are to one peer."""
        cdef PeerLink link
        if not self.count:
            return False
        link = <PeerLink> self.rows[0].link
        return link.unfinished + writes <= link.limit

    cdef bint add_move(self, LayerRun run, uint32_t row, PageIndex here, PageIndex there, uint32_t imm) except -1:
        """Add a move to a run. Return False if an offset leaves a memory."""
        cdef const Row* checked = &self.rows[row]
        cdef uint64_t size = self.moves[row].page_bytes
        cdef Op* op = &run.ops[run.count]
        if here.count != there.count or not lies_in(here, size, checked.local_bytes) or not lies_in(
                there, size, checked.remote_bytes):
            return False
        memcpy(op, &checked.op, sizeof(Op))
        op.local_index, op.remote_index = here.values, there.values
        op.part_bytes, op.parts = size, here.count
        op.counted = True
        op.imm = imm
        run.chosen[run.count] = row
        run.count += 1
        return True


cdef bint lies_in(PageIndex offsets, uint64_t size, uint64_t nbytes) noexcept:
    """Return whether pieces of `size` bytes at these offsets lie in the first `nbytes` bytes."""
    if offsets.count == 0:
        return True
    return size <= nbytes and offsets.least >= 0 and <uint64_t> offsets.most <= nbytes - size


cdef class LayerRun(TargetRun):
    """The writes of some layers, as one request. `layers` and `pieces` say how many it has, and it keeps the offsets
    alive.
    """

    @property
    def owner(self) -> object:
        """The connection to its peer, which explains the errors of the request."""
        return (<PeerLink> self.prepared.rows[0].link).peer
