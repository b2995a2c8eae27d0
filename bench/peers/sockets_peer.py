"""Measure plain stream sockets under asyncio: with uvloop, and with asyncio's own loop.

What was chosen, each as the fastest of what was tried:
* The stream carries payload alone, message after message, so that the receiver's `BufferedProtocol` lets the kernel
  write straight into the slots, as much at a time as has arrived; no header, no copy. What has come whole is
  acknowledged by a byte a message, all that one reading completed at once.
* uvloop: `transport.write` of a memoryview, which it gathers with its neighbours into one `writev`. asyncio's own
  transport copies what the kernel does not take at once, so there `loop.sock_sendall` sends.
* Under uvloop pages go out as they lie, by `transport.writelines` (an iovec): that is faster than one copy more where
  they are large, and no slower where they are small. `loop.sock_sendall` takes one piece, so there they are copied.
* `tcp` is TCP on the loopback interface, `shm` a Unix socket. The mode `spin` keeps a callback ready, so that the loop
  never sleeps; `event` is what everybody runs.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from importlib.metadata import version
from typing import Any

from common import Arena, Clock, Gather, Options, Outcome, Task, Worker, serve

SOCKET_BUFFER = 1 << 20
ECHO = 8  # bytes of a round trip


class Acknowledged(asyncio.BufferedProtocol):
    """The initiator's side: count the bytes that come back, and wake who waits for a number of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._memory = memoryview(bytearray(1 << 16))
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = 0
        self.arrived = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self.arrived += nbytes
        if self._waiter and self.arrived >= self._wanted:
            self._waiter.set_result(None)
            self._waiter = None

    async def reach(self, wanted: int) -> None:
        if self.arrived < wanted:
            self._wanted = wanted
            self._waiter = self._loop.create_future()
            await self._waiter

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter:
            self._waiter.set_exception(exc or ConnectionResetError("the other side has closed"))


class Receiving(asyncio.BufferedProtocol):
    """The target's side: let the stream flow into the slots, round and round, and acknowledge each that is full."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arena: Arena) -> None:
        self._loop = loop
        self._arena = arena
        self._transport: Any = None
        self.done: asyncio.Future[None] = loop.create_future()
        self.start(Task("latency", ECHO, 1, 1))

    def start(self, task: Task) -> None:
        self._memory = self._arena.view[: task.used]
        self._used, self._stride = task.used, task.stride
        self._left = task.count
        self._offset = self._begun = 0  # where the next byte goes; how much of the message there has come
        self._answers = b"\1" * (ECHO if task.op == "latency" else 1) * (task.window + 1)
        self._answer = len(self._answers) // (task.window + 1)
        self.done = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._offset :]

    def buffer_updated(self, nbytes: int) -> None:
        self._offset += nbytes
        if self._offset == self._used:
            self._offset = 0
        whole, self._begun = divmod(self._begun + nbytes, self._stride)
        if whole:
            self._transport.write(self._answers[: whole * self._answer])
            self._left -= whole
            if not self._left:
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the other side has closed"))


class Sockets(Worker):
    """One connection, from the initiator to the target."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.uvloop = options.variant != "asyncio"
        self.loop = self._make_loop()
        self.listener: socket.socket | None = None
        self.protocol: Any = None
        self.transport: Any = None
        self.socket: socket.socket | None = None
        self.buffers: list[Any] = []
        self.gather: Gather | None = None

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        if not self.uvloop:
            self.library = f"asyncio of Python {sys.version.split()[0]}, sockets"
            return asyncio.new_event_loop()
        import uvloop

        self.library = f"uvloop {version('uvloop')}, sockets"
        return uvloop.new_event_loop()

    def address(self) -> str:
        if self.options.initiator:
            return "-"
        self.listener = self._open()
        # an empty name lets the kernel choose one that is no file, so that nothing is left over if a worker is killed
        self.listener.bind(("127.0.0.1", 0) if self.options.provider == "tcp" else "")
        self.listener.listen(1)
        name = self.listener.getsockname()
        return name.hex() if isinstance(name, bytes) else str(name[1])

    def connect(self, peer: str) -> None:
        if self.listener:
            connection, _ = self.listener.accept()
            self.listener.close()
        else:
            connection = self._open()
            tcp = self.options.provider == "tcp"
            connection.connect(("127.0.0.1", int(peer)) if tcp else bytes.fromhex(peer))
        self.loop.run_until_complete(self._adopt(connection))

    def _open(self) -> socket.socket:
        """Make a socket with large buffers; before it is connected, for TCP settles its window scale then."""
        opened = socket.socket(socket.AF_INET if self.options.provider == "tcp" else socket.AF_UNIX)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            opened.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        return opened

    async def _adopt(self, connection: socket.socket) -> None:
        if self.options.initiator and not self.uvloop:
            # asyncio lets a descriptor either have a transport or be written to by sock_sendall
            self.socket = connection.dup()
            self.socket.setblocking(False)
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport, self.protocol = await self.loop.create_connection(self._make_protocol, sock=connection)

    def _make_protocol(self) -> asyncio.BaseProtocol:
        return Acknowledged(self.loop) if self.options.initiator else Receiving(self.loop, self.arena)

    def refusal(self, task: Task) -> str:
        return "sockets have no one-sided operations" if task.op == "read" else ""

    def prepare(self, task: Task) -> None:
        if not self.options.initiator:
            self.protocol.start(task)
            return
        self.protocol.arrived = 0
        slots = [self.arena.view[start : start + task.stride] for start in range(0, task.used, task.stride)]
        self.gather = None
        if task.op != "pages":
            self.buffers = slots
        elif self.uvloop:
            starts = [page * task.size for page in task.gathered]
            self.buffers = [[slot[start : start + task.size] for start in starts] for slot in slots]
        else:
            self.gather = Gather(self.arena, task)
            self.buffers = [piece.data for piece in self.gather.pieces]

    def run(self, task: Task) -> Outcome:
        return self.loop.run_until_complete(self._run(task))

    async def _run(self, task: Task) -> Outcome:
        self.spinning = self.options.spins
        if self.spinning:
            self._spin()
        times: list[int] = []
        with Clock() as clock:
            if not self.options.initiator:
                await self.protocol.done
            elif task.op == "latency":
                await self._ping(task, times)
            elif self.uvloop:
                await self._write(task)
            else:
                await self._send(task)
        self.spinning = False
        return clock.outcome(times)

    def _spin(self) -> None:
        if self.spinning:
            self.loop.call_soon(self._spin)

    async def _write(self, task: Task) -> None:
        protocol, buffers, window = self.protocol, self.buffers, task.window
        write = self.transport.writelines if task.op == "pages" else self.transport.write
        for number in range(task.count):
            slot = number % window
            if protocol.arrived <= number - window:
                await protocol.reach(number - window + 1)
            write(buffers[slot])
        await protocol.reach(task.count)

    async def _send(self, task: Task) -> None:
        protocol, buffers, gather, window = self.protocol, self.buffers, self.gather, task.window
        send, connection = self.loop.sock_sendall, self.socket
        assert connection
        for number in range(task.count):
            slot = number % window
            if protocol.arrived <= number - window:
                await protocol.reach(number - window + 1)
            if gather:
                gather(slot)
            await send(connection, buffers[slot])
        await protocol.reach(task.count)

    async def _ping(self, task: Task, times: list[int]) -> None:
        protocol, message, write, now = self.protocol, self.buffers[0], self.transport.write, time.perf_counter_ns
        for number in range(1, task.count + 1):
            start = now()
            write(message)
            await protocol.reach(number * ECHO)
            times.append(now() - start)

    def close(self) -> None:
        if self.transport:
            self.transport.abort()


if __name__ == "__main__":
    serve(Sockets)
