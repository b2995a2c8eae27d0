"""The `verbs` rail, driven by libibverbs: reliable connected queue pairs on a port of an RDMA device."""

from __future__ import annotations

import errno
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiote_native.system.base import StatusError
from aiote_native.verbs.nic import VerbsDevice
from aiote_native.verbs.nic import load as load_libibverbs
from aiote_native.verbs.queuepairs import VerbsEndpoint

from ..errors import FabricError
from ..machine.ports import Gid, Port
from .contract import RailInfo, Traits
from .libfabric import fabric_error

if TYPE_CHECKING:
    from ..machine.topology import Nic, Place

__all__ = ["VerbsRail", "load_libibverbs", "load_verbs"]

WIRES = {0: "verbs/infiniband", 1: "verbs/roce1", 2: "verbs/roce2"}


def load_verbs() -> None:
    """Open libibverbs. Raises FabricError that says what to install."""
    try:
        load_libibverbs()
    except ImportError as error:
        raise FabricError(
            errno.ENOENT,
            f"libibverbs cannot be opened: {error}; on Debian: apt-get install libibverbs1 ibverbs-providers",
            operation="load libibverbs",
        ) from error


class VerbsRail:
    """A port of an RDMA device. The caller has loaded libibverbs."""

    def __init__(self, index: int, port: Port, gid: Gid, settings: Mapping[str, int]) -> None:
        """Open the port; `settings` are arguments of the native device. Raises FabricError that names the port."""
        self.index = index
        self.port = port
        self.gid = gid
        self.traits = Traits(fragile=True, dmabuf=True)
        self.provider = "verbs"
        self.name = port.name
        self.wire = WIRES[gid.version]
        try:
            self.device = VerbsDevice(port.device, port.number, gid_index=gid.index, **settings)
        except (StatusError, LookupError) as error:
            raise fabric_error(error, "open rail", self.name) from error

    @functools.cached_property
    def nic(self) -> Nic | None:
        """The device as sysfs describes it, read once when first needed; None if sysfs has no device of that name."""
        # A local import keeps `import aiote` fast.
        from ..machine.sysfs import read_nic

        return read_nic(self.port.device)

    @property
    def place(self) -> Place:
        from ..machine.topology import Place

        return self.nic.place if self.nic is not None else Place()

    @property
    def info(self) -> RailInfo:
        speed = self.nic.speed_mbps if self.nic is not None else 0
        state = "up" if self.device.attributes["up"] else "down"
        return RailInfo(self.name, self.provider, speed, self.place.numa_node, state, "libibverbs")

    def open_endpoint(self) -> VerbsEndpoint:
        if not self.device.attributes["up"]:
            raise FabricError(errno.ENETDOWN, "the port is down", operation="open endpoint", rail=self.name)
        try:
            return VerbsEndpoint(self.device)
        except StatusError as error:
            raise fabric_error(error, "open endpoint", self.name) from error

    def close(self) -> None:
        self.device.close()
