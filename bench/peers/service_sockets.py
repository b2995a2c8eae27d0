"""The service over plain sockets with uvloop and msgspec: a length, a head, an array; a task for each request."""

from __future__ import annotations

import asyncio
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import uvloop

from service import Calls, Numbered, digest, filled, main, over_with_input

LENGTHS = struct.Struct("<IQ")
LIMIT = 1 << 20
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Connection:
    """Heads and arrays, both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, head: Any, array: Any = b"") -> None:
        data = encode(head)
        self.writer.writelines([LENGTHS.pack(len(data), len(array)), data, memoryview(array)])
        await self.writer.drain()

    async def receive(self) -> tuple[Any, bytes]:
        lengths = LENGTHS.unpack(await self.reader.readexactly(LENGTHS.size))
        return decode(await self.reader.readexactly(lengths[0])), await self.reader.readexactly(lengths[1])


async def answer(connection: Connection, number: int, name: str, arguments: list[int], data: bytes) -> None:
    if name == "count":
        for item in range(arguments[0]):
            await connection.send((number, item))
        await connection.send((number, None))
    elif name == "send":
        await connection.send((number, digest(np.frombuffer(data, np.uint8))))
    elif name == "fetch":
        await connection.send((number, None), filled(*arguments))
    else:
        await connection.send((number, time.process_time()))


async def serve(transport: str) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            while True:
                (number, name, *arguments), data = await connection.receive()
                task = asyncio.ensure_future(answer(connection, number, name, arguments, data))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except asyncio.IncompleteReadError:
            writer.close()

    with tempfile.TemporaryDirectory() as folder:
        if transport == "local":
            await asyncio.start_unix_server(work, f"{folder}/sockets", limit=LIMIT)
            print(f"{folder}/sockets", flush=True)
        else:
            server = await asyncio.start_server(work, "127.0.0.1", 0, limit=LIMIT)
            print(server.sockets[0].getsockname()[1], flush=True)
        await over_with_input().wait()


class Client(Numbered):
    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    async def read(self) -> None:
        while True:
            (number, result), data = await self.connection.receive()
            self.answered(number, result, data)

    async def transmit(self, head: tuple[Any, ...], array: Any) -> None:
        await self.connection.send(head, array)


async def call(transport: str, address: str, body: Callable[[Calls], Awaitable[None]]) -> None:
    if transport == "local":
        streams = await asyncio.open_unix_connection(address, limit=LIMIT)
    else:
        streams = await asyncio.open_connection("127.0.0.1", int(address), limit=LIMIT)
    client = Client(Connection(*streams))
    reading = asyncio.ensure_future(client.read())
    await body(client)
    reading.cancel()


if __name__ == "__main__":
    main(serve, call, uvloop.run)
