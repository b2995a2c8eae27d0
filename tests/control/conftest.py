"""What tests of connections share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import aiote
from children import Child


@pytest.fixture(scope="session", autouse=True)
def library_loaded() -> None:
    """Open both providers once: 1.17 takes half a second to look for its providers, which would count as blocking."""

    async def once() -> None:
        for provider in ("tcp", "shm"):
            async with aiote.open_engine(provider):
                pass

    asyncio.run(once())


@pytest.fixture
def child() -> Iterator[Callable[[], Child]]:
    """Start child processes; whatever became of them, they are killed in the end."""
    started: list[Child] = []

    def start() -> Child:
        started.append(Child())
        return started[-1]

    yield start
    for one in started:
        one.end()
