"""A comparison over two machines: one listens and starts target workers for the other, which measures.

The first line of a connection states which of the two known workers to start, and its setting. Then lines are relayed
in both directions. A peer cannot start any other program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import socket
import socketserver
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiote.bench.sides import PATIENCE_S, BenchError, JsonLines, LocalSide
from aiote.bench.work import MEMORIES

if TYPE_CHECKING:
    from aiote.bench.contestants import Setting

__all__ = ["PORT", "Listener", "RemoteSide", "TargetMachine", "parse_place", "parse_request", "serve_one"]

PORT = 18515
LINE_BYTES = 1 << 16
WORD = re.compile(r"[A-Za-z0-9_;:,.-]{0,200}")
CHOICES = {
    "kind": ("aiote", "raw"),
    "mode": ("spin", "event", "default"),
    "loop": ("asyncio", "uvloop", "trio"),
    "progress": ("adaptive", "loop", "thread"),
    "memory": tuple(MEMORIES),
}
ADDED = {"memory": "host", "gpu_sharing": None}
"""Settings that an older aiote on the other machine neither sends nor knows, with their values in that case."""
MAX_ARENA = 1 << 34
Command = Callable[[str, dict[str, Any], str], list[str]]
"""Makes a worker's command from its kind, its setting and the local address that the other side reached."""


def parse_place(text: str, *, default_host: str) -> tuple[str, int]:
    """Read HOST, HOST:PORT or :PORT, IPv6 hosts in brackets. Raises ValueError."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
        if not bracket or (rest and rest == port):
            raise ValueError(f"{text!r}: expected [IPv6 address] or [IPv6 address]:PORT")
    else:
        host, _, port = text.rpartition(":") if ":" in text else (text, "", "")
        if ":" in host:
            raise ValueError(f"{text!r}: put an IPv6 address in brackets, as in [::1]:7000")
    number = int(port) if port else PORT
    if not 0 <= number <= 65535:
        raise ValueError(f"{number} is not a port: expected 0 to 65535")
    return host or default_host, number


class RemoteSide:
    """A worker on another machine."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self._sock = sock
        self._lines = JsonLines(name, sock)

    def send(self, line: str) -> None:
        """Send a line. Raises BenchError when the connection is gone."""
        try:
            self._sock.sendall(f"{line}\n".encode())
        except OSError as error:
            raise BenchError(f"{self.name}: {error}") from error

    def receive(self, patience: float = PATIENCE_S) -> dict[str, Any]:
        """Return the worker's next answer."""
        return self._lines.next(patience)

    def close(self) -> None:
        """Close the connection, which ends the worker."""
        self._lines.close()
        self._sock.close()


class TargetMachine:
    """The machine that runs the targets. `spawn` opens a connection to it for each worker."""

    def __init__(self, host: str, port: int) -> None:
        """Connect once, to learn this machine's address on the way there. Raises BenchError if no listener answers."""
        self._place = host, port
        with self._dial() as sock:
            self.local_host: str = sock.getsockname()[0]

    def _dial(self) -> socket.socket:
        try:
            return socket.create_connection(self._place, timeout=10)
        except OSError as error:
            host, port = self._place
            raise BenchError(
                f"cannot connect to {host}:{port} ({error}); start `aiote bench write --listen` there first"
            ) from error

    def spawn(self, name: str, kind: str, setting: Setting) -> RemoteSide:
        """Start a target worker on the other machine. Raises BenchError."""
        if kind == "other":
            raise BenchError(f"{name}: other libraries can be compared on one machine only; omit --connect")
        sock = self._dial()
        sock.settimeout(None)
        side = RemoteSide(f"{name} target", sock)
        # A library's path on this machine is meaningless on the other machine, which uses its own.
        fields = {**dataclasses.asdict(setting), "kind": kind}
        del fields["library"]
        fields = {name: value for name, value in fields.items() if name not in ADDED or value != ADDED[name]}
        side.send(json.dumps(fields))
        return side


def parse_request(line: bytes) -> tuple[str, dict[str, Any]]:
    """Parse the other machine's request: the kind of worker and its setting. Raises BenchError for anything else."""
    try:
        fields = {**ADDED, **json.loads(line)}
        kind = fields.pop("kind")
        numbers = {name: fields[name] for name in ("arena", "gpu_sharing")}
        words = {name: fields[name] for name in ("provider", "rails", "mode", "loop", "progress", "memory")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"not a request for a worker: {error}") from error
    for name, value in {"kind": kind, **words}.items():
        allowed = value in CHOICES[name] if name in CHOICES else isinstance(value, str) and WORD.fullmatch(value)
        if not allowed:
            raise BenchError(f"{name}={value!r} is not accepted")
    arena, sharing = numbers["arena"], numbers["gpu_sharing"]
    if type(arena) is not int or not 0 < arena <= MAX_ARENA or set(fields) != {*words, *numbers}:
        raise BenchError(
            f"arena={arena!r} is not accepted, or the request has an unknown field; use one version of "
            "aiote on both machines"
        )
    if sharing is not None and not isinstance(sharing, bool):
        raise BenchError(f"gpu_sharing={sharing!r} is not accepted")
    return kind, {**words, **numbers}


def _first_line(sock: socket.socket) -> bytes:
    """Return the received bytes as soon as they contain a line, or b"" if the connection ends without a request."""
    held = b""
    while b"\n" not in held:
        data = sock.recv(LINE_BYTES)
        if not data and not held:
            return b""
        if not data or len(held) > LINE_BYTES:
            raise BenchError(f"expected a request: one line of at most {LINE_BYTES} bytes")
        held += data
    return held


def _relay(sock: socket.socket, side: LocalSide) -> None:
    """Relay lines in both directions until either end is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(side.output, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = sock.recv(LINE_BYTES) if key.fileobj is sock else os.read(side.output.fileno(), LINE_BYTES)
                if not data:
                    return
                if key.fileobj is sock:
                    side.feed(data)
                else:
                    sock.sendall(data)


def serve_one(sock: socket.socket, command: Command) -> str:
    """Start the worker that one connection requests and relay until its end; return its description, or ""."""
    sock.settimeout(10)
    line, _, rest = _first_line(sock).partition(b"\n")
    if not line:
        return ""
    try:
        kind, fields = parse_request(line)
        words = command(kind, fields, sock.getsockname()[0])
    except BenchError as error:
        with contextlib.suppress(OSError):
            sock.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        raise
    sock.settimeout(None)
    side = LocalSide(f"{kind} target", words)
    try:
        if rest:
            side.feed(rest)
        _relay(sock, side)
    finally:
        side.close()
    return f"{kind} over {fields['provider']}"


class Listener(socketserver.ThreadingTCPServer):
    """Serve several connections at a time, by `serve_forever` until shut down; call `report` with a line for each."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, command: Command, report: Callable[[str], object]) -> None:
        self.command = command
        self.report = report
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)


class _Handler(socketserver.BaseRequestHandler):
    server: Listener

    def handle(self) -> None:
        try:
            done = serve_one(self.request, self.server.command)
        except (BenchError, OSError) as error:
            done = str(error)
        if done:
            self.server.report(f"{self.client_address[0]}: {done}")
