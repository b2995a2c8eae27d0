"""Engines in processes of their own that a test stops, wakes and kills; see `child_engine` for what they can do.

A pytest plugin: its fixtures start children, and load the libraries of rails before a test is timed.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiote
from support.process.modules import command

SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 60


class ChildError(Exception):
    """The child answered with an error of aiote's; the text is its."""


class Child:
    """One child process with at most one engine. Made outside of a loop, for starting a process blocks."""

    def __init__(self, *prefix: str, module: str = "support.process.child_engine") -> None:
        """Start it; `prefix` is a command that runs another in its own process, as `nsenter`."""
        self._process = subprocess.Popen([*prefix, *command(module)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._unread = b""
        self._greeted = False
        self.pid = self._process.pid
        self.address = aiote.Address("unknown", 1)
        self.descriptor = b""

    async def answer(self) -> dict[str, Any]:
        """Return the answer to a command that was told. Raises ChildError."""
        answer = await self._line()
        if "error" in answer:
            raise ChildError(f"{answer['error']}: {answer['text']}")
        return answer

    async def _line(self) -> dict[str, Any]:
        while b"\n" not in self._unread:
            await anyio.wait_readable(self._output)
            data = os.read(self._output, 65536)
            assert data, f"child {self.pid} has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and return the answer. Raises ChildError."""
        if not self._greeted:
            await self._line()
            self._greeted = True
        self.tell(do, **arguments)
        return await self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command; its answer, if anybody wants it, is the next of `answer`."""
        os.write(self._input, json.dumps({"do": do, **arguments}).encode() + b"\n")

    def hold_until_answer(self) -> None:
        """Hold the calling loop until the child has answered a command that was told."""
        assert select.select([self._output], [], [], PATIENCE_S)[0], f"child {self.pid} does not answer"

    async def open(self, provider: str, size: int = 4096, rails: list[str] | None = None, **config: Any) -> None:
        """Open the child's engine; bytes in the config travel as hexadecimal text."""
        settings = {name: value.hex() if isinstance(value, bytes) else value for name, value in config.items()}
        answer = await self.ask("open", provider=provider, rails=rails, config=settings, size=size)
        self.address = aiote.Address.parse(answer["address"])
        self.descriptor = bytes.fromhex(answer["descriptor"])

    async def stop(self) -> None:
        """Stop the process and wait until it stands."""
        os.kill(self.pid, signal.SIGSTOP)
        await self._state("T")

    async def gone(self) -> None:
        """Wait until the kernel has closed all that a killed process had.

        Its first thread is a zombie before the others have ended; its pidfd tells of the last one.
        """
        whole = os.pidfd_open(self.pid)
        try:
            await anyio.wait_readable(whole)
        finally:
            os.close(whole)

    async def _state(self, letter: str) -> None:
        while (state := Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]) != letter:
            assert state != "Z", f"child {self.pid} has ended by itself: what it wrote to stderr says why"
            await anyio.sleep(0.001)

    def resume(self) -> None:
        """Let a stopped process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, stopped or not."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process if it lives, and remove what the shm provider leaves of a dead one."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        for pattern in (f"aiote-{self.pid}-*", f"{self.pid}:*"):
            for left in SHARED_MEMORY.glob(pattern):
                left.unlink(missing_ok=True)


@pytest.fixture
def child() -> Iterator[Callable[[], Child]]:
    """Start child processes; whatever became of them, they are killed in the end."""
    started: list[Child] = []

    def start() -> Child:
        started.append(Child())
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="session")
def library_loaded() -> None:
    """Open both providers once: 1.17 takes half a second to look for its providers, which would count as blocking."""

    async def once() -> None:
        for provider in ("tcp", "shm"):
            async with aiote.open_engine(provider):
                pass

    asyncio.run(once())
