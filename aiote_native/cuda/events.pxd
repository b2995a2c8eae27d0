from libc.stdint cimport uint64_t

cdef enum:
    HELD_MOST = 8  # events that one transfer waits for: one for each device that its memory is on

# A point in a stream: an event behind the work that the stream had when the event was recorded.
cdef struct StreamPoint:
    void* context
    void* stream
    void* event
    bint passed

# The stream points that one transfer waits for; stream_orders.pyx keeps a list of these.
cdef struct Hold:
    Hold* prev
    Hold* next
    void* op
    bint linked
    int count
    int first    # the first point that is not passed
    int error    # the driver's code if the points cannot be passed any more
    StreamPoint[HELD_MOST] points

cdef class EventPool:
    cdef void* context
    cdef readonly int device
    cdef bint primary
    cdef bint opened
    cdef uint64_t epoch
    cdef list spare
    cdef int take(self, void** event) except -1  # returns the driver's code
    cdef int record(self, uint64_t stream, StreamPoint* point) except -1  # returns the driver's code
    cdef void give(self, void* event) noexcept

cdef int hold_state(Hold* self) noexcept nogil
