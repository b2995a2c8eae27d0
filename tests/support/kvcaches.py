"""Decoders and prefillers for tests: ranks on engines of their own, a model whose cache can be checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import numpy as np
from numpy.typing import NDArray

import aiote
from aiote.kvcache import CacheLayout, Decoder, Job, Prefiller, Slot
from aiote.service.endpoint import Endpoint
from engines import opened

Bytes = NDArray[np.uint8]
SMALL = CacheLayout(layers=3, kv_heads=4, head_size=2, page_tokens=4, dtype="uint8")


def head_bytes(layout: CacheLayout, tokens: Sequence[int], layer: int, head: int, part: int) -> Bytes:
    """Return [tokens, head_size] bytes that a layer has for a head of keys (part 0) or values (1)."""
    numbers = np.asarray(tokens, np.int64)
    places = np.arange(len(numbers))
    mixed = numbers * 31 + places * 7 + layer * 59 + head * 101 + part * 151
    return ((mixed[:, None] + np.arange(layout.head_size) * 17) % 251).astype(np.uint8)


def cache_of(layout: CacheLayout, tokens: Sequence[int], layer: int, rank: int, ranks: int) -> Bytes:
    """Return the pages that a rank has in one layer, whole ones, as the layout says: the reference of all tests."""
    pages = layout.pages_for(len(tokens))
    heads = layout.heads(rank, ranks)
    padded = np.zeros((layout.parts, len(heads), pages * layout.page_tokens, layout.head_size), np.uint8)
    for part in range(layout.parts):
        for index, head in enumerate(heads):
            padded[part, index, : len(tokens)] = head_bytes(layout, tokens, layer, head, part)
    split = padded.reshape(layout.parts, -1, pages, layout.page_tokens, layout.head_size)
    if layout.mla:
        return np.ascontiguousarray(split[0, 0])
    order = (2, 0, 1, 3, 4) if layout.order == "HND" else (2, 0, 3, 1, 4)
    return np.ascontiguousarray(split.transpose(order))


def pool_of(layout: CacheLayout, pages: int, ranks: int) -> Bytes:
    return np.zeros((layout.layers, pages, *layout.page_shape(ranks)), np.uint8)


def tail_of(tokens: Sequence[int], nbytes: int) -> bytes:
    return ((np.arange(nbytes) * 13 + int(np.sum(tokens))) % 256).astype(np.uint8).tobytes()


@dataclass
class DecodeRank:
    engine: aiote.Engine
    memory: Bytes
    decoder: Decoder

    def check(self, slot: Slot, rank: int = 0, ranks: int = 1, layers: Sequence[int] | None = None) -> None:
        """Check every byte of a request's pages in some layers, and its tail."""
        layout = self.decoder.layout
        entries = list(slot.pages[: layout.pages_for(len(slot.tokens))])
        for layer in range(layout.layers) if layers is None else layers:
            wanted = cache_of(layout, slot.tokens, layer, rank, ranks)
            found = self.memory[layer, entries]
            last = len(slot.tokens) - (len(entries) - 1) * layout.page_tokens
            if last < layout.page_tokens:
                # What lies behind the last token is anything.
                axis = _token_axis(layout)
                wanted, found = (np.moveaxis(side.copy(), axis, 1) for side in (wanted, found))
                wanted[-1, last:] = found[-1, last:] = 0
            assert np.array_equal(found, wanted), f"layer {layer} of {slot.request_id!r}"


def _token_axis(layout: CacheLayout) -> int:
    return 1 if layout.mla else 3 if layout.order == "HND" else 2


@dataclass
class PrefillRank:
    engine: aiote.Engine
    memory: Bytes
    prefiller: Prefiller
    rank: int = 0
    ranks: int = 1
    free: list[int] = field(default_factory=list)
    tail_bytes: int = 0

    async def compute(self, job: Job, chunk_tokens: int = 8, pause: float = 0.0) -> None:
        """Run a job as a model would: chunk by chunk, layer by layer, in pages of its own."""
        layout = self.prefiller.layout
        count = layout.pages_for(len(job.tokens))
        pages = [self.free.pop() for _ in range(count)]
        try:
            async with job:
                for start in range(0, len(job.tokens), chunk_tokens):
                    stop = min(start + chunk_tokens, len(job.tokens))
                    chunk = job.chunk(start, stop, pages)
                    span = layout.span(start, stop)
                    entries = slice(span.first, span.end)
                    for layer in range(layout.layers):
                        whole = cache_of(layout, job.tokens, layer, self.rank, self.ranks)
                        self.memory[layer, pages[entries]] = whole[entries]
                        await chunk.done(layer)
                        await self.rest(pause)
                if job.wants_tail:
                    await job.tail(tail_of(job.tokens, self.tail_bytes))
        finally:
            # Nothing may be read of them any more, or a later job's bytes go to this one's decoder.
            assert job.in_flight == 0
            self.free += pages

    @staticmethod
    async def rest(pause: float) -> None:
        """Let a layer take its time."""
        if pause > 0:
            await anyio.sleep(pause)

    async def serve(self, **settings: Any) -> None:
        """Compute every job, several at a time."""
        async with anyio.create_task_group() as group:
            async for job in self.prefiller.jobs():
                group.start_soon(self._compute, job, settings)

    async def _compute(self, job: Job, settings: dict[str, Any]) -> None:
        await self.compute(job, **settings)


@asynccontextmanager
async def decode_rank(
    open_engine: Callable[..., Any], layout: CacheLayout = SMALL, pages: int = 32, *, ranks: int = 1, **settings: Any
) -> AsyncIterator[DecodeRank]:
    async with open_engine() as engine:
        memory = pool_of(layout, pages, ranks)
        async with Decoder(engine, layout, memory, ranks=ranks, **settings) as decoder:
            yield DecodeRank(engine, memory, decoder)


@asynccontextmanager
async def prefill_rank(
    open_engine: Callable[..., Any],
    layout: CacheLayout = SMALL,
    pages: int = 64,
    *,
    rank: int = 0,
    ranks: int = 1,
    tail_bytes: int = 0,
    **settings: Any,
) -> AsyncIterator[PrefillRank]:
    async with open_engine() as engine:
        memory = pool_of(layout, pages, ranks)
        async with Prefiller(engine, layout, memory, rank=rank, ranks=ranks, **settings) as prefiller:
            yield PrefillRank(engine, memory, prefiller, rank, ranks, list(range(pages)), tail_bytes)


@dataclass
class Deployment:
    prefill: list[PrefillRank]
    decode: list[DecodeRank]

    @property
    def group(self) -> list[aiote.Address]:
        return [rank.engine.address for rank in self.prefill]


@asynccontextmanager
async def deployed(
    provider: str | Callable[..., Any],
    layout: CacheLayout = SMALL,
    *,
    prefill: int = 1,
    decode: int = 1,
    pages: int = 32,
    tail_bytes: int = 24,
    serving: bool = True,
    **settings: Any,
) -> AsyncIterator[Deployment]:
    """Open a prefill group that serves and a decode group; `settings` are the decoders'."""

    def open_engine() -> Any:
        return opened(provider) if isinstance(provider, str) else provider()

    async with AsyncExitStack() as stack:
        prefillers = [
            await stack.enter_async_context(
                prefill_rank(open_engine, layout, rank=rank, ranks=prefill, tail_bytes=tail_bytes)
            )
            for rank in range(prefill)
        ]
        decoders = [
            await stack.enter_async_context(
                decode_rank(open_engine, layout, pages, rank=rank, ranks=decode, tail_bytes=tail_bytes, **settings)
            )
            for rank in range(decode)
        ]
        async with anyio.create_task_group() as group:
            if serving:
                for rank in prefillers:
                    group.start_soon(rank.serve)
            yield Deployment(prefillers, decoders)
            group.cancel_scope.cancel()


def calls(engine: aiote.Engine) -> int:
    """Return how many calls are under way on an engine, of its own and of its peers."""
    return sum(len(link.calls) + len(link.running) for link in Endpoint.of(engine)._links.values())


async def until_idle(deployment: Deployment) -> None:
    """Check that nothing is left behind."""
    for decoder in (rank.decoder for rank in deployment.decode):
        assert (decoder.requests, decoder.waiting, decoder.free_pages) == (0, 0, decoder.pages)
        assert not len(decoder._context.immediates)
    with anyio.fail_after(20):
        while any(rank.prefiller.live or len(rank.free) < rank.prefiller.pages for rank in deployment.prefill):
            await anyio.sleep(0.001)
        while any(calls(rank.engine) for rank in (*deployment.prefill, *deployment.decode)):
            await anyio.sleep(0.001)
    for rank in deployment.prefill:
        assert not rank.prefiller._gathering
        assert not rank.prefiller._queue
