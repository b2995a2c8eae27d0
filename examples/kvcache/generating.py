"""A decode server: has prompts' caches moved into its pages, and generates from there, all requests in one batch.

Each step computes one token of every request that is in the batch. A request joins when its cache has arrived, and
leaves after the step that gave its last token, or when its client has left. Its pages are free when nothing is written
to them any more and no step reads them.
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
from batching import Batch
from caching import FreePages, ModelCache, Slots
from computing import Prompts, Scores
from sampling import Logits, Sampling, Token, choose


class PrefillFailed(aiote.AioteError):
    """No prefill server has delivered; the text says why each of them has not."""


class Generation(AsyncIterator[Token]):
    """Iterates over the tokens that follow a prompt. Made by `DecodeServer.request`.

    It ends after the mark of end or `max_tokens` tokens, and `finish` says which: "stop" or "length". `round` tells
    which of the prefill servers has delivered, from 1; `prompt` has the prompt's tokens with their log-probabilities,
    if those were wanted.
    """

    def __init__(self, cache: RequestCache, how: Sampling, prompt: int, max_tokens: int) -> None:
        self.round = 0
        self.finish = "" if max_tokens else "length"
        self.prompt: list[Token] = []
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


class Decode(Batch[Generation]):
    """The requests that generate: a step computes a token of each of them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    async def compute(self, chosen: Sequence[Generation]) -> None:
        """Compute a token of each, and take those out that have their last one."""
        tokens, positions = [one.last for one in chosen], [one.position for one in chosen]
        caches = [one.cache for one in chosen]
        logits = await anyio.to_thread.run_sync(self._model.steps, tokens, positions, caches)
        for one, row in zip(chosen, logits, strict=True):
            one.position += 1
            one.take(row)
            if one.finish:
                self.running.pop(one, None)


class DecodeServer:
    """A model, and the pages in which it finds its prompts: `async with server.serving()`, and `request` in it.

    `bytes_arrived` counts.
    """

    def __init__(self, engine: aiote.Engine, settings: Settings, model: Model, *, name: str) -> None:
        self.cache = ModelCache(name, settings)
        self.pages = FreePages(settings.pool_pages)
        self.slots = Slots(settings.concurrency)
        self.batch = Decode(model)
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
        self,
        prompt: Sequence[int],
        prefillers: Sequence[aiote.Address],
        max_tokens: int,
        how: Sampling,
        *,
        echo: bool = False,
    ) -> AsyncIterator[Generation]:
        """Have a prompt's cache moved here from one of these prefill servers, tried one after the other, and give what
        follows it.

        echo: the prompt's log-probabilities are wanted as well, as `how` says of the others. The pages are free again
        when the block is left, however it is left. Raises PrefillFailed.
        """
        async with self.slots.take() as slot:
            table = self.pages.take(self.cache.pages_for(len(prompt) + max(max_tokens - 1, 0)))
            generation = Generation(RequestCache(self.cache.memory, table), how, len(prompt), max_tokens)
            try:
                by = await self._fill(prompt, prefillers, table, slot, how.logprobs if echo else None)
                generation.round, generation.prompt = by
                self.bytes_arrived += self.cache.bytes_of(len(prompt))
                if not generation.finish:
                    generation.take(self.cache.logits[slot])
                if not generation.finish:
                    self.batch.join(generation)
                yield generation
            finally:
                await self.batch.leave(generation)
                self.pages.give(table)

    async def _fill(
        self,
        prompt: Sequence[int],
        prefillers: Sequence[aiote.Address],
        table: Sequence[int],
        slot: int,
        top: int | None,
    ) -> tuple[int, list[Token]]:
        """Return which prefill server has delivered, and the prompt's log-probabilities if `top` is a number."""
        pages = table[: self.cache.pages_for(len(prompt))]
        failures = []
        for number, address in enumerate(prefillers, 1):
            call = Call(service.client(self._engine, address, Prompts), prompt, top)
            self._group.start_soon(call.run)
            try:
                with call.receiving:
                    rows = self.cache.rows(pages, slot)
                    async with self._consumer.receive([address], call.name, tokens=len(prompt), rows=rows) as reception:
                        await reception.arrived()
                    if top is None:
                        return number, []
                    await call.over.wait()  # the log-probabilities are its result
                    if call.scores is not None:
                        return number, call.scores.tokens(prompt)
            except aiote.AioteError as error:
                call.failure = call.failure or str(error)
            except anyio.get_cancelled_exc_class():
                call.calling.cancel()
                raise
            call.calling.cancel()
            failures.append(call.failure)
        raise PrefillFailed("; ".join(failures))


class Call:
    """A prompt that a prefill server is asked to compute; what fails there ends the receiving here.

    `scores` are its log-probabilities, where `top` says how many alternatives they name, once the call is `over`.
    """

    def __init__(self, client: Prompts, prompt: Sequence[int], top: int | None) -> None:
        self.name = secrets.token_hex(12)
        self.failure = ""
        self.calling, self.receiving = anyio.CancelScope(), anyio.CancelScope()
        self.scores: Scores | None = None
        self.over = anyio.Event()
        self._client, self._prompt, self._top = client, np.array(prompt, np.uint32), top

    async def run(self) -> None:
        """Call, and take note of how it ends."""
        with self.calling:
            try:
                self.scores = await self._client.compute(self.name, self._prompt, self._top)
            except aiote.AioteError as error:
                self.failure = self.failure or str(error)
                self.receiving.cancel()
        self.over.set()
