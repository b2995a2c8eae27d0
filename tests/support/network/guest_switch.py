"""The guest's switch: NIC i is plugged into its port swi. A cable is pulled there, or made a bad one."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from aiote.machine.ports import read_ports
from support.engines.opening import LOST_SOON, PATIENCE_S

SOONER = {"heartbeat_interval": 0.5, "heartbeat_timeout": 3.0}
"""For those who wait until a peer is given up."""


def nics() -> int:
    """Return how many NICs with an RDMA device there are."""
    return len(read_ports())


class Switch:
    """The ports of the switch; `mend` puts everything right again."""

    def __init__(self) -> None:
        self._pulled: set[int] = set()
        self._disturbed: set[int] = set()

    def pull(self, nic: int) -> None:
        self._run("ip", "link", "set", f"sw{nic}", "down")
        self._pulled.add(nic)

    def plug(self, nic: int) -> None:
        self._run("ip", "link", "set", f"sw{nic}", "up")
        self._pulled.discard(nic)

    def disturb(self, nic: int, *netem: str) -> None:
        """Have what the NIC is sent go through netem, as with ("loss", "1%")."""
        self._run("tc", "qdisc", "replace", "dev", f"sw{nic}", "root", "netem", *netem)
        self._disturbed.add(nic)

    def mend(self) -> None:
        for nic in tuple(self._pulled):
            self.plug(nic)
        for nic in self._disturbed:
            self._run("tc", "qdisc", "del", "dev", f"sw{nic}", "root")
        self._disturbed.clear()

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


@asynccontextmanager
async def over_switch(rails: int, **settings) -> AsyncIterator[tuple[aiote.Engine, aiote.Engine, list[aiote.Event]]]:
    """Open two connected engines: the left on the devices 0 to `rails` - 1, the right on as many more."""
    config = aiote.EngineConfig(**{**LOST_SOON, **settings})
    names = [f"rxe{number}" for number in range(2 * rails)]
    with anyio.fail_after(PATIENCE_S):
        async with (
            aiote.open_engine("verbs", names[:rails], config) as left,
            aiote.open_engine("verbs", names[rails:], config) as right,
        ):
            await left.connect(right.address)
            events: list[aiote.Event] = []
            left.listen_events(events.append)
            yield left, right, events


@pytest.fixture
def switch() -> Iterator[Switch]:
    """Put right afterwards what a test has done to the switch."""
    switch = Switch()
    yield switch
    switch.mend()
