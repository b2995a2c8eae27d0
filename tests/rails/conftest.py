"""The contract suite runs on every kind of rail, with progress on the event loop's thread and on a native one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.rails.rail_pair import KINDS, STAGED, Kind, Pair, Rails, opened


@pytest.fixture(params=[*KINDS, *STAGED], ids=lambda kind: kind.provider + ("-gpu" if kind.memory == "cuda" else ""))
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(params=[False, True], ids=["loop", "thread"])
def rails(request: pytest.FixtureRequest, kind: Kind) -> Iterator[Rails]:
    """Fabrics to be opened and joined by the test."""
    with opened(kind, request.param) as rails:
        yield rails


@pytest.fixture
def pair(rails: Rails) -> Pair:
    """Two rail sets with one rail each, joined."""
    return Pair.of(rails)
