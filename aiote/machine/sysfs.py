"""Reading a machine's topology from sysfs.

It takes one pass over a few small files for each device; PCI paths come from the targets of symbolic links. Files may
be missing, unreadable (`speed` of a link that is down fails with EINVAL) or hold nonsense, and devices may disappear
during the pass: then a value is unknown, and no function raises. `Documentation/ABI` of the kernel describes the files.
The root is an argument, so that recorded trees can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from .topology import Gpu, Nic, Node, State, Topology, device_names
from .tree import Tree

__all__ = ["read_nic", "read_topology"]

MAX_PORTS = 16
MAX_SPEED = 100_000_000
"""The highest credible speed in Mbit/s; some drivers report 2**32 - 1 for a link that is down."""

RDMA_CLASSES: tuple[Literal["infiniband", "cxi"], ...] = ("infiniband", "cxi")

# PCI classes by their first two bytes. AMD's Instinct accelerators are not of the display class.
DISPLAY, ACCELERATOR, AMD = 0x03, 0x1200, 0x1002
NO_GPUS = frozenset({0x1013, 0x102B, 0x1234, 0x15AD, 0x1A03, 0x1AF4, 0x1B36})
"""Vendors of the displays of service processors (Matrox, ASPEED) and emulators: display devices that do not compute."""

_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec\b", re.ASCII)
_NODE = re.compile(r"node(\d{1,5})", re.ASCII)
_CPULIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*", re.ASCII)


def read_topology(root: str = "/sys") -> Topology:
    """Return the topology that the tree at `root` describes. Never raises because of its contents."""
    tree = Tree(root)
    nets = {name: _net(tree, name) for name in tree.devices("class/net")}
    rdma = [_rdma(tree, kind, name, nets.get) for kind in RDMA_CLASSES for name in tree.devices(f"class/{kind}")]
    owners: dict[str, list[str]] = {}
    for nic in rdma:
        for name in nic.partners:
            owners.setdefault(name, []).append(nic.name)
    joined = [replace(nic, partners=tuple(owners.get(nic.name, ()))) for nic in nets.values()]
    return Topology(tuple(_nodes(tree)), tuple(_gpus(tree)), (*rdma, *joined))


def read_nic(domain: str, root: str = "/sys") -> Nic | None:
    """Return the one NIC of a rail's (a libfabric domain's) name, without reading the others; None if there is none.

    For a net device, the RDMA devices (`partners`) stay unknown.
    """
    tree = Tree(root)
    for name in device_names(domain):
        if "/" in name or "\0" in name or name in (".", ".."):
            continue
        for kind in RDMA_CLASSES:
            if tree.link(f"class/{kind}/{name}"):
                return _rdma(tree, kind, name, lambda net: _net(tree, net) if tree.link(f"class/net/{net}") else None)
        if tree.link(f"class/net/{name}"):
            return _net(tree, name)
    return None


class _Port(NamedTuple):
    state: State
    speed_mbps: int
    net: str


def _net(tree: Tree, name: str) -> Nic:
    folder = f"class/net/{name}"
    target = tree.link(folder)
    return Nic(
        name,
        "net",
        tree.place(target),
        tree.number(f"{folder}/speed", MAX_SPEED, 0),
        _net_state(tree, folder),
        tree.driver(f"{folder}/device"),
        "/devices/virtual/" in target,
    )


def _net_state(tree: Tree, folder: str) -> State:
    text = tree.text(f"{folder}/operstate")
    if text == "unknown":  # lo and tun report this, whether they are up or down
        text = {"1": "up", "0": "down"}.get(tree.text(f"{folder}/carrier"), "")
    if text == "up":
        return "up"
    return "down" if text in ("down", "lowerlayerdown", "dormant", "notpresent", "testing") else "unknown"


def _rdma(tree: Tree, kind: Literal["infiniband", "cxi"], name: str, net_of: Callable[[str], Nic | None]) -> Nic:
    folder = f"class/{kind}/{name}"
    target = tree.link(folder)
    ports = [_port(tree, f"{folder}/ports/{number}") for number in tree.names(f"{folder}/ports")[:MAX_PORTS]]
    parent = tree.text(f"{folder}/parent")  # rxe has this file
    software = tree.software(folder)
    named = [parent] if parent else [port.net for port in ports if port.net]
    # Over InfiniBand no port names its net device, and EFA has no net device.
    named = named or tree.names(f"{folder}/device/net")
    nets = [net for net in map(net_of, dict.fromkeys(named)) if net is not None]
    place = tree.place(target)
    speed = 0 if software else max((port.speed_mbps for port in ports), default=0)
    return Nic(
        name,
        kind,
        place if place.path or not nets else nets[0].place,
        # rxe's own rate is not the rate of a wire.
        speed or max((net.speed_mbps for net in nets), default=0),
        _rdma_state(ports, nets),
        tree.driver(f"{folder}/device") if not software else "",
        software,
        tuple(net.name for net in nets),
    )


def _rdma_state(ports: list[_Port], nets: list[Nic]) -> State:
    states: list[State] = [port.state for port in ports] or [net.state for net in nets]
    wanted: tuple[State, ...] = ("up", "down")
    return next((state for state in wanted if state in states), "unknown")


def _port(tree: Tree, folder: str) -> _Port:
    text = tree.text(f"{folder}/state")  # "4: ACTIVE"
    state: State = "up" if text.endswith("ACTIVE") else "down" if re.match(r"\d: [A-Z]+", text) else "unknown"
    rate = _RATE.match(tree.text(f"{folder}/rate"))  # meaningless for a port that is down
    speed = round(float(rate[1]) * 1000) if rate and state != "down" else 0
    return _Port(state, speed if speed <= MAX_SPEED else 0, tree.net(f"{folder}/gid_attrs/ndevs/0"))


def _gpus(tree: Tree) -> Iterator[Gpu]:
    # The numbers in addresses are hexadecimal; this is also CUDA's order by PCI_BUS_ID.
    for address in sorted(tree.names("bus/pci/devices")):
        folder = f"bus/pci/devices/{address}"
        kind = tree.hexadecimal(f"{folder}/class") >> 8
        if kind >> 8 != DISPLAY and kind != ACCELERATOR:
            continue
        vendor = tree.hexadecimal(f"{folder}/vendor")
        place = tree.place(tree.link(folder))
        if place.path and vendor not in NO_GPUS and (kind != ACCELERATOR or vendor == AMD):
            yield Gpu(place, vendor, tree.hexadecimal(f"{folder}/device"), tree.driver(folder))


def _nodes(tree: Tree) -> Iterator[Node]:
    for name in tree.names("devices/system/node"):
        if match := _NODE.fullmatch(name):
            text = tree.text(f"devices/system/node/{name}/cpulist")
            yield Node(int(match[1]), text if _CPULIST.fullmatch(text) else "")
