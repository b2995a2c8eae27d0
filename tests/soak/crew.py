"""A worker of the soak as its parent sees it: a process that is asked, stopped and killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("worker.py")


class GoneError(Exception):
    """The worker has ended before it answered."""


class Member:
    """One worker process. `life` is the number of its engine, 0 while it has none."""

    def __init__(
        self, process: asyncio.subprocess.Process, role: str, loops: str, violation: Callable[[str], None]
    ) -> None:
        self.pid = process.pid
        self.role = role
        self.loops = loops
        self.life = 0
        self.address = ""
        self.host = ""
        self.stopped = False
        self.doomed = False
        self.busy = asyncio.Lock()
        self.greeted = asyncio.get_running_loop().create_future()
        self._process = process
        self._violation = violation
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(
        cls, prefix: list[str], job: tuple[str, ...], loops: str, violation: Callable[[str], None]
    ) -> Member:
        """Start a process. The last word of its `job` is its role."""
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *(sys.executable, str(SCRIPT), *job, loops),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        return cls(process, job[-1], loops, violation)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "violation" in said:
                self._violation(f"process {self.pid} ({self.role}, {self.loops}): {said['violation']}")
            elif "greeting" in said:
                self.greeted.set_result(None)
            else:
                waiting = self._answers.pop(said.pop("number"), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
        await self._process.wait()
        if not self.doomed:
            self._violation(f"process {self.pid} ended by itself, with status {self._process.returncode}")
        for waiting in (*self._answers.values(), self.greeted):
            if not waiting.done():
                waiting.set_exception(GoneError())
                waiting.exception()  # nobody need ask for it

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and return the answer. Raises GoneError."""
        if self._process.returncode is not None or self._reading.done():
            raise GoneError
        self._number += 1
        waiting = self._answers[self._number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "number": self._number, **arguments}).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise GoneError from None
        return await waiting

    def stop(self) -> None:
        """Stop the process."""
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self.stopped and not self.doomed:
            os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    async def kill(self) -> None:
        """Kill the process, stopped or not, and wait for its end."""
        self.doomed = True
        try:
            self._process.kill()
        except ProcessLookupError:
            pass
        await self._reading

    async def leave(self) -> int:
        """Let it end by itself and return its status."""
        self.doomed = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._reading
        return self._process.returncode or 0
