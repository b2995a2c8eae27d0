"""How the cluster of examples/kvcache replaces servers: with processes that only pretend."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from support.process.examples import EXAMPLES, PATIENCE_S

ARGUMENTS = argparse.Namespace(
    prefill=0,
    decode=2,
    provider="sim",
    host="",
    advertise=None,
    page_tokens=1,
    context=1,
    layers=1,
    seed=0,
    weights=None,
    chunk_tokens=1,
    step_tokens=1,
    slower=0,
    slots=1,
    lease=1,
    drain_limit=60,
)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "kvcache"), *sys.path])
    import cluster

    monkeypatch.setattr(cluster, "AGAIN_S", 0.0)
    return cluster


class Process:
    """A server that says that it is ready, and lives until it is told to die."""

    def __init__(self, number: int) -> None:
        self.pid = number
        self.returncode: int | None = None
        self.dead = anyio.Event()

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        return self._said()

    async def _said(self) -> AsyncIterator[bytes]:
        yield json.dumps({"ready": f"http://{self.pid}"}).encode() + b"\n"
        await self.dead.wait()

    async def wait(self) -> int:
        await self.dead.wait()
        return 1


@pytest.mark.anyio
async def test_two_deaths_at_once_are_two_replacements(module, monkeypatch):
    started: list[Process] = []

    async def open_process(*_: Any, **__: Any) -> Process:
        await anyio.lowlevel.checkpoint()  # as a real one does
        started.append(Process(len(started)))
        return started[-1]

    monkeypatch.setattr(anyio, "open_process", open_process)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            cluster = module.Cluster(ARGUMENTS, group)
            await cluster.scale({})
            await anyio.wait_all_tasks_blocked()
            for process in tuple(started):
                process.dead.set()
            while len(started) < 4 or not all(child.ready for child in cluster.children):
                await anyio.sleep(0.001)
            await anyio.wait_all_tasks_blocked()
            assert (len(started), len(cluster.children)) == (4, 2)
            group.cancel_scope.cancel()
