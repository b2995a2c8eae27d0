"""A clock of somebody else's: where time is virtual, an engine must neither spin nor set a timer of the system's."""


cdef class Clock:
    """What a core is given in place of the system's timers; made by a subclass."""

    def __cinit__(self):
        self.clock_ops = NULL
        self.clock_context = NULL
