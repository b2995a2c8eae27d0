"""Handing doorbells to peers on this host.

Each engine has a datagram socket with an abstract name (nothing in the file system, gone with the process). Over the
authenticated control connection both sides tell that name and a random token; then each sends its doorbell's two
descriptors in one datagram that carries the other's token. A datagram without a known token is dropped, with what it
brought.
"""

from __future__ import annotations

import os
import secrets
import socket
from array import array
from collections.abc import Callable

import anyio

from ..errors import FabricError
from .loops import EventLoop, Task

__all__ = ["BellExchange"]

TOKEN_BYTES = 16


def unbound(error: OSError) -> FabricError:
    """Say that there is no socket for doorbells."""
    return FabricError(error.errno or 0, error.strerror or str(error), operation="exchange doorbells")


class BellExchange:
    """This engine's socket; `own` are the descriptors of its doorbell, which stay its own."""

    def __init__(self, loop: EventLoop, own: tuple[int, int]) -> None:
        """Bind the socket and start to listen. Raises FabricError."""
        self.name = b"\0aiote-" + secrets.token_hex(16).encode()
        self._own = own
        self._expected: dict[bytes, Callable[[int, int], None]] = {}
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise unbound(error) from error
        try:
            self._socket.setblocking(False)
            self._socket.bind(self.name)
        except OSError as error:
            self._socket.close()
            raise unbound(error) from error
        self._task: Task = loop.spawn(self._listen, name="aiote doorbells", after=self._socket.close)

    def expect(self, on_arrival: Callable[[int, int], None]) -> bytes:
        """Return a token; the two descriptors that come with it are handed to `on_arrival`, which owns them then."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = on_arrival
        return token

    def forget(self, token: bytes) -> None:
        """Expect a token no longer."""
        self._expected.pop(token, None)

    async def send(self, name: bytes, token: bytes) -> None:
        """Send our own doorbell to a peer's socket. Raises FabricError when it cannot be reached."""
        # A full queue empties as soon as the peer's loop runs; the connection's own deadline bounds the loop.
        while True:
            try:
                # socket.send_fds drops its address argument.
                self._socket.sendmsg([token], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self._own))], 0, name)
                return
            except BlockingIOError:
                await anyio.sleep(0.001)
            except OSError as error:
                raise FabricError(
                    error.errno or 0,
                    f"{error.strerror}: the peer's doorbell is not reachable; "
                    "shm needs both engines in one network namespace",
                    operation="exchange doorbells",
                ) from error

    async def _listen(self) -> None:
        while True:
            await anyio.wait_readable(self._socket)
            try:
                token, descriptors, _flags, _sender = socket.recv_fds(self._socket, TOKEN_BYTES + 1, 8)
            except BlockingIOError:
                continue
            on_arrival = self._expected.pop(token, None) if len(descriptors) == 2 else None
            if on_arrival is None:
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                on_arrival(descriptors[0], descriptors[1])

    async def close(self) -> None:
        """Stop listening."""
        self._task.cancel()
        await self._task.join()
        self._socket.close()

    def abandon(self) -> None:
        """Stop listening without waiting: the socket is closed as soon as the loop lets go of it."""
        self._task.cancel()
        if self._task.ended:
            self._socket.close()
