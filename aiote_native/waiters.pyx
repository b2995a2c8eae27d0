"""The objects on which coroutines sleep, and how they are woken.

asyncio's tasks accept a `NativeWaiter` as a future (they look for `_asyncio_future_blocking`, and so does uvloop's
loop, which runs the same tasks). A future makes its task run in the loop's next turn, which costs a handle, a call of
the selector and 2 us. A waiter that is woken in a callback of the loop, where no other task is running, runs its task
right there, which is what that next turn would do.
"""

cimport cython


@cython.freelist(64)
cdef class NativeWaiter:
    """One sleep of one task. `loop` is asyncio's or uvloop's; a cancelled sleep raises `cancelled_error`."""

    def __init__(self, loop, cancelled_error):
        self.loop = loop
        self.cancelled_error = cancelled_error

    def get_loop(self):
        return self.loop

    def done(self) -> bool:
        return self.is_done

    def cancelled(self) -> bool:
        return self.is_cancelled

    def result(self) -> None:
        if self.is_cancelled:
            raise self.cancelled_error() if self.message is None else self.cancelled_error(self.message)
        if not self.is_done:
            raise RuntimeError("the waiter was not woken yet")

    def add_done_callback(self, callback, *, context=None) -> None:
        """Call `callback`, a task's wake-up, when this is over. Usually there is one, but any number may be added."""
        if self.callback is not None:
            self.others = [*(self.others or ()), (callback, context)]
            return
        self.callback = callback
        self.context = context
        if self.is_done:
            self.resolve()

    def set_result(self, value) -> None:
        """Wake the task in the loop's next turn."""
        if self.is_done:
            raise RuntimeError("the waiter was already woken")
        self.is_done = True
        self.resolve()

    def cancel(self, msg=None) -> bool:
        """Make the task raise `cancelled_error`; the task that is cancelled calls this."""
        if self.is_done:
            return False
        self.is_done = self.is_cancelled = True
        self.message = msg
        self.resolve()
        return True

    cdef int resolve(self) except -1:
        callback, self.callback = self.callback, None
        if callback is not None:
            self.loop.call_soon(callback, self, context=self.context)
        if self.others is not None:
            self.resolve_others()
        return 0

    cdef int resolve_others(self) except -1:
        others, self.others = self.others, None
        for callback, context in others:
            self.loop.call_soon(callback, self, context=context)
        return 0

    cdef int now(self) except -1:
        """Run the task at once. Only for a callback of the loop, because a task must not run inside another one."""
        if self.is_done:
            return 0
        self.is_done = True
        callback, self.callback = self.callback, None
        if callback is None:
            return 0
        if self.others is not None:
            self.resolve_others()
        context = self.context
        if context is None:
            callback(self)
        else:
            context.run(callback, self)
        return 0

    def __await__(self):
        cdef Pause pause = Pause.__new__(Pause)
        pause.waiter = self
        return pause

    __iter__ = __await__


cdef class Pause:
    """The iterator of one await of a waiter."""

    def __iter__(self):
        return self

    def __next__(self):
        if not self.yielded and not self.waiter.is_done:
            self.yielded = True
            self.waiter._asyncio_future_blocking = True
            return self.waiter
        self.waiter.result()
        raise StopIteration

    def send(self, value):
        return self.__next__()

    def throw(self, kind, error=None, trace=None):
        if error is None:
            error = kind() if isinstance(kind, type) else kind
        raise error

    def close(self):
        pass


cpdef int wake(object waiter) except -1:
    """Wake the task that awaits it, soon; does nothing if it was woken before, or if its loop was closed."""
    if type(waiter) is list:
        for one in waiter:
            wake(one)
        return 0
    try:
        if not waiter.done():
            waiter.set_result(None)
    except RuntimeError:
        pass
    return 0


cpdef int run(object waiter) except -1:
    """Run the task that awaits it at once, if the loop allows that. Only for a callback of the loop."""
    if type(waiter) is NativeWaiter:
        return (<NativeWaiter> waiter).now()
    return wake(waiter)


cdef object wake_all(list waiters, bint direct, listener):
    """Wake the waiters, at once where `direct` allows it, and call the listener, if there is one.

    Return the last exception that is not a task's own. An interrupt in one task ends the loop, but the other waiters
    have to hear of their own ends first.
    """
    raised = None
    for waiter in waiters:
        if direct and type(waiter) is NativeWaiter:
            try:
                (<NativeWaiter> waiter).now()
            except BaseException as error:
                raised = error
        else:
            wake(waiter)
    if listener is not None:
        try:
            listener()
        except BaseException as error:
            raised = error
    return raised
