"""Pass descriptors to peers on this host: the wake-up page, the ring of a rail that has one, and shared memory.

For each channel, each side opens a datagram socket and sends its address over the authenticated control connection.
Each side then sends one datagram with the descriptors to the other. A request for shared memory has such a socket, too
(`aiote.links.sharing`). The socket accepts datagrams only from senders that know its secret (`guarded_socket`), so
neither strangers nor other peers can fill its queue. The first datagram closes it.
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

__all__ = ["Handover", "close_aside", "hand_over"]

MAX_BYTES = 128
MAX_DESCRIPTORS = 8


def hand_over(address: bytes, descriptors: Sequence[int], data: bytes) -> None:
    """Send descriptors and data to a peer's `Handover`. The caller keeps the descriptors. Raises FabricError,
    ValueError.
    """
    secret, name = parse_address(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            # Do not use socket.send_fds: it drops its address argument.
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
    """Tell whether a descriptor is a memfd, because only memfds have seals.

    Asking for seals does not involve a file system, which may be under the peer's control.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def close_aside(descriptors: Sequence[int]) -> None:
    """Close descriptors that a peer has sent, in a thread of its own.

    The peer chose them, so closing may take as long as the peer likes, as with a socket that lingers.
    """

    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    try:
        threading.Thread(target=close, name="aiote close", daemon=True).start()
    except RuntimeError:
        # The system has no thread left. Close them here, because otherwise the descriptors would run out next.
        close()


class Handover:
    """The socket for one channel, or one request. The peer sends to `address`.

    `on_arrival` is called once: with the received descriptors, which it owns from then on, and the received data; or
    with the error that prevented their arrival.
    """

    def __init__(self, loop: EventLoop, on_arrival: Callable[[Sequence[int], bytes, OSError | None], object]) -> None:
        """Open the socket and begin to listen. Raises FabricError."""
        try:
            self._socket, self.address = guarded_socket(rights=True)
        except OSError as error:
            raise failed(error, f"cannot open a socket to exchange wake-ups: {error.strerror}") from error
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
                # The datagram cannot be received again.
                self._on_arrival([], b"", error)
            else:
                self._on_arrival(descriptors, data, None)
            return

    def _receive(self) -> tuple[list[int], bytes]:
        # Do not use socket.recv_fds: it ignores its flags (seen in CPython 3.11 to 3.13).
        data, ancillary, flags, _sender = self._socket.recvmsg(
            MAX_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array("i")
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        if flags & socket.MSG_CTRUNC:
            # The kernel has installed the descriptors that fit, so close them.
            close_aside(list(descriptors))
            raise OSError(
                errno.EMFILE,
                f"not all descriptors came: there were over {MAX_DESCRIPTORS}, or this process may "
                "not open more (ulimit -n)",
            )
        if not all(map(_is_memory, descriptors)):
            close_aside(list(descriptors))
            raise OSError(errno.EINVAL, "a descriptor is not shared memory")
        return list(descriptors), data[len(parse_address(self.address)[0]) :]

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Stop listening; the socket is closed as soon as the loop has stopped watching it. Idempotent."""
        self._task.cancel()
        if self._task.has_ended:
            self._socket.close()
