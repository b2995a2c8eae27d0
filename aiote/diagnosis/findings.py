"""Findings about what a machine lacks for RDMA and for aiote, each with the command that mends it.

`aiote.diagnosis.facts` reads the facts; this module judges them and reads nothing. An unknown fact (None, an empty
name) yields no finding, so that the same code examines a recorded tree and a live machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..rails.contract import NEVER_RUN
from .facts import Facts, PortFacts, RdmaDevice, gather

__all__ = ["Facts", "Finding", "examine", "gather"]

Level = Literal["wrong", "hint"]

MIB = 1 << 20
GIB = 1 << 30
LITTLE_LOCKED = 64 * MIB
"""Bytes. A lower limit is a system's default (64 KiB or 8 MiB) and is wrong; a higher one was set on purpose."""
SHM_OF_A_PEER = 16 * MIB
SHM_WANTED = GIB
"""Less than this in /dev/shm yields a hint."""
SHM_NEEDED = 8 * SHM_OF_A_PEER
"""Less than this is wrong: it is the room for one process on each of eight GPUs. Docker gives 64 MiB."""

DMA_BUF = (5, 12)
"""The first Linux release that registers GPU memory by DMA-BUF."""
FORKS = (5, 13)
"""The first Linux release that copies pinned pages at a fork, so that libfabric's EFA needs no care of its own."""
EFA_INSTALLER = (
    "curl -O https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz && "
    "tar -xf aws-efa-installer-latest.tar.gz && (cd aws-efa-installer && ./efa_installer.sh -y)"
)
NVIDIA = 0x10DE
"""PCI vendor ID."""

# Kernel driver of the device below an RDMA device -> name of its user-space library, as in rdma-core's `providers`.
LIBRARIES = {
    "be2net": "ocrdma",
    "bnxt_en": "bnxt_re",
    "cxgb4": "cxgb4",
    "efa": "efa",
    "erdma": "erdma",
    "hfi1": "hfi1verbs",
    "hns3": "hns",
    "i40e": "irdma",
    "ice": "irdma",
    "irdma": "irdma",
    "mana": "mana",
    "mlx4_core": "mlx4",
    "mlx5_core": "mlx5",
    "mlx5_core.sf": "mlx5",
    "qede": "qedr",
    "rxe": "rxe",
    "siw": "siw",
    "vmw_pvrdma": "vmw_pvrdma",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is stated about the subject `about`; `mend` is a shell command that helps.

    level: "wrong" if the subject is present and does not work, else "hint".
    """

    level: Level
    about: str
    what: str
    mend: str


def examine(facts: Facts) -> list[Finding]:
    """Return the findings on a machine, those of level "wrong" first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.level != "wrong")


def _no_device(facts: Facts) -> Iterator[Finding]:
    if not facts.has_rdma and not facts.efa_unbound:
        command = f"modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {shlex.quote(facts.net or 'eth0')}"
        yield Finding(
            "hint",
            "RDMA",
            "there is no RDMA device; local, socket, tcp and shm need none, and this command adds one in software",
            command,
        )


def _software(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        if device.software:
            limits = "it cannot write with immediate data" if device.driver == "siw" else "it is slower than a NIC"
            yield Finding(
                "hint",
                device.name,
                f"is RDMA in software ({device.driver or 'unknown'}), for trials only: {limits}; this "
                "command removes it",
                f"rdma link delete {shlex.quote(device.name)}",
            )


def _locked_memory(facts: Facts) -> Iterator[Finding]:
    limit = facts.memlock
    if limit is None or limit.exempt or limit.soft < 0 or not facts.has_rdma:
        return
    if facts.container:
        mend = "docker run --ulimit memlock=-1"
    elif limit.hard < 0:
        mend = "ulimit -l unlimited"
    else:
        mend = "echo '* - memlock unlimited' > /etc/security/limits.d/rdma.conf"
    again = (
        ""
        if mend.startswith("ulimit") or facts.container
        else "; log in again afterwards (for a service set LimitMEMLOCK=infinity)"
    )
    yield Finding(
        "wrong" if limit.soft < LITTLE_LOCKED else "hint",
        "locked memory",
        f"at most {_size(limit.soft)} can be registered with NICs{again}",
        mend,
    )


def _libfabric(facts: Facts) -> Iterator[Finding]:
    if facts.libfabric_error:
        # aiote opens only the path that the user gave, so it would ignore a newly installed library.
        mend = "unset AIOTE_LIBFABRIC" if facts.library else 'pip install "aiote[libfabric]"'
        yield Finding("wrong", "libfabric.so.1", facts.libfabric_error, mend)


def _efa(facts: Facts) -> Iterator[Finding]:
    """Yield why EFA's NICs cannot be used, or that they can be, though `auto` does not choose them."""
    if facts.efa_unbound:
        what = f"{facts.efa_unbound} of its NICs have no kernel driver"
        yield Finding("wrong", "EFA", what, "modprobe efa")
    here = any(device.driver == "efa" for device in facts.devices)
    if here and facts.efa_installed is False:
        what = "its libfabric is not under /opt/amazon/efa, so aiote opens another one"
        yield Finding("hint" if facts.efa else "wrong", "EFA", what, EFA_INSTALLER)
    if facts.efa_error:
        other = facts.efa_installed and facts.library and not facts.library.startswith("/opt/amazon/efa/")
        mend = "unset AIOTE_LIBFABRIC" if other else "fi_info -p efa -t FI_EP_RDM"
        yield Finding("wrong", "EFA", facts.efa_error, mend)
    elif facts.efa:
        names = ", ".join(facts.efa)
        what = f"{names} can be used with provider='efa'; auto does not choose it, because it {NEVER_RUN}"
        what += "; two hosts need a security group that allows all traffic to and from itself, unseen from here"
        yield Finding("hint", "EFA", what, "aiote prove efa")


def _libibverbs(facts: Facts) -> Iterator[Finding]:
    if facts.libibverbs_error:
        why = f"cannot be opened: {facts.libibverbs_error}"
        level: Level = "wrong" if facts.devices else "hint"
        what = why if facts.devices else f"{why}; RDMA devices need it"
        yield Finding(level, "libibverbs.so.1", what, "apt-get install libibverbs1 ibverbs-providers")


def _driver_libraries(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        name = LIBRARIES.get(device.driver, "")
        if name and facts.libraries is not None and name not in facts.libraries:
            what = f"its user-space driver, lib{name}-rdmav*.so for {device.driver}, is not installed"
            yield Finding("wrong", device.name, what, "apt-get install ibverbs-providers")


def _device_nodes(facts: Facts) -> Iterator[Finding]:
    container = "docker run --device=/dev/infiniband"
    for device in facts.devices:
        path = f"/dev/infiniband/{device.uverbs}"
        if device.node == "unloaded":
            yield Finding(
                "wrong", device.name, "programs cannot open it: ib_uverbs is not loaded", "modprobe ib_uverbs"
            )
        elif device.node == "missing":
            trigger = "udevadm trigger --subsystem-match=infiniband_verbs"
            yield Finding("wrong", device.name, f"{path} does not exist", container if facts.container else trigger)
        elif device.node == "denied":
            mend = container if facts.container else f"chmod a+rw {shlex.quote(path)}"
            yield Finding("wrong", device.name, f"{path} may not be opened by this user", mend)


def _links(facts: Facts) -> Iterator[Finding]:
    for device, port in _ports(facts):
        if port.state in ("", "ACTIVE"):
            continue
        off = next((net.name for net in port.nets if net.up is False), "")
        net = next((net.name for net in port.nets), "")
        if off:
            yield Finding("wrong", port.name, f"is down: {off} is switched off", f"ip link set {shlex.quote(off)} up")
        elif not port.ethernet and port.physical == "LinkUp":
            what = f"has a link but is {port.state}: no subnet manager of its fabric answers"
            yield Finding("wrong", port.name, what, "systemctl start opensm")
        elif not port.ethernet and port.physical == "Disabled":
            mend = f"ibportstate -C {shlex.quote(device.name)} -D 0 {port.number} enable"
            yield Finding("wrong", port.name, "is down: it is disabled", mend)
        else:
            over = f" of {net}" if net else ""
            show = f"ethtool {shlex.quote(net)}" if net and port.ethernet else f"ibstat {shlex.quote(device.name)}"
            yield Finding("wrong", port.name, f"is down: check the cable{over} and the switch's port", show)


def _addresses(facts: Facts) -> Iterator[Finding]:
    for device, port in _ports(facts):
        if port.state != "ACTIVE" or not port.ethernet or port.gids is None or device.iwarp:
            continue
        net = next((net.name for net in port.nets), "DEV")
        address = f"ip address add ADDRESS/PREFIX dev {shlex.quote(net)}"
        if not port.gids:
            yield Finding("wrong", port.name, f"has no GID: {net} has no IP address", address)
            continue
        if all(gid.link_local for gid in port.gids):
            what = f"{net} has only a link-local IP address, which other networks cannot reach"
            yield Finding("hint", port.name, what, address)
        if all(gid.version != 2 for gid in port.gids):
            yield _no_roce2(device, port)


def _no_roce2(device: RdmaDevice, port: PortFacts) -> Finding:
    if LIBRARIES.get(device.driver) == "mlx5" and device.address:
        handle = f"pci/{device.address}"
        command = f"devlink dev param set {handle} name enable_roce value true cmode driverinit"
        return Finding(
            "wrong", port.name, "has no RoCE v2 GID: RoCE is disabled", f"{command} && devlink dev reload {handle}"
        )
    return Finding(
        "hint",
        port.name,
        "has no RoCE v2 GID, and routers do not forward RoCE v1; this command shows the firmware, "
        "which decides about v2",
        f"ibv_devinfo -v -d {shlex.quote(device.name)}",
    )


def _gpu_memory(facts: Facts) -> Iterator[Finding]:
    """Yield what NICs lack to reach GPU memory: DMA-BUF, or, for NVIDIA's GPUs, the older kernel module."""
    if not facts.gpus or not (facts.cxi or any(not device.software for device in facts.devices)):
        return
    old = facts.kernel is not None and facts.kernel < DMA_BUF
    if old:
        release = ".".join(map(str, facts.kernel or ()))
        yield Finding(
            "hint" if facts.peermem else "wrong",
            "kernel",
            f"Linux {release} cannot register GPU memory by DMA-BUF; 5.12 and later can",
            "apt-get install linux-image-amd64 && reboot",
        )
    # NVIDIA's open kernel modules export DMA-BUFs, the proprietary ones do not.
    if NVIDIA in facts.gpus and facts.peermem is False and (old or facts.nvidia_open is False):
        why = f"Linux is older than {DMA_BUF[0]}.{DMA_BUF[1]}" if old else "NVIDIA's proprietary driver exports none"
        what = f"nvidia_peermem is not loaded, and there is no DMA-BUF ({why}): NICs cannot reach GPU memory"
        yield Finding("wrong", "GPU memory", what, "modprobe nvidia_peermem")


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    if facts.kernel is not None and facts.kernel < FORKS and any(device.driver == "efa" for device in facts.devices):
        release = ".".join(map(str, facts.kernel))
        what = f"on Linux {release}, EFA's NICs do not take them while forks are safe; 5.13 and later do"
        yield Finding("hint", "huge pages", what, "export FI_EFA_FORK_SAFE=0")
    elif facts.huge_pages == 0 and any(not device.software for device in facts.devices):
        what = "none are reserved; buffers in huge pages need fewer translations in the NIC"
        yield Finding("hint", "huge pages", what, "sysctl -w vm.nr_hugepages=1024")


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    size = facts.shm_bytes
    if size is None or size >= SHM_WANTED:
        return
    if facts.container:
        mend = "docker run --shm-size=4g"
    elif size:
        mend = "mount -o remount,size=4G /dev/shm"
    else:
        mend = "mkdir -p /dev/shm && mount -t tmpfs -o size=4G tmpfs /dev/shm"
    has = f"has {_size(size)}" if size else "does not exist"
    yield Finding(
        "wrong" if size < SHM_NEEDED else "hint",
        "/dev/shm",
        f"{has}; shm needs {_size(SHM_OF_A_PEER)} there for each peer",
        mend,
    )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _libfabric,
    _efa,
    _libibverbs,
    _driver_libraries,
    _device_nodes,
    _links,
    _addresses,
    _locked_memory,
    _gpu_memory,
    _shared_memory,
    _huge_pages,
    _no_device,
    _software,
)


def _ports(facts: Facts) -> Iterator[tuple[RdmaDevice, PortFacts]]:
    for device in facts.devices:
        for port in device.ports:
            yield device, port


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count // unit} {name}"
    return f"{count} bytes"
