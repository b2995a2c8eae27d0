"""The data connections of engines of this process, to be cut under them, as a NIC or a wire between would."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import aiote


def _connected() -> Iterator[socket.socket]:
    """Yield a copy of each connected TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        with one:
            if one.type == socket.SOCK_STREAM and one.family == socket.AF_INET:
                try:
                    one.getpeername()
                except OSError:
                    continue
                yield one


def data_connections(*engines: aiote.Engine) -> list[tuple[int, int]]:
    """Return the port pairs of the data connections between engines of this process, each once."""
    control = {engine.address.port for engine in engines}
    pairs = {tuple(sorted((one.getsockname()[1], one.getpeername()[1]))) for one in _connected()}
    return sorted((low, high) for low, high in pairs if not control & {low, high})


def cut(pair: tuple[int, int]) -> None:
    """Shut one connection down, under whoever uses it."""
    for one in _connected():
        if tuple(sorted((one.getsockname()[1], one.getpeername()[1]))) == pair:
            one.shutdown(socket.SHUT_RDWR)
            return
