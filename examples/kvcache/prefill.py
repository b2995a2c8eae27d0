"""A prefill server: computes prompts' caches and writes them, layer by layer, into the memory of decode servers.

    python examples/kvcache/prefill.py --registry 'aiote://...'

Work comes from decoders, as calls of aiote.service; HTTP is for those who look (`/stats`). Pages of prompts that were
computed stay until others need them, and a prompt that begins with the same tokens is computed from there on.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiote
import serving
from aiote.demo import Orders, PrefillServer, tell, weights


def statistics(server: PrefillServer, engine: aiote.Engine) -> dict[str, object]:
    """Return what the router's page shows, as counts since the start."""
    return {
        **serving.engine_stats(engine),
        "requests": server.prefiller.live,
        "waiting": server.prefiller.waiting,
        "pages": server.pages.pages,
        "pages_held": server.pages.used,
        "pages_kept": server.pages.kept,
        "bytes_written": server.prefiller.statistics().bytes,
        "tokens": server.tokens,
        "cached_tokens": server.cached_tokens,
        "done": server.done,
        "cancelled": server.cancelled,
    }


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Serve until told to drain, and then until the jobs are over that are there."""
    settings, token = serving.settings_of(args), serving.token()
    model = await anyio.to_thread.run_sync(settings.model)
    async with serving.member_of_a_cluster(args) as (engine, registry):
        server = PrefillServer(engine, settings, model, slower=args.slower)

        async def stats(_: Request) -> JSONResponse:
            return JSONResponse(statistics(server, engine))

        app = Starlette(routes=[Route("/stats", stats)])
        async with server.prefiller, anyio.create_task_group() as group, serving.http(app, args, engine, token) as url:
            group.start_soon(server.serve)
            member = serving.member(args, "prefill", engine, url, weights.fingerprint(model))
            if await orders.while_wanted(registry.ready):
                async with registry.join(member) as registration:
                    tell(ready=url, name=member.name)
                    await orders.drain.wait()
                    await orders.unhurried(
                        partial(serving.announce_draining, registry, registration), server.prefiller.drain
                    )
            # What is still there is stopped, and its decoders are told.
            group.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = serving.model_parser("Compute prompts' caches for decode servers.").parse_args()
    sys.exit(serving.start("prefill.py", partial(main, arguments), with_parent=arguments.with_parent))
