"""`aiote bench` over RDMA devices, beside the raw loops over libibverbs; and what it says where there are none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiote.bench.devices import ports_of
from aiote.bench.perftest import available
from aiote.bench.sides import BenchError
from aiote.bench.work import OPS

AIOTE = [sys.executable, "-P", "-m", "aiote", "bench"]
# A guest may take many times as long as a machine for all of this.
QUICK = ["--runs", "1", "--seconds", "0.02", "--mode", "event"]
NONE_HERE = Path("/sys/class/infiniband")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AIOTE, *arguments], capture_output=True, text=True, timeout=110)


@pytest.mark.needs_rdma
def test_both_are_measured_and_the_data_are_right(tmp_path, monkeypatch):
    # Verified by the workers: wrong data end the measurement. No libfabric is looked for.
    monkeypatch.setenv("AIOTE_LIBFABRIC", "/nowhere/libfabric.so.1")
    file = tmp_path / "records.json"
    # One start of the workers for all: that alone takes ten seconds in a guest.
    arguments = ["--provider", "verbs", "--sizes", "16K", "--pages", "64", *QUICK, "--json", str(file)]
    done = bench("compare", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verbs, libibverbs, event")
    records = json.loads(file.read_text())["records"]
    contestants = ["raw", "aiote", *(["perftest"] if available() else [])]
    assert [(record["op"], record["contestant"]) for record in records] == [
        (op, who) for op in OPS for who in contestants
    ]
    for record in records:
        if record["contestant"] == "perftest":
            # On a busy machine it fails to find out how fast its clock is.
            assert record["value"]["median"] > 0 or re.search("no pages|cycle counter", record["note"]), record["note"]
            assert record["library"].startswith("perftest ")
            continue
        assert record["runs"] == 1
        assert record["value"]["median"] > 0
        assert record["library"] == "libibverbs"
        assert record["congestion"] == ""


@pytest.mark.needs_rdma
def test_devices_are_named_for_both_sides():
    first = ports_of("initiator", "")[0][0]
    done = bench("write", "--provider", "verbs", "--rails", first.name, "--sizes", "4K", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "write 4K" in done.stdout


@pytest.mark.needs_rdma
def test_the_raw_loops_run_over_several_rails():
    names = ",".join(sorted({ports_of(role, "")[0][0].name for role in ("initiator", "target")}))
    done = bench("raw", "pages", "--provider", "verbs", "--rails", names, "--pages", "256", "--sizes", "4K", *QUICK)
    assert done.returncode == 0, done.stderr


@pytest.mark.needs_rdma
def test_a_device_that_does_not_exist_is_refused():
    done = bench("raw", "write", "--provider", "verbs", "--rails", "mlx5_99", *QUICK)
    assert done.returncode == 2
    assert "'mlx5_99' does not exist" in done.stderr


@pytest.mark.skipif(NONE_HERE.exists() and any(NONE_HERE.iterdir()), reason="there is an RDMA device")
@pytest.mark.parametrize("who", [("raw", "write"), ("latency",), ("compare",)])
def test_without_a_device_it_says_so(who):
    done = bench("write", "--provider", "verbs")
    assert done.returncode == 2
    assert "this machine has no RDMA device" in done.stderr
    assert "Traceback" not in done.stderr


def port(folder: Path, name: str, address: str, state: str = "4: ACTIVE") -> None:
    """Add a RoCE port with one GID to a tree of sysfs."""
    place = folder / "devices" / name / "ports/1"
    files = {"link_layer": "Ethernet", "state": state, "gids/3": f"::ffff:{address}", "gid_attrs/types/3": "RoCE v2"}
    for file, text in files.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(f"{text}\n")
    (folder / "class/infiniband").mkdir(parents=True, exist_ok=True)
    (folder / "class/infiniband" / name).symlink_to(folder / "devices" / name)


@pytest.mark.parametrize(
    ("role", "rails", "host", "names"),
    [
        ("initiator", "", "", ["a0"]),
        ("target", "", "", ["c0"]),
        ("target", "", "10.0.0.1", ["a0"]),
        ("initiator", "", "10.0.0.4", ["d0"]),
        ("initiator", "d0,a0", "", ["d0", "a0"]),
        ("target", "d0,a0", "", ["d0", "a0"]),
    ],
)
def test_each_side_has_the_ports_of_its_role_and_host(tmp_path, role, rails, host, names):
    for number, name in enumerate(["a0", "b0", "c0", "d0"], 1):
        port(tmp_path, name, f"10.0.0.{number}", "1: DOWN" if name == "b0" else "4: ACTIVE")
    found = ports_of(role, rails, host, root=str(tmp_path))
    assert [(port.name, gid.index) for port, gid in found] == [(name, 3) for name in names]


def test_a_single_port_is_both_sides(tmp_path):
    port(tmp_path, "a0", "10.0.0.1")
    assert ports_of("target", "", root=str(tmp_path)) == ports_of("initiator", "", root=str(tmp_path))


def test_a_machine_whose_ports_are_down_is_refused(tmp_path):
    port(tmp_path, "a0", "10.0.0.1", "1: DOWN")
    with pytest.raises(BenchError, match="no port is up"):
        ports_of("target", "", root=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("write", "--provider", "verbs", "--library", "/some/libfabric.so.1"), "verbs needs none"),
        (("write", "--provider", "verbs", "--listen", "--host", "127.0.0.1:99999"), "99999"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(arguments, why):
    done = bench(*arguments)
    assert done.returncode in (1, 2)
    assert why in done.stderr
    assert "Traceback" not in done.stderr
