"""The decode process: has each prompt's cache filled by `aiote.kvcache.Decoder`, and generates from there.

The library lends its pages to the prefiller, counts what arrives, and takes the pages back once nobody can write to
them; here is what a serving system adds to that: the model, and who is told what.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

import aiote
from aiote.demo import tokens, weights, wire
from aiote.demo.mail import Mail
from aiote.demo.model import Model
from aiote.demo.pages import RequestCache
from aiote.demo.settings import Settings
from aiote.errors import AioteError
from aiote.kvcache import Decoder

__all__ = ["DecodeServer"]

# Prompts are computed one after the other, in numpy: the last of many long ones may wait for minutes before its first
# page comes. A prefiller that is gone or stands still is noticed by its connection, whatever this is.
_STALL_LIMIT_S = 86400.0


class DecodeServer:
    """Serves `Generate` requests; `run` is its life."""

    def __init__(self, mail: Mail, router: aiote.Peer, settings: Settings, model: Model) -> None:
        self._mail, self._router, self._settings, self._model = mail, router, settings, model
        self._memory = settings.memory(model.config)
        self._turn = anyio.Lock()
        self._decoder = Decoder(
            mail.mailroom,
            settings.layout(model.config),
            self._memory,
            tail_bytes=model.config.vocabulary * self._memory.itemsize,
            slots=settings.concurrency,
            stall_limit=_STALL_LIMIT_S,
        )

    async def run(self) -> None:
        """Serve until cancelled; at Stop, report."""
        hello = wire.Hello("decode", os.getpid(), str(self._mail.engine.address), weights.fingerprint(self._model))
        async with self._decoder, anyio.create_task_group() as requests:
            await self._mail.send(self._router, hello)
            async for _, message in self._mail:
                match message:
                    case wire.Generate():
                        requests.start_soon(self._serve, message)
                    case wire.Stop():
                        requests.start_soon(self._report)
                    case _:
                        raise wire.WireError(f"a {type(message).__name__} is not for a decoder")

    async def _report(self) -> None:
        total = self._decoder.pages
        await self._mail.send(self._router, wire.Report("decode", total - self._decoder.free_pages, total))

    async def _serve(self, asked: wire.Generate) -> None:
        """Serve one request, and tell the router how it ended, after its pages are free again."""
        outcome: wire.Message
        prompt = tokens.encode(asked.prompt)
        try:
            prefiller = aiote.Address.parse(asked.prefiller)
            async with self._decoder.request(prompt, [prefiller], request_id=wire.identity(asked.request)) as slot:
                # There are pages for all slots at their longest, so this never waits.
                await slot.extend(self._settings.new_tokens - 1)
                await slot.arrived()
                cache = RequestCache(self._memory, slot.pages)
                count = await self._generate(asked.request, prompt, slot.tail, cache)
                checksum = await anyio.to_thread.run_sync(cache.checksum, len(prompt))
            outcome = wire.Done(asked.request, count, checksum)
        except AioteError as error:
            outcome = wire.Failed(asked.request, str(error))
        await self._mail.send(self._router, outcome)

    async def _generate(self, request: int, prompt: Sequence[int], tail: bytes, cache: RequestCache) -> int:
        """Stream the answer to the router and return its length. Steps of several requests take turns."""
        logits = np.frombuffer(tail, np.float32)
        last = self._settings.new_tokens - 1
        for index in range(self._settings.new_tokens):
            token = int(np.argmax(logits))
            await self._mail.send(self._router, wire.Token(request, index, token))
            if token == tokens.END or index == last:
                return index + 1
            async with self._turn:
                logits = await anyio.to_thread.run_sync(self._model.step, token, len(prompt) + index, cache)
        return self._settings.new_tokens
