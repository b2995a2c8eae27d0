"""Several engines in one process of their own, connected to an engine of the test, that do nothing.

Run as a script: reads a provider and an address from a line of its input, connects, says so, and ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

import aiote
from support.process.modules import command

SHARED_MEMORY = Path("/dev/shm")


class IdleEngines:
    """The other end, in the test. Made outside of a loop, for starting a process blocks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            command("support.engines.idle_engines"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()

    async def join(self, provider: str, address: aiote.Address, count: int) -> None:
        """Have so many engines connect; returns when they are."""
        os.write(self._input, f"{provider} {address} {count}\n".encode())
        said = b""
        while not said.endswith(b"\n"):
            await anyio.wait_readable(self._output)
            data = os.read(self._output, 100)
            assert data, "the process has ended"
            said += data

    def kill(self) -> None:
        """Kill all of them at once."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process if it lives, and remove what the shm provider leaves of a dead one."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        for pattern in (f"aiote-{self._process.pid}-*", f"{self._process.pid}:*"):
            for left in SHARED_MEMORY.glob(pattern):
                left.unlink(missing_ok=True)


async def be(provider: str, address: str, count: int) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(count):
            engine = await stack.enter_async_context(aiote.open_engine(provider))
            await engine.connect(address)
        print("connected", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    where, whom, number = sys.stdin.readline().split()
    asyncio.run(be(where, whom, int(number)))
