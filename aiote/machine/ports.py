"""The ports of RDMA devices with their GIDs, read from sysfs, and the choice of the port and GID that a rail uses.

A port over Ethernet has a GID for each address of its net device and each supported version: RoCE v1, which no router
forwards, and RoCE v2, which is UDP. Over InfiniBand the first GID is the port's own. The kernel's
Documentation/ABI/stable/sysfs-class-infiniband describes the files.
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
"""Drivers whose devices have no reliable connected queue pairs, or hardly usable ones."""


@dataclass(frozen=True, slots=True)
class Gid:
    """A port's address: its index, its 16 bytes, 2 or 1 for RoCE v2 or v1 (0: InfiniBand), and its net device."""

    index: int
    raw: bytes
    version: int
    net: str

    @property
    def ip(self) -> str:
        """The IP address that the GID stands for."""
        address = ipaddress.IPv6Address(self.raw)
        return str(address.ipv4_mapped or address)

    @property
    def rank(self) -> int:
        """The GID's rank among a port's, higher is better: RoCE v2 first, then IPv4, then IPv6, link-local addresses
        last.
        """
        address = ipaddress.IPv6Address(self.raw)
        return 4 * self.version + (2 if address.ipv4_mapped else 0 if address.is_link_local else 1)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device; `software` marks a device without hardware (rxe, siw)."""

    device: str
    number: int
    up: bool
    ethernet: bool
    software: bool
    gids: tuple[Gid, ...]
    driver: str = ""

    @property
    def name(self) -> str:
        """The device's name; for every port but the first, followed by the port's number."""
        return self.device if self.number == 1 else f"{self.device}:{self.number}"

    @property
    def nets(self) -> tuple[str, ...]:
        """The port's net devices."""
        return tuple(dict.fromkeys(gid.net for gid in self.gids if gid.net))


def read_ports(root: str = "/sys") -> tuple[Port, ...]:
    """Return the ports of all RDMA devices. Never raises because of the contents of the tree."""
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
    """Return one entry of a port's GID table, or None if it is empty."""
    text = tree.text(f"{port}/gids/{index}")
    if text == UNUSED:  # most entries are unused; parsing them took most of the time of opening an engine
        return None
    try:
        raw = ipaddress.IPv6Address(text).packed
    except ValueError:
        return None
    # An unused entry is all zeros. So is the second half of an InfiniBand port's GID before the port has a number.
    if raw[8:] == NONE[8:]:
        return None
    kind = tree.text(f"{port}/gid_attrs/types/{index}")
    version = 0 if not ethernet else 2 if kind == "RoCE v2" else 1
    return Gid(index, raw, version, tree.net(f"{port}/gid_attrs/ndevs/{index}"))


def hardware(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    """Return the ports that `auto` may choose: up, with a GID, of hardware devices that have queue pairs."""
    return tuple(port for port in ports if port.up and port.gids and not port.software and port.driver not in OTHERS)


def choose_gid(port: Port, wanted: int | None = None) -> Gid:
    """Return the GID with the index `wanted`, or else the best one. Raises UsageError if the port has no such GID."""
    if wanted is not None:
        for gid in port.gids:
            if gid.index == wanted:
                return gid
    elif port.gids:
        # On InfiniBand, the subnet manager assigned the first GID.
        return max(port.gids, key=lambda gid: (gid.rank, -gid.index)) if port.ethernet else port.gids[0]
    known = ", ".join(f"{gid.index} ({gid.ip}, {_protocol_name(gid)})" for gid in port.gids) or "none"
    asked = f"gid_index={wanted}: " if wanted is not None else ""
    hint = f"; give {' or '.join(port.nets) or 'its net device'} an IP address" if not port.gids else ""
    raise UsageError(f"{asked}port {port.name} has no such GID; it has {known}{hint}")


def _protocol_name(gid: Gid) -> str:
    return f"RoCE v{gid.version}" if gid.version else "InfiniBand"


def choose_ports(names: tuple[str, ...] | None, host: str, ports: tuple[Port, ...]) -> list[Port]:
    """Return the named ports. A name is a device and port, a net device or an IP address. Without names, return the
    port that has the host's address, or the first that is up. Raises UsageError.
    """
    if not ports:
        raise UsageError(
            "provider='verbs': this machine has no RDMA device (/sys/class/infiniband is empty); "
            "run `aiote doctor`, or use another provider"
        )
    if names is not None:
        return [_named_port(name, names, ports) for name in names]
    up = [port for port in ports if port.up]
    if not up:
        raise UsageError(
            f"provider='verbs': no port is up ({', '.join(port.name for port in ports)}); `aiote doctor` says why"
        )
    return [next((port for port in up if any(gid.ip == host for gid in port.gids)), up[0])]


def _named_port(name: str, names: tuple[str, ...], ports: tuple[Port, ...]) -> Port:
    for port in ports:
        if name in (port.name, f"{port.device}:{port.number}", *port.nets) or any(gid.ip == name for gid in port.gids):
            return port
    present = ", ".join(f"{port.name} ({', '.join(port.nets)})" if port.nets else port.name for port in ports)
    raise UsageError(f"rails={list(names)}: {name!r} does not exist; the RDMA ports are {present}")
