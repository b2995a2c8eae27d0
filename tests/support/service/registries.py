"""Registries for tests: an etcd of its own, engines, and what both kinds of registry are opened by."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiote
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.membership import Member, MemberEvent
from aiote.discovery.registry_server import RegistryServer
from support.engines.opening import opened
from support.machine import SLOWER

START_S = 20.0 * SLOWER


def member(name: str, incarnation: int = 1, role: str = "prefill", **attributes: Any) -> Member:
    """Return a member whose address is its name."""
    return Member(name, role, name.encode(), incarnation, attributes)


async def until_told(events: AsyncIterator[MemberEvent], *wanted: tuple[str, str]) -> list[MemberEvent]:
    """Read events until each of these (kind, name) has come, and return all that were read."""
    missing, seen = set(wanted), []
    while missing:
        seen.append(await anext(events))
        missing.discard((seen[-1].kind, seen[-1].member.name))
    return seen


@asynccontextmanager
async def served(provider: str = "sim", **settings: Any) -> AsyncIterator[RegistryServer]:
    """Serve the embedded registry by an engine of its own."""
    async with opened(provider, **settings) as engine, RegistryServer(engine) as server:
        yield server


@asynccontextmanager
async def client(
    *addresses: aiote.Address, lease_s: float = 10.0, provider: str = "sim", **settings: Any
) -> AsyncIterator[EmbeddedRegistry]:
    """Open a client of the embedded registry, by an engine of its own."""
    async with opened(provider, **settings) as engine:
        async with EmbeddedRegistry(engine, addresses, lease_s=lease_s) as registry:
            yield registry


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Etcd:
    """An etcd process on loopback; it may be killed, and started again with what it had stored."""

    folder: str
    port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers; for tests that are not in a coroutine, and for threads."""
        urls = ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        peer = f"http://127.0.0.1:{self.peer_port}"
        urls += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"t={peer}"]
        with open(Path(self.folder) / "log", "ab") as log:
            command = ["etcd", "--name", "t", "--data-dir", f"{self.folder}/data", "--unsafe-no-fsync", *urls]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                if b"true" in opener.open(f"{self.endpoint}/health", timeout=5).read():
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"etcd did not start: {(Path(self.folder) / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def ask(etcd: Etcd, path: str, body: dict[str, object]) -> dict[str, object]:
    """Ask etcd without the code under test; to be called in a thread."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(etcd.endpoint + path, json.dumps(body).encode(), timeout=10) as answer:
        found: dict[str, object] = json.loads(answer.read())
        return found


@contextmanager
def etcd_process() -> Iterator[Etcd]:
    """Run an etcd of its own."""
    with tempfile.TemporaryDirectory(prefix="aiote-etcd-") as folder:
        etcd = Etcd(folder, free_port(), free_port())
        try:
            etcd.start()
            yield etcd
        finally:
            etcd.kill()
