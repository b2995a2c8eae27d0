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
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiote
import serving
from aiote.demo import DecodeServer, Orders, tell, tokens, weights
from aiote.kvcache import PrefillError
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


class Endpoint:
    """A decode server as it is reached over HTTP: what is asked of it, and what became of that."""

    def __init__(self, server: DecodeServer, context: int) -> None:
        self.server, self.context = server, context
        self.draining = False
        self.done = self.failed = self.cancelled = self.failovers = self.tokens = self.bytes = 0

    async def answer(self, asked: Asked, emit: Emit) -> None:
        """Serve one request. Raises Refused where nothing was emitted yet."""
        layout = self.server.layout
        try:
            async with self.server.request(asked.tokens, asked.prefillers, asked.max_tokens) as generation:
                self.bytes += layout.pages_for(len(asked.tokens)) * layout.page_bytes(1) * layout.layers
                self.failovers += generation.round > 1
                await emit(line(round=generation.round))
                async for token in generation:
                    self.tokens += 1
                    await emit(line(token=token))
                await emit(line(finish=generation.finish))
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

    def stats(self, engine: aiote.Engine) -> dict[str, object]:
        """Return what the router's page shows, as counts since the start."""
        decoder = self.server.decoder
        return {
            **serving.engine_stats(engine),
            "requests": decoder.requests,
            "waiting": decoder.waiting,
            "pages": decoder.pages,
            "pages_held": decoder.pages - decoder.free_pages,
            "grants": decoder.grants,
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


def application(endpoint: Endpoint, engine: aiote.Engine, calls: serving.Calls) -> Starlette:
    """Return what is served over HTTP."""

    async def generate(request: Request) -> serving.Answer:
        if endpoint.draining:
            raise Refused(503, "the decode server is draining", retry=True)
        asked = Asked.of(await serving.body_of(request), endpoint.context)
        return serving.Answer(calls, partial(endpoint.answer, asked), "application/x-ndjson")

    async def stats(_: Request) -> JSONResponse:
        return JSONResponse(endpoint.stats(engine))

    routes: Sequence[Route] = [Route("/generate", generate, methods=["POST"]), Route("/stats", stats)]
    return Starlette(routes=routes, exception_handlers={Refused: serving.refusal})


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Serve until told to drain, and then until the requests are over that are there."""
    settings, token = serving.settings_of(args), serving.token()
    model = await anyio.to_thread.run_sync(settings.model)
    calls = serving.Calls()
    async with serving.member_of_a_cluster(args) as (engine, registry):
        endpoint = Endpoint(DecodeServer(engine, settings, model), args.context)
        app = application(endpoint, engine, calls)
        async with endpoint.server.decoder, serving.http(app, args, engine, token, calls) as url:
            member = serving.member(args, "decode", engine, url, weights.fingerprint(model))
            if not await orders.while_wanted(registry.ready):
                return
            async with registry.join(member) as registration:
                tell(ready=url, name=member.name)
                await orders.drain.wait()
                await orders.unhurried(partial(serving.announce_draining, registry, registration))
                endpoint.draining = True
                await orders.unhurried(calls.none)


if __name__ == "__main__":
    arguments = serving.model_parser("Generate from caches that prefill servers write.").parse_args()
    sys.exit(serving.start("decode.py", partial(main, arguments), with_parent=arguments.with_parent))
