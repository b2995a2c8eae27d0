"""A decode server: has prompts' caches filled in its memory, and generates from there.

    python examples/kvcache/decode.py --registry 'aiote://...'

`POST /generate` takes {"tokens": [...], "max_tokens": n, "prefillers": ["aiote://...", ...]}, those to be tried one
after the other, and answers with lines of JSON: {"round": k} when the k-th has delivered, {"token": t} for each token,
{"finish": "stop"} or {"finish": "length"}; or {"error": ...}. A client that leaves ends all of it: the prefiller is
told to stop, its writes end, and the pages come back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiote
import serving
from aiote.demo import tokens, weights
from aiote.demo.model import Model
from aiote.demo.pages import RequestCache
from aiote.demo.settings import Settings
from aiote.kvcache import Decoder, PrefillError, Slot
from serving import Emit, Refused

MOST_PREFILLERS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    tokens: tuple[int, ...]
    max_tokens: int
    prefillers: tuple[aiote.Address, ...]

    @classmethod
    def of(cls, body: dict[str, Any], context: int) -> Asked:
        """Read a body. Raises Refused."""
        prompt, count, prefillers = body.get("tokens"), body.get("max_tokens"), body.get("prefillers")
        if not _integers(prompt, tokens.VOCABULARY) or not prompt:
            raise Refused(400, "tokens: one token at least expected")
        if not _integers([count], context + 1) or not count or len(prompt) + count > context:
            raise Refused(400, f"max_tokens: at least 1, and with the prompt at most {context}")
        if not isinstance(prefillers, list) or not 1 <= len(prefillers) <= MOST_PREFILLERS:
            raise Refused(400, f"prefillers: 1 to {MOST_PREFILLERS} addresses expected")
        try:
            addresses = tuple(map(aiote.Address.parse, prefillers))
        except (aiote.UsageError, TypeError, AttributeError) as error:
            raise Refused(400, f"prefillers: {error}") from None
        return cls(tuple(prompt), count, addresses)


def _integers(values: Any, stop: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < stop for value in values)


class DecodeServer:
    """A model, and the pages in which it finds its prompts."""

    def __init__(self, settings: Settings, model: Model) -> None:
        self.settings, self.model = settings, model
        self.layout = settings.layout(model.config)
        self.memory = settings.memory(model.config)
        self.draining = False
        self.done = self.failed = self.cancelled = self.failovers = self.tokens = self.bytes = 0
        self._turn = anyio.Lock()

    async def answer(self, decoder: Decoder, asked: Asked, emit: Emit) -> None:
        """Serve one request. Raises Refused where nothing was emitted yet."""
        groups = [(address,) for address in asked.prefillers]
        try:
            async with decoder.request(asked.tokens, groups[0], alternatives=groups[1:]) as slot:
                # There are pages for all slots at their longest, so this never waits.
                await slot.extend(asked.max_tokens - 1)
                await slot.arrived()
                self.bytes += self.layout.pages_for(len(asked.tokens)) * self.layout.page_bytes(1) * self.layout.layers
                self.failovers += slot.round > 1
                await emit(line(round=slot.round))
                await emit(line(finish=await self._generate(slot, asked, emit)))
            self.done += 1
        except aiote.UsageError as error:
            raise Refused(400, str(error)) from None
        except aiote.AioteError as error:
            self.failed += 1
            whose = "prefill" if isinstance(error, PrefillError) else "decode"
            raise Refused(503, str(error), retry=True, whose=whose) from None
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise

    async def _generate(self, slot: Slot, asked: Asked, emit: Emit) -> str:
        """Emit the tokens, greedily, and return why there are no more. The steps of several requests take turns."""
        cache = RequestCache(self.memory, slot.pages)
        logits = np.frombuffer(slot.tail, np.float32)
        for index in range(asked.max_tokens):
            token = int(np.argmax(logits))
            self.tokens += 1
            await emit(line(token=token))
            if token == tokens.END:
                return "stop"
            if index + 1 < asked.max_tokens:
                async with self._turn:
                    logits = await anyio.to_thread.run_sync(self.model.step, token, len(asked.tokens) + index, cache)
        return "length"

    def stats(self, engine: aiote.Engine, decoder: Decoder) -> dict[str, object]:
        """Return what the router's page shows, as counts since the start."""
        return {
            **serving.engine_stats(engine),
            "requests": decoder.requests,
            "waiting": decoder.waiting,
            "pages": decoder.pages,
            "pages_held": decoder.pages - decoder.free_pages,
            "loans": decoder.loans,
            "revoked": decoder.revoked,
            "bytes_arrived": self.bytes,
            "tokens": self.tokens,
            "done": self.done,
            "failed": self.failed,
            "failovers": self.failovers,
            "cancelled": self.cancelled,
        }


def line(**facts: Any) -> bytes:
    """Return one line of an answer."""
    return json.dumps(facts).encode() + b"\n"


def application(server: DecodeServer, engine: aiote.Engine, decoder: Decoder, calls: serving.Calls) -> Starlette:
    """Return what is served over HTTP."""

    async def generate(request: Request) -> serving.Answer:
        if server.draining:
            raise Refused(503, "the decode server is draining", retry=True)
        asked = Asked.of(await serving.body_of(request), server.settings.new_tokens)
        return serving.Answer(calls, partial(server.answer, decoder, asked), "application/x-ndjson")

    async def stats(_: Request) -> JSONResponse:
        return JSONResponse(server.stats(engine, decoder))

    routes: Sequence[Route] = [Route("/generate", generate, methods=["POST"]), Route("/stats", stats)]
    return Starlette(routes=routes, exception_handlers={Refused: serving.refusal})


async def main(args: argparse.Namespace, orders: serving.Orders) -> None:
    """Serve until told to drain, and then until the requests are over that are there."""
    settings, token = serving.settings_of(args), serving.token()
    server = DecodeServer(settings, await anyio.to_thread.run_sync(settings.model))
    calls = serving.Calls()
    tail = server.model.config.vocabulary * np.dtype(np.float32).itemsize
    async with serving.member_of_a_cluster(args) as (engine, mailroom, registry):
        decoder = Decoder(mailroom, server.layout, server.memory, tail_bytes=tail, slots=args.slots)
        app = application(server, engine, decoder, calls)
        async with decoder, serving.http(app, args, engine, token, calls) as url:
            member = serving.member(args, "decode", engine, url, weights.fingerprint(server.model))
            if not await orders.while_wanted(registry.ready):
                return
            async with registry.join(member) as seat:
                serving.tell(ready=url, name=member.name)
                await orders.drain.wait()
                await orders.unhurried(partial(serving.announce_draining, registry, seat))
                server.draining = True
                await orders.unhurried(calls.none)


if __name__ == "__main__":
    arguments = serving.model_parser("Generate from caches that prefill servers write.").parse_args()
    sys.exit(serving.start("decode.py", partial(main, arguments), with_parent=arguments.with_parent))
