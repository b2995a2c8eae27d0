"""Groups of requests that one owner follows together: the requests of one job, or those through one lease.

Awaiting a request costs a waiter, an entry in its list, and a turn of its task. A caller with sixteen requests in
flight often needs only the failures and the end of the last one, and is called for just these.
"""

from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from libc.stdint cimport uint64_t


cdef class Flight:
    """The requests of a flight that are not over. Iterating goes over a copy, oldest first.

    The flight calls `changed(request)` for each request that fails, when that is over, and `changed(None)` when the
    last one is over and has not failed. It calls in the middle of a round, so `changed` may only record the call.
    `shut` belongs to the owner, which sets it to keep new requests out; the code that starts requests looks at it.
    `landed` counts the requests that went well, and `landed_bytes` their bytes.
    """

    def __cinit__(self, changed=None):
        self.pending = {}  # a dict keeps the order in which they began, and a set would not
        self.changed = changed

    def __len__(self):
        return len(self.pending)

    def __iter__(self):
        return iter(list(self.pending))

    def enter(self, request) -> None:
        """Add a request that starts."""
        self.pending[request] = None

    def drop(self, request) -> None:
        """Remove a request that never started, or whose end is not for this flight to judge."""
        self.pending.pop(request, None)
        if not self.pending:
            self.notify(None)

    cdef int leave(self, object request, bint failed, uint64_t nbytes) except -1:
        """Record that a request is over."""
        if self.pending.pop(request, self) is self:
            return 0
        if not failed:
            self.landed += 1
            self.landed_bytes += nbytes
        if failed:
            self.notify(request)
        elif not self.pending:
            self.notify(None)
        return 0

    cdef int notify(self, object request) except -1:
        if self.changed is None:
            return 0
        # The callback is its owner's: a mistake in it must not keep others from hearing of this end.
        try:
            self.changed(request)
        except BaseException as error:
            PyErr_SetObject(type(error), error)
            PyErr_WriteUnraisable(self)
        return 0
