"""The service in FastAPI, on uvicorn, called by httpx: bodies of bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import fastapi
import httpx
import numpy as np
import uvicorn
from fastapi.responses import Response, StreamingResponse

from service import CONCURRENT, Calls, digest, filled, main, over_with_input

app = fastapi.FastAPI()


@app.post("/empty")
async def empty() -> None:
    return None


@app.post("/send")
async def send(request: fastapi.Request) -> int:
    return digest(np.frombuffer(await request.body(), np.uint8))


@app.post("/fetch")
async def fetch(nbytes: int, value: int) -> Response:
    return Response(filled(nbytes, value).tobytes(), media_type="application/octet-stream")


@app.post("/count")
async def count(items: int) -> StreamingResponse:
    async def lines() -> AsyncIterator[bytes]:
        for item in range(items):
            yield b"%d\n" % item

    return StreamingResponse(lines())


@app.post("/cpu")
async def cpu() -> float:
    return time.process_time()


async def serve(transport: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listener = socket.socket(socket.AF_UNIX if transport == "local" else socket.AF_INET)
        listener.bind(f"{folder}/http" if transport == "local" else ("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        print(listener.getsockname() if transport == "local" else listener.getsockname()[1], flush=True)
        await over_with_input().wait()
        server.should_exit = True
        await serving


class Client(Calls):
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def empty(self) -> None:
        (await self.client.post("/empty")).raise_for_status()

    async def send(self, array: Any) -> int:
        return int(json.loads((await self.client.post("/send", content=array.tobytes())).content))

    async def fetch(self, nbytes: int, value: int) -> Any:
        answer = await self.client.post("/fetch", params={"nbytes": nbytes, "value": value})
        return np.frombuffer(answer.content, np.uint8)

    async def count(self, items: int) -> AsyncIterator[int]:
        async with self.client.stream("POST", "/count", params={"items": items}) as answer:
            async for line in answer.aiter_lines():
                yield int(line)

    async def cpu(self) -> float:
        return float(json.loads((await self.client.post("/cpu")).content))


async def call(transport: str, address: str, body: Callable[[Calls], Awaitable[None]]) -> None:
    limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=CONCURRENT)
    local = transport == "local"
    way = httpx.AsyncHTTPTransport(uds=address if local else None, limits=limits)
    base = "http://local" if local else f"http://127.0.0.1:{address}"
    async with httpx.AsyncClient(transport=way, base_url=base, timeout=300) as client:
        await body(Client(client))


if __name__ == "__main__":
    main(serve, call)
