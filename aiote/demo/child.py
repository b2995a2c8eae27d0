"""The entry of the demo's child processes: `python -m aiote.demo.child ROLE SETTINGS`.

Their parent, which is the command, gives the decoder its prompts and hears of every page and every token:

    prefill, decode   {"ready": address, "model": fingerprint}, at the end {"report": {...}}
    prefill           {"request": n, "pages": so many more on their way}
    decode            {"request": n, "token": t}; then {"request": n, "checksum": c} or {"request": n, "failed": why}
    to decode         {"request": n, "prompt": [tokens], "prefiller": address}
    to local          {"prompts": [[bytes], ...]}; it answers with its results, one a line

The decoder says how a request ended when its pages are free again.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterable
from functools import partial

import anyio
import anyio.to_thread

import aiote
from aiote.demo import one_process, weights
from aiote.demo.children import NAMES
from aiote.demo.decode import DecodeServer
from aiote.demo.life import Orders, explain, leave_with_parent, live, tell
from aiote.demo.prefill import PrefillServer
from aiote.demo.settings import Settings
from aiote.errors import AioteError
from aiote.kvcache import Job

__all__ = ["main"]

# Prompts are computed one after the other, in numpy: a layer of a long chunk may take minutes. A prefiller that is
# gone or stands still is noticed by its connection, whatever this is.
_STALL_LIMIT_S = 86400.0


def main(role: str, settings: Settings) -> int:
    """Do the work of a role until told to end; returns the exit status."""
    if role != "local":
        return live(NAMES[role], partial({"prefill": prefill, "decode": decode}[role], settings))
    try:
        prompts = json.loads(sys.stdin.buffer.readline())["prompts"]
        leave_with_parent(sys.stdin.fileno())
        one_process.main(settings, [bytes(prompt) for prompt in prompts])
    except Exception as error:
        return explain(NAMES[role], error)
    return 0


async def prefill(settings: Settings, orders: Orders) -> None:
    """Compute prompts until told to drain, and report once the last one is over."""
    leave_with_parent(sys.stdin.fileno())
    model = await anyio.to_thread.run_sync(settings.model)

    def written(job: Job, pages: int) -> None:
        tell(request=int.from_bytes(job.request_id), pages=pages)

    async with aiote.open_engine(settings.provider) as engine:
        server = PrefillServer(engine, settings, model, written=written)
        async with server.prefiller:
            async with anyio.create_task_group() as group:
                group.start_soon(server.serve)
                tell(ready=str(engine.address), model=weights.fingerprint(model))
                await orders.drain.wait()
                await orders.unhurried(server.prefiller.drain)
                if orders.at_once.is_set():
                    group.cancel_scope.cancel()
            done = server.prefiller.statistics()
            counts = {"writes": done.transfers, "bytes": done.bytes, "busy_s": done.busy_s}
            tell(report={"pages_held": server.pages.used, "pages_total": server.pages.pages, **counts})


async def decode(settings: Settings, orders: Orders) -> None:
    """Answer prompts until told to drain, and report."""
    loop = asyncio.get_running_loop()
    sending, lines = anyio.create_memory_object_stream[bytes](math.inf)
    leave_with_parent(sys.stdin.fileno(), lambda line: loop.call_soon_threadsafe(sending.send_nowait, line))
    with sending, lines:
        model = await anyio.to_thread.run_sync(settings.model)
        async with aiote.open_engine(settings.provider) as engine:
            server = DecodeServer(engine, settings, model, stall_limit=_STALL_LIMIT_S)
            async with server.decoder as decoder, anyio.create_task_group() as group:
                group.start_soon(answer_all, server, lines)
                tell(ready=str(engine.address), model=weights.fingerprint(model))
                await orders.drain.wait()
                tell(report={"pages_held": decoder.pages - decoder.free_pages, "pages_total": decoder.pages})
                group.cancel_scope.cancel()


async def answer_all(server: DecodeServer, lines: AsyncIterable[bytes]) -> None:
    """Serve all requests that come."""
    async with anyio.create_task_group() as group:
        async for line in lines:
            group.start_soon(answer, server, line)


async def answer(server: DecodeServer, line: bytes) -> None:
    """Serve one request, and tell the parent how it ended, after its pages are free again."""
    asked = json.loads(line)
    request, prefiller = asked["request"], aiote.Address.parse(asked["prefiller"])
    name, most = request.to_bytes(8), server.settings.new_tokens
    try:
        async with server.request(asked["prompt"], [prefiller], most, request_id=name) as generation:
            async for token in generation:
                tell(request=request, token=token)
            checksum = await generation.checksum()
        tell(request=request, checksum=checksum)
    except AioteError as error:
        tell(request=request, failed=str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Settings.from_json(sys.argv[2])))
