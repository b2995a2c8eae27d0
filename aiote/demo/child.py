"""Child processes: started with a job on standard input, ended with the run, never outliving it.

Every child holds a pipe from its parent as standard input. When the parent closes it, or dies in whatever way, the
child sees the end of that pipe and leaves; see `leave_with_parent`. Children are in a session of their own, so that an
interrupt at the terminal reaches the parent alone, which then ends them in order.

Numpy's BLAS is held to one thread: its results depend on how it splits a product, and a run compares them bit by bit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from aiote.demo.faults import DemoError
from aiote.demo.settings import Job

__all__ = ["NAMES", "Child", "how_it_ended", "leave_with_parent", "spawn"]

NAMES = {"prefill": "prefiller", "decode": "decoder", "local": "one-process reference"}

_ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
# A child that was told to leave first lets its engine drain; one that does not manage in this time is killed.
_GRACE_S = 5.0
_LAST_WORDS_S = 1.0
_STDERR_LINES = 40


class Child:
    """A running child process."""

    def __init__(self, role: str, process: anyio.abc.Process) -> None:
        self.role = role
        self.name = NAMES[role]
        self.pid = process.pid
        self._process = process
        self._errors: deque[str] = deque(maxlen=_STDERR_LINES)
        self._errors_read = anyio.Event()

    @property
    def code(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def complaint(self) -> str:
        """Return the last line that the child wrote to standard error, or an empty text."""
        return self._errors[-1] if self._errors else ""

    async def wait(self) -> int:
        """Wait until the child has ended and its last words are read; return its exit status."""
        code = await self._process.wait()
        # A grandchild that inherited the pipe could hold it open for ever.
        with anyio.move_on_after(_LAST_WORDS_S):
            await self._errors_read.wait()
        return code

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the child's standard output."""
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            yield line

    async def start(self, job: Job) -> None:
        """Write the job; a child that ended already is left for `wait` to tell."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(job.to_json().encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def collect_errors(self) -> None:
        """Keep the last lines of the child's standard error until it ends."""
        assert self._process.stderr is not None
        async for line in _lines(self._process.stderr):
            if line.strip():
                self._errors.append(line.decode(errors="replace").rstrip())
        self._errors_read.set()

    async def end(self) -> None:
        """Close the child's standard input, wait until it has left, and kill it if it takes too long."""
        assert self._process.stdin is not None
        with anyio.CancelScope(shield=True):
            await self._process.stdin.aclose()
            with anyio.move_on_after(_GRACE_S):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


@asynccontextmanager
async def spawn(role: str, job: Job) -> AsyncIterator[Child]:
    """Start a child with a job, and end it when the block is left, however it is left."""
    command = [sys.executable, "-P", "-m", "aiote.demo.worker", role]
    try:
        process = await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if role == "local" else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
    except OSError as error:
        raise DemoError(f"cannot start the {NAMES[role]} ({command[0]}): {error.strerror}") from error
    child = Child(role, process)
    async with process, anyio.create_task_group() as readers:
        readers.start_soon(child.collect_errors)
        try:
            await child.start(job)
            yield child
        finally:
            await child.end()
            readers.cancel_scope.cancel()


def how_it_ended(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def leave_with_parent(pipe: int) -> None:
    """Make this process get SIGTERM at the end of a pipe, given as a descriptor, and end it where that does not help.

    A thread of its own reads the pipe, so that it works whatever the event loop is doing. It reads the descriptor and
    not `sys.stdin`, whose lock a daemon thread must not hold when the interpreter ends.
    """

    def watch() -> None:
        while os.read(pipe, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


async def _lines(stream: anyio.abc.ByteReceiveStream) -> AsyncIterator[bytes]:
    rest = b""
    async for part in stream:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
