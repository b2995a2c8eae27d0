"""The prefiller: runs prompts, and writes each layer's pages into the decoder's pool as soon as the layer is done.

It owns a pool of its own, in which a prompt's keys and values are computed, and gives a request's pages back only when
every write from them is over. One prompt is computed at a time, in threads, so that the event loop goes on serving the
engine; writes of a layer run beside the computation of the next one, and of the next prompt.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np

import aiote
from aiote.cli.demo import weights, wire
from aiote.cli.demo.faults import DemoError, leaves
from aiote.cli.demo.mail import Mail
from aiote.cli.demo.model import Model
from aiote.cli.demo.pages import Chunk, PageAllocator, PageLayout, RequestCache, plan
from aiote.cli.demo.settings import Settings
from aiote.cli.demo.waits import PageQueue
from aiote.errors import AioteError

__all__ = ["FlightMeter", "Prefiller"]


class FlightMeter:
    """Adds up the time in which at least one transfer was in flight, on the sender's clock."""

    def __init__(self) -> None:
        self.busy_ns = 0
        self.writes = self.pages = self.bytes = 0
        self._flying = 0
        self._since = 0

    @asynccontextmanager
    async def flight(self, pages: int, size: int) -> AsyncIterator[None]:
        """Count one transfer of so many pages and bytes; one that fails adds its time and nothing else."""
        if not self._flying:
            self._since = time.perf_counter_ns()
        self._flying += 1
        try:
            yield
            self.writes += 1
            self.pages += pages
            self.bytes += size
        finally:
            self._flying -= 1
            if not self._flying:
                self.busy_ns += time.perf_counter_ns() - self._since


class Prefiller:
    """Serves `Fill` requests; `run` is its life."""

    def __init__(self, engine: aiote.Engine, router: aiote.Peer, settings: Settings, model: Model) -> None:
        self._engine, self._router, self._settings, self._model = engine, router, settings, model
        self._layout = settings.layout(model.config)
        self._pool = self._layout.allocate()
        self._logits = np.zeros((settings.concurrency, model.config.vocabulary), dtype=np.float32)
        self._allocator = PageAllocator(self._layout.pages)
        self._pages = PageQueue(self._allocator)
        self._places = PageQueue(PageAllocator(settings.concurrency))
        self._turn = anyio.Lock()
        self._meter = FlightMeter()
        self._mail = Mail(engine)
        self._region = engine.register(self._pool)
        self._logits_region = engine.register(self._logits)

    async def run(self) -> None:
        """Serve until Stop, report once the last request is over, and stay until cancelled."""
        await self._mail.send(
            self._router,
            wire.Hello("prefill", os.getpid(), str(self._engine.address), weights.fingerprint(self._model)),
        )
        try:
            async with anyio.create_task_group() as requests, aclosing(self._mail.receive()) as messages:
                async for peer, message in messages:
                    match message:
                        case wire.Fill():
                            requests.start_soon(self._serve, peer, message)
                        case wire.Stop():
                            break
                        case _:
                            raise wire.WireError(f"a {type(message).__name__} is not for a prefiller")
            await self._report()
            # The engine must outlive the report's way to the router, which then closes this process's standard input.
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self._region.aclose()
                await self._logits_region.aclose()

    async def _report(self) -> None:
        meter, pages = self._meter, self._allocator
        await self._mail.send(
            self._router,
            wire.Report(
                "prefill", pages.held, pages.peak, pages.pages, meter.writes, meter.pages, meter.bytes, meter.busy_ns
            ),
        )

    async def _serve(self, peer: aiote.Peer, fill: wire.Fill) -> None:
        """Serve one request; what fails is that request alone, and the decoder hears it once nothing is in flight."""
        reason = ""
        try:
            count = self._layout.pages_for(len(fill.tokens))
            async with self._places.borrow(1) as places, self._pages.borrow(count) as pages:
                await self._fill(fill, pages, places[0])
        except* (AioteError, DemoError) as group:
            reason = "; ".join(dict.fromkeys(str(cause) for cause in leaves(group)))
        if reason:
            # Not inside the handler: a cancellation there would come out as a group.
            await self._refuse(peer, fill.request, reason)

    async def _refuse(self, peer: aiote.Peer, request: int, reason: str) -> None:
        try:
            await self._mail.send(peer, wire.Refused(request, reason))
        except AioteError:
            # The decoder is gone, and with it whoever wanted to know; the router sees it end.
            return

    async def _fill(self, fill: wire.Fill, pages: list[int], place: int) -> None:
        """Run the prompt; leaves only when every write is over."""
        remote = self._engine.attach(fill.pool)
        config, layout = self._model.config, self._layout
        target = PageLayout(config.layers, fill.pool_pages, config.kv_heads, layout.page_tokens, config.head_size)
        if len(fill.pages) != len(pages):
            raise wire.WireError(f"{len(fill.pages)} pages for a prompt of {len(pages)}")
        cache = RequestCache(self._pool, pages)
        async with anyio.create_task_group() as writes, self._turn:
            for chunk in plan(len(fill.tokens), self._settings.chunk_tokens, layout.page_tokens):
                tokens = fill.tokens[chunk.start : chunk.stop]
                span = await anyio.to_thread.run_sync(self._model.begin, tokens, chunk.start)
                for layer in range(config.layers):
                    await anyio.to_thread.run_sync(self._model.layer, layer, span, cache)
                    writes.start_soon(
                        self._write_pages,
                        fill,
                        self._pages_of(self._region, layout, layer, chunk, pages),
                        self._pages_of(remote, target, layer, chunk, fill.pages),
                        chunk.pages,
                    )
            self._logits[place] = self._model.logits(span)
            writes.start_soon(self._write_logits, fill, place)

    @staticmethod
    def _pages_of(
        region: aiote.Region | aiote.RemoteRegion, layout: PageLayout, layer: int, chunk: Chunk, table: Sequence[int]
    ) -> aiote.Pages:
        indices, offset = layout.place(layer, chunk, table)
        return aiote.Pages(region, indices, layout.page_bytes, layout.page_bytes, offset)

    async def _write_pages(self, fill: wire.Fill, source: aiote.Pages, target: aiote.Pages, count: int) -> None:
        async with self._meter.flight(count, count * self._layout.page_bytes):
            await self._engine.write_pages(source, target, fill.imm)
        await self._mail.send(self._router, wire.Progress(fill.request, count))

    async def _write_logits(self, fill: wire.Fill, place: int) -> None:
        size = self._logits[place].nbytes
        remote = self._engine.attach(fill.logits)[fill.logits_offset : fill.logits_offset + size]
        async with self._meter.flight(0, size):
            await self._engine.write_imm(self._logits_region[place * size : (place + 1) * size], remote, fill.imm)
