"""Engines on RDMA devices that a switch joins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.network.guest_switch import Switch, nics


@pytest.fixture
def switch() -> Iterator[Switch]:
    switch = Switch()
    yield switch
    switch.mend()


@pytest.fixture
def need_four() -> None:
    if nics() < 4:
        pytest.skip(f"{nics()} RDMA devices, 4 are needed (tools/guest --nics 4)")
