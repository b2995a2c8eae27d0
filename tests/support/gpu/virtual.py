"""A GPU in virtual time: what is launched runs in order, each after a pause that is drawn, by the loop of the test.

The native threads that post when a flag is raised have no virtual time. So after each kernel, and after each request
that waits for a flag, they are waited for in real time, until they have looked at all flags: virtual time stands still
meanwhile, and a seed gives the same events each time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aiote
from aiote.moe.posting import Posting
from support.gpu.emulation import Arrays, Emulation

PAUSES_S = (0.0, 0.0, 1e-6, 1e-5, 1e-4)


class VirtualGpu(Arrays):
    """A launcher of `aiote.moe.device`."""

    interface = "__cuda_array_interface__"
    threads = 32

    def __init__(self, emulation: Emulation, rng: random.Random) -> None:
        self._emulation, self._rng = emulation, rng
        self._launched: deque[Callable[[], None]] = deque()
        self._due, self._running = False, False
        self.engines: list[aiote.Engine] = []
        """Whose ranks it computes for."""
        self.failure: BaseException | None = None

    def fetch(self, array: Any) -> NDArray[Any]:
        """Return a copy; what was launched before has run. Within a callback of the stream, as it is there."""
        while self._launched and not self._running:
            self._run()
        return np.array(array.memory)

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        def run() -> None:
            self._emulation.launch(name, 1, threads, shared, arguments)
            # The last one is the flag that it has raised.
            if arguments[-1]:
                for engine in self.engines:
                    settle(engine)

        self.call(run)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the order of what was launched."""
        self._launched.append(function)
        self._schedule()

    def _schedule(self) -> None:
        if self._launched and not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(self._rng.choice(PAUSES_S), self._next)

    def _next(self) -> None:
        self._due = False
        if self._launched:
            self._run()
        self._schedule()

    def _run(self) -> None:
        function, self._running = self._launched.popleft(), True
        try:
            if self.failure is None:
                function()
        except BaseException as error:
            self.failure = error
        finally:
            self._running = False


def settle(engine: aiote.Engine) -> None:
    """Return once the thread of an engine has seen every flag that is raised now."""
    if engine.closed:
        return
    proxy = engine._runtime.core.proxy
    if proxy is None:
        return
    seen = proxy.looks + 2
    while proxy.armed and proxy.looks < seen:
        time.sleep(0)


async def idle(gpu: VirtualGpu) -> None:
    """Wait until all that was launched has run. Raises what failed."""
    while gpu._launched:
        await anyio.sleep(1e-4)
    if gpu.failure is not None:
        raise gpu.failure


def watched(patched: pytest.MonkeyPatch) -> None:
    """Have each request that waits for a flag seen by the thread before time goes on."""
    for name in ("post_when_alone", "post_when", "submit_flag_wait"):
        patched.setattr(Posting, name, _followed(getattr(Posting, name)))


def _followed(submit: Callable[..., Any]) -> Callable[..., Any]:
    def submitted(self: Posting, *given: Any) -> Any:
        made = submit(self, *given)
        settle(self._engine)
        return made

    return submitted
