"""Rails whose registrations last until a test lets them end, as those of many GiB do."""

from __future__ import annotations

import errno
import threading
from typing import Any

import aiote
from aiote_native.engine.provider import NativeDevice, NicRegistration
from aiote_native.system.base import StatusError
from support.engines.opening import PATIENCE_S


class PinningDevice(NativeDevice):
    """A NIC that pins for long. `begun` is set when it has begun to; it ends with `end`, or `fails` once."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.pins = True
        self.fails = False
        self.thread = ""
        self.begun = threading.Event()
        self._over = threading.Event()

    def register(self, address: int, length: int, writable: bool = True, access: int = 3) -> NicRegistration:
        self.thread = threading.current_thread().name
        self.begun.set()
        assert self._over.wait(PATIENCE_S)
        if self.fails:
            self.fails = False
            raise StatusError(errno.ENOMEM, "ibv_reg_mr")
        return self.real.register(address, length, writable, access)

    def end(self, *, fails: bool = False) -> None:
        self.fails = fails
        self._over.set()


class PinningRail:
    """A rail with such a NIC."""

    def __init__(self, rail: Any) -> None:
        self._rail = rail
        self.device = PinningDevice(rail.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rail, name)


def pinning(engine: aiote.Engine, rail: int = -1) -> PinningDevice:
    """Have one of an engine's rails pin for long from now on, the last one if no other is named."""
    rails = engine._runtime.rail_set.rails
    rails[rail] = PinningRail(rails[rail])
    return rails[rail].device
