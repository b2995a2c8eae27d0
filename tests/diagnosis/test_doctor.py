"""`aiote doctor`: each finding over made-up facts, the command as users run it, and a link that goes down for real."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.cli.doctor import as_dict, lines
from aiote.cli.trial import PROVIDERS, Trial, tried
from aiote.diagnosis.facts import Facts, GidFacts, Limit, Net, PortFacts, RdmaDevice, gather
from aiote.diagnosis.findings import Finding, examine
from aiote.rails.contract import NEVER_RUN
from aiote.rails.libfabric import CXI_LACKS
from support.rails import sysfs_trees

GIB = 1 << 30
ROUTED = GidFacts(2, "10.0.0.1")
LOCAL = GidFacts(2, "fe80::1", link_local=True)
PORT = PortFacts("mlx5_0", 1, "ACTIVE", "LinkUp", True, (LOCAL, ROUTED), (Net("ens5", True),))
UVERBS = "/dev/infiniband/uverbs0"
PERMANENT = "echo '* - memlock unlimited' > /etc/security/limits.d/rdma.conf"
HAND_IN = "docker run --device=/dev/infiniband"


def device(**changes) -> RdmaDevice:
    values = {"name": "mlx5_0", "driver": "mlx5_core", "address": "0000:18:00.0", "uverbs": "uverbs0", "node": "ok"}
    return RdmaDevice(**{**values, "ports": (PORT,), **changes})


def port(**changes) -> tuple[RdmaDevice, ...]:
    values = {name: getattr(PORT, name) for name in PortFacts.__slots__}
    return (device(ports=(PortFacts(**{**values, **changes}),)),)


def software(driver: str) -> tuple[RdmaDevice, ...]:
    return (device(name="soft0", driver=driver, software=True, iwarp=driver == "siw", address=""),)


def facts(**changes) -> Facts:
    """Return the facts of a machine that lacks nothing, but for the changes."""
    well = {
        "devices": (device(),),
        "gpus": (0x10DE,),
        "net": "eth0",
        "peermem": True,
        "huge_pages": 512,
        "kernel": (6, 1),
        "nvidia_open": True,
        "memlock": Limit(-1, -1),
        "shm_bytes": 4 * GIB,
        "libfabric_error": "",
        "libibverbs_error": "",
        "libraries": ("efa", "mlx5", "rxe", "siw"),
    }
    return Facts(**{**well, **changes})


def test_a_machine_that_lacks_nothing_has_no_findings():
    assert examine(facts()) == []


def test_of_what_is_unknown_nothing_is_said():
    assert examine(Facts(devices=(RdmaDevice("mlx5_0", ports=(PortFacts("mlx5_0"),)),), gpus=(0x10DE,))) == []


EFA = (device(name="rdmap79s0", driver="efa"),)
INSTALL_EFA = (
    "curl -O https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz && "
    "tar -xf aws-efa-installer-latest.tar.gz && (cd aws-efa-installer && ./efa_installer.sh -y)"
)

WRONG = {
    "EFA's kernel driver": ({"efa_unbound": 2}, "EFA", "modprobe efa"),
    "EFA's kernel driver, and no other device": ({"efa_unbound": 2, "devices": ()}, "EFA", "modprobe efa"),
    "EFA's library": ({"devices": EFA, "efa_installed": False}, "EFA", INSTALL_EFA),
    "EFA's library, and another one was named": (
        {"efa_error": "old", "efa_installed": True, "library": "/usr/lib/libfabric.so.1"},
        "EFA",
        "unset AIOTE_LIBFABRIC",
    ),
    "EFA": ({"efa_error": "old", "efa_installed": True}, "EFA", "fi_info -p efa -t FI_EP_RDM"),
    "locked memory, EFA": ({"devices": EFA, "memlock": Limit(65536, -1)}, "locked memory", "ulimit -l unlimited"),
    "libfabric": ({"libfabric_error": "none"}, "libfabric.so.1", 'pip install "aiote[libfabric]"'),
    "libfabric that was named": (
        {"libfabric_error": "none", "library": "/x"},
        "libfabric.so.1",
        "unset AIOTE_LIBFABRIC",
    ),
    "libibverbs": (
        {"libibverbs_error": "none"},
        "libibverbs.so.1",
        "apt-get install libibverbs1 ibverbs-providers",
    ),
    "driver's library": ({"libraries": ("efa",)}, "mlx5_0", "apt-get install ibverbs-providers"),
    "ib_uverbs": ({"devices": (device(node="unloaded"),)}, "mlx5_0", "modprobe ib_uverbs"),
    "device node": (
        {"devices": (device(node="missing"),)},
        "mlx5_0",
        "udevadm trigger --subsystem-match=infiniband_verbs",
    ),
    "device node, container": ({"devices": (device(node="missing"),), "container": True}, "mlx5_0", HAND_IN),
    "permission": ({"devices": (device(node="denied"),)}, "mlx5_0", f"chmod a+rw {UVERBS}"),
    "permission, container": ({"devices": (device(node="denied"),), "container": True}, "mlx5_0", HAND_IN),
    "switched off": (
        {"devices": port(state="DOWN", physical="Disabled", nets=(Net("ens5", False),))},
        "mlx5_0",
        "ip link set ens5 up",
    ),
    "a name for no shell": (
        {"devices": port(state="DOWN", nets=(Net("a;b", False),))},
        "mlx5_0",
        "ip link set 'a;b' up",
    ),
    "cable": ({"devices": port(state="DOWN", physical="Polling")}, "mlx5_0", "ethtool ens5"),
    "cable, InfiniBand": (
        {"devices": port(state="DOWN", physical="Polling", ethernet=False)},
        "mlx5_0",
        "ibstat mlx5_0",
    ),
    "subnet manager": ({"devices": port(state="INIT", ethernet=False)}, "mlx5_0", "systemctl start opensm"),
    "disabled": (
        {"devices": port(state="DOWN", physical="Disabled", ethernet=False, number=2)},
        "mlx5_0",
        "ibportstate -C mlx5_0 -D 0 2 enable",
    ),
    "no GID": ({"devices": port(gids=())}, "mlx5_0", "ip address add ADDRESS/PREFIX dev ens5"),
    "RoCE disabled": (
        {"devices": port(gids=(GidFacts(1, "10.0.0.1"),))},
        "mlx5_0",
        "devlink dev param set pci/0000:18:00.0 name enable_roce value true cmode driverinit "
        "&& devlink dev reload pci/0000:18:00.0",
    ),
    "locked memory": ({"memlock": Limit(65536, -1)}, "locked memory", "ulimit -l unlimited"),
    "locked memory, hard": ({"memlock": Limit(65536, 65536)}, "locked memory", PERMANENT),
    "locked memory, container": (
        {"memlock": Limit(65536, 65536), "container": True},
        "locked memory",
        "docker run --ulimit memlock=-1",
    ),
    "kernel": (
        {"kernel": (5, 11), "gpus": (0x1002,), "peermem": False},
        "kernel",
        "apt-get install linux-image-amd64 && reboot",
    ),
    "peermem": ({"nvidia_open": False, "peermem": False}, "GPU memory", "modprobe nvidia_peermem"),
    "small /dev/shm": ({"shm_bytes": 64 << 20}, "/dev/shm", "mount -o remount,size=4G /dev/shm"),
    "small /dev/shm, container": (
        {"shm_bytes": 64 << 20, "container": True},
        "/dev/shm",
        "docker run --shm-size=4g",
    ),
    "no /dev/shm": (
        {"shm_bytes": 0},
        "/dev/shm",
        "mkdir -p /dev/shm && mount -t tmpfs -o size=4G tmpfs /dev/shm",
    ),
}
HINTS = {
    "no device": (
        {"devices": ()},
        "RDMA",
        "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0",
    ),
    "rxe": ({"devices": software("rxe")}, "soft0", "rdma link delete soft0"),
    "siw": ({"devices": software("siw")}, "soft0", "rdma link delete soft0"),
    "libibverbs without devices": (
        {"libibverbs_error": "none", "devices": (), "cxi": 1},
        "libibverbs.so.1",
        "apt-get install libibverbs1 ibverbs-providers",
    ),
    "link's own address": (
        {"devices": port(gids=(LOCAL,))},
        "mlx5_0",
        "ip address add ADDRESS/PREFIX dev ens5",
    ),
    "RoCE v1 alone": (
        {"devices": (device(driver="mlx4_core", ports=port(gids=(GidFacts(1, "10.0.0.1"),))[0].ports),)}
        | {"libraries": ("mlx4",)},
        "mlx5_0",
        "ibv_devinfo -v -d mlx5_0",
    ),
    "locked memory": ({"memlock": Limit(GIB, -1)}, "locked memory", "ulimit -l unlimited"),
    "kernel, with peermem": ({"kernel": (5, 11)}, "kernel", "apt-get install linux-image-amd64 && reboot"),
    "smallish /dev/shm": ({"shm_bytes": GIB - 1}, "/dev/shm", "mount -o remount,size=4G /dev/shm"),
    "EFA": ({"efa": ("rdmap79s0-rdm",)}, "EFA", "aiote prove efa"),
    "huge pages, EFA": (
        {"devices": EFA, "kernel": (5, 12), "gpus": (), "huge_pages": 0},
        "huge pages",
        "export FI_EFA_FORK_SAFE=0",
    ),
    "huge pages": ({"huge_pages": 0}, "huge pages", "sysctl -w vm.nr_hugepages=1024"),
}


@pytest.mark.parametrize(("changes", "about", "mend"), WRONG.values(), ids=WRONG)
def test_each_thing_that_is_wrong_is_found_with_what_mends_it(changes, about, mend):
    (finding,) = examine(facts(**changes))
    assert (finding.level, finding.about, finding.mend) == ("wrong", about, mend)


@pytest.mark.parametrize(("changes", "about", "mend"), HINTS.values(), ids=HINTS)
def test_each_thing_that_could_be_better_is_hinted_at_with_what_mends_it(changes, about, mend):
    (finding,) = examine(facts(**changes))
    assert (finding.level, finding.about, finding.mend) == ("hint", about, mend)


@pytest.mark.parametrize(
    "changes",
    [
        {"memlock": Limit(65536, 65536, exempt=True)},
        {"memlock": Limit(65536, 65536), "devices": (), "cxi": 0},
        {"kernel": (5, 12), "peermem": False},
        {"kernel": (5, 11), "gpus": ()},
        {"kernel": (5, 11), "devices": software("rxe")},
        {"nvidia_open": False, "peermem": False, "gpus": (0x1002,)},
        {"nvidia_open": None, "peermem": False},
        {"huge_pages": 0, "devices": software("rxe")},
        {"shm_bytes": GIB},
        {"devices": (device(driver="unheard_of"),), "libraries": ()},
        {"devices": (), "cxi": 1},
    ],
)
def test_facts_that_need_no_mending_are_no_findings(changes):
    about = {finding.about for finding in examine(facts(**changes))}
    assert about <= {"soft0", "RDMA"}


def test_of_an_efa_that_can_be_used_the_security_group_is_named():
    """And another libfabric than its own is a hint then, for it works."""
    own, usable = examine(facts(devices=EFA, efa=("rdmap79s0-rdm",), efa_installed=False))
    assert (own.level, own.mend) == ("hint", INSTALL_EFA)
    assert "security group" in usable.what
    assert NEVER_RUN in usable.what


def test_an_old_kernel_and_a_missing_module_are_two_findings():
    found = examine(facts(kernel=(5, 10), peermem=False))
    assert [(finding.level, finding.about) for finding in found] == [("wrong", "kernel"), ("wrong", "GPU memory")]
    assert "5.10" in found[0].what


def test_of_a_port_that_is_down_or_iwarp_no_address_is_asked():
    (finding,) = examine(facts(devices=port(state="DOWN", gids=())))
    assert "cable" in finding.what
    (iwarp,) = port(gids=(GidFacts(1, "2::", link_local=True),))
    assert examine(facts(devices=(device(iwarp=True, ports=iwarp.ports),))) == []


def test_what_is_wrong_comes_first():
    levels = [finding.level for finding in examine(facts(huge_pages=0, shm_bytes=0, devices=port(gids=(LOCAL,))))]
    assert levels == ["wrong", "hint", "hint"]


@given(st.from_type(Facts))
def test_any_facts_are_examined_without_an_error(facts):
    findings = examine(facts)
    assert all(finding.level in ("wrong", "hint") and finding.what and finding.mend for finding in findings)
    assert [finding.level for finding in findings] == sorted((finding.level for finding in findings), reverse=True)
    json.dumps(as_dict(findings, facts))
    assert all(line.isascii() and line.isprintable() for line in lines(findings, facts))


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "aiote", "doctor", *arguments]
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, env=variables)


def told(done: subprocess.CompletedProcess[str]) -> dict:
    """Return the JSON, whose shape and exit status are checked."""
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert set(report) == {"providers", "findings", "facts"}
    for one in report["providers"]:
        assert one["usable"] == bool(one["rails"]) == (not one["reason"])
    assert all(set(finding) == {"level", "about", "what", "mend"} for finding in report["findings"])
    assert done.returncode == int(any(finding["level"] == "wrong" for finding in report["findings"]))
    return report


def test_the_report_of_this_machine_says_every_finding():
    report = told(doctor("--json"))
    known = report["facts"]
    assert not known["recorded"]
    assert known["left_out"] == []
    assert known["memlock"]["soft"] >= -1
    assert known["kernel"] >= [4, 0]
    done = doctor()
    assert done.returncode == int(any(finding["level"] == "wrong" for finding in report["findings"]))
    for finding in report["findings"]:
        assert f"{finding['level']:5}  {finding['about']}: " in done.stdout
        assert f"       {finding['mend']}\n" in done.stdout


def test_each_provider_is_usable_or_why_it_is_not_is_said():
    report = {one["provider"]: one for one in told(doctor("--json"))["providers"]}
    assert set(report) == set(PROVIDERS)
    assert report["local"]["rails"] == ["local"]
    assert report["socket"]["usable"]
    assert CXI_LACKS in report["cxi"]["reason"] or report["cxi"]["reason"].startswith("load libfabric: ")
    done = doctor(AIOTE_LIBFABRIC="/none/libfabric.so.1")
    said = [line for line in done.stdout.splitlines() if line[:5] in ("yes  ", "no   ")]
    assert [line.split()[1] for line in said] == list(PROVIDERS)
    for line in said:
        assert (" is usable: " if line.startswith("yes") else " is not usable: ") in line
        assert line.startswith("yes") == (line.split()[1] in ("local", "socket", "verbs") and " is usable" in line)
    assert "tcp is not usable: load libfabric: no libfabric was found" in done.stdout


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "the process that tried it ended by signal 11"),
        ("import os; os._exit(3)", "the process that tried it ended with status 3"),
        ("import time; time.sleep(100)", "it was not open after 5 s"),
    ],
    ids=["crashes", "ends", "hangs"],
)
def test_a_library_that_crashes_or_hangs_is_not_usable_and_harms_nothing(code, reason, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert tried(("local",), 5) == [Trial("local", (), reason)]


def test_a_missing_libfabric_is_found_with_what_mends_it():
    done = doctor(AIOTE_LIBFABRIC="/none/libfabric.so.1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "/none/libfabric.so.1" in done.stdout
    assert "       unset AIOTE_LIBFABRIC\n" in done.stdout


def test_a_recorded_tree_is_examined_and_what_it_lacks_is_named(tmp_path):
    root = sysfs_trees.recorded(tmp_path, "dgx")
    report = told(doctor("--json", "--sysfs", root))
    assert [(finding["level"], finding["about"]) for finding in report["findings"]] == [("wrong", "mlx5_11")]
    assert "locked memory" in report["facts"]["left_out"]
    assert report["facts"]["memlock"] is None
    done = doctor("--sysfs", root)
    assert done.returncode == 1
    assert "A recorded tree, left out: " in done.stdout


@pytest.mark.parametrize(
    ("name", "said"), [("p5", []), ("no-node", []), ("grace", []), ("software", [("hint", "rxe0")])]
)
def test_recorded_trees_have_their_known_findings(name, said, tmp_path):
    found = examine(gather(sysfs_trees.recorded(tmp_path, name)))
    assert [(finding.level, finding.about) for finding in found] == said


def test_wrong_arguments_are_refused(tmp_path):
    assert doctor("--sysfs", str(tmp_path / "none")).returncode == 2
    assert doctor("--loud").returncode == 2
    done = doctor(AIOTE_SPIN_US="soon")
    assert done.returncode == 2
    assert "AIOTE_SPIN_US" in done.stderr


def of(name: str) -> list[Finding]:
    """Return what is wrong with a device, now."""
    return [finding for finding in examine(gather()) if finding.about == name and finding.level == "wrong"]


def until_wrong(name: str, count: int) -> list[Finding]:
    """Wait, for the state of a link comes after the command."""
    deadline = time.monotonic() + 60
    while len(found := of(name)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.fixture
def spare() -> Iterator[str]:
    """Make a device of its own: the routes of the others would be lost with their link."""
    run("ip link add spare type veth peer name sparesw")
    try:
        run("ip link set sparesw up")
        run("ip link set spare up")
        run("rdma link add rxespare type rxe netdev spare")
        yield "rxespare"
    finally:
        subprocess.run(shlex.split("rdma link delete rxespare"), capture_output=True)
        run("ip link delete spare")


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True, capture_output=True)


@pytest.mark.needs_rdma
def test_a_pulled_cable_is_found(switch):
    until_wrong("rxe0", 0)
    switch.pull(0)
    (finding,) = until_wrong("rxe0", 1)
    assert "cable of nic0" in finding.what
    assert finding.mend == "ethtool nic0"
    assert doctor().returncode == 1
    switch.plug(0)
    until_wrong("rxe0", 0)


@pytest.mark.needs_rdma
def test_what_is_switched_off_is_found_and_mended(spare):
    until_wrong(spare, 0)
    run("ip link set spare down")
    (finding,) = until_wrong(spare, 1)
    assert finding.mend == "ip link set spare up"
    report = told(doctor("--json"))
    assert [found["mend"] for found in report["findings"] if found["level"] == "wrong"] == [finding.mend]
    run(finding.mend)
    until_wrong(spare, 0)


@pytest.mark.needs_rdma
def test_devices_of_this_machine_are_known():
    known = gather()
    assert known.devices
    assert {(device.node, device.driver) for device in known.devices if device.software} <= {("ok", "rxe")}
    assert all(device.ports for device in known.devices)
