"""Whether the caller runs in the event loop that an engine belongs to: what no method may be called outside of."""


cdef class OwnLoop:
    """The loop of one engine. `running` returns the loop that runs the caller, or None; it may not raise."""

    def __init__(self, running, loop):
        self.running = running
        self.loop = loop

    cdef bint is_running(self) except -1:
        # 30 ns of asyncio's own function in C; another thread has another loop there, or none.
        return self.running() is self.loop
