"""What every kind of rail provides, and what is known of each provider before it is opened.

A rail hides registration modes, addressing, the largest message, how an immediate alone is posted and whether there
is a wait descriptor. The contract suite in `tests/rails` runs the same expectations against every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aiote_native.provider import NativeDevice, NativeEndpoint

if TYPE_CHECKING:
    from .topology import Place

__all__ = ["TRAITS", "Rail", "RailInfo", "Traits", "traits_of"]


@dataclass(frozen=True, slots=True)
class RailInfo:
    """A rail as users see it: name of the NIC, provider, speed in Mbit/s (0: unknown), NUMA node (-1: none), state,
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
    """What is known of a provider.

    `waits`: its queues have a descriptor to sleep on. `least`: bytes that an immediate alone carries (shm of 1.17
    never completes a write of none). `by_address`: opened by a local IP address. `host_only`: reaches peers of
    this host alone. `fragile`: one request that fails takes its connection with it, so that it has to be made anew
    also where there is no other. `dmabuf`: reaches GPU memory through DMA-BUFs. `scarce`: its NICs have few endpoints
    for all processes of a host, so that there may be none left for a peer.
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
    """Return what is known of a provider by its name, of layered ones ("tcp;ofi_rxm") by the first part."""
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
        """Name the provider in full."""
        ...

    @property
    def name(self) -> str:
        """Name the NIC."""
        ...

    @property
    def info(self) -> RailInfo:
        """Describe the rail."""
        ...

    @property
    def place(self) -> Place:
        """Where the NIC is; unknown for what has no place."""
        ...

    @property
    def wire(self) -> str:
        """Name what travels on the wire; two rails can be joined when they say the same."""
        ...

    def open_endpoint(self) -> NativeEndpoint:
        """Open an endpoint for one peer. Raises FabricError."""
        ...

    def close(self) -> None:
        """Close the NIC; everything under it is closed before. Idempotent."""
        ...
