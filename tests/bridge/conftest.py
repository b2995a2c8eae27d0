"""What tests of the bridge share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.process.children import Child


@pytest.fixture
def child() -> Iterator[Child]:
    """One child process, started."""
    child = Child()
    yield child
    child.end()
