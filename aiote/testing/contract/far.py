"""The second side of the contract's checks: an engine with memory that does what the first side asks.

The first side asks by name, with plain arguments, and gets plain answers. So the second side can be in the same process
or on another machine; `aiote.cli.prove_wire` carries the questions there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import numpy as np

import aiote

from .memory import ArrayMemory

__all__ = ["FENCE", "Ask", "Broken", "FarSide", "NotHere", "child_command", "random_bytes"]

FENCE = 0x5E771ED
"""The immediate of the exchanges after which an effect that did not occur is taken not to occur."""
Ask = Callable[..., Awaitable[Any]]


class Broken(Exception):
    """A promise was not kept; the text says which."""


class NotHere(Exception):
    """A check cannot be run here; the text says why."""


class FarSide:
    """The second engine, its memory, and the child processes of its machine. `child` starts one; None: it cannot.

    `ask` runs a question of COMMANDS. `end` ends the child processes; the engine's owner closes the engine.
    """

    def __init__(self, engine: aiote.Engine, memory: ArrayMemory, child: list[str] | None = None) -> None:
        self._engine = engine
        self._memory = memory
        self._command = child
        self._arrays: list[tuple[Any, aiote.Region]] = []
        self._leases: list[aiote.Lease] = []
        self._counters: dict[int, aiote.Counter] = {}
        self._child: anyio.abc.Process | None = None
        self._killed = False

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Run one question and return its answer. Raises NotHere for an unknown one, else what the engine raises."""
        if name not in COMMANDS:
            raise NotHere(f"the second side does not know {name!r}")
        return await COMMANDS[name](self, *arguments)

    async def end(self) -> None:
        """Kill the child process, if one runs."""
        if self._child is not None:
            # Not after another kill: asyncio then reaps the process by itself, and its own wait misses the status.
            if not self._killed:
                with contextlib.suppress(ProcessLookupError):
                    self._child.kill()
            await self._child.aclose()
            self._child = None

    async def target(self, size: int) -> tuple[int, bytes]:
        """Register zeros; return their number and their descriptor."""
        return self._register(np.zeros(size, np.uint8))

    async def source(self, size: int, seed: int) -> tuple[int, bytes]:
        """Register the random bytes of a seed; return their number and their descriptor."""
        return self._register(random_bytes(size, seed))

    def _register(self, data: Any) -> tuple[int, bytes]:
        array = self._memory.filled(data)
        region = self._engine.register(array)
        self._arrays.append((array, region))
        return len(self._arrays) - 1, bytes(region.descriptor)

    async def release(self, number: int) -> None:
        """Give registered memory back."""
        await self._arrays[number][1].aclose()

    async def clear(self, number: int) -> None:
        """Fill memory with zeros."""
        array = self._arrays[number][0]
        self._memory.fill(array, np.zeros(array.shape[0], np.uint8))

    async def content(self, number: int, size: int) -> bytes:
        """Return the first bytes of memory."""
        data: bytes = self._memory.bytes_of(self._arrays[number][0])[:size].tobytes()
        return data

    async def written(self, number: int) -> bool:
        """Tell whether memory contains anything but zeros."""
        return bool(self._memory.bytes_of(self._arrays[number][0]).any())

    async def counted(self, immediate: int, count: int, number: int, size: int) -> bytes:
        """Wait for counts, then return the bytes that memory contains at that moment."""
        await self._counter(immediate).wait(count)
        return await self.content(number, size)

    async def wait(self, immediate: int, count: int) -> None:
        """Wait for counts."""
        await self._counter(immediate).wait(count)

    async def left_over(self, immediate: int) -> int:
        """Stop counting an immediate; return the counts that were not waited for."""
        counter = self._counter(immediate)
        value = counter.value
        counter.close()
        del self._counters[immediate]
        return int(value)

    def _counter(self, immediate: int) -> aiote.Counter:
        if immediate not in self._counters:
            self._counters[immediate] = self._engine.counter(immediate)
        return self._counters[immediate]

    async def fence(self, address: str) -> None:
        """Wait for one immediate, and write one to the first side."""
        await self._counter(FENCE).wait(1)
        await self._engine.write_imm(None, address, FENCE)

    async def send(self, address: str, data: bytes) -> None:
        """Send a message to the first side."""
        await self._engine.send(address, data)

    async def receive(self) -> bytes:
        """Return the next message."""
        return bytes((await self._engine.recv()).data)

    async def lease(self, number: int, address: str) -> tuple[int, bytes]:
        """Lease memory to the first side; return the number of the lease and its descriptor."""
        lease = self._arrays[number][1].lease(slice(None), address)
        self._leases.append(lease)
        return len(self._leases) - 1, bytes(lease.descriptor)

    async def revoke(self, number: int) -> None:
        """Revoke a lease."""
        await self._leases[number].revoke()

    async def start(self) -> bytes:
        """Start a process with an engine on this machine; return the descriptor of its memory."""
        if self._command is None:
            raise NotHere("no third engine in a process of its own: the simulated network lies in one process")
        self._child, self._killed = await anyio.open_process(self._command, stderr=None), False
        return bytes.fromhex(await _line(self._child))

    async def signal(self, name: str) -> float:
        """Send SIGKILL, SIGSTOP or SIGCONT to that process; return the time by this side's clock."""
        assert self._child is not None
        self._killed = name == "kill"
        self._child.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "resume": signal.SIGCONT}[name])
        return time.monotonic()

    async def cpu(self) -> float:
        """Return the CPU time of this side's process, in seconds."""
        return time.process_time()


COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    each.__name__: each
    for each in (
        FarSide.target,
        FarSide.source,
        FarSide.release,
        FarSide.clear,
        FarSide.content,
        FarSide.written,
        FarSide.counted,
        FarSide.wait,
        FarSide.left_over,
        FarSide.fence,
        FarSide.send,
        FarSide.receive,
        FarSide.lease,
        FarSide.revoke,
        FarSide.start,
        FarSide.signal,
        FarSide.cpu,
    )
}
"""The questions, by their names: another machine can ask nothing else."""


def random_bytes(size: int, seed: int) -> Any:
    """Return the bytes of a seed, none of them zero: both sides draw the same."""
    return np.random.default_rng(seed).integers(1, 256, size, np.uint8)


def child_command(provider: str, rails: list[str] | None, host: str | None = None) -> list[str]:
    """Return the command that starts a process with an engine like the second one, listening at `host`."""
    return [sys.executable, "-P", "-m", f"{__package__}.child", json.dumps([provider, rails, host])]


async def _line(process: anyio.abc.Process) -> str:
    """Return the first line of a process's output. Raises Broken if the process ends before it."""
    said = b""
    assert process.stdout is not None
    async for piece in process.stdout:
        said += piece
        if b"\n" in said:
            return said.decode()
    raise Broken("the second side's process ended before it was ready")
