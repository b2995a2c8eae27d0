"""`aiote prove` over two machines: one listens with the second engine, the other connects, tests it and reports.

A frame is four bytes of length and a MessagePack array. Both sides say first what they are and draw a challenge; each
answers the other's with a keyed hash, so that a side with another cluster key is told apart before any engine opens.
Then the connecting side asks, a frame for each question, and the listener answers each with a frame.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream

import aiote
from aiote.bench.remote import parse_place
from aiote.testing.contract import Broken, NotHere

__all__ = [
    "PORT",
    "FarLost",
    "FarRefused",
    "Frames",
    "Greeting",
    "ask",
    "dial",
    "engine_host",
    "exchange",
    "keep_alive",
    "place",
    "serve",
]

PORT = 18516
PROTOCOL = 1
GREETING_S = 10.0
SMALL, LARGE = 1 << 16, 64 << 20
"""The bytes of a frame at most: before the other side has shown that it has the key, and after."""
NONCE_BYTES = 32
Answering = Callable[[str, list[Any]], Awaitable[Any]]


class FarRefused(Exception):
    """The other side does not fit; the text says in one sentence why."""


class FarLost(Exception):
    """The connection to the other side ended."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A side of the connection: whether it listens, its subject, and its cluster key or None."""

    listens: bool
    what: str
    key: bytes | None


class Frames:
    """Frames over a byte stream. Raises FarLost when the other side is gone, FarRefused for bytes that are no frame."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._buffer = BufferedByteReceiveStream(stream)
        self.limit = SMALL
        self.local_host = str(stream.extra(anyio.abc.SocketAttribute.local_address)[0])

    async def send(self, frame: list[Any]) -> None:
        """Send one frame."""
        data = msgspec.msgpack.encode(frame)
        try:
            await self._stream.send(struct.pack("!I", len(data)) + data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise FarLost("the other side is gone") from error

    async def receive(self) -> list[Any]:
        """Return the next frame."""
        try:
            (size,) = struct.unpack("!I", await self._buffer.receive_exactly(4))
            if size > self.limit:
                raise FarRefused("the other side is no `aiote prove`")
            frame = msgspec.msgpack.decode(await self._buffer.receive_exactly(size))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise FarLost("the other side is gone") from error
        except msgspec.DecodeError as error:
            raise FarRefused("the other side is no `aiote prove`") from error
        if not isinstance(frame, list) or not frame:
            raise FarRefused("the other side is no `aiote prove`")
        return frame


def place(text: str) -> tuple[str, int]:
    """Read HOST, HOST:PORT or :PORT; the host is loopback and the port is PORT, if left out. Raises UsageError."""
    try:
        host, port = parse_place(text, default_host="127.0.0.1")
    except ValueError as error:
        raise aiote.UsageError(str(error)) from error
    named = text.rpartition("]")[2] if text.startswith("[") else text
    return host, port if ":" in named else PORT


def engine_host(local: str) -> str | None:
    """Return where the engines of a side listen: the setting if there is one, else where the other side reached it."""
    return aiote.EngineConfig().host or local


async def exchange(frames: Frames, ours: Greeting) -> None:
    """Compare versions, subjects and keys with the other side. Raises FarRefused, with a sentence, or FarLost."""
    nonce = os.urandom(NONCE_BYTES)
    version = metadata.version("aiote")
    try:
        with anyio.fail_after(GREETING_S):
            await frames.send(["aiote prove", PROTOCOL, version, ours.what, nonce])
            theirs = await frames.receive()
            _compare(theirs, version, ours.what)
            await frames.send([_proof(ours, ours.listens, nonce, theirs[4])])
            proof = (await frames.receive())[0]
    except TimeoutError as error:
        raise FarRefused(f"the other side said nothing for {GREETING_S:g} s; it may be no `aiote prove`") from error
    wanted = _proof(ours, not ours.listens, theirs[4], nonce)
    if not isinstance(proof, bytes) or not hmac.compare_digest(proof, wanted):
        raise FarRefused("the other side has another cluster key; set AIOTE_CLUSTER_KEY to the same secret on both")
    frames.limit = LARGE


def _compare(theirs: list[Any], version: str, what: str) -> None:
    """Raise FarRefused unless the other side's greeting fits."""
    if theirs[0] != "aiote prove" or len(theirs) < 5 or not isinstance(theirs[4], bytes):
        raise FarRefused("the other side is no `aiote prove`")
    if theirs[1] != PROTOCOL or theirs[2] != version:
        raise FarRefused(
            f"the other side runs aiote {str(theirs[2])[:40]}, this one {version}; install one version on both"
        )
    if theirs[3] != what:
        raise FarRefused(f"the other side proves {str(theirs[3])[:40]}, this one {what}; name the same on both")


def _proof(ours: Greeting, by_listener: bool, first: bytes, second: bytes) -> bytes:
    """Return the hash that a side answers with. It names the side, so a side cannot be sent its own answer."""
    text = b"aiote prove" + (b"L" if by_listener else b"C") + first + second
    return hmac.new(ours.key or b"no key", text, hashlib.sha256).digest()


@contextlib.asynccontextmanager
async def dial(host: str, port: int, ours: Greeting) -> AsyncIterator[Frames]:
    """Connect to a listener and greet it. Raises FarRefused or FarLost."""
    try:
        with anyio.fail_after(GREETING_S):
            stream = await anyio.connect_tcp(host, port)
    except (OSError, TimeoutError) as error:
        raise FarRefused(
            f"nobody listens there; start `aiote prove {ours.what} --listen` on the other machine"
        ) from error
    async with stream:
        keep_alive(stream)
        frames = Frames(stream)
        await exchange(frames, ours)
        yield frames


async def ask(frames: Frames, name: str, *arguments: Any) -> Any:
    """Ask the listener one question and return its answer. Raises FarLost, and Broken or NotHere from there."""
    await frames.send([name, list(arguments)])
    kind, answer = await frames.receive()
    if kind == "answer":
        return answer
    raise NotHere(str(answer)) if kind == "not here" else Broken(f"on the other machine: {answer}")


async def serve(frames: Frames, answer: Answering) -> None:
    """Answer questions until the connection ends, which also ends the question that is being answered."""
    send, receive = anyio.create_memory_object_stream[list[Any]](1)
    async with send, receive, anyio.create_task_group() as tasks:
        tasks.start_soon(_answers, frames, receive, answer)
        with contextlib.suppress(FarLost, FarRefused):
            while True:
                await send.send(await frames.receive())
        tasks.cancel_scope.cancel()


async def _answers(frames: Frames, asked: MemoryObjectReceiveStream[list[Any]], answer: Answering) -> None:
    async for frame in asked:
        try:
            name, arguments = frame
            reply = ["answer", await answer(name, arguments)]
        except NotHere as error:
            reply = ["not here", str(error)]
        except Broken as error:
            reply = ["failed", str(error)]
        except Exception as error:  # whatever it is, the other side reports it
            reply = ["failed", f"{type(error).__name__}: {error}"]
        with contextlib.suppress(FarLost):
            await frames.send(reply)


def keep_alive(stream: anyio.abc.ByteStream) -> None:
    """Have the kernel notice within half a minute that the other machine is gone without a word."""
    sock = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
