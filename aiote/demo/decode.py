"""A decode server: has each prompt's cache filled by `aiote.kvcache.Decoder`, and generates from there.

The library lends its pages to the prefiller, counts what arrives, and takes the pages back once nobody can write to
them; here is what a serving system adds to that: the model, and whose turn it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np

import aiote
from aiote.demo import tokens
from aiote.demo.model import Model
from aiote.demo.request_cache import RequestCache
from aiote.demo.settings import Settings
from aiote.kvcache import Decoder, Slot

__all__ = ["DecodeServer", "Generation"]


class DecodeServer:
    """A model, and the pages in which it finds its prompts: `request`, inside `async with decoder`.

    A prompt is given up when nothing of it moves for `stall_limit` seconds; see `aiote.kvcache.Decoder`.
    """

    def __init__(self, engine: aiote.Engine, settings: Settings, model: Model, *, stall_limit: float = 30.0) -> None:
        self.settings, self.model = settings, model
        self.layout = settings.layout(model.config)
        self.memory = settings.memory(model.config)
        self.decoder = Decoder(
            engine,
            self.layout,
            self.memory,
            tail_bytes=model.config.vocabulary * self.memory.itemsize,
            slots=settings.concurrency,
            stall_limit=stall_limit,
        )
        self.turn = anyio.Lock()

    @asynccontextmanager
    async def request(
        self,
        prompt: Sequence[int],
        prefillers: Sequence[aiote.Address],
        max_tokens: int,
        *,
        request_id: bytes | None = None,
    ) -> AsyncIterator[Generation]:
        """Have a prompt's cache filled by one of these prefillers, tried one after the other, and give what follows it.

        The pages are free again when the block is left, however it is left. Raises as `Decoder.request` and
        `Slot.arrived` do.
        """
        first, *others = [(prefiller,) for prefiller in prefillers]
        async with self.decoder.request(prompt, first, alternatives=others, request_id=request_id) as slot:
            # There are pages for all slots at their longest, so this never waits.
            await slot.extend(max_tokens - 1)
            await slot.arrived()
            yield Generation(self, slot, max_tokens)


class Generation(AsyncIterator[int]):
    """Iterates over the tokens that follow a prompt, greedily; the steps of several take turns.

    It ends after the mark of end or `max_tokens` tokens, and `finish` says which: "stop" or "length". `round` tells
    which of the prefillers has delivered, from 1. Made by `DecodeServer.request`.
    """

    def __init__(self, server: DecodeServer, slot: Slot, max_tokens: int) -> None:
        self.round = slot.round
        self.finish = ""
        self._server = server
        self._prompt = len(slot.tokens)
        self._cache = RequestCache(server.memory, slot.pages)
        self._logits = np.frombuffer(slot.tail, np.float32)
        self._token, self._count, self._most = -1, 0, max_tokens

    async def __anext__(self) -> int:
        if self.finish:
            raise StopAsyncIteration
        if self._count:
            async with self._server.turn:
                position = self._prompt + self._count - 1
                step = self._server.model.step
                self._logits = await anyio.to_thread.run_sync(step, self._token, position, self._cache)
        self._token, self._count = int(np.argmax(self._logits)), self._count + 1
        if self._token == tokens.END:
            self.finish = "stop"
        elif self._count == self._most:
            self.finish = "length"
        return self._token

    async def checksum(self) -> int:
        """Return the checksum of the prompt's keys and values as they arrived."""
        return await anyio.to_thread.run_sync(self._cache.checksum, self._prompt)
