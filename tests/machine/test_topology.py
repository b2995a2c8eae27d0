"""What is read of recorded sysfs trees, which are written after real hosts, not copied from one (`sysfs_trees`)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.machine.sysfs import read_nic, read_topology
from aiote.machine.topology import Distance, Nic, Topology, distance, nearest
from aiote.machine.tree import MAX_ENTRIES, _numeric_key
from support.rails import sysfs_trees


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Topology:
    """Return the topology of the recorded tree that the test names."""
    return read_topology(sysfs_trees.recorded(tmp_path, request.param))


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("host", [name], indirect=True)


def named(*groups: tuple[Nic, ...]) -> list[list[str]]:
    return [[nic.name for nic in group] for group in groups]


def rdma(host: Topology) -> list[Nic]:
    return [nic for nic in host.nics if nic.kind != "net"]


@on("dgx")
def test_devices_of_a_dgx_are_read_with_place_speed_and_state(host):
    assert [(node.number, node.cpulist) for node in host.nodes] == [(0, "0-55,112-167"), (1, "56-111,168-223")]
    assert [gpu.place.address for gpu in host.gpus] == [
        f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    ]
    assert {(gpu.vendor, gpu.device, gpu.driver) for gpu in host.gpus} == {(0x10DE, 0x2330, "nvidia")}
    assert [gpu.place.numa_node for gpu in host.gpus] == [0] * 4 + [1] * 4
    assert [nic.name for nic in rdma(host)] == [f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)]
    first = host.nic("mlx5_0")
    assert first.place.path == ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0")
    assert (first.speed_mbps, first.state, first.driver, first.virtual) == (400_000, "up", "mlx5_core", False)
    assert first.partners == ("ibp24s0",)
    assert host.nic("ibp24s0").partners == ("mlx5_0",)
    # The rate that a port without a link gives is not its own.
    assert (host.nic("mlx5_11").speed_mbps, host.nic("mlx5_11").state) == (0, "down")


@on("dgx")
def test_net_devices_of_a_dgx_are_read_with_speed_and_state(host):
    eno1, eno2 = host.nic("eno1"), host.nic("eno2")
    assert (eno1.speed_mbps, eno1.state, eno1.driver, eno1.partners) == (10_000, "up", "ixgbe", ())
    assert (eno2.speed_mbps, eno2.state) == (0, "down")
    assert [nic.name for nic in host.nics if nic.virtual] == ["docker0", "lo"]
    assert (host.nic("lo").state, host.nic("docker0").state) == ("up", "down")
    assert host.nic("bonding_masters") is None


@on("dgx")
def test_dgx_each_gpu_has_a_nic_of_its_own(host):
    for gpu, nic in zip(host.gpus, rdma(host), strict=True):
        groups = nearest(gpu.place, rdma(host))
        assert groups[0] == (nic,)
        assert [len(group) for group in groups] == [1, 3, 4]
        assert [distance(gpu.place, group[0].place) for group in groups] == [
            Distance.SWITCH,
            Distance.NODE,
            Distance.OTHER,
        ]
    near, far = nearest(host.place(1), rdma(host))
    assert {nic.place.numa_node for nic in near} == {1}
    assert {nic.place.numa_node for nic in far} == {0}


@on("p5")
def test_each_gpu_of_a_p5_is_nearest_to_four_nics(host):
    assert (len(host.gpus), len(rdma(host))) == (8, 32)
    for gpu in host.gpus:
        bus = int(gpu.place.address[5:7], 16)
        groups = nearest(gpu.place, rdma(host))
        assert named(groups[0]) == [[f"rdmap{bus - k}s0" for k in (4, 3, 2, 1)]]
        assert [len(group) for group in groups] == [4, 12, 16]
    efa = host.nic("rdmap79s0-rdm")
    assert efa is host.nic("rdmap79s0")
    assert (efa.driver, efa.partners, efa.speed_mbps, efa.state) == ("efa", (), 100_000, "up")
    ena = host.nic("enp33s0")
    assert (ena.driver, ena.speed_mbps, ena.state) == ("ena", 0, "up")


@on("software")
def test_software_devices_have_no_place_and_the_speed_of_the_device_below(host):
    assert host.gpus == ()
    assert all(nic.virtual and nic.place.path == () and nic.place.numa_node == -1 for nic in host.nics)
    rxe = host.nic("rxe0")
    assert (rxe.kind, rxe.partners, rxe.state) == ("infiniband", ("veth0",), "up")
    assert rxe.speed_mbps == 10_000, "the speed is that of the device below, not the 2.5 Gb/sec that rxe states"
    assert host.nic("tun0").state == "unknown"
    (group,) = nearest(host.place(0), host.nics)
    assert distance(host.place(0), group[0].place) is Distance.UNKNOWN


@on("no-node")
def test_devices_of_a_host_without_nodes_are_one_group(host):
    assert {nic.place.numa_node for nic in host.nics} == {-1}
    assert [gpu.place.address for gpu in host.gpus] == ["0000:00:07.0", "0000:00:08.0"], "the emulated screen is no GPU"
    eth0 = host.nic("eth0")
    assert (eth0.place.address, eth0.driver, eth0.virtual, eth0.speed_mbps) == ("0000:00:03.0", "virtio_net", False, 0)
    assert host.nic("mlx5_1").partners == ("ens6v0",)
    (flat,) = nearest(host.gpus[0].place, rdma(host))
    assert named(flat) == [["mlx5_0", "mlx5_1"]]
    assert distance(host.gpus[0].place, flat[0].place) is Distance.ROOT
    assert len(nearest(host.place(0), rdma(host))) == 1


@on("grace")
def test_grace_has_no_switch(host):
    assert [(node.number, node.cpulist) for node in host.nodes] == [(0, "0-71"), (1, "72-143"), (2, ""), (10, "")]
    for node, gpu in enumerate(host.gpus):
        assert gpu.place.numa_node == node
        assert named(*nearest(gpu.place, rdma(host))) == [[f"mlx5_{node}"], [f"mlx5_{1 - node}"]]
        assert distance(gpu.place, host.nic(f"mlx5_{node}").place) is Distance.NODE
    assert host.nic("mlx5_1").partners == ("enP18p1s0np0",)


@on("dgx")
def test_places_are_found_by_address_and_by_node(host):
    assert host.place("0000:1B:00.0") == host.place("00000000:1B:00.0") == host.gpus[0].place
    assert host.place("0000:18:00.0") == host.nic("mlx5_0").place
    assert host.place(1).numa_node == 1
    for nowhere in (7, -1, "", "0000:ff:00.0", "GPU-1", "١:00:00.0"):
        assert host.place(nowhere) == type(host.place(0))()


@pytest.mark.parametrize("name", sysfs_trees.NAMES)
def test_one_nic_is_read_as_all_are(name, tmp_path):
    root = sysfs_trees.recorded(tmp_path, name)
    for nic in read_topology(root).nics:
        alone = read_nic(nic.name, root)
        assert alone == nic or (nic.kind == "net" and alone.partners == ())
        assert read_nic(nic.name + "-rdm", root) == alone
    for nowhere in ("", "shm", "-", ".", "..", "../lo", "lo/../lo", "l\0o", "bonding_masters", "x" * 5000):
        assert read_nic(nowhere, root) is None


def test_a_slingshot_nic_takes_state_and_speed_from_its_net_device(tmp_path):
    device = "devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0"
    tree = [
        ("class/cxi/cxi0", "->", f"../../{device}/cxi/cxi0"),
        ("class/net/hsn0", "->", f"../../{device}/net/hsn0"),
        (f"{device}/cxi/cxi0/device", "->", "../../../0000:c1:00.0"),
        (f"{device}/net/hsn0/operstate", "=", "up"),
        (f"{device}/net/hsn0/speed", "=", "200000"),
    ]
    root = sysfs_trees.build(tmp_path, [sysfs_trees.Entry(*entry) for entry in tree])
    nic = read_topology(root).nic("cxi0")
    assert (nic.partners, nic.state, nic.speed_mbps, nic.place.address) == (("hsn0",), "up", 200_000, "0000:c1:00.0")


def test_a_tree_that_is_not_there_is_empty(tmp_path):
    assert read_topology(str(tmp_path)) == read_topology(str(tmp_path / "none")) == Topology()


def test_this_machine_can_be_read():
    assert read_topology().nic("lo").virtual


def test_reading_the_topology_is_quick(tmp_path):
    root = sysfs_trees.recorded(tmp_path, "p5")
    took = []
    for _ in range(5):
        start = time.thread_time()
        read_topology(root)
        took.append(time.thread_time() - start)
    # Three milliseconds, of this thread alone; the limit is for a machine that is much slower.
    assert min(took) < 0.05


@given(st.lists(st.text("0123456789m_", min_size=1, max_size=12), unique=True))
def test_names_are_sorted_by_the_numbers_in_them(names):
    """Those that are a number and nothing else take a short cut."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,9})", name)]

    assert sorted(names, key=_numeric_key) == sorted(names, key=key)
    assert [_numeric_key(name) for name in names] == [key(name) for name in names]


def test_a_folder_without_end_is_read_in_part(tmp_path):
    folder = tmp_path / "class" / "net"
    folder.mkdir(parents=True)
    for number in range(MAX_ENTRIES + 50):
        (folder / f"veth{number}").symlink_to(f"../../devices/virtual/net/veth{number}")
    assert len(read_topology(str(tmp_path)).nics) == MAX_ENTRIES
