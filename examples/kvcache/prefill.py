"""A prefill server: computes prompts' caches and writes them, layer by layer, into the memory of decode servers.

    python examples/kvcache/prefill.py --registry 'aiote://...'

Work comes from decode servers, as calls of aiote.service; HTTP is for those who look. Pages of prompts that were
computed stay until others need them, and a prompt that begins with the same tokens is computed from there on.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import aiote
import metrics
import serving
import web
from aiote.demo import Orders, tell, weights
from computing import PrefillServer


def statistics(server: PrefillServer, engine: aiote.Engine) -> dict[str, object]:
    """Return what the router's page shows, as counts since the start."""
    return {
        **serving.engine_stats(engine),
        "requests": server.running,
        "waiting": server.waiting,
        "pages": server.pages.pages,
        "pages_held": server.pages.used,
        "pages_kept": server.pages.kept,
        "bytes_written": server.bytes_written,
        "tokens": server.batch.tokens,
        "steps": server.batch.steps,
        "largest_batch": server.batch.largest,
        "cached_tokens": server.cached_tokens,
        "done": server.done,
        "cancelled": server.cancelled,
    }


def application(server: PrefillServer, engine: aiote.Engine, orders: Orders) -> web.Starlette:
    """Return what is served over HTTP."""

    async def stats(_: Request) -> Response:
        return JSONResponse(statistics(server, engine))

    async def shown(_: Request) -> Response:
        return metrics.response(metrics.of_member("prefill", statistics(server, engine)))

    async def health(_: Request) -> Response:
        return web.health("draining" if orders.drain.is_set() else "")

    return web.application([Route("/stats", stats), Route("/metrics", shown), Route("/health", health)])


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Serve until told to drain, and then until the prompts are over that are there."""
    settings, token = serving.settings_of(args), serving.token()
    model = await anyio.to_thread.run_sync(settings.model)
    async with serving.member_of_a_cluster(args) as (engine, registry):
        name = serving.name_of(args, "prefill")
        how = {"step_tokens": args.step_tokens, "slower": args.slower}
        server = PrefillServer(engine, settings, model, name=name, **how)
        app = application(server, engine, orders)
        # Left early, it stops what is still there, and its decode servers are told.
        async with server.serving() as prompts, web.http(app, args, engine, token) as url:
            member = serving.member(args, "prefill", engine, url, weights.fingerprint(model), token)
            if await orders.while_wanted(registry.ready):
                async with registry.join(member) as registration:
                    tell(ready=url, name=member.name)
                    await orders.drain.wait()
                    await orders.unhurried(partial(serving.announce_draining, registry, registration), prompts.drain)


if __name__ == "__main__":
    arguments = serving.model_parser("Compute prompts' caches for decode servers.").parse_args()
    sys.exit(serving.start("prefill.py", partial(main, arguments), with_parent=arguments.with_parent))
