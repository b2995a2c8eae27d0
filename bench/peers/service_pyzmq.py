"""The service in pyzmq with msgspec: a ROUTER that starts a task for each request, a DEALER that pairs the answers.

Arrays are frames of their own, which pyzmq sends without one more copy.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from service import Calls, Numbered, digest, filled, main, over_with_input

COPIED_BELOW = 1 << 16
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


async def answer(socket: Any, client: bytes, head: bytes, data: Any) -> None:
    number, name, *arguments = decode(head)
    if name == "count":
        for item in range(arguments[0]):
            await socket.send_multipart([client, encode((number, item)), b""])
        await socket.send_multipart([client, encode((number, None)), b""])
        return
    result, array = None, b""
    if name == "send":
        result = digest(np.frombuffer(data, np.uint8))
    elif name == "fetch":
        array = filled(*arguments)
    elif name == "cpu":
        result = time.process_time()
    await socket.send_multipart([client, encode((number, result)), array], copy=len(array) < COPIED_BELOW)


async def serve(transport: str) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    tasks: set[asyncio.Task[None]] = set()
    with tempfile.TemporaryDirectory() as folder:
        socket.bind(f"ipc://{folder}/zmq" if transport == "local" else "tcp://127.0.0.1:*")
        print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)

        async def work() -> None:
            while True:
                client, head, data = await socket.recv_multipart(copy=False)
                task = asyncio.ensure_future(answer(socket, client.bytes, head.bytes, data.buffer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        working = asyncio.ensure_future(work())
        await over_with_input().wait()
        working.cancel()
        context.destroy(0)


class Client(Numbered):
    def __init__(self, socket: Any) -> None:
        super().__init__()
        self.socket = socket

    async def read(self) -> None:
        while True:
            head, data = await self.socket.recv_multipart(copy=False)
            self.answered(*decode(head.buffer), data.buffer)

    async def transmit(self, head: tuple[Any, ...], array: Any) -> None:
        await self.socket.send_multipart([encode(head), array], copy=len(array) < COPIED_BELOW)


async def call(_transport: str, address: str, body: Callable[[Calls], Awaitable[None]]) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(address)
    client = Client(socket)
    reading = asyncio.ensure_future(client.read())
    await body(client)
    reading.cancel()
    context.destroy(0)


if __name__ == "__main__":
    if "uvloop" in sys.argv:
        import uvloop

        main(serve, call, uvloop.run)
    else:
        main(serve, call)
