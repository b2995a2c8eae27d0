"""What tests of failures share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import aiote
from cables import RAILS
from children import Child
from namespaces import Network


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


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Make two namespaces that a cable for the control connection joins, and one for each rail."""
    with Network(cables=1 + RAILS) as network:
        yield network


@pytest.fixture(scope="module")
def processes(network) -> Iterator[tuple[Child, Child]]:
    """Start a process in each namespace."""
    started = [Child(*network.enter(side)) for side in (0, 1)]
    yield started[0], started[1]
    for child in started:
        child.end()
