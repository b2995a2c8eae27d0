"""The listening side of `aiote prove`: it opens an engine for each connection and does what the other side asks."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc

import aiote
from aiote.cli import bench
from aiote.cli.prove_private import names_here, without_names
from aiote.cli.prove_report import boot
from aiote.cli.prove_run import Subject
from aiote.cli.prove_wire import FarLost, FarRefused, Frames, Greeting, engine_host, exchange, keep_alive, serve
from aiote.testing.contract import FarSide, NotHere, child_command

__all__ = ["listen"]


class FarSession:
    """One connection of the other side: at most one engine and one server of benchmark targets."""

    def __init__(self, subject: Subject, machine: dict[str, Any], host: str, stack: contextlib.AsyncExitStack) -> None:
        self._subject = subject
        self._machine = machine
        self._host = host
        self._stack = stack
        self._side: FarSide | None = None

    async def answer(self, name: str, arguments: list[Any]) -> Any:
        """Answer one question. Errors lose the names and addresses of this machine."""
        try:
            return await self._answer(name, arguments)
        except aiote.AioteError as error:
            raise type(error)(without_names(str(error), names_here())) from error

    async def _answer(self, name: str, arguments: list[Any]) -> Any:
        if name == "machine":
            return {**self._machine, "boot": boot()}
        if name == "open" and self._side is None:
            return await self._open()
        if name == "bench":
            return self._bench()
        if self._side is None:
            raise NotHere(f"{name!r} was asked before the engine was open")
        return await self._side.ask(name, *arguments)

    async def _open(self) -> str:
        subject = self._subject
        try:
            opening = aiote.open_engine(subject.provider, subject.rails, host=engine_host(self._host))
            engine = await self._stack.enter_async_context(opening)
        except (aiote.UsageError, aiote.FabricError) as error:
            raise NotHere(without_names(f"no engine opens on the other machine: {error}", names_here())) from error
        self._side = FarSide(
            engine, subject.memory, child_command(subject.provider, subject.rails, engine.address.host)
        )
        self._stack.push_async_callback(self._side.end)
        return str(engine.address)

    def _bench(self) -> int:
        """Serve targets of benchmarks while this connection lasts; return the port."""
        serving = bench.listener(self._host, 0, lambda _line: None)
        self._stack.callback(serving.server_close)
        self._stack.callback(serving.shutdown)
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        return int(serving.server_address[1])


def listen(subject: Subject, place: tuple[str, int], machine: dict[str, Any], tell: Callable[[str], object]) -> None:
    """Be the second engine for whoever connects, until interrupted. Raises OSError if it cannot listen."""
    anyio.run(_listen, subject, place, machine, tell)


async def _listen(
    subject: Subject, place: tuple[str, int], machine: dict[str, Any], tell: Callable[[str], object]
) -> None:
    async with await anyio.create_tcp_listener(local_host=place[0], local_port=place[1]) as listener:
        address: Any = listener.extra(anyio.abc.SocketAttribute.local_address)
        host, port = str(address[0]), address[1]
        shown = f"[{host}]" if ":" in host else host
        tell(f"listening at {shown}:{port}; on the other machine: aiote prove {subject.what} --connect {shown}:{port}")

        async def one(stream: anyio.abc.ByteStream) -> None:
            try:
                async with stream, contextlib.AsyncExitStack() as stack:
                    await _serve(stream, stack, subject, machine)
            except (FarRefused, FarLost) as error:
                tell(f"refused: {error}")
            except Exception as error:  # one connection's trouble ends no other
                tell(f"a connection ended: {type(error).__name__}: {error}")

        await listener.serve(one)


async def _serve(
    stream: anyio.abc.ByteStream, stack: contextlib.AsyncExitStack, subject: Subject, machine: dict[str, Any]
) -> None:
    """Greet one connection and answer its questions until it ends. Raises FarRefused or FarLost if it does not fit."""
    keep_alive(stream)
    frames = Frames(stream)
    await exchange(frames, Greeting(listens=True, what=subject.what, key=aiote.EngineConfig().cluster_key))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that a provider was never run: the report says so
        await serve(frames, FarSession(subject, machine, frames.local_host, stack).answer)
