"""The ports of RDMA devices as sysfs has them, with their GIDs: which one a rail speaks from.

A port over Ethernet has a GID for each address of its net device, in up to two ways of sending: RoCE v1, which no
router forwards, and RoCE v2, which is UDP. Over InfiniBand the first is the port's own. The files are described in the
kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ..errors import UsageError
from .tree import Tree

__all__ = ["Gid", "Port", "choose_gid", "choose_ports", "hardware", "read_ports"]

MAX_GIDS = 256
MAX_PORTS = 16
NONE = bytes(16)
UNUSED = ":".join(["0000"] * 8)
OTHERS = ("efa", "hfi1", "mana", "usnic_verbs")
"""Drivers whose devices have no reliable connected queue pairs, or none to speak of."""


@dataclass(frozen=True, slots=True)
class Gid:
    """A port's address: its index, its 16 bytes, 2 or 1 for RoCE v2 or v1 (0: InfiniBand), and its net device."""

    index: int
    raw: bytes
    version: int
    net: str

    @property
    def ip(self) -> str:
        """The IP address that it stands for."""
        address = ipaddress.IPv6Address(self.raw)
        return str(address.ipv4_mapped or address)

    @property
    def rank(self) -> int:
        """How much it is preferred: routed before unrouted, IPv4 before IPv6 before what one link alone knows."""
        address = ipaddress.IPv6Address(self.raw)
        return 4 * self.version + (2 if address.ipv4_mapped else 0 if address.is_link_local else 1)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device; `software` tells devices that are none (rxe, siw)."""

    device: str
    number: int
    up: bool
    ethernet: bool
    software: bool
    gids: tuple[Gid, ...]
    driver: str = ""

    @property
    def name(self) -> str:
        """The device's name, with the number of any port but the first."""
        return self.device if self.number == 1 else f"{self.device}:{self.number}"

    @property
    def nets(self) -> tuple[str, ...]:
        """Its net devices."""
        return tuple(dict.fromkeys(gid.net for gid in self.gids if gid.net))


def read_ports(root: str = "/sys") -> tuple[Port, ...]:
    """Return the ports of all RDMA devices. Never raises for what is in the tree."""
    tree = Tree(root)
    return tuple(
        _port(tree, device, int(number))
        for device in tree.devices("class/infiniband")
        for number in tree.names(f"class/infiniband/{device}/ports")[:MAX_PORTS]
        if number.isascii() and number.isdigit() and 0 < int(number) < 256
    )


def _port(tree: Tree, device: str, number: int) -> Port:
    folder = f"class/infiniband/{device}"
    port = f"{folder}/ports/{number}"
    ethernet = tree.text(f"{port}/link_layer") == "Ethernet"
    indices = sorted(int(name) for name in tree.names(f"{port}/gids")[:MAX_GIDS] if name.isascii() and name.isdigit())
    return Port(
        device,
        number,
        tree.text(f"{port}/state").endswith("ACTIVE"),
        ethernet,
        tree.software(folder),
        tuple(gid for index in indices if (gid := _gid(tree, port, index, ethernet=ethernet)) is not None),
        tree.driver(f"{folder}/device"),
    )


def _gid(tree: Tree, port: str, index: int, *, ethernet: bool) -> Gid | None:
    """Return one entry of a port's table, or None where it is empty."""
    text = tree.text(f"{port}/gids/{index}")
    if text == UNUSED:  # most of a table is, and parsing it took most of the time of opening an engine
        return None
    try:
        raw = ipaddress.IPv6Address(text).packed
    except ValueError:
        return None
    # An unused entry is of zeros, and so is the second half of an InfiniBand port's that has no number yet.
    if raw[8:] == NONE[8:]:
        return None
    kind = tree.text(f"{port}/gid_attrs/types/{index}")
    version = 0 if not ethernet else 2 if kind == "RoCE v2" else 1
    return Gid(index, raw, version, tree.net(f"{port}/gid_attrs/ndevs/{index}"))


def hardware(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    """Return the ports that are worth to be taken unasked: up, with an address, of devices that have queue pairs."""
    return tuple(port for port in ports if port.up and port.gids and not port.software and port.driver not in OTHERS)


def choose_gid(port: Port, wanted: int | None = None) -> Gid:
    """Return the GID of a port that is wanted, or else the best. Raises UsageError where there is none."""
    if wanted is not None:
        for gid in port.gids:
            if gid.index == wanted:
                return gid
    elif port.gids:
        # Of InfiniBand's the first is the one that a subnet manager gave.
        return max(port.gids, key=lambda gid: (gid.rank, -gid.index)) if port.ethernet else port.gids[0]
    known = ", ".join(f"{gid.index} ({gid.ip}, {_way(gid)})" for gid in port.gids) or "none"
    asked = f"gid_index={wanted}: " if wanted is not None else ""
    hint = f"; give {' or '.join(port.nets) or 'its net device'} an IP address" if not port.gids else ""
    raise UsageError(f"{asked}port {port.name} has no such GID, it has {known}{hint}")


def _way(gid: Gid) -> str:
    return f"RoCE v{gid.version}" if gid.version else "InfiniBand"


def choose_ports(names: tuple[str, ...] | None, host: str, ports: tuple[Port, ...]) -> list[Port]:
    """Return the ports that are named: by device and port, net device or IP address. Without names, the one that has
    the host's address, or the first that is up. Raises UsageError.
    """
    if not ports:
        raise UsageError(
            "provider='verbs': this machine has no RDMA device (/sys/class/infiniband is empty); "
            "`aiote doctor` says what else it lacks"
        )
    if names is not None:
        return [_named(name, names, ports) for name in names]
    up = [port for port in ports if port.up]
    if not up:
        raise UsageError(f"provider='verbs': no port is up; there is {', '.join(port.name for port in ports)}")
    return [next((port for port in up if any(gid.ip == host for gid in port.gids)), up[0])]


def _named(name: str, names: tuple[str, ...], ports: tuple[Port, ...]) -> Port:
    for port in ports:
        if name in (port.name, f"{port.device}:{port.number}", *port.nets) or any(gid.ip == name for gid in port.gids):
            return port
    present = ", ".join(f"{port.name} ({', '.join(port.nets)})" if port.nets else port.name for port in ports)
    raise UsageError(f"rails={list(names)}: {name!r} is not here; the RDMA ports are {present}")
