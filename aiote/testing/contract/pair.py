"""A pair of connected engines, on which every check of the contract runs, and the check itself as a value."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

import aiote

from .far import FENCE, Ask, Broken, FarSide, random_bytes
from .memory import ArrayMemory, HostMemory

__all__ = ["Check", "EnginePair", "RailPull", "expect", "joined"]


@dataclass
class EnginePair:
    """Two connected engines: the first one, and the questions to the second one and its address; `times` more rounds
    than usual; the memory to move; and how a rail of the first engine is lost and comes back, if it may be.
    """

    left: aiote.Engine
    far: Ask
    address: str
    memory: ArrayMemory
    times: int = 1
    pull: RailPull | None = None
    figures: dict[str, float] = field(default_factory=dict)

    async def target(self, size: int) -> tuple[int, aiote.RemoteRegion]:
        """Return the number of zeros that the second engine registered, and the region as the first attaches it."""
        number, descriptor = await self.far("target", size)
        return number, self.left.attach(descriptor)

    def source(self, size: int, seed: int = 1) -> tuple[Any, aiote.Region]:
        """Return random bytes of a seed for the first engine, and their region."""
        data = random_bytes(size, seed)
        return data, self.left.register(self.memory.filled(data))

    async def content(self, number: int, size: int) -> Any:
        """Return the first bytes of the second engine's memory, as an array."""
        return np.frombuffer(await self.far("content", number, size), np.uint8)

    async def settle(self, times: int = 5) -> None:
        """Exchange immediates `times` times. An effect that has not occurred by then is taken not to occur."""
        with self.left.counter(FENCE) as here:
            for _ in range(times):
                await self.left.write_imm(None, self.address, FENCE)
                await self.far("fence", str(self.left.address))
                await here.wait(1)


def expect(condition: object, text: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(text)


RailPull: TypeAlias = Callable[[EnginePair], AbstractAsyncContextManager[str]]
"""Within the context a rail of the pair is lost, and afterwards it comes back; the text says how it was lost."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name in the report, the claim in one sentence, the function that tests it, and how many rails each
    engine needs. The function raises Broken for a broken promise, and returns what it observed.
    """

    name: str
    claim: str
    run: Callable[[EnginePair], Awaitable[str]]
    rails: int = 1


@contextlib.asynccontextmanager
async def joined(
    left: aiote.Engine,
    right: aiote.Engine,
    *,
    memory: ArrayMemory | None = None,
    child: list[str] | None = None,
    pull: RailPull | None = None,
    times: int = 1,
) -> AsyncIterator[EnginePair]:
    """Connect two engines of this process for the checks. The caller closes the engines.

    `child` is the command of a process with a third engine (`child_command`); without it the checks that kill or stop
    a process raise NotHere. Without `pull` the check that loses a rail does.
    """
    side = FarSide(right, memory or HostMemory(), child)
    try:
        await left.connect(right.address)
        yield EnginePair(left, side.ask, str(right.address), memory or HostMemory(), times, pull)
    finally:
        await side.end()
