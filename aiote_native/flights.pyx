"""Requests that somebody cares for together: those of one job, those through one lease.

To await a request costs a waiter, an entry in its list, and a turn of its task. A caller with sixteen requests under
way that only needs their failures and the end of the last is called for just these.
"""

from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from libc.stdint cimport uint64_t


cdef class Flight:
    """The requests of a flight that are not over; iterating goes over a copy, oldest first.

    `changed` is called with each one that fails, when it is over, and, when the last one is over and has not failed,
    with None. It is called in the middle of a round, so what it may do is to take note. `shut` is for the owner, who
    wants nothing more to enter; who starts requests looks at it. `landed` counts those that went well, and
    `landed_bytes` their bytes.
    """

    def __cinit__(self, changed=None):
        self.pending = {}  # in the order of their beginnings, which a set would not keep
        self.changed = changed

    def __len__(self):
        return len(self.pending)

    def __iter__(self):
        return iter(list(self.pending))

    def enter(self, request) -> None:
        """Take note of a request that starts."""
        self.pending[request] = None

    def drop(self, request) -> None:
        """Forget a request, which never started, or whose end is not for this flight to judge."""
        self.pending.pop(request, None)
        if not self.pending:
            self.notify(None)

    cdef int leave(self, object request, bint failed, uint64_t nbytes) except -1:
        """Take note that a request is over."""
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
        # It is its owner's: a mistake in it must not keep others from hearing of this end.
        try:
            self.changed(request)
        except BaseException as error:
            PyErr_SetObject(type(error), error)
            PyErr_WriteUnraisable(self)
        return 0
