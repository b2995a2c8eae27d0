"""Registries of each kind, for what holds for all: the embedded one's clients, its server's own process, etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.membership import Registry
from support.engines.opening import PATIENCE_S
from support.service.registries import Etcd, client, etcd_process, served

Open = Callable[[], AbstractAsyncContextManager[Any]]

KINDS = ["embedded", "server", pytest.param("etcd", marks=pytest.mark.needs_etcd)]
_number = iter(range(1 << 30))


@pytest.fixture(scope="module")
def etcd() -> Iterator[Callable[[], Etcd]]:
    """Start an etcd when the first test asks for it."""
    running: list[Etcd] = []
    contexts = []

    def get() -> Etcd:
        if not running:
            contexts.append(etcd_process())
            running.append(contexts[0].__enter__())
        return running[0]

    yield get
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture(params=KINDS)
def registry(request: pytest.FixtureRequest) -> Callable[[], AbstractAsyncContextManager[Open]]:
    """Return what makes a registry, whose clients are then opened one by one."""
    if request.param == "etcd":
        endpoint = request.getfixturevalue("etcd")().endpoint

    @asynccontextmanager
    async def make() -> AsyncIterator[Open]:
        with anyio.fail_after(PATIENCE_S):
            if request.param == "etcd":
                prefix = f"contract/{next(_number)}/"
                yield lambda: EtcdRegistry(endpoint, prefix=prefix, lease_s=2)
                return
            async with served() as server:
                turns = iter(range(1 << 30))
                local = request.param == "server"
                yield lambda: _as_it_is(server) if local and next(turns) % 2 == 0 else client(server.address)

    return make


@asynccontextmanager
async def _as_it_is(server: Registry) -> AsyncIterator[Registry]:
    yield server
