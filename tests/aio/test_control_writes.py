"""Writing to a control connection past its stream: in order, whatever the socket takes."""

from __future__ import annotations

import socket

import anyio
import pytest
from anyio.abc import SocketAttribute

import aiote.aio as aio
from aiote.aio.loops import current_loop
from aiote.core.control import MessageReceived
from aiote.core.control_frames import AckCounts, Bye, ImmCount, Ready
from support.engines.control_peers import TALK, talked
from support.engines.opening import PATIENCE_S, until

COUNTS = tuple(ImmCount(number, 1) for number in range(2000))
MESSAGES = 30
"""Of 24 KB each: more than the sockets' buffers take, and less than the connection holds."""


@pytest.mark.anyio
async def test_a_full_socket_delays_frames_and_keeps_their_order():
    with anyio.fail_after(PATIENCE_S), socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream = await anyio.connect_tcp(*server.getsockname())
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs, _ = server.accept()
        with theirs:
            theirs.setblocking(False)
            both, joined = talked(TALK.index(Ready()) + 1)
            both.right.receive(joined)
            connection = aio.ControlConnection(current_loop(), stream, both.left, "test")
            connection.start()
            for number in range(MESSAGES):
                connection.send(AckCounts(number, 0, COUNTS))
            connection.send(Bye("all said"))
            seen: list[object] = []

            def read() -> bool:
                try:
                    while data := theirs.recv(65536):
                        events = both.right.receive(data)
                        seen.extend(event.message for event in events if isinstance(event, MessageReceived))
                except BlockingIOError:
                    pass
                return bool(seen) and isinstance(seen[-1], Bye)

            await until(read)
            assert [one.channel for one in seen[:-1]] == list(range(MESSAGES))
            await connection.aclose()
