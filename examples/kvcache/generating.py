"""A decode server: has prompts' caches moved into its pages, and generates from there, all requests in one batch.

The batch is continuous: each step computes one token of every request that is in it. A request joins before the next
step when its cache has arrived, and leaves after the step that gave its last token, or when its client has left. So
nobody waits for the end of another one's answer. A request's pages are free when nothing is written to them any more
and no step reads them.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np

import aiote
from aiote import service
from aiote.demo import Model, RequestCache, Settings
from aiote.demo import tokens as vocabulary
from aiote.kvcache import Consumer
from caching import FreePages, ModelCache, Slots
from computing import Prompts
from sampling import Logits, Sampling, Token, choose


class PrefillFailed(aiote.AioteError):
    """No prefill server has delivered; the text says why each of them has not."""


class Generation(AsyncIterator[Token]):
    """Iterates over the tokens that follow a prompt. Made by `DecodeServer.request`.

    It ends after the mark of end or `max_tokens` tokens, and `finish` says which: "stop" or "length". `round` tells
    which of the prefill servers has delivered, from 1.
    """

    def __init__(self, cache: RequestCache, how: Sampling, prompt: int, max_tokens: int) -> None:
        self.round = 0
        self.finish = ""
        self.cache, self.position = cache, prompt
        self.last = -1
        self._how, self._left = how, max_tokens
        self._given: deque[Token] = deque()
        self._news = anyio.Event()

    def take(self, logits: Logits) -> None:
        """Choose the next token."""
        token = choose(logits, self.position, self._how)
        self.last, self._left = token.id, self._left - 1
        if token.id == vocabulary.END:
            self.finish = "stop"
        elif not self._left:
            self.finish = "length"
        self._given.append(token)
        self._news.set()

    async def __anext__(self) -> Token:
        while not self._given:
            if self.finish:
                raise StopAsyncIteration
            self._news = anyio.Event()
            await self._news.wait()
        return self._given.popleft()


class Batch:
    """The requests that generate: `run` computes a token of each of them at a time, while there are any.

    `steps` counts, `largest` is the most that one step had.
    """

    def __init__(self, model: Model) -> None:
        self.running: dict[Generation, None] = {}
        self.steps = self.largest = 0
        self._model = model
        self._reading: Sequence[Generation] = ()
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Compute for ever."""
        while True:
            if not self.running:
                await self._changed.wait()
                continue
            self._reading = tuple(self.running)
            caches = [one.cache for one in self._reading]
            logits = await anyio.to_thread.run_sync(
                self._model.steps, [one.last for one in self._reading], [one.position for one in self._reading], caches
            )
            self.steps, self.largest = self.steps + 1, max(self.largest, len(self._reading))
            for one, row in zip(self._reading, logits, strict=True):
                one.position += 1
                one.take(row)
                if one.finish:
                    self.running.pop(one, None)
            self._reading = ()
            self._change()

    def join(self, one: Generation) -> None:
        """Take a request in, before the next step."""
        self.running[one] = None
        self._change()

    async def leave(self, one: Generation) -> None:
        """Take a request out, and return when no step reads its pages."""
        self.running.pop(one, None)
        with anyio.CancelScope(shield=True):
            while one in self._reading:
                await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class DecodeServer:
    """A model, and the pages in which it finds its prompts: `async with server.serving()`, and `request` in it.

    `bytes_arrived` counts.
    """

    def __init__(self, engine: aiote.Engine, settings: Settings, model: Model, *, name: str) -> None:
        self.cache = ModelCache(name, settings)
        self.pages = FreePages(settings.pool_pages)
        self.slots = Slots(settings.concurrency)
        self.batch = Batch(model)
        self.bytes_arrived = 0
        self._engine = engine
        self._consumer = Consumer(engine, self.cache.cache)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve for the length of the block."""
        async with self._consumer, anyio.create_task_group() as self._group:
            self._group.start_soon(self.batch.run)
            yield
            self._group.cancel_scope.cancel()

    @asynccontextmanager
    async def request(
        self, prompt: Sequence[int], prefillers: Sequence[aiote.Address], max_tokens: int, how: Sampling
    ) -> AsyncIterator[Generation]:
        """Have a prompt's cache moved here from one of these prefill servers, tried one after the other, and give what
        follows it.

        The pages are free again when the block is left, however it is left. Raises PrefillFailed.
        """
        async with self.slots.take() as slot:
            table = self.pages.take(self.cache.pages_for(len(prompt) + max_tokens - 1))
            generation = Generation(RequestCache(self.cache.memory, table), how, len(prompt), max_tokens)
            try:
                generation.round = await self._fill(prompt, prefillers, table, slot)
                self.bytes_arrived += self.cache.bytes_of(len(prompt))
                generation.take(self.cache.logits[slot])
                if not generation.finish:
                    self.batch.join(generation)
                yield generation
            finally:
                await self.batch.leave(generation)
                self.pages.give(table)

    async def _fill(
        self, prompt: Sequence[int], prefillers: Sequence[aiote.Address], table: Sequence[int], slot: int
    ) -> int:
        """Return which prefill server has delivered."""
        pages = table[: self.cache.pages_for(len(prompt))]
        failures = []
        for number, address in enumerate(prefillers, 1):
            call = Call(service.client(self._engine, address, Prompts), prompt)
            self._group.start_soon(call.run)
            try:
                with call.receiving:
                    rows = self.cache.rows(pages, slot)
                    async with self._consumer.receive([address], call.name, tokens=len(prompt), rows=rows) as reception:
                        await reception.arrived()
                    return number
            except aiote.AioteError as error:
                call.failure = call.failure or str(error)
            except anyio.get_cancelled_exc_class():
                call.calling.cancel()
                raise
            call.calling.cancel()
            failures.append(call.failure)
        raise PrefillFailed("; ".join(failures))


class Call:
    """A prompt that a prefill server is asked to compute; what fails there ends the receiving here."""

    def __init__(self, client: Prompts, prompt: Sequence[int]) -> None:
        self.name = secrets.token_hex(12)
        self.failure = ""
        self.calling, self.receiving = anyio.CancelScope(), anyio.CancelScope()
        self._client, self._prompt = client, np.array(prompt, np.uint32)

    async def run(self) -> None:
        """Call, and take note of how it ends."""
        with self.calling:
            try:
                await self._client.compute(self.name, self._prompt)
            except aiote.AioteError as error:
                self.failure = self.failure or str(error)
                self.receiving.cancel()
