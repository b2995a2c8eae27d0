from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint64_t

cdef class Integers:
    cdef Py_buffer view
    cdef bint present
    cdef bint signed
    cdef uint64_t count
    cdef Py_ssize_t step
    cdef str name
    cdef uint64_t at(self, uint64_t i) noexcept nogil
    cdef object value(self, uint64_t i)

cdef class PageNumbers:
    cdef readonly object pages
    cdef readonly int64_t start
    cdef Integers numbers

# How many tokens a unit of a group has (0: the page is opaque), and the units in a page on either side.
cdef struct Group:
    int64_t unit
    int64_t here
    int64_t there

cdef class RequestPlan:
    cdef readonly list groups
    cdef list layouts    # for each distinct layout of a layer: the position of a group, and the pieces of a unit
    cdef list of_layers  # the layout of each layer
    cdef Group* units
    cdef Py_ssize_t count
    cdef list in_order(self, dict rows)

# The layout of units in the pages of one side, and a loop over the pieces of a unit.
cdef struct Grid:
    int64_t units
    uint64_t page_stride
    uint64_t unit_stride

cdef struct Axis:
    int64_t times
    uint64_t strides[2]

cdef enum:
    MOST_AXES = 8  # a pattern has three: fields, heads and tokens

cdef struct Pattern:
    Axis axes[MOST_AXES]
    int count
    Grid grids[2]

cdef class RequestPages:
    cdef RequestPlan plan
    cdef list patterns
    cdef list source
    cdef list target
    cdef object spans  # of `found`; None: there is none yet
    cdef list found
