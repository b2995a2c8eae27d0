"""The service in grpc.aio: bytes as messages, without protobuf, which would copy once more."""

from __future__ import annotations

import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import numpy as np

from service import Calls, digest, filled, main, over_with_input

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
NUMBER = struct.Struct("<q")


class Bench:
    """What is called."""

    async def empty(self, _request: bytes, _context: Any) -> bytes:
        return b""

    async def send(self, request: bytes, _context: Any) -> bytes:
        return NUMBER.pack(digest(np.frombuffer(request, np.uint8)))

    async def fetch(self, request: bytes, _context: Any) -> bytes:
        nbytes, value = struct.unpack("<qq", request)
        return filled(nbytes, value).tobytes()

    async def count(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for item in range(NUMBER.unpack(request)[0]):
            yield NUMBER.pack(item)

    async def cpu(self, _request: bytes, _context: Any) -> bytes:
        return struct.pack("<d", time.process_time())


async def serve(transport: str) -> None:
    bench = Bench()
    names = ("empty", "send", "fetch", "cpu")
    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(bench, name)) for name in names}
    handlers["count"] = grpc.unary_stream_rpc_method_handler(bench.count)
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bench", handlers),))
    with tempfile.TemporaryDirectory() as folder:
        if transport == "local":
            address = f"unix:{folder}/grpc"
            server.add_insecure_port(address)
        else:
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        print(address, flush=True)
        await over_with_input().wait()
        await server.stop(0)


class Client(Calls):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._empty, self._send, self._fetch, self._cpu = (
            channel.unary_unary(f"/Bench/{name}") for name in ("empty", "send", "fetch", "cpu")
        )
        self._count = channel.unary_stream("/Bench/count")

    async def empty(self) -> None:
        await self._empty(b"")

    async def send(self, array: Any) -> int:
        return int(NUMBER.unpack(await self._send(array.tobytes()))[0])

    async def fetch(self, nbytes: int, value: int) -> Any:
        return np.frombuffer(await self._fetch(struct.pack("<qq", nbytes, value)), np.uint8)

    async def count(self, items: int) -> AsyncIterator[int]:
        async for item in self._count(NUMBER.pack(items)):
            yield NUMBER.unpack(item)[0]

    async def cpu(self) -> float:
        return float(struct.unpack("<d", await self._cpu(b""))[0])


async def call(_transport: str, address: str, body: Callable[[Calls], Awaitable[None]]) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        await body(Client(channel))


if __name__ == "__main__":
    main(serve, call)
