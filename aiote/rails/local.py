"""The `local` rail: aiote's own rail between processes of one host, by rings in shared memory, without a library."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from aiote_native.streams.endpoints import RingEndpoint
from aiote_native.streams.rail import StreamDevice
from aiote_native.system.base import StatusError

from ..errors import FabricError
from ..machine.addresses import unknown
from .contract import RailInfo, Traits, traits_of

if TYPE_CHECKING:
    from ..machine.topology import Place

__all__ = ["LOCAL", "LocalRail", "choose_local", "may_make_rings"]

LOCAL = "local"
"""The name of the provider, and of its only NIC."""

VERSION = 5
"""The version of the ring's layout and frames. Two rails can be connected only if their versions are equal.

Since 2 the ring is a memfd. Since 3 each side chooses the length of its own ring. Since 4 frames refer to memory. Since
5 such memory may consist of several segments.
"""


class LocalRail:
    """Shared memory between processes of one host, presented as a NIC."""

    def __init__(self, index: int, ring_bytes: int, shares: bool, staging_bytes: int) -> None:
        self.index = index
        self._ring_bytes = ring_bytes
        self.traits: Traits = traits_of(LOCAL)
        self.device = StreamDevice(shares, staging_bytes)
        self.provider = LOCAL
        self.name = LOCAL

    @property
    def wire(self) -> str:
        return f"{LOCAL}/{VERSION}"

    @property
    def place(self) -> Place:
        from ..machine.topology import Place

        return Place()

    @property
    def info(self) -> RailInfo:
        return RailInfo(name=self.name, provider=LOCAL, speed_mbps=0, numa_node=-1, state="up", library="aiote")

    def open_endpoint(self) -> RingEndpoint:
        try:
            return RingEndpoint(self.device, self._ring_bytes)
        except StatusError as error:
            reason = f"{error.operation}: {error.strerror}"
            raise FabricError(error.errno or 0, reason, operation="open endpoint", rail=self.name) from error

    def close(self) -> None:
        self.device.close()


def choose_local(names: tuple[str, ...] | None) -> int:
    """Return how many rails to open, one for each name. Raises UsageError for a name that is not there."""
    if names is not None and set(names) - {LOCAL}:
        raise unknown(names, [LOCAL])
    return 1 if names is None else len(names)


def may_make_rings() -> bool:
    """Tell whether this process may create rings: the limit on file sizes, which covers memfds, must not be set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return limit == resource.RLIM_INFINITY
