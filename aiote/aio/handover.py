"""Passing descriptors to peers on this host: the wake-up page, and a ring where the rail has one.

For each channel each side opens a datagram socket, and tells its address over the authenticated control connection.
Each then sends the other one datagram with the descriptors. The socket takes nothing from anybody who was not told its
secret (`guarded_socket`), so neither strangers nor other peers can fill its queue, and it is closed by the first one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from array import array
from collections.abc import Callable, Sequence

import anyio

from ..errors import FabricError
from ..rails import guarded_socket, parse_address
from .loops import EventLoop, LoopTask

__all__ = ["Handover", "hand_over"]

MAX_BYTES = 128
MAX_DESCRIPTORS = 8


def hand_over(address: bytes, descriptors: Sequence[int], data: bytes) -> None:
    """Send descriptors, which stay the caller's, and data to a peer's `Handover`. Raises FabricError, ValueError."""
    secret, name = parse_address(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            # socket.send_fds drops its address argument.
            sender.sendmsg([secret + data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))], 0, name)
    except OSError as error:
        why = f"{error.strerror}: descriptors cannot be handed over"
        if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
            why = (
                f"{error.strerror}: the peer's wake-up socket is not reachable; "
                "memory is shared only by engines in one network namespace"
            )
        raise failed(error, why) from error


def failed(error: OSError, what: str) -> FabricError:
    return FabricError(error.errno or 0, what, operation="exchange wake-ups")


def _is_memory(descriptor: int) -> bool:
    """Tell whether it is a memfd: only these have seals. Nothing is asked of a file system that may be the peer's."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _close_aside(descriptors: Sequence[int]) -> None:
    """Close what a peer has chosen: that may take as long as it likes, as of a socket that lingers."""

    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    try:
        threading.Thread(target=close, name="aiote close", daemon=True).start()
    except RuntimeError:
        # The system has no thread left, and descriptors that are kept would be the next that it lacks.
        close()


class Handover:
    """The socket for one channel. `address` is for the peer; `on_arrival` is called once, with the descriptors that
    came, which are its own then, and what came with them, or with what kept us from having them.
    """

    def __init__(self, loop: EventLoop, on_arrival: Callable[[Sequence[int], bytes, OSError | None], object]) -> None:
        """Open the socket and begin to listen. Raises FabricError."""
        try:
            self._socket, self.address = guarded_socket(True)
        except OSError as error:
            raise failed(error, f"no socket to hand over wake-ups by: {error.strerror}") from error
        self._on_arrival = on_arrival
        self._task: LoopTask = loop.spawn(self._listen, name="aiote handover", after=self._socket.close)

    async def _listen(self) -> None:
        while True:
            try:
                await anyio.wait_readable(self._socket)
                descriptors, data = self._receive()
            except BlockingIOError:
                continue
            except OSError as error:
                # It cannot be had again.
                self._on_arrival([], b"", error)
            else:
                self._on_arrival(descriptors, data, None)
            return

    def _receive(self) -> tuple[list[int], bytes]:
        # Not socket.recv_fds, which forgets its flags (seen in CPython 3.11 to 3.13).
        data, ancillary, flags, _sender = self._socket.recvmsg(
            MAX_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array("i")
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        if flags & socket.MSG_CTRUNC:
            # Those that came are here all the same.
            _close_aside(list(descriptors))
            raise OSError(errno.EMFILE, f"not all of it came: over {MAX_DESCRIPTORS}, or more than may be open here")
        if not all(map(_is_memory, descriptors)):
            _close_aside(list(descriptors))
            raise OSError(errno.EINVAL, "something that is no memory")
        return list(descriptors), data[len(parse_address(self.address)[0]) :]

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Stop listening: the socket is closed as soon as the loop lets go of it. Idempotent."""
        self._task.cancel()
        if self._task.ended:
            self._socket.close()
