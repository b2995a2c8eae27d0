"""Prefill and decode server, each alone on an engine of its own, against a partner that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aiote
from aiote.demo import DecodeServer, PrefillServer, Settings, one_process, tokens, weights
from aiote.demo.request_cache import RequestCache
from aiote.kvcache import Decoder, Job, Prefiller, PrefillError
from engines import PATIENCE_S

pytestmark = pytest.mark.libfabric

PROMPT = tokens.encode(b"Once, in a storm, the lamp at the far end went out.")
SETTINGS = Settings("tcp", 2, 1, None, 4, 16, 5, 1, 0).with_pool_for(len(PROMPT))
MODEL = weights.seeded(weights.seeded_config(2), 1)
LAYOUT = SETTINGS.layout(MODEL.config)
NEEDED = LAYOUT.pages_for(len(PROMPT))
TAIL = 4 * MODEL.config.vocabulary


@asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[aiote.Engine, aiote.Engine]]:
    """Open two engines: the test's and the server's."""
    with anyio.fail_after(PATIENCE_S):
        async with aiote.open_engine("tcp") as mine, aiote.open_engine("tcp") as its:
            yield mine, its


def computed() -> tuple[np.ndarray, np.ndarray]:
    """Return the cache and the logits of the prompt, in pages from 0 on."""
    memory = SETTINGS.memory(MODEL.config)
    return memory, MODEL.prefill(PROMPT, RequestCache(memory, range(NEEDED)), SETTINGS.chunk_tokens)


class Told:
    """What a prefill server says of its progress: pages by request."""

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}
        self.first = anyio.Event()

    def __call__(self, job: Job, pages: int) -> None:
        self.pages[job.request_id] = self.pages.get(job.request_id, 0) + pages
        self.first.set()


@asynccontextmanager
async def prefill_server(told: Told, memory: np.ndarray) -> AsyncIterator[tuple[PrefillServer, Decoder]]:
    """Run a prefill server, and a decoder over `memory` beside it; it must hold no page at the end."""
    async with two_engines() as (mine, its):
        server = PrefillServer(its, SETTINGS, MODEL, written=told)
        async with server.prefiller:
            async with anyio.create_task_group() as group:
                group.start_soon(server.serve)
                async with Decoder(mine, LAYOUT, memory, tail_bytes=TAIL) as decoder:
                    yield server, decoder
                await server.prefiller.drain()
            assert (server.pages.used, server.pages.pages) == (0, SETTINGS.pool_pages)


async def test_a_prefill_server_fills_the_pages_it_was_given():
    """Those of two requests: it has pages for one at a time, and the other waits."""
    expected, logits = await anyio.to_thread.run_sync(computed)
    memory = np.zeros((2, 2 * NEEDED + 3, *LAYOUT.page_shape(1)), np.float32)
    told = Told()
    async with prefill_server(told, memory) as (server, decoder):

        async def have_filled(request: bytes) -> None:
            async with decoder.request(PROMPT, [server.prefiller.engine.address], request_id=request) as slot:
                await slot.arrived()
                assert np.array_equal(memory[:, slot.pages], expected[:, :NEEDED])
                assert slot.tail == logits.tobytes()

        async with anyio.create_task_group() as group:
            group.start_soon(have_filled, b"7")
            group.start_soon(have_filled, b"1")
        assert not memory[:, 2 * NEEDED :].any()
    assert told.pages == {b"7": 2 * NEEDED, b"1": 2 * NEEDED}
    # The second one's whole chunks were kept from the first, but for the last, which gives the logits.
    assert (server.done, server.cached_tokens) == (2, (len(PROMPT) - 1) // 16 * 16)


async def test_a_prefill_server_goes_on_after_a_request_that_was_cancelled():
    told = Told()
    async with prefill_server(told, SETTINGS.memory(MODEL.config)) as (server, decoder):
        address = server.prefiller.engine.address
        async with decoder.request(PROMPT, [address]):
            await told.first.wait()
        async with decoder.request(PROMPT, [address]) as slot:
            await slot.arrived()


async def test_a_prompt_that_never_fits_is_refused():
    """A prefiller's cache may be smaller than its decoder's."""
    memory = np.zeros((2, 3 * SETTINGS.pool_pages, *LAYOUT.page_shape(1)), np.float32)
    async with prefill_server(Told(), memory) as (server, decoder):
        most = SETTINGS.pool_pages * SETTINGS.page_tokens
        async with decoder.request([1] * (most + 1), [server.prefiller.engine.address]) as slot:
            with pytest.raises(PrefillError, match=f"a prompt of {most + 1} tokens, the most here are {most}"):
                await slot.arrived()


@asynccontextmanager
async def decode_server(serve: Callable[[Job], Awaitable[None]]) -> AsyncIterator[tuple[DecodeServer, aiote.Address]]:
    """Run a decode server, and a prefiller that holds the prompt's cache; no page may be held at the end."""
    memory, _ = await anyio.to_thread.run_sync(computed)
    async with two_engines() as (mine, its):
        server = DecodeServer(its, SETTINGS, MODEL)
        async with Prefiller(mine, LAYOUT, memory) as prefiller, anyio.create_task_group() as group:

            async def work() -> None:
                async for job in prefiller.jobs():
                    await serve(job)

            group.start_soon(work)
            async with server.decoder as decoder:
                yield server, mine.address
                assert (decoder.free_pages, decoder.pages) == (SETTINGS.pool_pages, SETTINGS.pool_pages)
            group.cancel_scope.cancel()


async def test_a_decode_server_goes_on_from_what_arrived():
    memory, logits = await anyio.to_thread.run_sync(computed)

    async def fill(job: Job) -> None:
        assert (job.tokens.tolist(), job.request_id) == (PROMPT, b"5")
        async with job:
            await job.chunk(0, len(PROMPT), range(NEEDED)).done_to(2)
            await job.tail(logits)

    async with decode_server(fill) as (server, prefiller):
        async with server.request(PROMPT, [prefiller], SETTINGS.new_tokens, request_id=b"5") as generation:
            assert generation.round == 1
            answer = [token async for token in generation]
            checksum = await generation.checksum()
    cache = RequestCache(memory, range(SETTINGS.pool_pages))
    assert answer == await anyio.to_thread.run_sync(list, one_process.generate(MODEL, PROMPT, cache, SETTINGS))
    assert checksum == cache.checksum(len(PROMPT))
    assert generation.finish == ("stop" if answer[-1] == tokens.END else "length")


async def test_a_decode_server_frees_the_pages_of_a_refused_request_and_goes_on():
    async def refuse(job: Job) -> None:
        job.refuse("no room")

    async with decode_server(refuse) as (server, prefiller):
        for _ in range(3):
            with pytest.raises(PrefillError, match="no room$"):
                async with server.request(PROMPT, [prefiller], SETTINGS.new_tokens):
                    pass


async def test_a_decode_server_frees_the_pages_when_the_prefiller_is_lost():
    async def nothing(job: Job) -> None:
        await anyio.sleep_forever()

    async with decode_server(nothing) as (server, _):
        async with (
            aiote.open_engine("tcp") as engine,
            Prefiller(engine, LAYOUT, SETTINGS.memory(MODEL.config)) as doomed,
        ):
            address = engine.address

            async def ask() -> None:
                with pytest.raises(PrefillError, match="prefill rank 0"):
                    async with server.request(PROMPT, [address], SETTINGS.new_tokens):
                        pass

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await doomed.next_job()
                await engine.aclose()
        for _ in range(2):
            await ask()
