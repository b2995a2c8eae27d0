"""Handing peers on this host what they map: the page of the doorbell, and a ring where the rail has one.

For each channel each side opens a datagram socket, and tells its address over the authenticated control connection.
Each then sends the other one datagram with the descriptors. The socket takes nothing from anybody who was not told its
secret (`guarded_socket`), so neither strangers nor other peers can fill its queue, and it is closed by the first one.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Sequence

import anyio

from ..errors import FabricError
from ..rails import guarded_socket, told
from .loops import EventLoop, Task

__all__ = ["Handover", "hand_over"]

MOST_BYTES = 128
MOST_DESCRIPTORS = 8


def hand_over(address: bytes, descriptors: Sequence[int], data: bytes) -> None:
    """Send descriptors, which stay the caller's, and data to a peer's `Handover`. Raises FabricError, ValueError."""
    secret, name = told(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            # socket.send_fds drops its address argument.
            sender.sendmsg([secret + data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))], 0, name)
    except OSError as error:
        raise failed(
            error,
            f"{error.strerror}: the peer's doorbell is not reachable; "
            "memory is shared only by engines in one network namespace",
        ) from error


def failed(error: OSError, what: str) -> FabricError:
    return FabricError(error.errno or 0, what, operation="exchange doorbells")


class Handover:
    """The socket for one channel. `address` is for the peer; `on_arrival` is called once, with what came and its
    descriptors, which are its own then.
    """

    def __init__(self, loop: EventLoop, on_arrival: Callable[[Sequence[int], bytes], object]) -> None:
        """Open the socket and begin to listen. Raises FabricError."""
        try:
            self._socket, self.address = guarded_socket()
        except OSError as error:
            raise failed(error, f"no socket to hand over doorbells by: {error.strerror}") from error
        self._on_arrival = on_arrival
        self._task: Task = loop.spawn(self._listen, name="aiote doorbells", after=self._socket.close)

    async def _listen(self) -> None:
        while True:
            try:
                await anyio.wait_readable(self._socket)
                descriptors, data = self._receive()
            except BlockingIOError:
                continue
            except OSError:
                # It cannot be had again, so the peer has shared nothing.
                descriptors, data = [], b""
            self._on_arrival(descriptors, data)
            return

    def _receive(self) -> tuple[list[int], bytes]:
        # Not socket.recv_fds, which forgets its flags (CPython 3.11 to 3.14).
        data, ancillary, _flags, _sender = self._socket.recvmsg(
            MOST_BYTES, socket.CMSG_SPACE(MOST_DESCRIPTORS * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array("i")
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        return list(descriptors), data[len(told(self.address)[0]) :]

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Stop listening: the socket is closed as soon as the loop lets go of it. Idempotent."""
        self._task.cancel()
        if self._task.ended:
            self._socket.close()
