"""The entry of the demo's child processes: `python -m aiote.demo.child ROLE SETTINGS`.

Their parent, the command, sends each prompt to both, and they report every page and every token to it:

    prefill, decode   {"ready": address, "model": fingerprint}, at the end {"report": {...}}
    prefill           {"request": n, "pages": number of further pages in flight}
    decode            {"request": n, "token": t}; then {"request": n, "checksum": c} or {"request": n, "failed": why}
    to prefill        {"request": n, "prompt": [tokens]}
    to decode         {"request": n, "prompt": [tokens], "prefiller": address}
    to local          {"prompts": [[bytes], ...]}; it answers with its results, one a line

The decoder reports the end of a request when its pages are free again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

import aiote
from aiote.demo import one_process, weights
from aiote.demo.children import NAMES
from aiote.demo.decoder import DecodeWorker
from aiote.demo.life import Orders, ParentRequests, explain, leave_with_parent, live, tell
from aiote.demo.prefiller import PrefillWorker
from aiote.demo.settings import Settings
from aiote.errors import AioteError

__all__ = ["main"]

# Prompts are computed one after the other, in numpy, so that a request may wait for an hour for its pages. The
# connection detects a child that is gone or does not respond, independently of this limit.
_MATCH_TIMEOUT_S = 86400.0
_LAST_S = 2.0
"""Seconds that the prefiller's last requests may take to end, after the decoder has reported that all are over."""


def main(role: str, settings: Settings) -> int:
    """Do the work of a role until the parent ends it; return the exit status."""
    if role != "local":
        return live(NAMES[role], partial({"prefill": prefill, "decode": decode}[role], settings))
    try:
        prompts = json.loads(sys.stdin.buffer.readline())["prompts"]
        leave_with_parent(sys.stdin.fileno())
        one_process.main(settings, [bytes(prompt) for prompt in prompts])
    except Exception as error:
        return explain(NAMES[role], error)
    return 0


@asynccontextmanager
async def asked(
    each: Callable[[dict[str, Any]], Coroutine[Any, Any, None]], last_s: float = 0.0
) -> AsyncIterator[None]:
    """Run `each` with every request that the parent writes. After the block, these have `last_s` seconds to end."""
    with ParentRequests() as requests:

        async def hear() -> None:
            async for request in requests:
                group.start_soon(each, request)

        async with anyio.create_task_group() as group:
            group.start_soon(hear)
            yield
            requests.end()
            group.cancel_scope.deadline = anyio.current_time() + last_s


async def prefill(settings: Settings, orders: Orders) -> None:
    """Compute prompts until ordered to drain, and report."""

    async def compute(request: dict[str, Any]) -> None:
        await worker.compute(str(request["request"]), request["prompt"])

    def written(request: str, pages: int) -> None:
        tell(request=int(request), pages=pages)

    model = await anyio.to_thread.run_sync(settings.model)
    async with aiote.open_engine(settings.provider) as engine:
        worker = PrefillWorker(engine, settings, model, match_timeout=_MATCH_TIMEOUT_S, written=written)
        async with worker.producer as producer:
            async with asked(compute, _LAST_S):
                tell(ready=str(engine.address), model=weights.fingerprint(model))
                await orders.drain.wait()
            done = producer.written
        counts = {"writes": done.transfers, "bytes": done.bytes, "busy_s": done.busy_s}
        tell(report={"pages_held": worker.pages.used, "pages_total": worker.pages.pages, **counts})


async def decode(settings: Settings, orders: Orders) -> None:
    """Answer prompts until ordered to drain, and report."""
    model = await anyio.to_thread.run_sync(settings.model)
    async with aiote.open_engine(settings.provider) as engine:
        worker = DecodeWorker(engine, settings, model)
        async with worker.consumer, asked(partial(answer, worker)):
            tell(ready=str(engine.address), model=weights.fingerprint(model))
            await orders.drain.wait()
            tell(report={"pages_held": worker.pool.pages - worker.pool.free, "pages_total": worker.pool.pages})


async def answer(worker: DecodeWorker, asked: dict[str, Any]) -> None:
    """Serve one request, and report its end to the parent after its pages are free again."""
    request, prefiller = asked["request"], aiote.Address.parse(asked["prefiller"])
    try:
        async with worker.request(str(request), asked["prompt"], prefiller, worker.settings.new_tokens) as answering:
            async for token in answering:
                tell(request=request, token=token)
            checksum = await answering.checksum()
        tell(request=request, checksum=checksum)
    except AioteError as error:
        tell(request=request, failed=str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Settings.from_json(sys.argv[2])))
