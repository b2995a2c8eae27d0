"""Check whether the caller runs in the engine's own event loop; no method may be called from outside of it."""


cdef class OwnLoop:
    """The event loop of one engine. `running` returns the loop that runs the caller, or None; it must not raise."""

    def __init__(self, running, loop):
        self.running = running
        self.loop = loop

    cdef bint is_running(self) except -1:
        # asyncio's own function in C takes 30 ns; in another thread it returns another loop, or None.
        return self.running() is self.loop
