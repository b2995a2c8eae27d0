from libc.stdint cimport uint64_t

cdef enum:
    HELD_MOST = 8  # events that one transfer waits for: one of each device that its memory is on

# A point in a stream: the event behind what the stream had to do when that was recorded.
cdef struct StreamPoint:
    void* context
    void* stream
    void* event
    bint passed

# What one transfer waits for; held.pyx has them in a list.
cdef struct Hold:
    Hold* prev
    Hold* next
    void* op
    bint linked
    int count
    int first    # of the points that are not passed
    int error    # the driver's code for which they never will be
    StreamPoint[HELD_MOST] points

cdef class EventPool:
    cdef void* context
    cdef readonly int device
    cdef bint primary
    cdef bint opened
    cdef uint64_t epoch
    cdef list spare
    cdef int take(self, void** event) except -1  # the driver's code
    cdef int record(self, uint64_t stream, StreamPoint* point) except -1  # the driver's code
    cdef void give(self, void* event) noexcept

cdef int hold_state(Hold* self) noexcept nogil
