"""Prefiller and decoder, each alone on an engine of its own, against a partner that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aiote
from aiote.cli.demo import local, tokens, weights, wire
from aiote.cli.demo.decode import Decoder
from aiote.cli.demo.mail import Mail
from aiote.cli.demo.pages import PageAllocator, RequestCache
from aiote.cli.demo.prefill import Prefiller
from aiote.cli.demo.settings import Settings

pytestmark = pytest.mark.libfabric

PROMPT = tokens.encode(b"Once, in a storm, the lamp at the far end went out.")
SETTINGS = Settings("tcp", 2, 1, None, 4, 16, 5, 1, 0).with_pool_for(len(PROMPT))
MODEL = weights.seeded(weights.seeded_config(2), 1)
LAYOUT = SETTINGS.layout(MODEL.config)
NEEDED = LAYOUT.pages_for(len(PROMPT))


class Partner:
    """Router and other side in one: an engine, and the messages that came."""

    def __init__(self, engine: aiote.Engine) -> None:
        self.engine = engine
        self.mail = Mail(engine)
        self.arrivals = self.mail.receive()
        self.peer: aiote.Peer | None = None

    async def next(self, kind: type) -> wire.Message:
        """Return the next message, which must be of this kind."""
        self.peer, message = await anext(self.arrivals)
        assert isinstance(message, kind), message
        return message

    async def next_but(self, kind: type) -> list[wire.Message]:
        """Return the messages up to and with the first of this kind."""
        got = []
        while not got or not isinstance(got[-1], kind):
            self.peer, message = await anext(self.arrivals)
            got.append(message)
        return got

    async def send(self, message: wire.Message) -> None:
        await self.mail.send(self.peer, message)


@asynccontextmanager
async def partner_of(service: type[Prefiller] | type[Decoder]) -> AsyncIterator[Partner]:
    """Run a service on its own engine, greeted; it must hold no page at the end."""
    with anyio.fail_after(30):
        async with aiote.open_engine(provider="tcp") as mine, aiote.open_engine(provider="tcp") as its:
            partner = Partner(mine)
            async with anyio.create_task_group() as group:
                group.start_soon(service(its, await its.connect(mine.address), SETTINGS, MODEL).run)
                hello = await partner.next(wire.Hello)
                assert hello.fingerprint == weights.fingerprint(MODEL)
                assert hello.address == str(its.address)
                yield partner
                await partner.send(wire.Stop())
                report = (await partner.next_but(wire.Report))[-1]
                assert (report.pages_held, report.pages_total) == (0, LAYOUT.pages)
                group.cancel_scope.cancel()


async def test_a_prefiller_fills_the_pages_it_was_given():
    pool = LAYOUT.allocate()
    logits = np.zeros((3, MODEL.config.vocabulary), dtype=np.float32)
    pages = PageAllocator(LAYOUT.pages, seed=4).take(NEEDED)
    async with partner_of(Prefiller) as partner:
        engine = partner.engine
        region, logits_region = engine.register(pool), engine.register(logits)
        with engine.counter() as counter:
            fill = wire.Fill(
                7,
                counter.imm,
                tuple(PROMPT),
                tuple(pages),
                region.descriptor,
                LAYOUT.pages,
                logits_region.descriptor,
                logits[0].nbytes,
            )
            await partner.send(fill)
            await counter.wait(2 * NEEDED + 1)
        expected = LAYOUT.allocate()
        table = PageAllocator(LAYOUT.pages).take(NEEDED)
        wanted = await anyio.to_thread.run_sync(MODEL.prefill, PROMPT, RequestCache(expected, table), 16, 4)
        assert np.array_equal(pool[:, pages], expected[:, table])
        assert not pool[:, [page for page in range(LAYOUT.pages) if page not in pages]].any()
        assert np.array_equal(logits[1], wanted)
        assert not logits[[0, 2]].any()
        await region.aclose()
        await logits_region.aclose()


async def test_a_prefiller_refuses_what_cannot_be():
    pool = LAYOUT.allocate()
    async with partner_of(Prefiller) as partner:
        region = partner.engine.register(pool)
        for pages in (range(NEEDED - 1), range(NEEDED + 1)):
            descriptor = region.descriptor
            await partner.send(wire.Fill(3, 1, tuple(PROMPT), tuple(pages), descriptor, LAYOUT.pages, descriptor, 0))
            refused = await partner.next(wire.Refused)
            assert refused.request == 3
            assert f"{len(pages)} pages for a prompt of {NEEDED}" in refused.reason
        assert not pool.any()
        await region.aclose()


async def test_a_decoder_goes_on_from_what_arrived():
    async with partner_of(Decoder) as partner:
        engine = partner.engine
        await partner.send(wire.Introduce(str(engine.address)))
        await partner.send(wire.Generate(5, tuple(PROMPT)))
        fill = await partner.next(wire.Fill)
        assert (fill.request, fill.tokens, fill.pool_pages) == (5, tuple(PROMPT), LAYOUT.pages)
        assert len(set(fill.pages)) == NEEDED
        pool = LAYOUT.allocate()
        table = PageAllocator(LAYOUT.pages).take(LAYOUT.pages)
        logits = await anyio.to_thread.run_sync(MODEL.prefill, PROMPT, RequestCache(pool, table), 16, 4)
        source, last = engine.register(pool), engine.register(logits)
        remote = engine.attach(fill.pool)
        for layer in range(2):
            offset, size = LAYOUT.layer_offset(layer), LAYOUT.page_bytes
            await engine.write_pages(
                aiote.Pages(source, table[:NEEDED], size, size, offset),
                aiote.Pages(remote, list(fill.pages), size, size, offset),
                fill.imm,
            )
        place = engine.attach(fill.logits)[fill.logits_offset : fill.logits_offset + logits.nbytes]
        await engine.write_imm(last, place, fill.imm)
        got = await partner.next_but(wire.Done)
        answer = {message.index: message.token for message in got if isinstance(message, wire.Token)}
        cache = RequestCache(LAYOUT.allocate(), table)
        again = local.generate(MODEL, PROMPT, cache, SETTINGS)
        expected = await anyio.to_thread.run_sync(list, again)
        assert [answer[index] for index in sorted(answer)] == expected
        assert got[-1] == wire.Done(5, len(expected), cache.checksum(len(PROMPT)))
        await source.aclose()
        await last.aclose()


async def test_a_decoder_frees_the_pages_of_a_refused_request_and_goes_on():
    async with partner_of(Decoder) as partner:
        await partner.send(wire.Introduce(str(partner.engine.address)))
        for request in (1, 2, 3):
            await partner.send(wire.Generate(request, tuple(PROMPT)))
            fill = await partner.next(wire.Fill)
            await partner.send(wire.Refused(fill.request, "no room"))
            assert await partner.next(wire.Failed) == wire.Failed(request, "no room")


async def test_a_decoder_frees_the_pages_when_the_prefiller_is_lost():
    async with partner_of(Decoder) as partner:
        async with aiote.open_engine(provider="tcp") as prefiller:
            await partner.send(wire.Introduce(str(prefiller.address)))
            await partner.send(wire.Generate(1, tuple(PROMPT)))
            _, fill = await anext(Mail(prefiller).receive())
            assert fill.request == 1
        failed = await partner.next(wire.Failed)
        assert "the prefiller was lost" in failed.reason
        await partner.send(wire.Generate(2, tuple(PROMPT)))
        assert (await partner.next(wire.Failed)).request == 2
