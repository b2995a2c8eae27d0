"""The `socket` rail: aiote's own rail over TCP, by the kernel's sockets, without a library."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from aiote_native.streams.endpoints import SocketEndpoint
from aiote_native.streams.rail import StreamDevice
from aiote_native.system.base import StatusError

from ..errors import FabricError, UsageError
from ..machine.addresses import addresses, in_order, nearest, node_of
from .contract import RailInfo, Traits, traits_of

if TYPE_CHECKING:
    from ..machine.topology import Nic, Place

__all__ = ["SOCKET", "SocketRail", "choose_sockets"]

SOCKET = "socket"
"""The name of the provider."""

VERSION = 2  # since 2 the accepting side answers with a token
"""The version of its frames. Two rails can be connected only if their versions are equal."""


class SocketRail:
    """A network interface with an IP address, of version 4 or 6."""

    def __init__(self, index: int, host: str, name: str, staging_bytes: int) -> None:
        self.index = index
        self.traits: Traits = traits_of(SOCKET)
        self.device = StreamDevice(staging_bytes=staging_bytes)
        self.provider = SOCKET
        self.name = name
        self.host = host

    @property
    def wire(self) -> str:
        return f"{SOCKET}/{VERSION}"

    @functools.cached_property
    def nic(self) -> Nic | None:
        """The NIC as sysfs describes it, read once when it is first needed; None if sysfs has no NIC of that name."""
        # A local import keeps `import aiote` fast.
        from ..machine.sysfs import read_nic

        return read_nic(self.name)

    @property
    def place(self) -> Place:
        from ..machine.topology import Place

        return self.nic.place if self.nic is not None else Place()

    @property
    def info(self) -> RailInfo:
        speed = self.nic.speed_mbps if self.nic is not None else 0
        return RailInfo(
            name=self.name,
            provider=SOCKET,
            speed_mbps=speed,
            numa_node=self.place.numa_node,
            state="up",
            library="aiote",
        )

    def open_endpoint(self) -> SocketEndpoint:
        try:
            return SocketEndpoint(self.device, self.host)
        except (OSError, StatusError) as error:
            reason = f"listen at {self.host}: {error}"
            raise FabricError(error.errno or 0, reason, operation="open endpoint", rail=self.name) from error

    def close(self) -> None:
        self.device.close()


def choose_sockets(names: tuple[str, ...] | None, host: str) -> list[tuple[str, str]]:
    """Return (address, interface) of the rails to open: those named by either, or the one that leads to `host`.

    A named interface usually has an IPv4 and an IPv6 address; the IP version of the host decides between them. Raises
    UsageError for names that are not there.
    """
    hosts = in_order(host, addresses())
    if not hosts:
        raise UsageError(
            "provider='socket': no interface of this machine has an IP address; bring one up, or use provider='local'"
        )
    nodes = [nearest(host, list(hosts))] if names is None else [node_of(name, hosts, names) for name in names]
    return [(node, hosts[node]) for node in nodes]
