"""A link that is cut: nothing of either engine is closed, and what was under way over it ends within the limit.

Each engine is a process in one of two network namespaces: `near` and `other` in the first, `far` in the second.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from support.engines.opening import LOST_SOON, PATIENCE_S
from support.network.namespaces import HOSTS, Network
from support.process.children import Child

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.needs_namespaces,
    pytest.mark.blocking_allowed("starts processes, and no engine runs here"),
]

SIZE = 1 << 20
CONFIG = {"cluster_key": b"a secret of sixteen", "connect_timeout": 3.0, **LOST_SOON}
RESET = ("REJECT", "--reject-with", "tcp-reset")


@dataclass(frozen=True)
class Link:
    """The engines and what is between them."""

    network: Network
    near: Child
    other: Child
    far: Child

    @property
    def control(self) -> tuple[int, ...]:
        """The ports of the control plane."""
        return self.near.address.port, self.far.address.port


CUTS: dict[str, Callable[[Link], Awaitable[None]]] = {
    "cable pulled": lambda link: link.network.pull(),
    "all dropped": lambda link: link.network.refuse("DROP"),
    "data dropped": lambda link: link.network.refuse("DROP", but=link.control),
    "control dropped": lambda link: link.network.refuse("DROP", ports=link.control),
    "all reset": lambda link: link.network.refuse(*RESET),
    "data reset": lambda link: link.network.refuse(*RESET, but=link.control),
    "control reset": lambda link: link.network.refuse(*RESET, ports=link.control),
}
each_cut = pytest.mark.parametrize("cut", [pytest.param(cut, id=name) for name, cut in CUTS.items()])


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def processes(network) -> Iterator[tuple[Child, Child, Child]]:
    started = [Child(*network.enter(side)) for side in (0, 0, 1)]
    yield tuple(started)
    for child in started:
        child.end()


@asynccontextmanager
async def opened(network: Network, processes: tuple[Child, Child, Child], **settings) -> AsyncIterator[Link]:
    """Open the three engines and connect the near one with both others."""
    with anyio.fail_after(PATIENCE_S):
        await network.heal()
        for child, host in zip(processes, (HOSTS[0], HOSTS[0], HOSTS[1]), strict=True):
            await child.open("tcp", SIZE, host=host, **CONFIG, **settings)
            await child.ask("take")
        yield Link(network, *processes)
        for child in processes:
            await child.ask("close")


async def served_on(link: Link) -> None:
    """Check that the near engine and its neighbour are as well as before."""
    assert (await link.near.ask("check", descriptor=link.other.descriptor.hex()))["same"]
    assert await sees(link.near, link.other)


async def sees(one: Child, other: Child) -> bool:
    """Tell whether one has the other for a peer."""
    return str(other.address) in (await one.ask("peers"))["peers"]


async def healed(link: Link) -> None:
    """Mend the link and check that both sides meet again, as soon as both or neither have seen that it was cut."""
    await link.network.heal()
    while await sees(link.near, link.far) != await sees(link.far, link.near):
        await anyio.sleep(0.01)
    assert (await link.near.ask("check", descriptor=link.far.descriptor.hex()))["same"]
    assert (await link.far.ask("check", descriptor=link.near.descriptor.hex()))["same"]


@each_cut
@pytest.mark.parametrize("progress", ["adaptive", "thread"])
async def test_everything_under_way_ends_when_the_link_fails(cut, progress, network, processes):
    async with opened(network, processes, progress=progress) as link:
        await link.near.ask("connect", address=str(link.other.address))
        await link.far.ask("flood", descriptor=link.near.descriptor.hex(), imm=42)
        await link.near.ask("mixing", descriptor=link.far.descriptor.hex())
        await anyio.sleep(random.uniform(0, 0.05))
        await served_on(link)
        await cut(link)
        await served_on(link)
        said = await link.near.ask("mixed")
        await served_on(link)
        assert set(said["ended"]) == {"write", "write_imm", "alone", "write_pages", "read", "send", "wait"}
        for verb, error in said["ended"].items():
            assert str(link.far.address) in error
            assert verb.partition("_")[0] in error or (verb == "alone" and "write_imm" in error)
        await healed(link)
        await served_on(link)


@each_cut
async def test_connecting_ends_when_the_link_fails(cut, network, processes):
    """Cut at a random moment: before, while or after it connects; idle it would notice nothing, so it writes."""
    async with opened(network, processes) as link:
        for longest in (0.01, 0.04):
            link.near.tell("last", address=str(link.far.address))
            await anyio.sleep(random.uniform(0, longest))
            await cut(link)
            assert str(link.far.address) in (await link.near.answer())["said"]
            await served_on(link)
            await healed(link)
