"""Forks: an object that was made before a fork belongs to the parent.

A child must not call a library whose locks another thread of its parent may have held, so every object that reaches
such a library remembers the epoch in which it was made.
"""

from libc.stdint cimport uint64_t

# Incremented in every child of a fork.
cdef uint64_t forks = 0


def after_fork() -> None:
    """Make everything of the parent unusable in this process; to be called in the child of a fork."""
    global forks
    forks += 1


class ForkError(RuntimeError):
    """A child of a fork has used an object of its parent."""


cdef uint64_t fork_epoch() noexcept nogil:
    return forks


cdef int check_process(uint64_t epoch) except -1:
    """Raise ForkError for an object that was made before a fork."""
    if epoch != forks:
        raise ForkError("this engine belongs to the parent process: after a fork, open another one in the child")
    return 0
