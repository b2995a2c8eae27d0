"""The simulated kind of rail: NICs of one process, on a network that a test has made (`aiote.testing`).

A context variable holds the network that an engine's rails are plugged into, so that concurrent tests have their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiote_native.engine.provider import NativeEndpoint
from aiote_native.sim.world import NullEndpoint, SimDevice, SimEndpoint, World
from aiote_native.system.base import StatusError

from ..errors import FabricError, UsageError
from .contract import RailInfo, Traits

if TYPE_CHECKING:
    from ..machine.topology import Place

__all__ = ["SimNetwork", "SimNic", "SimRail", "World", "current_network", "network", "sim_identity"]


@dataclass(frozen=True, slots=True)
class SimNic:
    """Describe a simulated NIC: its name, its speed, and its numbers as `aiote_native.sim.world` takes them."""

    name: str
    speed_mbps: int
    numbers: Mapping[str, float]


class SimNetwork:
    """A network and the NICs that each engine on it has. `is_virtual` is called when an engine is opened."""

    def __init__(self, seed: int, nics: Sequence[SimNic], is_virtual: Callable[[], bool], remembered: int) -> None:
        self.seed = seed
        self.nics = tuple(nics)
        self.nodes = 0
        self.on_open: Callable[[World], object] | None = None
        self._is_virtual = is_virtual
        self._remembered = remembered
        self._world: World | None = None
        self._identities = 0

    @property
    def has_opened_engine(self) -> bool:
        """Whether an engine was ever opened on the network."""
        return self._world is not None

    @property
    def world(self) -> World:
        """The native network, which is made when it is first needed."""
        if self._world is None:
            self._world = World(self.seed & (1 << 64) - 1, self._is_virtual(), self._remembered)
            if self.on_open is not None:
                self.on_open(self._world)
        return self._world

    def plug(self, names: tuple[str, ...] | None) -> list[SimRail]:
        """Open the NICs of one more engine: all, or the named ones. A name may be repeated. Raises UsageError."""
        if self.world.closed:
            raise UsageError("the simulated network is closed; use it within `with aiote.testing.Fabric(...)`")
        if self.world.virtual != self._is_virtual():
            raise UsageError(
                "the simulated network and this event loop disagree about virtual time; use a new Fabric for each run"
            )
        known = {nic.name: nic for nic in self.nics}
        wanted = tuple(known) if names is None else names
        if missing := [name for name in wanted if name not in known]:
            raise UsageError(
                f"rails={list(wanted)}: {missing[0]!r} does not exist; this network has {', '.join(known)}"
            )
        node = self.nodes
        self.nodes += 1
        return [SimRail(index, known[name], self.world, node) for index, name in enumerate(wanted)]

    def identity(self) -> bytes:
        """Return the next engine's identity. A seed determines the sequence of identities."""
        self._identities += 1
        return hashlib.sha256(f"aiote sim {self.seed} {self._identities}".encode()).digest()[:16]

    def close(self) -> None:
        """Close the network. Raises RuntimeError while an engine is open on it. Idempotent."""
        if self._world is not None:
            self._world.close()


current_network: ContextVar[SimNetwork | None] = ContextVar("aiote simulated network", default=None)


def network() -> SimNetwork:
    """Return the network of this context. Raises UsageError if there is none."""
    found = current_network.get()
    if found is None:
        raise UsageError(
            "provider='sim' needs a simulated network: open the engine within `with aiote.testing.Fabric(seed=1):`, "
            "or by that fabric's open_engine"
        )
    return found


def sim_identity() -> bytes:
    """Return an identity for the next engine of this context's network. Raises UsageError if there is none."""
    return network().identity()


class SimRail:
    """A NIC of the simulated network."""

    def __init__(self, index: int, nic: SimNic, world: World, node: int) -> None:
        self.index = index
        self.traits = Traits()
        self.provider = "sim"
        self.name = nic.name
        self.wire = "sim"
        self.node = node
        self._speed = nic.speed_mbps
        # As real NICs differ, every other one addresses memory from 0 instead of by its virtual address.
        self._endpoint = NullEndpoint if nic.numbers.get("null") else SimEndpoint
        self.device = SimDevice(world, node, index, dict(nic.numbers), index % 2 == 1)

    @property
    def place(self) -> Place:
        from ..machine.topology import Place

        return Place()

    @property
    def info(self) -> RailInfo:
        state = "up" if self.device.state == "up" else "down"
        return RailInfo(self.name, self.provider, self._speed, -1, state, "simulated")

    def open_endpoint(self) -> NativeEndpoint:
        try:
            return self._endpoint(self.device)
        except StatusError as error:
            raise FabricError(
                error.errno or 0, f"{error.strerror}", operation="open endpoint", rail=self.name
            ) from error

    def close(self) -> None:
        self.device.close()
