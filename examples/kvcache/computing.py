"""A prefill server: computes the prompts that decode servers ask for, while they have the cache moved to them.

A prompt is one call of `Prompts.compute`, by whoever receives it: the call offers the request's pages to
`aiote.kvcache`, which writes each layer when it is computed, and ends when all is moved and nothing is read from the
pages any more. A call that is cancelled stops all of that.

Prompts are computed chunk by chunk, in a batch. A step has one chunk of each of several prompts, at most `step_tokens`
tokens together. Prompts take turns, so a short one does not wait for the end of a long one. Products of matrices round
differently for other numbers of rows. So each chunk has products of its own, and a prompt's cache has the same bits
whoever was computed beside it.

Who asks for a prompt's log-probabilities has them as the call's result. They need the logits of every position, which
are made while it is computed and at no other time, so nothing of such a prompt is taken from the kept pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.demo import Model, PrefixPages, RequestCache, Settings, TokenSpan, plan
from aiote.kvcache import Offer, Producer
from batching import Batch
from caching import ModelCache, Slots
from sampling import Token, scores

MATCH_S = 86400.0


class PromptRefused(aiote.AioteError):
    """A prompt is not computed, or not moved; the text says why."""


class Scores(msgspec.Struct, frozen=True, eq=False):
    """The log-probabilities of a prompt's tokens but the first, which follows nothing: `values` [tokens - 1, 1 + n] of
    `ids`, of each position the prompt's own token and the n likeliest.
    """

    ids: NDArray[np.uint32]
    values: NDArray[np.float64]

    def tokens(self, prompt: Sequence[int]) -> list[Token]:
        """Return the prompt's tokens with their log-probabilities. Raises PromptRefused where they are of another."""
        if self.ids.shape != self.values.shape or self.ids[:, :1].ravel().tolist() != list(prompt[1:]):
            raise PromptRefused(f"log-probabilities of {self.ids.shape} tokens arrived for a prompt of {len(prompt)}")
        out = [Token(prompt[0])]
        for (number, *names), (own, *others) in zip(self.ids.tolist(), self.values.tolist(), strict=True):
            out.append(Token(number, own, tuple(zip(names, others, strict=True))))
        return out


class Prompts(service.Service):
    """What a decode server asks of a prefill server."""

    name = "kvcache.example.Prompts"

    def __init__(self, server: PrefillServer) -> None:
        self._server = server

    @service.method(raises=[PromptRefused])
    async def compute(self, request: str, tokens: NDArray[np.uint32], top: int | None) -> Scores | None:
        """Compute a prompt's cache and offer it under a name; return when it was moved.

        top: how many of the likeliest tokens to name beside each of the prompt's; None: no log-probabilities.
        """
        return await self._server.compute(request, tokens, top)


class Prompt:
    """A prompt in the batch: `parts` are the chunks that are left, `over` is set when there are none."""

    def __init__(self, tokens: NDArray[np.uint32], parts: Sequence[range], offer: Offer, cache: RequestCache) -> None:
        self.tokens, self.parts, self.offer, self.cache = tokens, deque(parts), offer, cache
        self.top: int | None = None
        self.slot = -1
        self.over = anyio.Event()
        self.span: TokenSpan
        self._scored: list[tuple[NDArray[np.uint32], NDArray[np.float64]]] = []

    def score(self, model: Model, part: range, top: int) -> None:
        """Take the log-probabilities of the tokens that follow a chunk's."""
        following = self.tokens[part.start + 1 : part.stop + 1]
        if len(following):
            self._scored.append(scores(model.all_logits(self.span)[: len(following)], following, top))

    def scores(self) -> Scores | None:
        """Return the log-probabilities, if they were wanted."""
        if self.top is None:
            return None
        nothing = np.zeros((0, 1 + self.top), np.uint32), np.zeros((0, 1 + self.top))
        ids, values = zip(nothing, *self._scored, strict=True)
        return Scores(np.concatenate(ids), np.concatenate(values))


class Prefill(Batch[Prompt]):
    """The prompts that are computed, `step_tokens` tokens at most in a step, or else one chunk.

    A layer of a step takes `slower` seconds more than it has to. `tokens` counts those that were computed.
    """

    def __init__(self, model: Model, cache: ModelCache, *, step_tokens: int, slower: float) -> None:
        super().__init__()
        self.tokens = 0
        self._model, self._cache, self._step_tokens, self._slower = model, cache, step_tokens, slower

    def choose(self) -> Sequence[Prompt]:
        """Return who is next, and of those behind it whose chunks fit into the step as well."""
        chosen: list[Prompt] = []
        left = self._step_tokens
        for one in self.running:
            if not chosen or len(one.parts[0]) <= left:
                chosen.append(one)
                left -= len(one.parts[0])
        return chosen

    async def compute(self, chosen: Sequence[Prompt]) -> None:
        """Compute a chunk of each, layer by layer, and say of each layer when it is done; then the last logits."""
        await anyio.to_thread.run_sync(self._begin, chosen)
        for layer in range(self._cache.layers):
            await anyio.to_thread.run_sync(self._layer, layer, chosen)
            await anyio.sleep(self._slower)
            for one in chosen:
                one.offer.computed(layer, one.parts[0].stop)
        await anyio.to_thread.run_sync(self._end, chosen)
        for one in chosen:
            self._take_out(one)

    def _begin(self, chosen: Sequence[Prompt]) -> None:
        for one in chosen:
            part = one.parts[0]
            one.span = self._model.begin(one.tokens[part.start : part.stop].tolist(), part.start)

    def _layer(self, layer: int, chosen: Sequence[Prompt]) -> None:
        for one in chosen:
            self._model.layer(layer, one.span, one.cache)

    def _end(self, chosen: Sequence[Prompt]) -> None:
        for one in chosen:
            if one.top is not None:
                one.score(self._model, one.parts[0], one.top)
            if len(one.parts) == 1:
                self._cache.logits[one.slot] = self._model.logits(one.span)

    def _take_out(self, one: Prompt) -> None:
        """End a prompt that has its last chunk, or is not wanted any more; the others are behind those that wait."""
        self.tokens += len(one.parts.popleft())
        if not one.parts:
            one.offer.computed(self._cache.layers)
        if one in self.running:
            del self.running[one]
            if one.parts and not one.offer.stopped:
                self.running[one] = None
                return
        one.over.set()


class PrefillServer:
    """A model, its pages, and the prompts that are computed in them: `async with server.serving()`.

    `done` and `cancelled` count prompts that were moved and others, `tokens` and `cached_tokens` those of prompts,
    `bytes_written` those of the former.
    """

    def __init__(
        self, engine: aiote.Engine, settings: Settings, model: Model, *, name: str, step_tokens: int, slower: float
    ) -> None:
        self.settings = settings
        self.cache = ModelCache(name, settings)
        self.pages = PrefixPages(settings.pool_pages, settings.page_tokens, settings.chunk_tokens)
        self.slots = Slots(settings.concurrency)
        self.batch = Prefill(model, self.cache, step_tokens=step_tokens, slower=slower)
        self.running = self.done = self.cancelled = self.cached_tokens = self.bytes_written = 0
        self._engine = engine
        # The call of whoever receives a prompt ends the wait for it, on both sides: a queue may be long.
        self._producer = Producer(engine, self.cache.cache, match_timeout=MATCH_S)

    @property
    def waiting(self) -> int:
        """How many prompts wait for a slot, or with their pages for their turn."""
        return self.slots.waiting + self.batch.waiting

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[service.Server]:
        """Serve for the length of the block; what is given drains the prompts."""
        async with self._producer, anyio.create_task_group() as group:
            group.start_soon(self.batch.run)
            async with service.serve(self._engine, Prompts(self)) as server:
                yield server
            group.cancel_scope.cancel()

    async def compute(self, request: str, tokens: NDArray[np.uint32], top: int | None) -> Scores | None:
        """Compute a prompt and have it moved; return its log-probabilities if wanted. Raises PromptRefused."""
        most, vocabulary = self.settings.pool_pages * self.settings.page_tokens, self.cache.logits.shape[1]
        if tokens.ndim != 1 or not 0 < len(tokens) <= most or tokens.max() >= vocabulary:
            raise PromptRefused(f"a prompt of {tokens.shape} tokens: expected 1 to {most} tokens of the vocabulary")
        if top is not None and not 0 <= top <= vocabulary:
            raise PromptRefused(f"the {top} likeliest tokens were asked for, and the vocabulary has {vocabulary}")
        self.running += 1
        outcome = "cancelled"
        try:
            outcome, found = await self._move(request, tokens, top)
        finally:
            self.running -= 1
            self.done += outcome == "moved"
            self.cancelled += outcome != "moved"
        if outcome != "moved":
            raise PromptRefused(outcome)
        self.bytes_written += self.cache.bytes_of(len(tokens))
        return found

    async def _move(self, request: str, tokens: NDArray[np.uint32], top: int | None) -> tuple[str, Scores | None]:
        """Compute and offer a prompt, and return what became of it, and its log-probabilities."""
        known = tokens.tolist()
        # The pages stay lent until the offer's block is left, which is when nothing is read from them any more.
        async with self.slots.take() as slot, self.pages.borrow(known, fresh=top is not None) as (table, cached):
            offer = self._producer.offer(request, tokens=len(known), rows=self.cache.rows(table, slot))
            # Never all: `cached` is less than the prompt.
            parts = [part for part in plan(len(known), self.settings.chunk_tokens) if part.stop > cached]
            one = Prompt(tokens, parts, offer, RequestCache(self.cache.memory, table))
            one.top, one.slot = top, slot
            async with offer:
                for layer in range(self.cache.layers):
                    offer.computed(layer, cached)
                self.batch.join(one)
                try:
                    await one.over.wait()
                finally:
                    await self.batch.leave(one)
            self.cached_tokens += cached
            if offer.outcome == "moved":
                self.pages.keep(known, table)
            return offer.outcome, one.scores()
