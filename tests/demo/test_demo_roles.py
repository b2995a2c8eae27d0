"""Prefill and decode process, each alone on an engine of its own, against a partner that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aiote
from aiote.demo import local, tokens, weights, wire
from aiote.demo.decode import DecodeServer
from aiote.demo.mail import Mail, open_mail
from aiote.demo.pages import RequestCache
from aiote.demo.prefill import PrefillServer
from aiote.demo.settings import Settings
from aiote.kvcache import Decoder, Job, Prefiller
from aiote.service import Mailroom

pytestmark = pytest.mark.libfabric

TEXT = b"Once, in a storm, the lamp at the far end went out."
PROMPT = tokens.encode(TEXT)
SETTINGS = Settings("tcp", 2, 1, None, 4, 16, 5, 1, 0).with_pool_for(len(PROMPT))
MODEL = weights.seeded(weights.seeded_config(2), 1)
LAYOUT = SETTINGS.layout(MODEL.config)
NEEDED = LAYOUT.pages_for(len(PROMPT))
TAIL = 4 * MODEL.config.vocabulary


class Partner:
    """Router and other side in one: an engine's mail."""

    def __init__(self, mail: Mail, service: aiote.Address) -> None:
        self.mail = mail
        self.mailroom = mail.mailroom
        self.service = service
        self.peer: aiote.Peer | None = None

    async def until(self, kind: type) -> list[wire.Message]:
        """Return the messages up to and with the first of this kind."""
        got = []
        while not got or not isinstance(got[-1], kind):
            self.peer, message = await anext(self.mail)
            got.append(message)
        return got

    async def send(self, message: wire.Message) -> None:
        await self.mail.send(self.peer, message)

    async def generate(self, request: int) -> None:
        await self.send(wire.Generate(request, TEXT, str(self.mail.engine.address)))


@asynccontextmanager
async def partner_of(service: type[PrefillServer | DecodeServer]) -> AsyncIterator[Partner]:
    """Run a service on its own engine, greeted; it must hold no page at the end."""
    with anyio.fail_after(30):
        async with open_mail("tcp") as mine, open_mail("tcp") as its:
            partner = Partner(mine, its.engine.address)
            async with anyio.create_task_group() as group:
                group.start_soon(service(its, await its.engine.connect(mine.engine.address), SETTINGS, MODEL).run)
                (hello,) = await partner.until(wire.Hello)
                assert hello.fingerprint == weights.fingerprint(MODEL)
                assert hello.address == str(its.engine.address)
                yield partner
                await partner.send(wire.Stop())
                report = (await partner.until(wire.Report))[-1]
                assert (report.pages_held, report.pages_total) == (0, SETTINGS.pool_pages)
                group.cancel_scope.cancel()


def computed() -> tuple[np.ndarray, np.ndarray]:
    """Return the cache and the logits of the prompt, in pages from 0 on."""
    memory = SETTINGS.memory(MODEL.config)
    return memory, MODEL.prefill(PROMPT, RequestCache(memory, range(NEEDED)), SETTINGS.chunk_tokens)


async def test_a_prefiller_fills_the_pages_it_was_given():
    """Those of two requests: it has pages for one at a time, and the other waits."""
    expected, logits = await anyio.to_thread.run_sync(computed)
    memory = np.zeros((2, 2 * NEEDED + 3, *LAYOUT.page_shape(1)), np.float32)
    async with partner_of(PrefillServer) as partner:
        decoder = Decoder(partner.mailroom, LAYOUT, memory, tail_bytes=TAIL)

        async def have_filled(request: int) -> None:
            async with decoder.request(PROMPT, [partner.service], request_id=wire.identity(request)) as slot:
                await slot.arrived()
                assert np.array_equal(memory[:, slot.pages], expected[:, :NEEDED])
                assert slot.tail == logits.tobytes()

        async with decoder, anyio.create_task_group() as group:
            group.start_soon(have_filled, 7)
            group.start_soon(have_filled, 1)
        assert not memory[:, 2 * NEEDED :].any()
        told = []
        while sum(message.pages for message in told) < 2 * 2 * NEEDED:
            told += await partner.until(wire.Progress)
        for request in (1, 7):
            assert sum(message.pages for message in told if message.request == request) == 2 * NEEDED


async def test_a_prefiller_goes_on_after_a_request_that_was_cancelled():
    memory = SETTINGS.memory(MODEL.config)
    async with partner_of(PrefillServer) as partner:
        async with Decoder(partner.mailroom, LAYOUT, memory, tail_bytes=TAIL) as decoder:
            async with decoder.request(PROMPT, [partner.service], request_id=wire.identity(0)):
                await partner.until(wire.Progress)
            async with decoder.request(PROMPT, [partner.service], request_id=wire.identity(1)) as slot:
                await slot.arrived()


@asynccontextmanager
async def prefiller_of(mailroom: Mailroom, serve: Callable[[Job], Awaitable[None]]) -> AsyncIterator[None]:
    """Serve jobs one after the other, from pages that hold the prompt's cache."""
    memory, _ = await anyio.to_thread.run_sync(computed)
    async with Prefiller(mailroom, LAYOUT, memory) as prefiller, anyio.create_task_group() as group:

        async def work() -> None:
            async for job in prefiller.jobs():
                await serve(job)

        group.start_soon(work)
        yield
        group.cancel_scope.cancel()


async def test_a_decoder_goes_on_from_what_arrived():
    memory, logits = await anyio.to_thread.run_sync(computed)

    async def fill(job: Job) -> None:
        assert (job.tokens.tolist(), wire.request_of(job.request_id)) == (PROMPT, 5)
        async with job:
            await job.chunk(0, len(PROMPT), range(NEEDED)).done_to(2)
            await job.tail(logits)

    async with partner_of(DecodeServer) as partner, prefiller_of(partner.mailroom, fill):
        await partner.generate(5)
        got = await partner.until(wire.Done)
    answer = {message.index: message.token for message in got if isinstance(message, wire.Token)}
    cache = RequestCache(memory, range(SETTINGS.pool_pages))
    expected = await anyio.to_thread.run_sync(list, local.generate(MODEL, PROMPT, cache, SETTINGS))
    assert [answer[index] for index in sorted(answer)] == expected
    assert got[-1] == wire.Done(5, len(expected), cache.checksum(len(PROMPT)))


async def test_a_decoder_frees_the_pages_of_a_refused_request_and_goes_on():
    async def refuse(job: Job) -> None:
        job.refuse("no room")

    async with partner_of(DecodeServer) as partner, prefiller_of(partner.mailroom, refuse):
        for request in (1, 2, 3):
            await partner.generate(request)
            (failed,) = await partner.until(wire.Failed)
            assert failed.request == request
            assert failed.reason.endswith("no room")


async def test_a_decoder_frees_the_pages_when_the_prefiller_is_lost():
    async with partner_of(DecodeServer) as partner:
        async with open_mail("tcp") as prefiller:
            asked = prefiller.mailroom.queue(0xE2)
            address = str(prefiller.engine.address)
            await partner.send(wire.Generate(1, TEXT, address))
            with asked:
                await anext(asked)
        for request in (1, 2):
            (failed,) = await partner.until(wire.Failed)
            assert failed.request == request
            assert "prefill rank 0" in failed.reason
            await partner.send(wire.Generate(request + 1, TEXT, address))
        await partner.until(wire.Failed)


@pytest.mark.parametrize("service", [PrefillServer, DecodeServer])
async def test_what_is_for_another_ends_a_service(service):
    with pytest.raises(ExceptionGroup) as told:
        async with partner_of(service) as partner:
            await partner.send(wire.Token(1, 2, 3))
            await anyio.sleep_forever()
    assert told.group_contains(wire.WireError, match="Token is not for a")
