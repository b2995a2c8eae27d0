"""The interface that every kind of rail provides, and the traits of each provider that are known before it is opened.

A rail hides registration modes, addressing, the largest message, how an immediate without data is posted, and whether
there is a wait descriptor. The contract suite in `tests/rails` runs the same expectations against every kind of rail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aiote_native.engine.provider import NativeDevice, NativeEndpoint

if TYPE_CHECKING:
    from ..machine.topology import Place

__all__ = ["NEVER_RUN", "PROVEN", "TRAITS", "Rail", "RailInfo", "Traits", "is_proven", "traits_of"]

PROVEN = frozenset({"local", "shm", "sim", "socket", "tcp", "verbs"})
"""The kinds of rail that aiote was run on. `auto` takes no other kind; the table in docs/hardware.md names the rest."""
NEVER_RUN = "was never run with aiote on hardware"
"""What is said of any other kind."""


def is_proven(provider: str) -> bool:
    """Tell whether aiote was run on a provider. The first part of a layered name ("tcp;ofi_rxm") decides."""
    return provider.partition(";")[0] in PROVEN


@dataclass(frozen=True, slots=True)
class RailInfo:
    """Describe a rail to users: name of the NIC, provider, speed in Mbit/s (0: unknown), NUMA node (-1: none), state,
    library.
    """

    name: str
    provider: str
    speed_mbps: int
    numa_node: int
    state: str
    library: str


@dataclass(frozen=True, slots=True)
class Traits:
    """Describe the properties of a provider that are known in advance.

    `waits`: its queues have a descriptor to sleep on. `least`: bytes that a write with only an immediate carries,
    because shm of 1.17 never completes a write of zero bytes. `by_address`: its rails are opened by a local IP address.
    `host_only`: it reaches only peers on this host. `fragile`: a request that fails breaks its connection, so that the
    engine has to make the connection anew even if it has no other one. `dmabuf`: it reaches GPU memory through
    DMA-BUFs. `scarce`: its NICs have few endpoints for all processes of a host, so that a peer may find none left.
    """

    waits: bool = True
    least: int = 0
    by_address: bool = False
    host_only: bool = False
    fragile: bool = False
    dmabuf: bool = False
    scarce: bool = False


TRAITS = {
    "tcp": Traits(by_address=True),
    "shm": Traits(waits=False, least=1, host_only=True),
    "local": Traits(waits=False, host_only=True),
    "socket": Traits(by_address=True),
    "verbs": Traits(by_address=True),
    "efa": Traits(scarce=True),
    "cxi": Traits(),
}


def traits_of(provider: str) -> Traits:
    """Return the traits of a provider by its name. The first part of a layered name ("tcp;ofi_rxm") decides."""
    return TRAITS.get(provider.partition(";")[0], Traits())


class Rail(Protocol):
    """An opened NIC."""

    index: int
    traits: Traits

    @property
    def device(self) -> NativeDevice:
        """The native NIC."""
        ...

    @property
    def provider(self) -> str:
        """The provider's full name."""
        ...

    @property
    def name(self) -> str:
        """The NIC's name."""
        ...

    @property
    def info(self) -> RailInfo:
        """The description of the rail for users."""
        ...

    @property
    def place(self) -> Place:
        """The place of the NIC in the machine; unknown for a rail without a physical NIC."""
        ...

    @property
    def wire(self) -> str:
        """The name of the wire protocol. Two rails can be connected if their names are equal."""
        ...

    def open_endpoint(self) -> NativeEndpoint:
        """Open an endpoint for one peer. Raises FabricError."""
        ...

    def close(self) -> None:
        """Close the NIC. The caller has closed everything that uses it. Idempotent."""
        ...
