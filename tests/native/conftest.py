"""Rails of one process; what wants another kind of them has a fixture of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.rails.rail_pair import Kind, Rails, Side, opened


@pytest.fixture
def rails() -> Iterator[Rails]:
    with opened(Kind("local")) as rails:
        yield rails


@pytest.fixture
def side(rails: Rails) -> Side:
    return rails.side()
