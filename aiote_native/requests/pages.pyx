"""The page numbers of requests, and the arithmetic on them: what moves, in how many pieces, from where and to where.

`aiote.kvcache.mapping` says what pages, units and pieces are. The references are in `tests/reference/pages.py`.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcpy

from aiote_native.requests.operations cimport PageIndex
from aiote_native.system.buffers cimport refuse_mask

# Larger numbers of tokens, units and pieces count as this one: no request has so many, and sums of two fit.
cdef uint64_t FARTHEST = 1 << 62


cdef class Integers:
    """A caller's row of 64-bit integers, through the buffer protocol; `None` stands for zeros. Raises TypeError."""

    def __cinit__(self, str name, values):
        cdef const char* kind
        self.name = name
        if values is None:
            return
        try:
            refuse_mask(values)
            PyObject_GetBuffer(values, &self.view, PyBUF_FORMAT | PyBUF_STRIDES)
        except TypeError:
            raise TypeError(f"{name}: expected an array of 64-bit integers, got {type(values).__name__}") from None
        except ValueError as error:
            raise TypeError(f"{name}: {error}") from None
        self.present = True
        kind = self.view.format
        # "<" is the native order on every machine that this runs on.
        if kind[0] in (c"@", c"=", c"<"):
            kind += 1
        self.signed = kind[0] in (c"l", c"q")
        if (self.view.ndim != 1 or self.view.itemsize != 8 or kind[0] == 0 or kind[1] != 0
                or not (self.signed or kind[0] in (c"L", c"Q"))):
            raise TypeError(f"{name}: expected one dimension of int64 or uint64, got {self.view.ndim} of format "
                            f"{(<bytes> self.view.format).decode()!r}")
        self.count = self.view.shape[0]
        # Arrays of ctypes leave the strides out even where the caller asks for them.
        self.step = self.view.strides[0] if self.view.strides != NULL else 8

    def __dealloc__(self):
        if self.present:
            PyBuffer_Release(&self.view)

    cdef uint64_t at(self, uint64_t i) noexcept nogil:
        """Return a number. A number below 0 becomes larger than any bound."""
        cdef uint64_t value = 0
        if self.present:
            memcpy(&value, <char*> self.view.buf + <Py_ssize_t> i * self.step, 8)
        return value

    cdef object value(self, uint64_t i):
        """Return a number as its owner sees it."""
        return <int64_t> self.at(i) if self.signed else self.at(i)


cdef uint64_t add(uint64_t a, uint64_t b) noexcept nogil:
    return min(a + b, FARTHEST)


cdef uint64_t multiply(uint64_t a, uint64_t b) noexcept nogil:
    return FARTHEST if b and a > FARTHEST // b else a * b


cdef class PageNumbers:
    """A row of page numbers, `pages`, whose first one is page `start` of its request.

    `pages` stays the caller's array, so what is found in it may be different at the next look: whoever computes with
    the numbers checks the result.
    """

    def __init__(self, pages, int64_t start=0):
        self.numbers = Integers("pages", pages)
        self.pages, self.start = pages, start


def page_fault(dict rows, dict groups, bint distinct) -> tuple[int, bool] | None:
    """Return the first group whose row has a page that the group does not have, of `groups[group]`, with False; or, if
    its pages have to be `distinct`, the first in whose row one occurs twice, with True. None: there is none.
    """
    cdef PageNumbers row
    for group, given in rows.items():
        row = <PageNumbers?> given
        if not all_below(row.numbers, groups.get(group, 0)):
            return group, False
    if distinct:
        for group, given in rows.items():
            if occurs_twice((<PageNumbers> given).numbers, groups.get(group, 0)):
                return group, True
    return None


cdef bint all_below(Integers given, int64_t pages) noexcept:
    cdef uint64_t i
    for i in range(given.count):
        if not 0 <= <int64_t> given.at(i) < pages:
            return False
    return True


cdef int compare(const void* left, const void* right) noexcept nogil:
    cdef int64_t a = (<const int64_t*> left)[0], b = (<const int64_t*> right)[0]
    return (a > b) - (a < b)


cdef bint occurs_twice(Integers given, int64_t pages) except -1:
    cdef uint64_t i
    cdef int64_t* ordered
    cdef bint twice = False
    if given.count < 2:
        return False
    # More numbers than pages must repeat one, so a row that is sorted is no longer than its group.
    if given.count > <uint64_t> pages:
        return True
    ordered = <int64_t*> malloc(given.count * sizeof(int64_t))
    if ordered == NULL:
        raise MemoryError
    for i in range(given.count):
        ordered[i] = <int64_t> given.at(i)
    with nogil:
        qsort(ordered, given.count, sizeof(int64_t), compare)
        for i in range(1, given.count):
            if ordered[i] == ordered[i - 1]:
                twice = True
                break
    free(ordered)
    return twice


cdef class RequestPlan:
    """The units and pieces of requests, between two caches.

    units: for each group how many tokens a unit has (0: a page is one unit, whatever its tokens), and how many units a
    page has at the source and at the target. layers: for each layer, for each of its moves, the position of the group
    in `units` and the number of pieces of a unit.
    """

    def __cinit__(self, dict units, list layers):
        cdef Py_ssize_t i
        self.groups = list(units)
        self.count = len(self.groups)
        self.units = <Group*> calloc(self.count or 1, sizeof(Group))
        if self.units == NULL:
            raise MemoryError
        for i, (unit, here, there) in enumerate(units.values()):
            self.units[i] = Group(unit, here, there)
        # Most layers are alike, so the pieces of a request are counted once for each distinct layout.
        self.layouts = list(dict.fromkeys(layers))
        self.of_layers = [self.layouts.index(pieces) for pieces in layers]

    def __dealloc__(self):
        free(self.units)

    cdef list in_order(self, dict rows):
        return [rows.get(group) for group in self.groups]

    def spans(self, dict rows, tokens) -> list[range]:
        """Return the units of each group that move onto these pages of the target for a request of `tokens` tokens."""
        cdef uint64_t wanted = min(tokens, FARTHEST), first, stop
        cdef PageNumbers row
        cdef Py_ssize_t i
        cdef list spans = []
        for i, given in enumerate(self.in_order(rows)):
            first = stop = 0
            if given is not None:
                row = <PageNumbers?> given
                first = multiply(row.start, self.units[i].there)
                stop = add(first, multiply(row.numbers.count, self.units[i].there))
                if self.units[i].unit:
                    stop = min(stop, max(first, (wanted + self.units[i].unit - 1) // self.units[i].unit))
            spans.append(range(first, stop))
        return spans

    def counts(self, list spans) -> list[int]:
        """Return how many pieces each layer has for the units `spans` of each group."""
        cdef list known = []
        cdef uint64_t pieces
        for layout in self.layouts:
            pieces = 0
            for place, times in layout:
                span = spans[place]
                pieces = add(pieces, multiply(<uint64_t> (span.stop - span.start), times))
            known.append(pieces)
        return [known[layout] for layout in self.of_layers]

    def lacks(self, dict rows, list spans) -> int:
        """Return the position of the first group whose pages at the source do not hold the units `spans`, or -1."""
        cdef uint64_t first, stop
        cdef PageNumbers row
        cdef Py_ssize_t i
        for i, given in enumerate(self.in_order(rows)):
            span = spans[i]
            if span.start == span.stop:
                continue
            if given is None:
                return i
            row = <PageNumbers?> given
            first = multiply(row.start, self.units[i].here)
            stop = add(first, multiply(row.numbers.count, self.units[i].here))
            if not (first <= <uint64_t> span.start and <uint64_t> span.stop <= stop):
                return i
        return -1


def piece_offsets(source_grid, target_grid, axes, PageNumbers source not None, PageNumbers target not None,
                  span) -> tuple[PageIndex, PageIndex]:
    """Return the byte offsets of the pieces of the units `span`, a range, on both sides, from page 0 on.

    A grid has the units of a page and the strides of pages and units in bytes; an axis has how often it steps, and the
    bytes of a step on both sides. Raises ValueError if a row does not hold the units.
    """
    cdef Pattern pattern
    pattern.count = len(axes)
    if pattern.count > MOST_AXES:
        raise ValueError(f"a pattern has {pattern.count} axes, expected up to {MOST_AXES}")
    for i, (times, near, far) in enumerate(axes):
        pattern.axes[<int> i].times = times
        pattern.axes[<int> i].strides[0] = near
        pattern.axes[<int> i].strides[1] = far
    pattern.grids[0], pattern.grids[1] = grid_of(source_grid), grid_of(target_grid)
    return (offsets_of(&pattern, 0, source, span.start, span.stop),
            offsets_of(&pattern, 1, target, span.start, span.stop))


cdef Grid grid_of(grid) except *:
    cdef Grid found
    found.units, found.page_stride, found.unit_stride = grid
    if found.units < 1:
        raise ValueError(f"a page has {found.units} units, expected 1 or more")
    return found


cdef PageIndex offsets_of(const Pattern* pattern, int side, PageNumbers row, int64_t start, int64_t stop):
    """Return the offsets on one side. They wrap around as NumPy's do: whoever uses them compares them with bounds."""
    cdef PageIndex found = PageIndex.__new__(PageIndex)
    cdef const Grid* grid = &pattern.grids[side]
    cdef int64_t last = (stop - 1) // grid.units - row.start
    cdef uint64_t pieces = 1, filled = 0, offset
    cdef int64_t unit, place
    cdef int axis
    if stop <= start:
        found.allocate(0)
        return found
    if start < 0 or start // grid.units < row.start or last < 0 or <uint64_t> last >= row.numbers.count:
        raise ValueError(f"units {start} to {stop - 1} do not lie in {row.numbers.count} pages from {row.start} on")
    for axis in range(pattern.count):
        pieces = multiply(pieces, max(pattern.axes[axis].times, 0))
    pieces = multiply(pieces, <uint64_t> (stop - start))
    if pieces > FARTHEST // 16:
        raise MemoryError
    found.allocate(pieces)
    with nogil:
        for unit in range(start, stop):
            place = unit // grid.units
            offset = row.numbers.at(place - row.start) * grid.page_stride + (
                <uint64_t> (unit - place * grid.units) * grid.unit_stride)
            filled = add_pieces(found.values, filled, pattern.axes, pattern.count, side, offset)
    found.find_bounds()
    return found


cdef uint64_t add_pieces(int64_t* values, uint64_t filled, const Axis* axes, int count, int side,
                         uint64_t offset) noexcept nogil:
    """Write the offsets of the pieces of one unit, the last axis fastest; return how many there are now."""
    cdef int64_t i
    if count == 0:
        values[filled] = <int64_t> offset
        return filled + 1
    for i in range(axes[0].times):
        filled = add_pieces(values, filled, axes + 1, count - 1, side, offset + <uint64_t> i * axes[0].strides[side])
    return filled


cdef class RequestPages:
    """The pages of one request on both sides, with the offsets that were found last.

    patterns: what `piece_offsets` takes of each pattern, behind the position of its group and the pieces of a unit.
    """

    def __cinit__(self, RequestPlan plan not None, patterns, dict source, dict target):
        self.patterns = list(patterns)
        self.plan = plan
        self.target = plan.in_order(target)
        self.replace(source)

    def replace(self, dict source) -> None:
        """Take other pages of the source from now on."""
        self.source = self.plan.in_order(source)
        self.spans = None

    def offsets(self, list spans, uint64_t most) -> list | None:
        """Return the offsets of each pattern for the units `spans` of each group, None for a pattern without units; or
        None if a pattern has more than `most` pieces.
        """
        cdef list found
        if self.spans is not None and self.spans == spans:
            return self.found
        found = []
        for place, pieces, source, target, axes in self.patterns:
            span = spans[place]
            if multiply(<uint64_t> (span.stop - span.start), pieces) > most:
                return None
            found.append(piece_offsets(source, target, axes, self.source[place], self.target[place],
                                       span) if span.start < span.stop else None)
        self.spans, self.found = spans, found
        return found
