"""Trees with missing, unreadable or nonsensical files: nothing raises, and what is told is in range."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from aiote.cli.info import Machine, as_dict, picture
from aiote.machine.sysfs import MAX_SPEED, read_nic, read_topology
from aiote.machine.topology import Topology, nearest
from aiote.machine.tree import MAX_NODE
from support.rails import sysfs_trees
from support.rails.sysfs_trees import Entry

# Removing a tree of a hundred folders from a disk takes longer than all the rest.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

# p5 is large, and has nothing that the others lack.
TREES = {name: sysfs_trees.entries(name) for name in sysfs_trees.NAMES if name != "p5"}
NUMBERS = ["-2147483648", "99999999999999999999", "4294967295", "1_0", "0x", "0xffffffffffff", "1e9", "nan", "١"]
NAMES = ["4:ACTIVE", "9: ACTIVE", "../../lo", "/etc", ".", "..", "up\0", ""]
garbage = (
    st.sampled_from(NUMBERS + NAMES)
    | st.text(max_size=30)
    | st.binary(max_size=30).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
)
targets = garbage | st.sampled_from(
    ["/", "loop", "../../devices/pci0000:00", "../../devices/pci0000:zz/0000:zz:00.0/net/x", "x" * 4000, "../net"]
)


damages = (
    st.tuples(st.just("gone"), st.just(""))
    | st.tuples(st.just("!"), st.just(""))
    | st.tuples(st.just("="), garbage)
    | st.tuples(st.just("->"), targets.map(lambda text: text.replace("\0", "") or "x"))
)
# Which tree, and for some of its entries, by number, what becomes of them. dgx is large, hence seldom.
broken = st.tuples(
    st.sampled_from(["software", "grace", "no-node"] * 3 + ["dgx"]),
    st.dictionaries(st.integers(0, 399), damages, max_size=60),
)


def damaged(name: str, damage: dict[int, tuple[str, str]]) -> list[Entry]:
    """Return a tree of which some entries are gone, cannot be read, or hold garbage."""
    tree = TREES[name]
    fates = {number % len(tree): fate for number, fate in damage.items()}
    changed = [Entry(entry.path, *fates.get(n, (entry.sign, entry.value))) for n, entry in enumerate(tree)]
    return [entry for entry in changed if entry.sign != "gone"]


def check(topology: Topology) -> None:
    for device in (*topology.gpus, *topology.nics):
        assert -1 <= device.place.numa_node <= MAX_NODE
    for nic in topology.nics:
        assert 0 <= nic.speed_mbps <= MAX_SPEED
        assert nic.state in ("up", "down", "unknown")
        assert all(topology.nic(name) for name in nic.partners)
    for gpu in topology.gpus:
        nearest(gpu.place, topology.nics)


def show(topology: Topology) -> None:
    machine = Machine(topology, {}, sysfs="\x1b[31m tree")
    json.loads(json.dumps(as_dict(machine)).encode())
    for encoding in ("ascii", "utf-8"):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        picture(machine, Console(file=file, width=120))
        file.flush()
        assert b"\x1b" not in file.buffer.getvalue()


@given(broken)
def test_a_damaged_tree_is_read_without_an_error(tree):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root = sysfs_trees.build(Path(folder), damaged(*tree))
        topology = read_topology(root)
        check(topology)
        for nic in topology.nics:
            assert read_nic(nic.name, root) is not None


# Drawing takes rich far longer than reading takes us.
@settings(max_examples=15)
@given(broken)
def test_a_damaged_tree_is_shown_without_an_error(tree):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        show(read_topology(sysfs_trees.build(Path(folder), damaged(*tree))))


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\x1b[2J", "é".encode(), b"[bold]x[red]", b"-", b"x" * 255])
def test_devices_with_odd_names_are_read_and_shown(name, tmp_path):
    for kind in ("net", "infiniband"):
        folder = tmp_path / "class" / kind
        folder.mkdir(parents=True)
        os.symlink(b"../../devices/virtual/" + kind.encode() + b"/" + name, os.fsencode(folder) + b"/" + name)
    topology = read_topology(str(tmp_path))
    assert len(topology.nics) == 2
    check(topology)
    show(topology)


def test_a_pipe_does_not_block(tmp_path):
    folder = tmp_path / "devices" / "virtual" / "net" / "p"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "speed")
    (tmp_path / "class" / "net").mkdir(parents=True)
    (tmp_path / "class" / "net" / "p").symlink_to("../../devices/virtual/net/p")
    assert read_topology(str(tmp_path)).nic("p").speed_mbps == 0
