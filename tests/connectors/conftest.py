"""What tests of connectors share."""

from __future__ import annotations

from collections.abc import Iterator

import anyio.from_thread
import pytest


@pytest.fixture
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    """A thread with an event loop, for the coroutines of a test that is one of an engine's threads."""
    with anyio.from_thread.start_blocking_portal() as portal:
        yield portal
