"""What tests of lost links and rails share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.network.namespaced_engines import RAILS
from support.network.namespaces import Network
from support.process.children import Child


@pytest.fixture(scope="session", autouse=True)
def library_is_loaded(library_loaded: None) -> None:
    """Load the libraries of rails before the first test."""


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
