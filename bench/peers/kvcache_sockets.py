"""The KV-cache service over plain stream sockets, in asyncio's own loop and in uvloop.

What was chosen, by what the workers for single transfers have shown to be fast:
* One connection, one stream of payload alone: requests are answered in their order, so the decode side knows what comes
  next. `recvmsg_into` has the kernel scatter what has come into the pages, and `sendmsg` gathers it: no copy in Python.
* Up to 64 pages a call, across layers of a request. The loop tells when the descriptor is ready (`add_reader`,
  `add_writer`); both ways try before they wait.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from common import Arena, Options, serve
from sockets_peer import Sockets

from kvcache import Cache, Request, Service, ServiceTask, ask, ask_bytes, asked

PIECES = 64


class Scatter:
    """Pages in a row of one stream: what is left of them, PIECES at a time."""

    def __init__(self, pages: list[memoryview]) -> None:
        self._pages = pages
        self._size = len(pages[0])
        self.moved = 0

    @property
    def left(self) -> int:
        return len(self._pages) * self._size - self.moved

    def pieces(self) -> list[memoryview]:
        page, begun = divmod(self.moved, self._size)
        pieces = self._pages[page : page + PIECES]
        if begun:
            pieces[0] = pieces[0][begun:]
        return pieces


class KvSockets(Service, Sockets):
    """One connection; the descriptor is read and written directly, the loop says when."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.line: socket.socket
        self.views: list[list[memoryview]] = []

    async def _adopt(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.line = connection

    def prepare(self, task: ServiceTask) -> None:
        pages = self.cache.bytes
        self.views = [[page.data for page in layer] for layer in pages]

    def work(self, task: ServiceTask) -> None:
        self.loop.run_until_complete(self._decode(task) if self.decodes else self._prefill(task))

    def _pages(self, numbers: list[int]) -> Scatter:
        return Scatter([layer[page] for layer in self.views for page in numbers])

    async def _decode(self, task: ServiceTask) -> None:
        cache, tokens, flying = self.cache, self.tokens(task), deque[tuple[Request, Scatter]]()
        while cache.left:
            while cache.more and len(flying) < task.window:
                request = cache.begin()
                flying.append((request, self._pages(request.pages.tolist())))
                await self._send(memoryview(ask(request, tokens)))
            request, pages = flying[0]
            await self._receive_some(request, pages, cache, task.layer_bytes)
            if not pages.left:
                flying.popleft()
                cache.end(request)

    async def _receive_some(self, request: Request, pages: Scatter, cache: Cache, layer_bytes: int) -> None:
        while pages.left:
            try:
                got = self.line.recvmsg_into(pages.pieces())[0]
            except BlockingIOError:
                await self._ready(self.loop.add_reader, self.loop.remove_reader)
                continue
            if not got:
                raise ConnectionResetError("the other side has closed")
            pages.moved += got
            while request.layers < pages.moved // layer_bytes:
                cache.arrived(request)

    async def _prefill(self, task: ServiceTask) -> None:
        message = memoryview(bytearray(ask_bytes(task)))
        for _ in range(task.count):
            await self._receive(message)
            number, _theirs = asked(message)
            pages = self._pages(self.cache.ours(number).tolist())
            while pages.left:
                try:
                    pages.moved += self.line.sendmsg(pages.pieces())
                except BlockingIOError:
                    await self._ready(self.loop.add_writer, self.loop.remove_writer)

    async def _receive(self, memory: memoryview) -> None:
        while memory:
            try:
                got = self.line.recv_into(memory)
            except BlockingIOError:
                await self._ready(self.loop.add_reader, self.loop.remove_reader)
                continue
            memory = memory[got:]

    async def _send(self, memory: memoryview) -> None:
        while memory:
            try:
                memory = memory[self.line.send(memory) :]
            except BlockingIOError:
                await self._ready(self.loop.add_writer, self.loop.remove_writer)

    async def _ready(self, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        future = self.loop.create_future()
        add(self.line, lambda: future.done() or future.set_result(None))
        try:
            await future
        finally:
            remove(self.line)

    def close(self) -> None:
        self.line.close()


if __name__ == "__main__":
    serve(KvSockets)
