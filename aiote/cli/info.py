"""The command `aiote info`: the machine's NUMA nodes, GPUs and NICs as a picture or as JSON.

libfabric tells which NICs are rails. It knows nothing of a recorded tree, for which the kind of a device decides; the
output says so.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

import aiote
from aiote.machine.addresses import addresses
from aiote.machine.sysfs import read_topology
from aiote.machine.topology import Gpu, Nic, Place, Topology, nearest
from aiote.rails.libfabric import offered_nics
from aiote.rails.library import library_summary, load
from aiote.rails.local import LOCAL
from aiote.rails.sockets import SOCKET

__all__ = ["Machine", "as_dict", "command", "likely_providers", "picture"]

SYSFS = "/sys"
WIDTH = 170
SOFTWARE_SHOWN = 16
MAKERS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
SHORTEST_BEHIND_A_SWITCH = 5
"""The elements of such a path: root complex, root port, a switch's upper and lower port, the device."""

Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Sysfs = Annotated[
    Path | None,
    typer.Option("--sysfs", metavar="DIR", exists=True, file_okay=False, help="Show a recorded tree instead of /sys."),
]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to show. `providers` are those of each NIC, by the NIC's name; `asked`: libfabric reported them."""

    topology: Topology
    providers: dict[str, tuple[str, ...]]
    sysfs: str = SYSFS
    library: str = ""
    asked: bool = False


def command(as_json: Json = False, sysfs: Sysfs = None) -> None:
    """Show this machine's NUMA nodes, GPUs and NICs, and which NICs are usable as rails."""
    try:
        machine = _this_machine() if sysfs is None else _recorded(str(sysfs))
    except aiote.UsageError as error:
        typer.echo(f"aiote: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(as_dict(machine), indent=2))
    else:
        # An output that is not a terminal is a file, which has room for long lines.
        picture(machine, Console(width=None if sys.stdout.isatty() else WIDTH))


def _this_machine() -> Machine:
    topology = read_topology(SYSFS)
    explicit = aiote.EngineConfig().libfabric
    library = library_summary(explicit)
    offers = {SOCKET: tuple(dict.fromkeys(addresses().values())), LOCAL: (LOCAL,)}
    try:
        load(explicit)
        asked = True
    except aiote.FabricError:
        asked = False
    providers: dict[str, list[str]] = {}
    for provider, domains in (*(offered_nics() if asked else {}).items(), *offers.items()):
        for domain in domains:
            # A domain that belongs to no NIC (shm's) keeps its own name.
            nic = topology.nic(domain)
            known = providers.setdefault(nic.name if nic is not None else domain, [])
            known += [provider] if provider not in known else []
    found = {name: tuple(names) for name, names in providers.items()}
    return Machine(topology, found, SYSFS, library, asked=asked)


def _recorded(root: str) -> Machine:
    topology = read_topology(root)
    return Machine(topology, {nic.name: likely_providers(nic) for nic in topology.nics}, root)


def likely_providers(nic: Nic) -> tuple[str, ...]:
    """Return the providers that usually offer such a NIC as a rail; none while it is down."""
    if nic.state == "down":
        return ()
    if nic.kind == "net":
        return ("tcp",)
    return {"efa": ("efa",)}.get(nic.driver, ("cxi",) if nic.kind == "cxi" else ("verbs;ofi_rxm",))


def as_dict(machine: Machine) -> dict[str, Any]:
    """Return everything for a program; speeds in Mbit/s, -1 for an unknown node, 0 for an unknown speed."""
    topology = machine.topology
    rdma = [nic for nic in topology.nics if nic.kind != "net"]
    return {
        "aiote": metadata.version("aiote"),
        "python": platform.python_version(),
        "libfabric": machine.library or None,
        "sysfs": machine.sysfs,
        "rails_from": "libfabric" if machine.asked else "nothing" if machine.library else "kind of device",
        "nodes": [{"node": node.number, "cpulist": node.cpulist} for node in topology.nodes],
        "gpus": [
            {
                **_place(gpu.place),
                "vendor": f"{gpu.vendor:04x}",
                "device": f"{gpu.device:04x}",
                "driver": gpu.driver,
                "nearest": [nic.name for nic in next(iter(nearest(gpu.place, rdma)), ())],
            }
            for gpu in topology.gpus
        ],
        "nics": [
            {
                "name": nic.name,
                "kind": nic.kind,
                **_place(nic.place),
                "speed_mbps": nic.speed_mbps,
                "state": nic.state,
                "driver": nic.driver,
                "virtual": nic.virtual,
                "partners": list(nic.partners),
                "providers": list(machine.providers.get(nic.name, ())),
            }
            for nic in topology.nics
        ],
        "shm": "shm" in machine.providers,
        "local": "local" in machine.providers,
    }


def _place(place: Place) -> dict[str, Any]:
    return {"address": place.address, "path": list(place.path), "numa_node": place.numa_node}


def picture(machine: Machine, console: Console) -> None:
    """Print the picture. Its texts are ASCII, and rich draws its lines in ASCII if the terminal has no Unicode."""
    topology = machine.topology
    tree = Tree(Text(_plain(platform.node() if machine.sysfs == SYSFS else machine.sysfs), style="bold"))
    physical = [nic for nic in topology.nics if not nic.virtual and not _shown_elsewhere(nic, topology)]
    devices: list[Gpu | Nic] = [*topology.gpus, *physical]
    numbers = {node.number for node in topology.nodes} | {device.place.numa_node for device in devices}
    processors = {node.number: node.cpulist for node in topology.nodes}
    # The unknown node comes last.
    for number in sorted(numbers, key=lambda number: (number < 0, number)):
        here = [device for device in devices if device.place.numa_node == number]
        cpus = processors.get(number, "")
        if number >= 0 and not here and not cpus:
            continue
        title = f"NUMA node {number}" if number >= 0 else "NUMA node unknown"
        branch = tree.add(Text(title, style="bold").append(f"  processors {cpus}" if cpus else "", style="not bold"))
        _add_groups(branch, here, machine)
    _add_software(tree, machine)
    console.print(tree)
    console.print(Text(_footer(machine)))


def _add_groups(branch: Tree, devices: list[Gpu | Nic], machine: Machine) -> None:
    groups: dict[str, Tree] = {}
    for device in sorted(devices, key=lambda device: (not device.place.path, device.place.path)):
        title = _group(device.place)
        if title not in groups:
            groups[title] = branch.add(Text(title))
        groups[title].add(_line(device, machine))


def _group(place: Place) -> str:
    """Return the name of the component above a device: the switch nearest to it, or the root complex."""
    if not place.path:
        return "no PCI"
    if len(place.path) < SHORTEST_BEHIND_A_SWITCH:
        return f"PCIe root {place.path[0]}"
    return f"PCIe root {place.path[0]}, switch {place.path[-3]}"


def _add_software(tree: Tree, machine: Machine) -> None:
    devices = [nic for nic in machine.topology.nics if nic.virtual]
    shared = [name for name in (LOCAL, "shm") if name in machine.providers]
    if not devices and not shared:
        return
    branch = tree.add(Text("software", style="bold"))
    for nic in devices[:SOFTWARE_SHOWN]:
        branch.add(_line(nic, machine))
    if len(devices) > SOFTWARE_SHOWN:
        branch.add(Text(f"and {len(devices) - SOFTWARE_SHOWN} more, which --json lists"))
    if shared:
        rails = f"rail: {', '.join(shared)}"
        branch.add(Text("shared memory, for processes of this host  ").append(rails, style="green"))


def _line(device: Gpu | Nic, machine: Machine) -> Text:
    if isinstance(device, Gpu):
        maker = MAKERS.get(device.vendor, f"{device.vendor:04x}")
        words = ["GPU", device.place.address, f"{maker} {device.device:04x}", device.driver]
        return Text("  ".join(_plain(word) for word in words if word), style="cyan")
    line = Text("NIC  " + _plain(_name(device)))
    if device.place.address and not device.virtual:
        line.append(f"  {device.place.address}")
    line.append(f"  {_speed(device.speed_mbps)}")
    line.append(f"  {device.state}", style={"up": "green", "down": "red"}.get(device.state, "yellow"))
    if device.driver:
        line.append(f"  {_plain(device.driver)}")
    rails = [*machine.providers.get(device.name, ())]
    if device.kind != "net" and not device.virtual:
        # The net devices of an RDMA device have no line of their own.
        over = [name for partner in device.partners for name in machine.providers.get(partner, ())]
        rails += [name for name in dict.fromkeys(over) if name not in rails]
    return line.append(f"  rail: {', '.join(rails)}" if rails else "  no rail", style="green" if rails else "dim")


def _name(nic: Nic) -> str:
    if nic.kind == "net" or not nic.partners:
        return nic.name
    return f"{nic.name} ({'over ' if nic.virtual else ''}{', '.join(nic.partners)})"


def _shown_elsewhere(nic: Nic, topology: Topology) -> bool:
    """Tell whether a net device is shown in the line of its RDMA device, which has to be hardware."""
    owners = [other for other in topology.nics if other.kind != "net" and other.name in nic.partners]
    return nic.kind == "net" and any(not owner.virtual for owner in owners)


def _speed(mbps: int) -> str:
    return f"{mbps / 1000:g} Gbit/s" if mbps >= 1000 else f"{mbps} Mbit/s" if mbps else "speed unknown"


def _plain(text: str) -> str:
    """Replace characters that a terminal might take for a command, or cannot show."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)


def _footer(machine: Machine) -> str:
    if machine.asked:
        return f"{_plain(machine.library)}. The list has the rails that it offers."
    if machine.library:
        return f"{_plain(machine.library)}. So the list has only rails that need no library."
    return "A recorded tree: the rails are those that such devices usually have; libfabric was not asked."
