"""Engines on RDMA devices that a switch joins."""

from __future__ import annotations

import pytest

from support.network.guest_switch import nics


@pytest.fixture
def need_four() -> None:
    if nics() < 4:
        pytest.skip(f"{nics()} RDMA devices, 4 are needed (tools/guest --nics 4)")
