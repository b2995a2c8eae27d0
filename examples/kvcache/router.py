"""The router: serves OpenAI's API, chooses who works on a request, and shows the cluster.

    python examples/kvcache/router.py --port 8000

It keeps the registry of the members, which it prints as `registry` when it is ready, and the URL of its page with the
token, which it makes where `KVCACHE_TOKEN` is not set.

| path                                            | what                                                          |
|-------------------------------------------------|---------------------------------------------------------------|
| POST /v1/completions, POST /v1/chat/completions | OpenAI's (`openai_requests` says what of it)                  |
| GET /v1/models                                  | the one model                                                 |
| GET /health                                     | whether requests can be served; the only one without a token  |
| GET /metrics                                    | for Prometheus                                                |
| GET /, /events, /stats                          | the page, its stream of numbers, the same numbers once        |
| POST /scale                                     | {"prefill": n, "decode": m}, where something scales           |
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import aiote
import metrics
import serving
import web
from aiote.demo import Orders, tell
from aiote.discovery import RegistryServer
from api import Api
from front import Front
from openai_answers import event
from watching import Watcher
from web import Answer, Calls, Emit, Refused

PAGE = Path(__file__).with_name("page.html")
MOST_SERVERS = 16  # of a role
MOST_VIEWERS = 64


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    """How many servers of a role are wanted."""

    prefill: Annotated[int, Meta(ge=0, le=MOST_SERVERS)] | None = None
    decode: Annotated[int, Meta(ge=0, le=MOST_SERVERS)] | None = None


class Desk:
    """What the router serves besides OpenAI's API."""

    def __init__(self, front: Front, watcher: Watcher, viewers: Calls, orders: Orders, scalable: bool) -> None:
        self._front, self._watcher, self._viewers = front, watcher, viewers
        self._orders, self._scalable = orders, scalable

    def routes(self) -> list[Route]:
        """Return its routes."""
        return [
            Route("/", self.page),
            Route("/events", self.events),
            Route("/stats", self.stats),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
            Route("/scale", self.scale, methods=["POST"]),
        ]

    async def page(self, _: Request) -> Response:
        """Serve the page."""
        return HTMLResponse(PAGE.read_text(), headers={"cache-control": "no-store"})

    async def stats(self, _: Request) -> Response:
        """Serve the numbers once."""
        return JSONResponse(await self._watcher.look())

    async def events(self, _: Request) -> Response:
        """Serve the numbers as they change."""

        async def produce(emit: Emit) -> None:
            while True:
                await emit(event(await self._watcher.look()))
                await anyio.sleep(self._watcher.period)

        if len(self._viewers) >= MOST_VIEWERS:
            raise Refused(429, f"{MOST_VIEWERS} viewers are connected, which is the limit")
        return Answer(self._viewers, produce, "text/event-stream")

    async def metrics(self, _: Request) -> Response:
        """Serve the router's own numbers; the members serve theirs."""
        families = metrics.of_member("router", self._watcher.requests())
        return metrics.response([*families, metrics.of_members(self._front.members)], self._front.latencies)

    async def health(self, _: Request) -> Response:
        """Tell whether requests can be served."""
        missing = [role for role, count in self._front.members.items() if not count]
        trouble = f"there are no {' and no '.join(missing)} servers" if missing else ""
        return web.health("draining" if self._orders.drain.is_set() else trouble)

    async def scale(self, request: Request) -> Response:
        """Ask whoever started the router for other numbers of servers."""
        body = await web.body_of(request, Scale)
        if not self._scalable:
            raise Refused(409, "this router cannot scale servers: start them with cluster.py")
        wanted = {role: count for role, count in msgspec.to_builtins(body).items() if count is not None}
        if not wanted:
            raise Refused(400, f'expected {{"prefill": n, "decode": m}}, each at most {MOST_SERVERS}')
        tell(scale=wanted)
        return JSONResponse({"scale": wanted}, 202)


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Serve until told to drain, and then until the requests are over that are there."""
    calls, viewers = Calls(), Calls()
    # A decode server may be silent for as long as its prompts wait; who is lost leaves the registry.
    token = os.environ.get(serving.TOKEN) or secrets.token_urlsafe(16)
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=2.0),
        # What is compressed could become any number of bytes.
        headers={"accept-encoding": "identity"},
        limits=httpx.Limits(),
        trust_env=False,
    )
    async with client, aiote.open_engine(args.provider) as engine:
        async with RegistryServer(engine) as registry, anyio.create_task_group() as group:
            front = Front(registry, client, args.page_tokens, token, args.model)
            watcher = Watcher(front, client)
            group.start_soon(front.follow)
            desk = Desk(front, watcher, viewers, orders, args.scalable)
            app = web.application([*Api(front, calls, args.context).routes(), *desk.routes()])
            async with web.http(app, args, engine, token, calls, viewers) as url:
                tell(ready=url, page=f"{url}/?token={token}", registry=str(engine.address))
                await orders.drain.wait()
                # Whoever watches would do so for ever; who waits for tokens gets them.
                viewers.end()
                await orders.unhurried(calls.none)
            group.cancel_scope.cancel()


if __name__ == "__main__":
    parser = serving.parser("Take completions, and choose who works on them.")
    parser.add_argument("--model", default="", help="its fingerprint; by default that of the first server")
    parser.add_argument("--scalable", action="store_true", help="print what POST /scale asks for, for the parent to do")
    arguments = parser.parse_args()
    sys.exit(serving.start("router.py", partial(main, arguments), with_parent=arguments.with_parent))
