"""Ports and GIDs as sysfs has them, and which are chosen."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote import FabricError
from aiote.machine import ports
from aiote.machine.ports import Gid, Port, choose_gid, choose_ports, hardware, read_ports
from aiote.rails import selection
from aiote.rails.contract import NEVER_RUN
from aiote.rails.rail_set import RailSet

V1, V2 = "IB/RoCE v1", "RoCE v2"
FOUR, SIX, LOCAL = "::ffff:10.77.0.1", "fd00::1", "fe80::4b:1ff:fe00:1"


def device(root: Path, name: str, gids: list[tuple[str, str, str]], **files: str) -> None:
    """Write a device with one port: (GID, type, net device) of each index, and other files of the port."""
    real = root / "devices" / "virtual" / "infiniband" / name
    port = real / "ports" / files.pop("port", "1")
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for index, (gid, kind, net) in enumerate(gids):
        (port / "gids" / str(index)).write_text(ipaddress.IPv6Address(gid).exploded + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
        (port / "gid_attrs" / "ndevs" / str(index)).write_text(net + "\n")
    for file, text in {"state": "4: ACTIVE", "link_layer": "Ethernet", **files}.items():
        (port / file).write_text(text + "\n")
    classes = root / "class" / "infiniband"
    classes.mkdir(parents=True, exist_ok=True)
    if not (classes / name).exists():
        (classes / name).symlink_to(real)


def test_ports_are_read_with_their_gids(tmp_path):
    device(tmp_path, "mlx5_0", [(LOCAL, V1, "eth0"), (LOCAL, V2, "eth0"), ("::", V2, ""), (FOUR, V2, "eth0.7")])
    device(tmp_path, "mlx5_1", [], state="1: DOWN", port="2")
    first, second = read_ports(str(tmp_path))
    assert (first.name, first.up, first.ethernet, first.software) == ("mlx5_0", True, True, True)
    assert [(gid.index, gid.ip, gid.version) for gid in first.gids] == [
        (0, LOCAL, 1),
        (1, LOCAL, 2),
        (3, "10.77.0.1", 2),
    ]
    assert first.nets == ("eth0", "eth0.7")
    assert (second.name, second.up, second.gids) == ("mlx5_1:2", False, ())


def test_a_machine_without_ports_is_refused(tmp_path):
    assert read_ports(str(tmp_path)) == ()
    with pytest.raises(aiote.UsageError, match="no RDMA device"):
        choose_ports(None, "127.0.0.1", ())


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([(LOCAL, V1), (LOCAL, V2), (FOUR, V1), (FOUR, V2)], 3),
        ([(FOUR, V1), (LOCAL, V2)], 1),
        ([(LOCAL, V2), (SIX, V2)], 1),
        ([(LOCAL, V1), (FOUR, V1)], 1),
        ([(FOUR, V2), ("::ffff:10.0.0.9", V2)], 0),
    ],
)
def test_the_gid_that_goes_farthest_is_chosen(tmp_path, gids, chosen):
    device(tmp_path, "mlx5_0", [(gid, kind, "eth0") for gid, kind in gids])
    (port,) = read_ports(str(tmp_path))
    assert choose_gid(port).index == chosen
    assert choose_gid(port, 0).index == 0


def test_infiniband_takes_its_first_gid(tmp_path):
    device(tmp_path, "mlx4_0", [("fe80::2:c903:1", V1, ""), ("fd00::2", V1, "")], link_layer="InfiniBand")
    (port,) = read_ports(str(tmp_path))
    assert (port.ethernet, choose_gid(port)) == (False, port.gids[0])
    assert port.gids[0].version == 0


def test_a_gid_that_does_not_exist_is_refused(tmp_path):
    device(tmp_path, "mlx5_0", [(FOUR, V2, "eth0")])
    device(tmp_path, "mlx5_1", [("::", V2, "eth1")])
    has, has_not = read_ports(str(tmp_path))
    with pytest.raises(
        aiote.UsageError, match=r"gid_index=5: port mlx5_0 has no such GID; it has 0 \(10.77.0.1, RoCE v2\)"
    ):
        choose_gid(has, 5)
    with pytest.raises(aiote.UsageError, match="it has none; give its net device an IP address"):
        choose_gid(has_not)


def made(name: str, ip: str, *, up: bool = True, number: int = 1) -> Port:
    gid = Gid(0, ipaddress.IPv6Address(f"::ffff:{ip}").packed, 2, f"net-{name}")
    return Port(name, number, up, ethernet=True, software=False, gids=(gid,))


PORTS = (made("a", "10.0.0.1", up=False), made("b", "10.0.0.2"), made("c", "10.0.0.3"), made("c", "10.0.0.4", number=2))


def test_ports_are_chosen_by_any_of_their_names():
    wanted = ("a", "net-b", "10.0.0.3", "c:2", "b:1")
    assert choose_ports(wanted, "", PORTS) == [PORTS[0], PORTS[1], PORTS[2], PORTS[3], PORTS[1]]
    with pytest.raises(aiote.UsageError, match=r"'d' does not exist; the RDMA ports are a \(net-a\)"):
        choose_ports(("b", "d"), "", PORTS)


def test_without_a_name_the_one_with_the_address_or_the_first_that_is_up():
    assert choose_ports(None, "10.0.0.4", PORTS) == [PORTS[3]]
    assert choose_ports(None, "127.0.0.1", PORTS) == [PORTS[1]]
    with pytest.raises(aiote.UsageError, match=r"no port is up \(a\)"):
        choose_ports(None, "10.0.0.1", PORTS[:1])


@given(
    st.lists(st.tuples(st.text(max_size=40), st.text(max_size=12), st.text(max_size=8)), max_size=4),
    st.text(max_size=9),
)
def test_nonsense_in_the_tree_is_read_without_an_error(tmp_path_factory, gids, state):
    root = tmp_path_factory.mktemp("tree")
    device(root, "x", [("::1", "", "")] * len(gids), state=state)
    port = root / "class" / "infiniband" / "x" / "ports" / "1"
    for index, (gid, kind, net) in enumerate(gids):
        for file, text in (("gids", gid), ("gid_attrs/types", kind), ("gid_attrs/ndevs", net)):
            (port / file / str(index)).write_text(text, encoding="utf-8", errors="replace")
    for found in read_ports(str(root)):
        for gid in found.gids:
            assert len(gid.raw) == 16
            assert gid.rank >= 0


def test_only_hardware_ports_that_are_up_are_taken_unasked():
    """No software, nothing that is down or has no address, and no device without queue pairs."""
    good = made("a", "10.0.0.1")
    others = [
        dataclasses.replace(good, software=True),
        dataclasses.replace(good, up=False),
        dataclasses.replace(good, gids=()),
        dataclasses.replace(good, driver="efa"),
    ]
    assert hardware((*others, good)) == (good,)


@pytest.mark.libfabric
@pytest.mark.parametrize(
    ("fast", "names", "best"),
    [
        ("", None, "verbs"),
        ("verbs;ofi_rxm", None, "verbs"),
        ("", ("eth9",), "socket"),
        ("verbs;ofi_rxm", ("eth9",), "verbs;ofi_rxm"),
    ],
)
def test_auto_takes_the_best_that_is_here(monkeypatch, fast, names, best):
    """Ports of hardware where every name is theirs, then what libfabric drives, TCP last."""
    monkeypatch.setattr(selection, "is_usable", lambda provider, *_: provider == fast)
    good = made("a", "10.0.0.1")
    soft = dataclasses.replace(good, device="rxe0", software=True)
    monkeypatch.setattr(ports, "read_ports", lambda: (soft, good))
    monkeypatch.setattr(selection.os.path, "isdir", lambda _: True)
    # The one in software comes first, and is not taken for it.
    assert selection._hardware(names) == ((good,) if names is None else ())
    assert selection._best(selection.RailRequest("auto", names))[0] == best


def test_without_a_library_auto_takes_sockets(monkeypatch):
    """One that was named has to be there."""

    def missing(explicit: str) -> None:
        raise FabricError(2, f"no libfabric {explicit}", operation="load libfabric")

    monkeypatch.setattr(selection, "load", missing)
    monkeypatch.setattr(selection.os.path, "isdir", lambda _: False)
    assert selection._best(selection.RailRequest("auto")) == ("socket", None)
    with pytest.raises(FabricError, match="no libfabric /none"):
        selection._best(selection.RailRequest("auto", library="/none"))


def test_auto_never_takes_what_was_never_run(monkeypatch):
    """Not even where nothing else is offered; named, it is opened, and a warning says so."""
    provider = "efa"
    opened: list[str] = []
    monkeypatch.setattr(selection, "load", lambda _path: SimpleNamespace(version=(2, 5), path="here"))
    monkeypatch.setattr(selection, "is_usable", lambda name, *_: name == provider)
    monkeypatch.setattr(selection, "_hardware", lambda _names: ())
    monkeypatch.setattr(selection, "choose", lambda *_: [(provider, "", "nic0")])
    monkeypatch.setattr(selection, "LibfabricRail", lambda *arguments: opened.append(arguments[1]))
    assert selection._best(selection.RailRequest("auto"))[0] == "socket"
    with pytest.warns(RuntimeWarning, match=f"provider='{provider}' {NEVER_RUN}"):
        selection.open_rails(selection.RailRequest(provider), [])
    assert opened == [provider]


@pytest.mark.libfabric
def test_cxi_is_refused_with_what_is_missing():
    """Whether or not such a NIC is here, and without the warning of what can be opened."""
    with pytest.raises(FabricError, match=r"FI_MR_ENDPOINT.*fi_writedata.*use provider='socket'") as caught:
        RailSet("cxi", None, host="127.0.0.1", library="")
    assert caught.value.errno == errno.EOPNOTSUPP
