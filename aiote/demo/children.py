"""Child processes, as their parent sees them: they report facts, accept requests, and never outlive the parent.

Every child holds a pipe from its parent as standard input. When the parent closes the pipe, or dies in whatever way,
the child reads the end of the pipe and leaves (`life.leave_with_parent`). Children are in a session of their own, so
that an interrupt at the terminal reaches only the parent, which then ends them in order.

Both sides write lines of JSON objects: the child on its standard output, the parent on that pipe.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc

from aiote.demo.faults import DemoError
from aiote.demo.settings import Settings

__all__ = ["NAMES", "Child", "how_it_ended", "spawn", "started"]

NAMES = {"prefill": "prefiller", "decode": "decoder", "local": "one-process reference"}
_END_S = 10.0
"""Seconds that a child may take to end after an order to end at once."""

# The results of BLAS depend on how it splits a product over threads, and the demo compares runs bit by bit.
_ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
_LAST_WORDS_S = 1.0


class Child:
    """A process that `start` started.

    `ready` is the fact that it reported when it was ready, `draining` tells whether it was ordered to end, and
    `complaint` is the last line that it wrote to standard error, if that is a pipe and `read_errors` runs.
    """

    def __init__(self, role: str, name: str, process: anyio.abc.Process) -> None:
        self.role, self.name = role, name
        self.process = process
        self.ready: dict[str, Any] = {}
        self.draining = False
        self.complaint = ""
        self._errors_read = anyio.Event()

    @classmethod
    async def start(
        cls, role: str, name: str, command: Sequence[str], environment: Mapping[str, str], *, errors: int | None = None
    ) -> Child:
        """Start a child with a single thread for BLAS. Raises DemoError if the command cannot be started."""
        try:
            process = await anyio.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**environment, **_ONE_THREAD},
                start_new_session=True,
            )
        except OSError as error:
            raise DemoError(f"cannot start the {name} ({command[0]}): {error.strerror}") from error
        return cls(role, name, process)

    def facts(self) -> FactStream:
        """Iterate over the facts that the child reports until it ends. Raises DemoError for any other output."""
        return FactStream(self)

    async def ask(self, **facts: Any) -> None:
        """Write a line to the child. If it has ended, the line is dropped; `wait` reports the end."""
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send(json.dumps(facts).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return
        except RuntimeError:  # uvloop 0.20 raises it for a pipe that it has closed
            if self.process.returncode is None:
                raise

    async def read_errors(self) -> None:
        """Read the child's standard error until its end."""
        assert self.process.stderr is not None
        async for line in LineStream(self.process.stderr):
            text = line.decode(errors="replace").rstrip()
            self.complaint = text.removeprefix(f"{self.name}: ") or self.complaint
        self._errors_read.set()

    async def wait(self) -> int:
        """Wait until the child has ended and its errors are read; return its exit status, negative for a signal."""
        code = await self.process.wait()
        # The wait is limited, because a grandchild that inherited the pipe could hold it open for ever.
        with anyio.move_on_after(_LAST_WORDS_S):
            await self._errors_read.wait()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send the child a signal, if it still runs."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def end(self, number: signal.Signals, limit: float = _END_S) -> None:
        """Send the child a signal and wait until it ends. After `limit` seconds, escalate to SIGINT, then SIGKILL."""
        self.draining = True
        if not self.ready:
            # The child is still starting, when an interrupt would show a traceback.
            number = signal.SIGTERM
        steps = [(number, limit), (signal.SIGINT, _END_S), (signal.SIGKILL, _END_S)]
        if number == signal.SIGINT:
            del steps[1]
        for signal_number, patience in steps:
            self.send(signal_number)
            with anyio.move_on_after(patience):
                await self.process.wait()
                return


@asynccontextmanager
async def spawn(role: str, settings: Settings) -> AsyncIterator[Child]:
    """Start a process of the demo, and end it when the block is left for any reason. Raises DemoError."""
    async with started(role, NAMES[role], "aiote.demo.child", role, settings.to_json()) as child:
        yield child


@asynccontextmanager
async def started(role: str, name: str, module: str, *arguments: str) -> AsyncIterator[Child]:
    """Start a module of this package as a process, and end it when the block is left. Raises DemoError."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    child = await Child.start(role, name, command, os.environ, errors=subprocess.PIPE)
    async with child.process, anyio.create_task_group() as readers:
        readers.start_soon(child.read_errors)
        try:
            yield child
        finally:
            with anyio.CancelScope(shield=True):
                await child.end(signal.SIGINT)
            readers.cancel_scope.cancel()


def how_it_ended(code: int) -> str:
    """Describe an exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class LineStream(AsyncIterator[bytes]):
    """The complete lines of a stream. A killed process may leave an incomplete last line, which is dropped."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._rest = b""

    async def __anext__(self) -> bytes:
        while not self._lines:
            *whole, self._rest = (self._rest + await anext(self._stream)).split(b"\n")
            self._lines += whole
        return self._lines.popleft()


class FactStream(AsyncIterator[dict[str, Any]]):
    """The facts that a child reports. Made by `Child.facts`."""

    def __init__(self, child: Child) -> None:
        assert child.process.stdout is not None
        self._child = child
        self._lines = LineStream(child.process.stdout)

    async def __anext__(self) -> dict[str, Any]:
        line = await anext(self._lines)
        try:
            fact = json.loads(line)
        except ValueError:
            fact = None
        if not isinstance(fact, dict):
            raise DemoError(f"the {self._child.name} wrote {line[:80]!r}, which is not a JSON object")
        if "ready" in fact:
            self._child.ready = fact
        return fact
