"""What nobody closes goes with its object, and so does what a constructor leaves behind that fails."""

from __future__ import annotations

import os

import pytest

from aiote.rails import acquire
from support.rails.rail_pair import Kind, opened


@pytest.mark.parametrize("provider", ["local", "socket", "tcp", "sim"])
def test_what_nobody_closed_is_closed_when_it_goes(provider, monkeypatch):
    """Endpoints and registrations that are dropped, and those whose constructor fails half-way."""
    with opened(Kind(provider)) as rails:
        rail = rails.side().rail_set.rails[0]
        device, memory = rail.device, acquire(bytearray(4096))
        held, descriptors = device.children, len(os.listdir("/proc/self/fd"))
        endpoint = rail.open_endpoint()
        assert device.children == held + 1
        del endpoint
        registration = device.register(memory.address, memory.nbytes)
        assert device.children == held + 1
        del registration
        assert device.children == held
        with monkeypatch.context() as broken:
            broken.setattr(os, "urandom", _fail)
            with pytest.raises(OSError, match="no entropy"):
                device.register(memory.address, memory.nbytes)
        assert device.children == held
        if provider != "tcp":
            assert len(os.listdir("/proc/self/fd")) == descriptors
        memory.release()


def _fail(_size: int) -> bytes:
    raise OSError("no entropy")
