"""Requests that are computed together, step by step: those of a prefill server, and those of a decode server.

A batch is continuous: each step takes some of the requests that are there. They join before the next step and leave
after the one that was their last, so nobody waits for another one's end. A step reads and writes its requests' pages in
a thread; so a request that leaves in the middle of a step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Batch(Generic[T]):
    """The requests that are computed; `run` makes a step while there are any. What a step does is for subclasses.

    `steps` counts, `largest` is the most requests that one step had.
    """

    def __init__(self) -> None:
        self.running: dict[T, None] = {}
        self.steps = self.largest = 0
        self._reading: Sequence[T] = ()
        self._changed = anyio.Event()

    @property
    def waiting(self) -> int:
        """How many the present step does not have."""
        return len(self.running.keys() - self._reading)

    def choose(self) -> Sequence[T]:
        """Return the requests of the next step, of which there is one at least."""
        return tuple(self.running)

    async def compute(self, chosen: Sequence[T]) -> None:
        """Make a step, and take those out of `running` that are done."""
        raise NotImplementedError

    async def run(self) -> None:
        """Compute for ever."""
        while True:
            if not self.running:
                await self._changed.wait()
                continue
            self._reading = self.choose()
            self.steps, self.largest = self.steps + 1, max(self.largest, len(self._reading))
            try:
                await self.compute(self._reading)
            finally:
                self._reading = ()
                self._change()

    def join(self, one: T) -> None:
        """Take a request in, before the next step."""
        self.running[one] = None
        self._change()

    async def leave(self, one: T) -> None:
        """Take a request out, and return when no step reads its pages."""
        self.running.pop(one, None)
        with anyio.CancelScope(shield=True):
            while one in self._reading:
                await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
