"""Every verb toward one peer at once, each again and again until it fails; for tests that fail the peer meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiote

COUNTED = 41
"""The immediate of the mix's own writes."""
ECHOED = 42
"""The immediate that is waited for: the peer's mix writes it back where that is wanted."""


class Mix:
    """The awaits under way from one engine toward a peer, and with what each of them ended."""

    def __init__(self, engine: aiote.Engine, peer: aiote.Peer, descriptor: bytes) -> None:
        self.ended: dict[str, str] = {}
        self._engine = engine
        self._peer = peer
        remote = engine.attach(descriptor)
        local = engine.register(bytearray(b"\1" * remote.nbytes))
        back = engine.register(bytearray(remote.nbytes))
        self._regions = [local, back]
        pages = range(remote.nbytes // 4096)
        self.verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "write": lambda: engine.write(local, remote),
            "write_imm": lambda: engine.write_imm(local, remote, COUNTED),
            "alone": lambda: engine.write_imm(None, peer, COUNTED),
            "write_pages": lambda: engine.write_pages(
                aiote.Pages(local, pages, 4096), aiote.Pages(remote, pages, 4096), COUNTED
            ),
            "read": lambda: engine.read(remote, back),
            "send": lambda: engine.send(peer, bytes(8000)),
            "wait": self._wait,
        }
        self.done = dict.fromkeys(self.verbs, 0)
        self._tasks = [asyncio.ensure_future(self._keep(name, verb)) for name, verb in self.verbs.items()]

    async def _wait(self) -> None:
        """Wait for a count of the peer's; no death ends such a wait, so the peer's end is awaited beside it."""
        peer = self._peer
        with self._engine.counter(ECHOED) as counter:
            waits = [asyncio.ensure_future(counter.wait(1)), asyncio.ensure_future(peer.wait_closed())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if waits[1].done():
                    raise aiote.PeerError(str(peer.address), peer.reason, operation="wait")
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def _keep(self, name: str, verb: Callable[[], Awaitable[object]]) -> None:
        try:
            while True:
                await verb()
                self.done[name] += 1
                await asyncio.sleep(0)
        except aiote.AioteError as error:
            self.ended[name] = f"{type(error).__name__}: {error}"

    async def over(self) -> dict[str, str]:
        """Wait until every await has ended, and let go of the memory; return what each ended with."""
        await asyncio.gather(*self._tasks)
        await self._let_go()
        return self.ended

    async def cancel(self) -> None:
        """Cancel every await."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._let_go()

    async def _let_go(self) -> None:
        for region in self._regions:
            await region.aclose()
