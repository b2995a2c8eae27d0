"""Tasks that run the calls of a server, one after the other.

To start a task costs more than a small method does, and a turn of the loop. So a task whose call has ended waits for
the next one, unless the call has left something in it: a cancellation, or values of context variables.
"""

from __future__ import annotations

import contextvars
import functools
from typing import Protocol

from ..aio import LoopTask, Waiter
from .endpoint import Endpoint

__all__ = ["Job", "Workers"]

MAX_IDLE = 64


class Job(Protocol):
    """A call that is to be run."""

    task: LoopTask | None
    """The task that runs it; to be cleared by `after`."""

    async def run(self) -> None: ...
    def after(self) -> None:
        """Take note that it has ended, even if it never began."""


class Workers:
    """The tasks of one server. Their context is a copy of that in which this was made, for each call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.idle: list[_Worker] = []
        self._context = contextvars.copy_context()
        self._closed = False

    def start(self, job: Job) -> None:
        """Run a job: at once where a task is idle and may run now, or else soon."""
        if self.idle and self.endpoint.direct:
            worker = self.idle.pop()
            worker.job, job.task = job, worker.task
            self.endpoint.wake(worker.waiter)
            return
        worker = _Worker(self, job)
        spawn = functools.partial(
            self.endpoint.loop.spawn, worker.work, name="aiote service: calls", after=worker.after
        )
        worker.task = job.task = self._context.run(spawn)

    def keeps(self, task: LoopTask, context: contextvars.Context) -> bool:
        """Tell whether a task that has run a call may run another; `context` is what its own was before."""
        if self._closed or len(self.idle) >= MAX_IDLE or not task.untouched:
            return False
        try:
            return contextvars.copy_context() == context
        except Exception:
            # A value that cannot be compared, and is not the one that was there before.
            return False

    async def close(self) -> None:
        """End those that are idle; the others end with their calls."""
        self._closed = True
        for worker in tuple(self.idle):
            worker.task.cancel()
            await worker.task.join()


class _Worker:
    """One task; `job` is what it runs."""

    task: LoopTask

    def __init__(self, pool: Workers, job: Job) -> None:
        self._pool = pool
        self.job: Job | None = job
        self.waiter: Waiter

    async def work(self) -> None:
        pool, context = self._pool, contextvars.copy_context()
        while True:
            job = self.job
            assert job is not None
            await job.run()
            if not pool.keeps(self.task, context):
                # The end of the task is that of the call.
                return
            self.job = None
            job.after()
            del job
            self.waiter = pool.endpoint.loop.waiter()
            pool.idle.append(self)
            await self.waiter

    def after(self) -> None:
        if self.job is not None:
            self.job.after()
        elif self in self._pool.idle:
            self._pool.idle.remove(self)
