"""The hostile side's ends of data connections, made by hand: what goes over them is the test's."""

from __future__ import annotations

import mmap
import os
import socket
import struct

import anyio
import anyio.to_thread

from aiote.aio import Handover, current_loop, hand_over
from aiote.core.control_frames import Channel
from aiote_native.streams.endpoints import parse
from aiote_native.system.wakeups import PeerWakeup, WakeupEvent
from support.engines.wakeup_page import own_page
from support.rails.raw_ring import DATA, HEAD, NUMBER, RING_BYTES, SCHEME, TAIL, ring_memory

SLOT = struct.Struct("<iI")


class SocketEnd:
    """A TCP connection to an endpoint of `socket`."""

    def __init__(self, host: str) -> None:
        self._token = os.urandom(16)
        self._server = socket.create_server((host, 0))
        self._server.setblocking(False)
        self._socket: socket.socket | None = None
        port = self._server.getsockname()[1]
        self.address = f"aiote-tcp://{host}:{port}/{self._token.hex()}".encode()
        self.wakeup = b""

    async def join(self, channel: Channel) -> None:
        """Connect, or be connected to, and say what has to be said first."""
        host, port, token = parse(channel.address)
        if self.address > channel.address:
            self._socket = socket.create_connection((host, port))
            self._socket.setblocking(False)
            self._socket.send(token)
        else:
            while self._socket is None:
                await anyio.wait_readable(self._server)
                self._socket, _ = self._server.accept()
            self._socket.setblocking(False)
            self._socket.send(token)
        self._server.close()

    def say(self, data: bytes) -> None:
        """Send what there is room for."""
        assert self._socket is not None
        try:
            self._socket.send(data)
        except OSError:
            pass

    def hear(self) -> None:
        """Read what came."""
        assert self._socket is not None
        try:
            while self._socket.recv(1 << 18):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._server.close()
        if self._socket is not None:
            self._socket.close()


class RingEnd:
    """A ring to an endpoint of `local`, with a wake-up page of its own."""

    def __init__(self, _host: str) -> None:
        self.address = SCHEME + b"%016x" % NUMBER
        self._ring = ring_memory()
        self._own = mmap.mmap(self._ring, DATA + RING_BYTES)
        self._wakeup = WakeupEvent()
        self.page = own_page(self._wakeup)
        self._came: list[int] = []
        self._data = b""
        self._handover = Handover(current_loop(), self._arrived)
        self.wakeup = SLOT.pack(0, 2) + self._handover.address
        self._theirs: mmap.mmap | None = None
        self._peer: PeerWakeup | None = None
        self._head = 0

    def _arrived(self, descriptors: object, data: bytes, _error: OSError | None) -> None:
        self._came, self._data = list(descriptors), data  # type: ignore[call-overload]

    async def join(self, channel: Channel) -> None:
        """Exchange descriptors, and map."""
        hand_over(channel.wakeup[SLOT.size :], [self._wakeup.memory_fd, self._ring], self._wakeup.address)
        while not self._came:
            await anyio.sleep(0.001)
        self._peer = PeerWakeup(self._came[0], self._data)
        self._theirs = mmap.mmap(self._came[1], DATA + RING_BYTES)
        os.close(self._came[1])
        self._open_gates()

    def _open_gates(self) -> None:
        # The first slot's generation, as `wakeup` tells it.
        struct.pack_into("<I", self.page, 64 + 4 * 1000, 2)

    def say(self, data: bytes) -> None:
        """Put what there is room for into their ring, and wake them."""
        assert self._theirs is not None
        (tail,) = struct.unpack_from("<Q", self._theirs, TAIL)
        room = max(0, RING_BYTES - (self._head - tail) % 2**64) if self._head >= tail else 0
        data = data[: min(room, RING_BYTES)]
        at = self._head % RING_BYTES
        first = data[: RING_BYTES - at]
        self._theirs[DATA + at : DATA + at + len(first)] = first
        self._theirs[DATA : DATA + len(data) - len(first)] = data[len(first) :]
        self._head += len(data)
        struct.pack_into("<Q", self._theirs, HEAD, self._head)
        self.wake()

    def lie(self, place: int, number: int) -> None:
        """Write a number into the heads of either ring, or anywhere in theirs."""
        assert self._theirs is not None
        struct.pack_into("<Q", (self._theirs, self._own)[place & 1], place >> 1, number)
        self.wake()

    def scribble(self, at: int, number: int) -> None:
        """Write a number into our own page: asleep, waiting, gates, busy."""
        struct.pack_into("<I", self.page, at, number)

    def wake(self, count: int = 1) -> None:
        """Wake them, more often than their queue is long if that is asked."""
        assert self._peer is not None
        with socket.socket(fileno=os.dup(self._peer.socket_fd)) as sender:
            for _ in range(count):
                try:
                    sender.send(self._data[:16])
                except OSError:
                    break

    def hear(self) -> None:
        """Take what is in our ring."""
        (head,) = struct.unpack_from("<Q", self._own, HEAD)
        struct.pack_into("<Q", self._own, TAIL, head)
        self.wake()

    def close(self) -> None:
        self._handover.close()
        self.page.release()
        self._wakeup.close()
        self._own.close()
        os.close(self._ring)
        if self._peer is not None:
            self._peer.close()
        if self._theirs is not None:
            self._theirs.close()


ENDS = {"socket": SocketEnd, "local": RingEnd}
