"""The decoder: owns the pages that others write into, knows how many writes make a whole, and generates from there.

It picks pages and an immediate for a request, asks the prefiller to fill them, and awaits the count. It gives pages
back when the answer is complete, or when the prefiller said that it writes no more, or when the engine said that the
prefiller is gone, which it does only once nothing more can arrive from there.
"""

from __future__ import annotations

import os

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

import aiote
from aiote.cli.demo import tokens, weights, wire
from aiote.cli.demo.faults import DemoError, leaves
from aiote.cli.demo.mail import Mail
from aiote.cli.demo.model import Model
from aiote.cli.demo.pages import PageAllocator, RequestCache, expected_counts
from aiote.cli.demo.settings import Settings
from aiote.cli.demo.waits import PageQueue, first_of
from aiote.errors import AioteError

__all__ = ["Decoder"]

# Where the free pages of a pool that has served for a while lie: anywhere. Any seed does.
_SCATTER = 20


class _Arrival:
    """A prefill that is awaited; `end` is for a reason why it will not complete."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.reason = ""

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.ended.set()


class Decoder:
    """Serves `Generate` requests; `run` is its life."""

    def __init__(self, engine: aiote.Engine, router: aiote.Peer, settings: Settings, model: Model) -> None:
        self._engine, self._router, self._settings, self._model = engine, router, settings, model
        self._layout = settings.layout(model.config)
        self._pool = self._layout.allocate()
        self._logits = np.zeros((settings.concurrency, model.config.vocabulary), dtype=np.float32)
        self._allocator = PageAllocator(self._layout.pages, seed=_SCATTER)
        self._pages = PageQueue(self._allocator)
        self._places = PageQueue(PageAllocator(settings.concurrency))
        self._turn = anyio.Lock()
        self._arrivals: dict[int, _Arrival] = {}
        self._prefiller: aiote.Peer | None = None
        self._met = anyio.Event()
        self._lost = ""
        self._mail = Mail(engine)
        self._region = engine.register(self._pool)
        self._logits_region = engine.register(self._logits)

    async def run(self) -> None:
        """Serve until cancelled; at Stop, report."""
        await self._mail.send(
            self._router,
            wire.Hello("decode", os.getpid(), str(self._engine.address), weights.fingerprint(self._model)),
        )
        try:
            async with anyio.create_task_group() as requests:
                async for _, message in self._mail.receive():
                    self._take(message, requests)
        finally:
            with anyio.CancelScope(shield=True):
                await self._region.aclose()
                await self._logits_region.aclose()

    def _take(self, message: wire.Message, requests: anyio.abc.TaskGroup) -> None:
        match message:
            case wire.Introduce():
                requests.start_soon(self._meet, message)
            case wire.Generate():
                requests.start_soon(self._serve, message)
            case wire.Refused():
                if message.request in self._arrivals:
                    self._arrivals[message.request].end(message.reason)
            case wire.Stop():
                requests.start_soon(self._report)
            case _:
                raise wire.WireError(f"a {type(message).__name__} is not for a decoder")

    async def _report(self) -> None:
        pages = self._allocator
        await self._mail.send(self._router, wire.Report("decode", pages.held, pages.peak, pages.pages, 0, 0, 0, 0))

    async def _meet(self, introduced: wire.Introduce) -> None:
        """Connect to the prefiller, and end every arrival when it is lost."""
        try:
            self._prefiller = await self._engine.connect(aiote.Address.parse(introduced.address))
            self._met.set()
            self._lost = f"the prefiller was lost: {await self._prefiller.closed()}"
        except AioteError as error:
            self._lost = f"the prefiller cannot be reached: {error}"
            self._met.set()
        for arrival in self._arrivals.values():
            arrival.end(self._lost)

    async def _serve(self, asked: wire.Generate) -> None:
        """Serve one request, and tell the router how it ended, after its pages are free again."""
        outcome: wire.Message
        count = self._layout.pages_for(len(asked.tokens) + self._settings.new_tokens - 1)
        try:
            async with self._places.borrow(1) as places, self._pages.borrow(count) as pages:
                await self._prefill(asked, pages, places[0])
                cache = RequestCache(self._pool, pages)
                length = await self._generate(asked, cache, places[0])
                checksum = await anyio.to_thread.run_sync(cache.checksum, len(asked.tokens))
            outcome = wire.Done(asked.request, length, checksum)
        except* (AioteError, DemoError) as group:
            reason = "; ".join(dict.fromkeys(str(cause) for cause in leaves(group)))
            outcome = wire.Failed(asked.request, reason)
        await self._mail.send(self._router, outcome)

    async def _prefill(self, asked: wire.Generate, pages: list[int], place: int) -> None:
        """Have the pages of the prompt filled and the logits of its last position put in their place."""
        await self._met.wait()
        if self._prefiller is None or self._lost:
            raise DemoError(self._lost)
        arrival = self._arrivals[asked.request] = _Arrival()
        prompt_pages = tuple(pages[: self._layout.pages_for(len(asked.tokens))])
        counts = expected_counts(self._layout.layers, len(asked.tokens), self._layout.page_tokens)
        try:
            with self._engine.counter() as counter:
                fill = wire.Fill(
                    request=asked.request,
                    imm=counter.imm,
                    tokens=asked.tokens,
                    pages=prompt_pages,
                    pool=self._region.descriptor,
                    pool_pages=self._layout.pages,
                    logits=self._logits_region.descriptor,
                    logits_offset=place * self._logits[place].nbytes,
                )
                await self._mail.send(self._prefiller, fill)
                await first_of(lambda: counter.wait(counts), arrival.ended.wait)
        finally:
            del self._arrivals[asked.request]
        if arrival.reason:
            raise DemoError(arrival.reason)

    async def _generate(self, asked: wire.Generate, cache: RequestCache, place: int) -> int:
        """Stream the answer to the router and return its length. Steps of several requests take turns."""
        logits = self._logits[place].copy()
        last = self._settings.new_tokens - 1
        for index in range(self._settings.new_tokens):
            token = int(np.argmax(logits))
            await self._mail.send(self._router, wire.Token(asked.request, index, token))
            if token == tokens.END or index == last:
                return index + 1
            async with self._turn:
                logits = await anyio.to_thread.run_sync(self._model.step, token, len(asked.tokens) + index, cache)
        return self._settings.new_tokens
