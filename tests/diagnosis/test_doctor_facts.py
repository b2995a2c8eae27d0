"""What `aiote doctor` reads: of recorded trees and made-up ones, of limits and device nodes, and of broken ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiote.diagnosis import facts as module
from aiote.diagnosis.facts import Facts, GidFacts, Limit, Net, gather, node_state
from aiote.diagnosis.findings import examine
from aiote.errors import FabricError
from support.rails import sysfs_trees
from support.rails.sysfs_trees import Entry

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
NIC = "devices/pci0000:00/0000:00:05.0"
RXE = "devices/virtual/infiniband/rxe0"
BOTH = f"{NIC}/infiniband/mlx5_0/ports"
LINKS = [
    Entry("class/infiniband/mlx5_0", "->", f"../../{NIC}/infiniband/mlx5_0"),
    Entry("class/infiniband/rxe0", "->", f"../../{RXE}"),
    *(Entry(f"class/net/{name}", "->", f"../../{NIC}/net/{name}") for name in ("ib0", "ib1")),
    Entry("class/net/veth0", "->", "../../devices/virtual/net/veth0"),
]
PORTS = [
    Entry(f"{NIC}/driver", "->", "../../../bus/pci/drivers/mlx5_core"),
    Entry(f"{NIC}/infiniband/mlx5_0/device", "->", "../../../0000:00:05.0"),
    Entry(f"{BOTH}/1/state", "=", "4: ACTIVE"),
    Entry(f"{BOTH}/1/phys_state", "=", "5: LinkUp"),
    Entry(f"{BOTH}/2/state", "=", "1: DOWN"),
    Entry(f"{BOTH}/2/phys_state", "=", "2: Polling"),
    Entry(f"{NIC}/net/ib0/dev_port", "=", "0"),
    Entry(f"{NIC}/net/ib1/dev_port", "=", "1"),
    Entry(f"{NIC}/net/ib1/flags", "=", "0x1003"),
]
SOFT = [
    Entry("devices/virtual/net/veth0/flags", "=", "0x1002"),
    Entry(f"{RXE}/parent", "=", "veth0"),
    Entry(f"{RXE}/node_type", "=", "1: CA"),
    Entry(f"{RXE}/ports/1/link_layer", "=", "Ethernet"),
    Entry(f"{RXE}/ports/1/gids/0", "=", "fe80:0000:0000:0000:0000:0aff:fe4d:0001"),
    Entry(f"{RXE}/ports/1/gids/1", "=", "0000:0000:0000:0000:0000:ffff:0a4d:0001"),
    Entry(f"{RXE}/ports/1/gids/2", "=", "0000:0000:0000:0000:0000:0000:0000:0000"),
    *(Entry(f"{RXE}/ports/1/gid_attrs/types/{index}", "=", "RoCE v2") for index in (0, 1)),
    *(Entry(f"{RXE}/ports/1/gid_attrs/ndevs/{index}", "=", "veth0") for index in (0, 1)),
]
SYSTEM = [
    Entry("module/nvidia_peermem/refcnt", "=", "0"),
    Entry("kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "=", "3"),
    Entry("kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "=", "1"),
    Entry("class/infiniband_verbs/abi_version", "=", "6"),
    Entry("class/infiniband_verbs/uverbs7/ibdev", "=", "rxe0"),
]
WHOLE = LINKS + PORTS + SOFT + SYSTEM
TREES = {"doctor": WHOLE, **{name: sysfs_trees.entries(name) for name in sysfs_trees.NAMES if name != "p5"}}


def read(root: Path, *entries: Entry) -> Facts:
    return gather(sysfs_trees.build(root, [*WHOLE, *entries]))


def test_devices_and_ports_are_read_from_the_tree(tmp_path):
    mlx5, rxe = read(tmp_path).devices
    assert (mlx5.name, mlx5.driver, mlx5.software, mlx5.address) == ("mlx5_0", "mlx5_core", False, "0000:00:05.0")
    first, second = mlx5.ports
    assert (first.state, first.physical, first.ethernet, first.gids) == ("ACTIVE", "LinkUp", False, None)
    assert (second.name, second.state, second.physical) == ("mlx5_0:2", "DOWN", "Polling")
    assert (first.nets, second.nets) == ((Net("ib0"),), (Net("ib1", True),))
    assert (rxe.driver, rxe.software, rxe.iwarp, rxe.address, rxe.node) == ("rxe", True, False, "", "unknown")
    (port,) = rxe.ports
    assert port.gids == (GidFacts(2, "fe80::aff:fe4d:1", link_local=True), GidFacts(2, "10.77.0.1"))
    assert port.nets == (Net("veth0", up=False),)


def test_siw_is_known_by_its_description(tmp_path):
    folder = f"{NIC}/infiniband/mlx5_0"
    words = [Entry(f"{folder}/node_desc", "=", "Software iWARP stack"), Entry(f"{folder}/node_type", "=", "4: RNIC")]
    siw = read(tmp_path, *words).devices[0]
    assert (siw.driver, siw.software, siw.iwarp) == ("siw", True, True)


def test_facts_of_the_system_are_read_and_unknown_ones_are_none(tmp_path):
    known = read(tmp_path)
    assert (known.peermem, known.huge_pages, known.recorded, known.has_rdma) == (True, 4, True, True)
    assert (known.memlock, known.kernel, known.libraries, known.shm_bytes, known.libfabric_error) == (None,) * 5
    nothing = gather(str(tmp_path / "none"))
    assert nothing == Facts(recorded=True)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A tree that is taken for the machine's own, with device nodes and /proc beside it."""
    monkeypatch.setattr(module, "SYSFS", sysfs_trees.build(tmp_path / "sys", WHOLE))
    monkeypatch.setattr(module, "DEVICE_NODES", str(tmp_path / "dev"))
    monkeypatch.setattr(module, "PROC", str(tmp_path / "proc"))
    return tmp_path


def test_nics_of_efa_without_a_kernel_driver_are_counted(tmp_path):
    """Every NIC of the p5 has its driver; three lose it."""
    entries = sysfs_trees.entries("p5")
    assert gather(sysfs_trees.build(tmp_path / "whole", entries)).efa_unbound == 0
    drivers = [entry for entry in entries if entry.path.endswith("/driver") and entry.value.endswith("/efa")]
    left = [entry for entry in entries if entry not in drivers[:3]]
    known = gather(sysfs_trees.build(tmp_path / "unbound", left))
    assert known.efa_unbound == 3
    assert known.efa_installed is None, "a recorded tree does not tell"
    assert ("EFA", "3 of its NICs have no kernel driver") in {(each.about, each.what) for each in examine(known)}


def test_a_device_node_is_found_unloaded_missing_or_ok(machine):
    def nodes() -> list[tuple[str, str]]:
        return [(device.uverbs, device.node) for device in gather(module.SYSFS).devices]

    assert nodes() == [("", "unloaded"), ("uverbs7", "missing")]
    (machine / "dev").mkdir()
    (machine / "dev" / "uverbs7").touch()
    assert nodes()[1] == ("uverbs7", "ok")


def test_a_node_that_may_not_be_opened_is_denied(tmp_path, monkeypatch):
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(1, "refused", path)

    assert node_state(str(tmp_path / "none")) == "missing"
    assert node_state(str(tmp_path)) == "unknown", "a folder is no node"
    monkeypatch.setattr(os, "open", refuse)
    assert node_state(str(tmp_path)) == "denied"


@pytest.mark.parametrize(
    ("capabilities", "users", "exempt"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", False),
        ("000001ffffffffff", "0 1000 1", False),
        ("nonsense", "0 0 4294967295", False),
        ("", "", False),
    ],
)
def test_only_root_with_the_capability_is_exempt_from_the_limit(machine, capabilities, users, exempt):
    folder = machine / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\nCapBnd:\t0\n")
    (folder / "uid_map").write_text(f"{users}\n")
    limit = gather(module.SYSFS).memlock
    assert isinstance(limit, Limit)
    assert limit.exempt is exempt


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54", False),
        ("", None),
    ],
)
def test_the_driver_is_known_as_open_or_not_by_its_version(machine, text, known):
    folder = machine / "proc" / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)
    assert gather(module.SYSFS).nvidia_open is known


@pytest.mark.parametrize(("release", "known"), [("5.11.0-1-amd64", (5, 11)), ("6.1", (6, 1)), ("x", None)])
def test_the_kernel_is_known_by_two_numbers_of_its_release(machine, monkeypatch, release, known):
    monkeypatch.setattr(module.platform, "release", lambda: release)
    assert gather(module.SYSFS).kernel == known


def test_libraries_are_found_and_missing_ones_say_why(machine, monkeypatch):
    def missing(library: str = "") -> None:
        raise FabricError(2, f"no libfabric {library} To install one: x", operation="load libfabric")

    def unopened() -> None:
        raise ImportError("libibverbs.so.1: no such file")

    folder = machine / "usr"
    folder.mkdir()
    (folder / "libbnxt_re-rdmav34.so").touch()
    monkeypatch.setattr(module, "PROVIDERS", (str(folder / "lib*-rdmav*.so"),))
    monkeypatch.setattr(module, "find_libfabric", missing)
    monkeypatch.setattr(module, "load_libibverbs", unopened)
    known = gather(module.SYSFS, "/x")
    assert known.libraries == ("bnxt_re",)
    assert known.libfabric_error.endswith("no libfabric /x")
    assert (known.libibverbs_error, known.library) == ("libibverbs.so.1: no such file", "/x")


@pytest.mark.parametrize(("error", "size"), [(FileNotFoundError(), 0), (PermissionError(), None)])
def test_missing_shared_memory_is_none_and_unreadable_unknown(machine, monkeypatch, error, size):
    def statvfs(path: str) -> os.statvfs_result:
        raise error

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert gather(module.SYSFS).shm_bytes == size


damages = (
    st.tuples(st.sampled_from(["gone", "!"]), st.just(""))
    | st.tuples(
        st.just("="), st.text(max_size=20) | st.sampled_from(["9: ACTIVE", "-1", "0x", "1_0", "4: ", "٣: DOWN"])
    )
    | st.tuples(st.just("->"), st.sampled_from(["/", "loop", "../..", "x" * 4000]))
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(TREES)), st.dictionaries(st.integers(0, 399), damages, max_size=40))
def test_damaged_trees_are_examined_without_an_error(name, damage):
    fates = {number % len(TREES[name]): fate for number, fate in damage.items()}
    tree = [Entry(entry.path, *fates.get(n, (entry.sign, entry.value))) for n, entry in enumerate(TREES[name])]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        examine(gather(sysfs_trees.build(Path(folder), [entry for entry in tree if entry.sign != "gone"])))
