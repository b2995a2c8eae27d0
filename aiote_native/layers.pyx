"""Requests that are computed layer by layer: what became full since the last look, and one request for many layers.

A request of sixteen layers used to cost sixteen times what one layer costs: a call to note that it is computed, one to
find what of it is full, and a transfer. Here a program notes a layer in one native call, a reader learns in one call
what it may send of all layers, and layers that have the same pages are written by one request, each counting on an
immediate of its own.

The plain Python references are in `tests/native/test_layers.py`.
"""

from cpython.number cimport PyNumber_Index
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcpy

from aiote_native.core cimport Core
from aiote_native.counters cimport IMMEDIATE_BITS
from aiote_native.peers cimport PeerLink
from aiote_native.prepared cimport Integers, PreparedTargets, Row, TargetRun
from aiote_native.structs cimport Op
from aiote_native.workrequests cimport PageIndex

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
                if pair is not None and not self.fill(run, i, <PageIndex?> pair[0], <PageIndex?> pair[1],
                                                      <uint32_t> (imm + self.immediates[number])):
                    return None
        return run if run.is_open(False) else None

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

    cdef bint fill(self, LayerRun run, uint32_t row, PageIndex here, PageIndex there, uint32_t imm) except -1:
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


cdef int compare(const void* left, const void* right) noexcept nogil:
    cdef int64_t a = (<const int64_t*> left)[0], b = (<const int64_t*> right)[0]
    return (a > b) - (a < b)


def row_fault(numbers, int64_t pages, bint distinct) -> int:
    """Return 0 if all numbers are pages from 0 to `pages` - 1, otherwise 1; and 2, if they have to be `distinct`, where
    one occurs twice. Raises TypeError unless they are an array of 64-bit integers.
    """
    cdef Integers given = Integers("pages", numbers)
    cdef uint64_t i
    cdef int64_t* sorted_numbers
    cdef int fault = 0
    for i in range(given.count):
        if not 0 <= <int64_t> given.at(i) < pages:
            return 1
    if not distinct or given.count < 2:
        return 0
    # More numbers than pages must repeat one, so a row that is sorted is no longer than its group.
    if given.count > <uint64_t> pages:
        return 2
    sorted_numbers = <int64_t*> malloc(given.count * sizeof(int64_t))
    if sorted_numbers == NULL:
        raise MemoryError
    for i in range(given.count):
        sorted_numbers[i] = <int64_t> given.at(i)
    with nogil:
        qsort(sorted_numbers, given.count, sizeof(int64_t), compare)
        for i in range(1, given.count):
            if sorted_numbers[i] == sorted_numbers[i - 1]:
                fault = 2
                break
    free(sorted_numbers)
    return fault
