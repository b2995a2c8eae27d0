"""Child processes, as their parent sees them: they say facts, may be asked things, and never outlive it.

Every child holds a pipe from its parent as standard input. When the parent closes it, or dies in whatever way, the
child sees the end of that pipe and leaves (`life.leave_with_parent`). Children are in a session of their own, so that
an interrupt at the terminal reaches the parent alone, which then ends them in order.

What both say is lines of JSON objects: the child's on its standard output, the parent's on that pipe.
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
"""What a child that is to end at once may take for that."""

# The results of BLAS depend on how it splits a product over threads, and runs are compared bit by bit.
_ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
_LAST_WORDS_S = 1.0


class Child:
    """A process that was started here, by `start`.

    `ready` is what it said when it was, `draining` whether it was told to end, and `complaint` the last line that it
    wrote to standard error, where that is piped and `read_errors` runs.
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
        """Start one, with a single thread for BLAS. Raises DemoError where there is no such command."""
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
        """Iterate over what it says until it ends. Raises DemoError for what is no fact."""
        return FactStream(self)

    async def ask(self, **facts: Any) -> None:
        """Write a line to it; one that has ended is left for `wait` to tell."""
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send(json.dumps(facts).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def read_errors(self) -> None:
        """Read its standard error until it ends."""
        assert self.process.stderr is not None
        async for line in LineStream(self.process.stderr):
            text = line.decode(errors="replace").rstrip()
            self.complaint = text.removeprefix(f"{self.name}: ") or self.complaint
        self._errors_read.set()

    async def wait(self) -> int:
        """Wait until it has ended and its last words are read; return its exit status, negative for a signal."""
        code = await self.process.wait()
        # A grandchild that inherited the pipe could hold it open for ever.
        with anyio.move_on_after(_LAST_WORDS_S):
            await self._errors_read.wait()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def end(self, number: signal.Signals, limit: float = _END_S) -> None:
        """Send a signal, and wait until it has ended, which is helped after a while."""
        self.draining = True
        if not self.ready:
            # It is starting, where an interrupt would be shown as a traceback.
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
    """Start a process of the demo, and end it when the block is left, however it is left. Raises DemoError."""
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
    """Return an exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class LineStream(AsyncIterator[bytes]):
    """The whole lines of a stream: one that was killed may leave a part of its last one."""

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
    """What a child says. Made by `Child.facts`."""

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
            raise DemoError(f"the {self._child.name} wrote {line[:80]!r}, which is no JSON object")
        if "ready" in fact:
            self._child.ready = fact
        return fact
