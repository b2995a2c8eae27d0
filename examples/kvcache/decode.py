"""A decode server: has prompts' caches moved into its pages, and generates from there.

    python examples/kvcache/decode.py --registry 'aiote://...'

`POST /generate` is for the router: {"tokens": [...], "max_tokens": n, "prefillers": ["aiote://...", ...], "sampling":
{...}, "echo": false}, where the prefill servers are tried one after the other. It answers with lines of JSON: {"round":
k} when the k-th has delivered, {"prompt": [{"id": t, "logprob": p, "top": [...]}, ...]} with `echo`, {"token": {"id":
t, ...}} for each token that follows, {"finish": "stop"} or {"finish": "length"}.
A client that leaves ends all of it: the prefill server is told to stop, its writes end, and the pages come back.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Annotated

import anyio
import anyio.to_thread
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import aiote
import metrics
import serving
import web
from aiote.demo import Orders, tell, tokens, weights
from generating import DecodeServer, PrefillFailed
from sampling import Sampling
from web import Emit, Refused

MOST_PREFILLERS = 16


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request asks for."""

    tokens: Annotated[tuple[Annotated[int, Meta(ge=0, lt=tokens.VOCABULARY)], ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 32)]
    prefillers: Annotated[
        tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(min_length=1, max_length=MOST_PREFILLERS)
    ]
    sampling: Sampling = Sampling()
    echo: bool = False


class Endpoint:
    """A decode server as it is reached over HTTP: what is asked of it, and what became of that."""

    def __init__(self, server: DecodeServer, context: int) -> None:
        self.server, self.context = server, context
        self.draining = False
        self.requests = self.done = self.failed = self.cancelled = self.failovers = self.tokens = 0

    async def answer(self, asked: Asked, emit: Emit) -> None:
        """Serve one request. Raises Refused where nothing was emitted yet."""
        if len(asked.tokens) + asked.max_tokens > self.context:
            raise Refused(
                400, f"max_tokens: prompt and answer may have {self.context} tokens together", param="max_tokens"
            )
        self.requests += 1
        try:
            addresses = [aiote.Address.parse(address) for address in asked.prefillers]
            async with self.server.request(
                asked.tokens, addresses, asked.max_tokens, asked.sampling, echo=asked.echo
            ) as generation:
                self.failovers += generation.round > 1
                await emit(line(round=generation.round))
                if asked.echo:
                    await emit(line(prompt=generation.prompt))
                async for token in generation:
                    self.tokens += 1
                    await emit(line(token=token))
                await emit(line(finish=generation.finish))
            self.done += 1
        except aiote.UsageError as error:
            raise Refused(400, str(error)) from None
        except aiote.AioteError as error:
            self.failed += 1
            raise Refused(503, str(error), retry="prefill" if isinstance(error, PrefillFailed) else "decode") from None
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.requests -= 1

    def stats(self, engine: aiote.Engine) -> dict[str, object]:
        """Return what the router's page shows, as counts since the start."""
        server = self.server
        return {
            **serving.engine_stats(engine),
            "requests": self.requests,
            "waiting": server.slots.waiting,
            "pages": server.pages.count,
            "pages_held": server.pages.held,
            "bytes_arrived": server.bytes_arrived,
            "running": len(server.batch.running),
            "steps": server.batch.steps,
            "largest_batch": server.batch.largest,
            "tokens": self.tokens,
            "done": self.done,
            "failed": self.failed,
            "failovers": self.failovers,
            "cancelled": self.cancelled,
        }


def line(**facts: object) -> bytes:
    """Return one line of an answer."""
    return msgspec.json.encode(facts) + b"\n"


def application(endpoint: Endpoint, engine: aiote.Engine, calls: web.Calls) -> web.Starlette:
    """Return what is served over HTTP."""

    async def generate(request: Request) -> Response:
        if endpoint.draining:
            raise Refused(503, "the decode server is draining", retry="decode")
        asked = await web.body_of(request, Asked)
        return web.Answer(calls, partial(endpoint.answer, asked), "application/x-ndjson")

    async def stats(_: Request) -> Response:
        return JSONResponse(endpoint.stats(engine))

    async def shown(_: Request) -> Response:
        return metrics.response(metrics.of_member("decode", endpoint.stats(engine)))

    async def health(_: Request) -> Response:
        return web.health("draining" if endpoint.draining else "")

    routes = [Route("/stats", stats), Route("/metrics", shown), Route("/health", health)]
    return web.application([Route("/generate", generate, methods=["POST"]), *routes])


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Serve until told to drain, and then until the requests are over that are there."""
    settings, token = serving.settings_of(args), serving.token()
    model = await anyio.to_thread.run_sync(settings.model)
    calls = web.Calls()
    async with serving.member_of_a_cluster(args) as (engine, registry):
        server = DecodeServer(engine, settings, model, name=serving.name_of(args, "decode"))
        endpoint = Endpoint(server, args.context)
        app = application(endpoint, engine, calls)
        async with server.serving(), web.http(app, args, engine, token, calls) as url:
            member = serving.member(args, "decode", engine, url, weights.fingerprint(model), token)
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
