"""Where NICs, GPUs and memory are in a machine, and how far they are from each other.

This module contains only plain data and pure functions. `sysfs.py` reads the data from the kernel, and `numa.py` asks
the kernel where memory is. Every unknown fact has a value: -1 for a node, 0 for a speed, an empty path or name,
"unknown" for a state.

A place is a NUMA node and a PCI path from the root complex down, as sysfs spells it: `pci0000:15`, `0000:15:01.0` (a
root port), `0000:16:00.0` (a switch's upper port), `0000:17:02.0` (one of its lower ports), `0000:1b:00.0` (the
device). Host memory has a node and no path. The elements that two paths share determine their distance:

| In common | Distance |
|---|---|
| root complex, root port and a bridge below it | SWITCH |
| root complex, perhaps its port | ROOT, unless the nodes are known and differ |
| no element, the node is the same | NODE |
| no element, the nodes differ | OTHER |
| no element, a node is unknown | UNKNOWN |

`import aiote` does not import this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

__all__ = [
    "Distance",
    "Gpu",
    "Nic",
    "Node",
    "Place",
    "State",
    "Topology",
    "device_names",
    "distance",
    "nearest",
    "preference",
    "same_spelling",
]

State = Literal["up", "down", "unknown"]

BELOW_ROOT_PORT = 3
"""How many elements two paths share if they meet in a bridge below the root port."""

_ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.ASCII)


class Distance(IntEnum):
    """The distance of a NIC from a place; a smaller value is nearer."""

    SWITCH = 0
    ROOT = 1
    NODE = 2
    OTHER = 3
    UNKNOWN = 4


@dataclass(frozen=True, slots=True)
class Place:
    """A NUMA node (-1: unknown), and a PCI path from the root complex, empty for memory and virtual devices."""

    numa_node: int = -1
    path: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The PCI address, or an empty string."""
        return self.path[-1] if self.path else ""


@dataclass(frozen=True, slots=True)
class Nic:
    """A network device.

    `kind` is its class in sysfs: "infiniband" and "cxi" are RDMA devices, "net" are the kernel's own. `partners` are
    the names of an RDMA device's net devices, or of a net device's RDMA devices. `virtual`: without hardware, such as
    lo, veth, a bridge, or an rxe device. An rxe device has the place of the net device below it.
    """

    name: str
    kind: Literal["infiniband", "cxi", "net"]
    place: Place = Place()
    speed_mbps: int = 0
    state: State = "unknown"
    driver: str = ""
    virtual: bool = False
    partners: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its place, the numbers of its vendor and its model (0: unknown), its driver."""

    place: Place
    vendor: int = 0
    device: int = 0
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node, and its processors as the kernel lists them ("0-55,112-167"; empty if it has only memory)."""

    number: int
    cpulist: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes, GPUs and NICs of a machine, each in the order of their names."""

    nodes: tuple[Node, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()

    def nic(self, name: str) -> Nic | None:
        """Return the NIC of a rail's (a libfabric domain's) name; an RDMA device takes precedence over a net device."""
        for wanted in device_names(name):
            for nic in self.nics:
                if nic.name == wanted:
                    return nic
        return None

    def place(self, where: int | str) -> Place:
        """Return the place of a NUMA node by number, or of a GPU or NIC by PCI address in any common spelling."""
        if isinstance(where, int):
            return Place(where) if any(node.number == where for node in self.nodes) else Place()
        address = same_spelling(where)
        places = [gpu.place for gpu in self.gpus] + [nic.place for nic in self.nics]
        return next((place for place in places if address and place.address == address), Place())


def device_names(domain: str) -> Iterator[str]:
    """Yield the device names that a libfabric domain may belong to: its name, also without "-rdm" or "-dgram"."""
    if domain:
        yield domain
    device, dash, _ = domain.rpartition("-")
    if dash and device:
        yield device


def same_spelling(address: str) -> str:
    """Return a PCI address as sysfs spells it, or an empty string for a text that is not a PCI address.

    CUDA writes `0000:1B:00.0`, NVML `00000000:1B:00.0`.
    """
    match = _ADDRESS.fullmatch(address.strip().lower())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else ""


def distance(place: Place, other: Place) -> Distance:
    """Return the distance between two places; their order does not matter."""
    return _measure(place, other)[0]


def preference(place: Place, rails: Sequence[Place]) -> tuple[int, ...]:
    """Return the rank of each rail's place for a buffer at `place`: 0 for the nearest rails, equal for equal distances.

    Ranks have no gaps. Rails whose distance is unknown come last, with equal ranks. So all ranks are 0 for a buffer
    whose place is unknown.
    """
    measures = [_measure(place, rail) for rail in rails]
    order = {measure: rank for rank, measure in enumerate(sorted(set(measures)))}
    return tuple(order[measure] for measure in measures)


def nearest(place: Place, nics: Sequence[Nic]) -> tuple[tuple[Nic, ...], ...]:
    """Return the NICs in groups of equal distance, the nearest group first; within a group the order is kept."""
    groups: dict[int, list[Nic]] = {}
    for rank, nic in zip(preference(place, [nic.place for nic in nics]), nics, strict=True):
        groups.setdefault(rank, []).append(nic)
    return tuple(tuple(groups[rank]) for rank in sorted(groups))


def _measure(place: Place, other: Place) -> tuple[Distance, int]:
    """Return the distance, and for SWITCH the steps up from `place` to the common switch, because switches are
    cascaded.
    """
    common = _in_common(place.path, other.path)
    if common >= BELOW_ROOT_PORT:
        return Distance.SWITCH, len(place.path) - common
    known = place.numa_node >= 0 and other.numa_node >= 0
    if known and place.numa_node != other.numa_node:
        return Distance.OTHER, 0
    if common:
        return Distance.ROOT, 0
    return (Distance.NODE if known else Distance.UNKNOWN), 0


def _in_common(path: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for mine, its in zip(path, other, strict=False):
        if mine != its:
            break
        count += 1
    return count
