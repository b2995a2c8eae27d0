"""What tests of connectors share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio.from_thread
import pytest

from support.connectors.torch_stand_in import Pair, connector, paired


@pytest.fixture
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    """A thread with an event loop, for the coroutines of a test that is one of an engine's threads."""
    with anyio.from_thread.start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """torch as far as its connector uses it."""
    with connector() as module:
        yield module


@pytest.fixture
def pair(torch: Any) -> Iterator[Pair]:
    """A transport with a peer."""
    with paired(torch) as made:
        yield made
