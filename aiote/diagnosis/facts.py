"""The facts that the diagnosis of a machine needs, read from sysfs, the process's limits and the file system.

Reading never raises: a fact that cannot be read is unknown (None). For a recorded tree, only facts from sysfs are read.
"""

from __future__ import annotations

import errno
import glob
import ipaddress
import os
import platform
import re
import resource
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import FabricError
from ..machine.ports import Port, read_ports
from ..machine.sysfs import read_topology
from ..machine.topology import Nic, Topology
from ..machine.tree import Tree
from ..rails.library import EFA_PATHS, find_libfabric
from ..rails.stale_files import SHARED_MEMORY
from ..rails.verbs import load_libibverbs

__all__ = [
    "OF_THE_MACHINE",
    "Facts",
    "GidFacts",
    "Limit",
    "Net",
    "PortFacts",
    "RdmaDevice",
    "gather",
    "node_state",
    "with_efa",
]

SYSFS = "/sys"
PROC = "/proc"
DEVICE_NODES = "/dev/infiniband"
CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
PROVIDERS = (
    "/usr/lib/*/libibverbs/lib*-rdmav*.so",
    "/usr/lib/libibverbs/lib*-rdmav*.so",
    "/usr/lib64/libibverbs/lib*-rdmav*.so",
    "/usr/local/lib*/libibverbs/lib*-rdmav*.so",
)
OF_THE_MACHINE = ("container", "device nodes", "kernel", "libraries", "locked memory", "NVIDIA's driver", "/dev/shm")
"""Facts that a recorded tree does not contain."""

IFF_UP = 1
AMAZON, EFA_DEVICES = 0x1D0F, range(0xEFA0, 0xEFA4)
CAP_IPC_LOCK = 1 << 14
ALL_USERS = ["0", "0", "4294967295"]
SOFTWARE_IWARP = "Software iWARP"
"""The beginning of siw's node description. siw names the driver of the net device below it as its own driver."""

Node = Literal["unknown", "ok", "unloaded", "missing", "denied"]


@dataclass(frozen=True, slots=True)
class Net:
    """A net device of a port; `up`: it is switched on, whether or not a cable is plugged in."""

    name: str
    up: bool | None = None


@dataclass(frozen=True, slots=True)
class GidFacts:
    """A GID: its version (2 or 1 for RoCE v2 or v1), its IP address, and whether only one link knows the address."""

    version: int
    ip: str
    link_local: bool = False


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A port. `state` and `physical` are as sysfs has them ("ACTIVE", "LinkUp"); `gids` is None if sysfs lists none."""

    name: str
    number: int = 1
    state: str = ""
    physical: str = ""
    ethernet: bool = False
    gids: tuple[GidFacts, ...] | None = None
    nets: tuple[Net, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device; `node` is the result of opening its device node, whose name is `uverbs`."""

    name: str
    driver: str = ""
    software: bool = False
    iwarp: bool = False
    address: str = ""
    uverbs: str = ""
    node: Node = "unknown"
    ports: tuple[PortFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit on locked memory in bytes (-1: no limit). The limit does not apply to an `exempt` process."""

    soft: int
    hard: int
    exempt: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one machine, as far as they are known.

    `gpus` are the PCI vendor numbers of the GPUs, `cxi` counts Slingshot's NICs, `net` is a net device on which a
    software RDMA device can be created, `libraries` are the names of the user-space drivers, `library` is the libfabric
    that the user named. `libfabric_error` and `libibverbs_error` are empty if the library opens; `shm_bytes` is 0 if
    there is no /dev/shm. `efa` are the EFA NICs that can be used, `efa_error` says why they cannot be used,
    `efa_unbound` counts those without a kernel driver, `efa_installed` tells whether EFA's own libfabric is there.
    """

    recorded: bool = False
    container: bool = False
    devices: tuple[RdmaDevice, ...] = ()
    cxi: int = 0
    gpus: tuple[int, ...] = ()
    net: str = ""
    peermem: bool | None = None
    huge_pages: int | None = None
    kernel: tuple[int, int] | None = None
    nvidia_open: bool | None = None
    memlock: Limit | None = None
    shm_bytes: int | None = None
    library: str = ""
    libfabric_error: str | None = None
    libibverbs_error: str | None = None
    libraries: tuple[str, ...] | None = None
    efa: tuple[str, ...] = ()
    efa_error: str = ""
    efa_unbound: int = 0
    efa_installed: bool | None = None

    @property
    def has_rdma(self) -> bool:
        return bool(self.devices or self.cxi)


def gather(root: str = SYSFS, library: str = "") -> Facts:
    """Read the facts of the machine, or those of a recorded tree. Never raises.

    `library` is the path of the libfabric that the user wants. On a live machine this opens the libraries, and each
    device node for a moment.
    """
    tree = Tree(root)
    topology = read_topology(root)
    recorded = root != SYSFS
    facts = Facts(
        recorded=recorded,
        devices=tuple(_devices(tree, topology, recorded=recorded)),
        cxi=sum(nic.kind == "cxi" for nic in topology.nics),
        gpus=tuple(gpu.vendor for gpu in topology.gpus),
        net=_net_to_build_upon(topology),
        peermem=_peermem(tree),
        huge_pages=_huge_pages(tree),
        efa_unbound=_efa_unbound(tree),
    )
    return facts if recorded else _with_machine(facts, library)


def with_efa(facts: Facts) -> Facts:
    """Add what libfabric reports on EFA's NICs. It stays open for the life of the process. Never raises."""
    here = any(device.driver == "efa" for device in facts.devices)
    if facts.recorded or facts.libfabric_error or facts.libfabric_error is None:
        return facts
    if facts.devices and not here:
        # Asked for EFA on a machine that had only NICs of other kinds, libfabric 2.5 crashed in `doctor`.
        return facts
    from ..rails.libfabric import efa_state

    names, error = efa_state(facts.library, here=here)
    return replace(facts, efa=names, efa_error=error)


def _with_machine(facts: Facts, library: str) -> Facts:
    return replace(
        facts,
        container=any(map(os.path.exists, CONTAINERS)),
        kernel=_kernel(platform.release()),
        nvidia_open=_nvidia_open(Tree(PROC).text("driver/nvidia/version")),
        memlock=_memlock(),
        shm_bytes=_shm_bytes(),
        library=library,
        libfabric_error=_libfabric_error(library),
        libibverbs_error=_libibverbs_error(),
        libraries=_libraries(),
        efa_installed=any(map(os.path.exists, EFA_PATHS)),
    )


def _devices(tree: Tree, topology: Topology, *, recorded: bool) -> list[RdmaDevice]:
    nics = {nic.name: nic for nic in topology.nics if nic.kind == "infiniband"}
    ports: dict[str, list[Port]] = {name: [] for name in nics}
    for port in read_ports(tree.root):
        ports.setdefault(port.device, []).append(port)
    names = {} if recorded else {tree.text(f"class/infiniband_verbs/{n}/ibdev"): n for n in _uverbs(tree)}
    return [_device(tree, nic, ports[nic.name], names.get(nic.name, ""), recorded=recorded) for nic in nics.values()]


def _uverbs(tree: Tree) -> list[str]:
    return [name for name in tree.names("class/infiniband_verbs") if re.fullmatch(r"uverbs\d{1,5}", name, re.ASCII)]


def _device(tree: Tree, nic: Nic, ports: list[Port], uverbs: str, *, recorded: bool) -> RdmaDevice:
    folder = f"class/infiniband/{nic.name}"
    siw = tree.text(f"{folder}/node_desc").startswith(SOFTWARE_IWARP)
    software = siw or nic.virtual
    iwarp = siw or tree.text(f"{folder}/node_type").endswith("RNIC")
    node: Node = "unknown"
    if not recorded:
        node = node_state(os.path.join(DEVICE_NODES, uverbs)) if uverbs else "unloaded"
    return RdmaDevice(
        nic.name,
        "siw" if siw else _software_driver(tree, folder) if software else nic.driver,
        software,
        iwarp,
        "" if software else nic.place.address,
        uverbs,
        node,
        tuple(_port(tree, port, nic) for port in ports),
    )


def _software_driver(tree: Tree, folder: str) -> str:
    return "rxe" if tree.text(f"{folder}/parent") else ""


def _port(tree: Tree, port: Port, nic: Nic) -> PortFacts:
    folder = f"class/infiniband/{port.device}/ports/{port.number}"
    known = bool(tree.names(f"{folder}/gids"))
    gids = tuple(GidFacts(gid.version, gid.ip, ipaddress.ip_address(gid.ip).is_link_local) for gid in port.gids)
    return PortFacts(
        port.name,
        port.number,
        _word(tree.text(f"{folder}/state")),
        _word(tree.text(f"{folder}/phys_state")),
        port.ethernet,
        gids if known else None,
        tuple(Net(name, _switched_on(tree, name)) for name in port.nets or _nets_below(tree, port, nic)),
    )


def _nets_below(tree: Tree, port: Port, nic: Nic) -> list[str]:
    """Return the net devices for a port that names none (without a GID): its device's, matched by the port's number."""
    several = len(nic.partners) > 1
    return [
        name
        for name in nic.partners
        if not several or tree.number(f"class/net/{name}/dev_port", 255, -1) == port.number - 1
    ]


def _word(text: str) -> str:
    """Return the word in a text such as "4: ACTIVE", or an empty string."""
    number, colon, word = text.partition(": ")
    return word if colon and number.isdigit() else ""


def _switched_on(tree: Tree, name: str) -> bool | None:
    flags = tree.hexadecimal(f"class/net/{name}/flags")
    return bool(flags & IFF_UP) if flags else None


def node_state(path: str) -> Node:
    """Return the result of opening a device node, which a container's rules may deny even to root."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return "denied"
    except OSError as error:
        return "missing" if error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV) else "unknown"
    return "ok"


def _net_to_build_upon(topology: Topology) -> str:
    return next((nic.name for nic in topology.nics if nic.kind == "net" and not nic.virtual and nic.state == "up"), "")


def _peermem(tree: Tree) -> bool | None:
    modules = tree.names("module")
    return bool({"nvidia_peermem", "nv_peer_mem"}.intersection(modules)) if modules else None


def _huge_pages(tree: Tree) -> int | None:
    folder = "kernel/mm/hugepages"
    counts = [tree.number(f"{folder}/{name}/nr_hugepages", 1 << 40, -1) for name in tree.names(folder)]
    known = [count for count in counts if count >= 0]
    return sum(known) if known else None


def _efa_unbound(tree: Tree) -> int:
    folders = [f"bus/pci/devices/{address}" for address in tree.names("bus/pci/devices")]
    return sum(
        tree.hexadecimal(f"{folder}/vendor") == AMAZON
        and tree.hexadecimal(f"{folder}/device") in EFA_DEVICES
        and not tree.driver(folder)
        for folder in folders
    )


def _kernel(release: str) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", release, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def _nvidia_open(version: str) -> bool | None:
    return "Open Kernel Module" in version if version else None


def _memlock() -> Limit | None:
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    except (OSError, ValueError):
        return None
    # RLIM_INFINITY is -1 here.
    tree = Tree(PROC)
    return Limit(soft, hard, _exempt(tree.text("self/status"), tree.text("self/uid_map")))


def _exempt(status: str, uid_map: str) -> bool:
    """Tell whether the limit does not apply: the process has CAP_IPC_LOCK, and no user namespace maps its users."""
    match = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.ASCII | re.MULTILINE)
    return match is not None and bool(int(match[1], 16) & CAP_IPC_LOCK) and uid_map.split() == ALL_USERS


def _shm_bytes() -> int | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except FileNotFoundError:
        return 0
    except OSError:
        return None
    # A file system without a size limit reports 0.
    return status.f_blocks * status.f_frsize or None


def _libfabric_error(library: str) -> str:
    try:
        find_libfabric(library)
    except FabricError as error:
        return str(error).partition(" To install one:")[0].rstrip(".")
    return ""


def _libibverbs_error() -> str:
    try:
        load_libibverbs()
    except ImportError as error:
        return str(error)
    return ""


def _libraries() -> tuple[str, ...]:
    paths = [os.path.basename(path) for pattern in PROVIDERS for path in glob.glob(pattern)]
    return tuple(sorted({path.removeprefix("lib").rpartition("-rdmav")[0] for path in paths}))
