"""`aiote info` as users run it: this machine, recorded ones, terminals without Unicode."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from aiote.cli.info import SOFTWARE_SHOWN, Machine, as_dict, likely_providers, picture
from aiote.machine.sysfs import read_topology
from aiote.machine.topology import Nic, Topology
from support.rails import sysfs_trees

SECTIONS = {"aiote", "python", "libfabric", "sysfs", "rails_from", "nodes", "gpus", "nics", "shm", "local"}


def info(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "aiote", "info", *arguments]
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, env=variables)


def drawn(machine: Machine, width: int = 170, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    picture(machine, Console(file=file, width=width))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def shown(name: str, folder, **options) -> str:
    root = sysfs_trees.recorded(folder, name)
    topology = read_topology(root)
    return drawn(Machine(topology, {nic.name: likely_providers(nic) for nic in topology.nics}, "host"), **options)


@pytest.mark.libfabric
def test_this_machine_is_told_as_json():
    done = info("--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert set(told) == SECTIONS
    assert (told["sysfs"], told["rails_from"]) == ("/sys", "libfabric")
    (lo,) = [nic for nic in told["nics"] if nic["name"] == "lo"]
    assert lo["virtual"]
    assert "tcp" in lo["providers"]
    assert told["shm"] is told["local"] is True


@pytest.mark.libfabric
def test_this_machine_is_shown_as_a_picture():
    done = info()
    assert (done.returncode, done.stderr) == (0, "")
    assert "NIC  lo" in done.stdout
    assert "rail: local, shm" in done.stdout
    assert "libfabric" in done.stdout.splitlines()[-1]


def test_without_libfabric_the_machine_is_shown_all_the_same():
    done = info(AIOTE_LIBFABRIC="/none/libfabric.so.1")
    assert done.returncode == 0
    assert "NIC  lo" in done.stdout
    assert "no libfabric" in done.stdout
    told = json.loads(info("--json", AIOTE_LIBFABRIC="/none/libfabric.so.1").stdout)
    assert told["rails_from"] == "nothing"
    assert {tuple(nic["providers"]) for nic in told["nics"]} == {(), ("socket",)}


def test_a_recorded_tree_is_told_by_kind_of_device(tmp_path):
    root = sysfs_trees.recorded(tmp_path, "p5")
    told = json.loads(info("--json", "--sysfs", root).stdout)
    assert set(told) == SECTIONS
    assert (told["sysfs"], told["rails_from"], told["libfabric"]) == (root, "kind of device", None)
    assert told["shm"] is told["local"] is False
    assert told["gpus"][0]["nearest"] == [f"rdmap{number}s0" for number in (79, 80, 81, 82)]
    assert {tuple(nic["providers"]) for nic in told["nics"] if nic["kind"] == "infiniband"} == {("efa",)}
    done = info("--sysfs", root)
    assert done.stdout.count("rail: efa") == 32
    assert "recorded tree" in done.stdout


def test_what_is_no_folder_is_refused(tmp_path):
    assert info("--sysfs", str(tmp_path / "none")).returncode == 2
    done = info(AIOTE_SPIN_US="soon")
    assert done.returncode == 2
    assert "AIOTE_SPIN_US" in done.stderr


def test_the_picture_of_a_dgx_shows_nics_beside_gpus(tmp_path):
    lines = shown("dgx", tmp_path).splitlines()
    start = next(number for number, line in enumerate(lines) if "switch 0000:16:00.0" in line)
    assert lines[1] == "├── NUMA node 0  processors 0-55,112-167"
    assert lines[start : start + 3] == [
        "│   ├── PCIe root pci0000:15, switch 0000:16:00.0",
        "│   │   ├── NIC  mlx5_0 (ibp24s0)  0000:18:00.0  400 Gbit/s  up  mlx5_core  rail: verbs;ofi_rxm, tcp",
        "│   │   └── GPU  0000:1b:00.0  NVIDIA 2330  nvidia",
    ]
    assert "│       ├── NIC  mlx5_11 (ibp220s0)  0000:dc:00.0  speed unknown  down  mlx5_core  no rail" in lines
    assert sum("GPU" in line for line in lines) == 8
    assert sum("ibp24s0" in line for line in lines) == 1, "a net device is in the line of its RDMA device alone"


@pytest.mark.parametrize("name", sysfs_trees.NAMES)
def test_every_device_is_in_the_picture(name, tmp_path):
    text = shown(name, tmp_path)
    topology = read_topology(str(tmp_path))
    for nic in topology.nics:
        assert nic.name in text
    for gpu in topology.gpus:
        assert gpu.place.address in text
    assert shown(name, tmp_path / "ascii", encoding="ascii").isascii()


def test_devices_without_a_place_are_in_the_picture(tmp_path):
    text = shown("software", tmp_path)
    assert "NIC  rxe0 (over veth0)  10 Gbit/s  up  rail: verbs;ofi_rxm" in text
    assert text.index("software") < text.index("rxe0")
    assert "NUMA node unknown" in shown("no-node", tmp_path / "other")
    assert "NUMA node 2" not in shown("grace", tmp_path / "third"), "a GPU's memory is no place of NICs"


def test_a_host_of_containers_stays_readable():
    nics = tuple(Nic(f"veth{number}", "net", virtual=True) for number in range(500))
    machine = Machine(Topology(nics=nics), {})
    text = drawn(machine)
    assert text.count("veth") == SOFTWARE_SHOWN
    assert f"and {500 - SOFTWARE_SHOWN} more" in text
    assert len(as_dict(machine)["nics"]) == 500
