"""A prefill server: computes prompts' caches and writes them, layer by layer, into the memory of decode servers.

    python examples/kvcache/prefill.py --registry 'aiote://...'

Work comes from decoders, as messages of aiote; HTTP is for those who look (`/stats`). Pages of prompts that were
computed stay until others need them, and a prompt that begins with the same tokens is computed from there on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiote
import serving
from aiote.demo import weights
from aiote.demo.model import Model
from aiote.demo.pages import RequestCache, plan
from aiote.demo.settings import Settings
from aiote.kvcache import Job, Prefiller
from prefixes import PrefixPages


class PrefillServer:
    """A model, a pool of pages, and the jobs that are computed with them."""

    def __init__(self, settings: Settings, model: Model, slower: float) -> None:
        self.settings, self.model = settings, model
        self.slower = slower
        self.layout = settings.layout(model.config)
        self.memory = settings.memory(model.config)
        self.pages = PrefixPages(settings.pool_pages, settings.page_tokens, settings.chunk_tokens)
        self.done = self.cancelled = self.tokens = self.cached_tokens = 0
        self._turn = anyio.Lock()

    async def serve(self, prefiller: Prefiller) -> None:
        """Compute jobs, as many at a time as there are pages for; their chunks take turns."""
        async with anyio.create_task_group() as group:
            async for job in prefiller.jobs():
                group.start_soon(self._compute, job)

    async def _compute(self, job: Job) -> None:
        tokens = [int(token) for token in job.tokens]
        if len(tokens) > self.settings.new_tokens:
            job.refuse(f"a prompt of {len(tokens)} tokens, the most here are {self.settings.new_tokens}")
            return
        # The pages stay lent until the job's block is left, which is when nothing is read from them any more.
        async with self.pages.borrow(tokens) as (table, cached):
            async with job:
                await self._fill(job, tokens, table, cached)
                self.cached_tokens += cached
            if job.cancelled:
                self.cancelled += 1
                return
            self.done += 1
            self.pages.keep(tokens, table)

    async def _fill(self, job: Job, tokens: Sequence[int], table: Sequence[int], cached: int) -> None:
        cache, layers = RequestCache(self.memory, table), self.model.config.layers
        for part in plan(len(tokens), self.settings.chunk_tokens):
            chunk = job.chunk(part.start, part.stop, table)
            if part.stop <= cached:
                await chunk.done_to(layers)
            else:
                async with self._turn:
                    span = self.model.begin(tokens[part.start : part.stop], part.start)
                    for layer in range(layers):
                        await anyio.to_thread.run_sync(self.model.layer, layer, span, cache)
                        await anyio.sleep(self.slower)
                        await chunk.done(layer)
            self.tokens += len(part)
        # The last chunk was computed, so there is a span: `cached` is less than the prompt.
        await job.tail(self.model.logits(span))

    def stats(self, engine: aiote.Engine, prefiller: Prefiller) -> dict[str, object]:
        """Return what the router's page shows, as counts since the start."""
        return {
            **serving.engine_stats(engine),
            "requests": prefiller.live,
            "waiting": prefiller.waiting,
            "pages": self.pages.pages,
            "pages_held": self.pages.used,
            "pages_kept": self.pages.kept,
            "bytes_written": prefiller.statistics().bytes,
            "tokens": self.tokens,
            "cached_tokens": self.cached_tokens,
            "done": self.done,
            "cancelled": self.cancelled,
        }


async def main(args: argparse.Namespace, orders: serving.Orders) -> None:
    """Serve until told to drain, and then until the jobs are over that are there."""
    settings, token = serving.settings_of(args), serving.token()
    server = PrefillServer(settings, await anyio.to_thread.run_sync(settings.model), args.slower)
    async with serving.member_of_a_cluster(args) as (engine, mailroom, registry):
        async with Prefiller(mailroom, server.layout, server.memory) as prefiller:

            async def stats(_: Request) -> JSONResponse:
                return JSONResponse(server.stats(engine, prefiller))

            app = Starlette(routes=[Route("/stats", stats)])
            async with anyio.create_task_group() as group, serving.http(app, args, engine, token) as url:
                group.start_soon(server.serve, prefiller)
                member = serving.member(args, "prefill", engine, url, weights.fingerprint(server.model))
                if await orders.while_wanted(registry.ready):
                    async with registry.join(member) as seat:
                        serving.tell(ready=url, name=member.name)
                        await orders.drain.wait()
                        await orders.unhurried(partial(serving.announce_draining, registry, seat), prefiller.drain)
                # What is still there is stopped, and its decoders are told.
                group.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = serving.model_parser("Compute prompts' caches for decode servers.").parse_args()
    sys.exit(serving.start("prefill.py", partial(main, arguments), with_parent=arguments.with_parent))
