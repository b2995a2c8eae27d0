"""A worker of the soak as its parent sees it: a process that is asked, stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from findings import Findings

SCRIPT = Path(__file__).with_name("worker.py")


class GoneError(Exception):
    """The worker has ended before it answered."""


class Member:
    """One worker process. `life` is the number of its engine, 0 while it has none."""

    def __init__(self, process: asyncio.subprocess.Process, role: str, loop: str, findings: Findings) -> None:
        self.pid = process.pid
        self.role = role
        self.loop = loop
        self.life = 0
        self.address = ""
        self.host = ""
        self.stopped = False
        self.doomed = False
        self.busy = asyncio.Lock()
        self.greeted = asyncio.get_running_loop().create_future()
        self._process = process
        self._findings = findings
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, prefix: list[str], job: tuple[str, ...], loop: str, findings: Findings) -> Member:
        """Start a process. The last word of its `job` is its role.

        A session of its own keeps a terminal's Ctrl-C from it: the soak alone ends its workers.
        """
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *(sys.executable, str(SCRIPT), *job, loop),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            start_new_session=True,
        )
        return cls(process, job[-1], loop, findings)

    async def _read(self) -> None:
        try:
            await self._listen()
        except Exception as error:
            self._findings.unexpected(error, f"what process {self.pid} said")
        for waiting in (*self._answers.values(), self.greeted):
            if not waiting.done():
                waiting.set_exception(GoneError())
                waiting.exception()  # nobody need ask for it

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        name = f"process {self.pid} ({self.role}, {self.loop})"
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "violation" in said:
                self._findings.violation(f"{name}: {said['violation']}")
            elif "failure" in said:
                self._findings.failure(f"{name}: {said['failure']}")
            elif "greeting" in said:
                self.greeted.set_result(None)
            else:
                waiting = self._answers.pop(said.pop("number"), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
        status = await self._process.wait()
        if self.doomed:
            return
        if status > 0 and not self.greeted.done():
            self._findings.failure(f"{name} did not start: it ended with status {status}")
        else:
            self._findings.violation(f"{name} ended by itself, with status {status}")

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
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self.stopped and not self.doomed:
            self._signal(signal.SIGCONT)
        self.stopped = False

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process, stopped or not, and wait for its end."""
        self.doomed = True
        self._signal(signal.SIGKILL)
        await self._reading
        await self._process.wait()

    async def leave(self) -> int:
        """Let it end by itself and return its status."""
        self.doomed = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.shield(self._reading)
        return await self._process.wait()
