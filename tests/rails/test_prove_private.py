"""A report of `aiote prove` has no name and no address of a host, a device or a user."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aiote.cli.prove_private import hidden_setting, names_here, private, without_names
from aiote.cli.prove_report import Outcome, Report, now

SECRETS = {
    "IPv4": "10.31.7.254",
    "IPv6": "2001:db8::7:1",
    "link-local": "fe80::a4bf:1ff:fe00:1",
    "GID of IPv4": "0000:0000:0000:0000:0000:ffff:0a1f:07fe",
    "GID of a link": "fe80:0000:0000:0000:0e42:a1ff:fe4b:9c8d",
    "GUID": "0e42:a103:004b:9c8d",
    "GUID in hexadecimal": "0x0e42a103004b9c8d",
    "MAC": "0e:42:a1:4b:9c:8d",
    "PCI": "0000:3b:00.1",
    "PCI without its domain": "3b:00.1",
    "a home": "/home/ada",
    "a name that udev makes": "rdmap16s27",
    "another": "enp59s0f1np1",
    "one by its MAC": "enx0e42a14b9c8d",
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
@pytest.mark.parametrize("around", ["{}", "cannot reach ('{}', 4791).", "peer aiote://{}:4791/3c5a.18: gone", "at {}."])
def test_it_is_replaced(secret, around):
    assert secret not in without_names(around.format(secret), [])


KEPT = [
    "7 sizes up to 1000003 bytes",
    "mlx5_0: mlx5_core, MT4129, 28.39.1002, 400 Gb/sec (4X NDR), InfiniBand",
    "Linux 6.8.0-45-generic x86_64",
    "2026-11-27T17:12:39Z",
    "tests.rails.test_contract::test_a_read[socket-asyncio]",
    "libfabric 2.5 (wheel)",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03",
    "[Errno 111] Connect call failed",
]


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_name_stays(text):
    assert without_names(text, ["lovelace"]) == text


def test_names_are_replaced_as_whole_words():
    names = ["gpu7.cluster.example", "gpu7", "ada"]
    text = "gpu7.cluster.example refused ada: gpu7 is no gpu70, and adamant"
    assert without_names(text, names) == "<name> refused <name>: <name> is no gpu70, and adamant"


def test_settings_that_are_keys_or_places_are_hidden():
    assert hidden_setting("AIOTE_CLUSTER_KEY", "secret") == "(not told)"
    assert hidden_setting("FI_TCP_IFACE", "private0") == "(not told)"
    assert hidden_setting("AIOTE_HOST", "gpu7") == "(not told)"
    assert hidden_setting("AIOTE_SPIN_US", "0") == "0"


def test_every_text_of_a_report_is_searched(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.cluster.example")
    told = {
        "system": "Linux on gpu7",
        "doctor": [{"level": "hint", "about": "10.31.7.254", "what": "gpu8", "mend": ""}],
    }
    report = Report("efa", "efa", told, now(), missing="no gpu7", partial="lost gpu8", far=dict(told), names=["gpu8"])
    report.outcomes.append(
        Outcome("writes", "a write arrives", "failed", "peer 10.31.7.254 of gpu8 at 3b:00.1 is lost")
    )
    path = tmp_path / "report.json"
    written = report.write(path).read_text() + path.read_text()
    for secret in ("gpu7", "gpu8", "10.31.7.254", "3b:00.1"):
        assert secret not in written
    assert "is lost" in written


def facts_of_this_machine() -> set[str]:
    """Return this machine's names and addresses, each as the system shows them."""
    found = {socket.gethostname(), getpass.getuser(), *(str(name) for name in names_here())}
    addresses = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=False).stdout
    found |= set(re.findall(r"inet6? ([0-9a-f:.]+)", addresses))
    found |= {path.read_text().strip() for path in Path("/sys/class/net").glob("*/address")}
    found |= {path.name for path in Path("/sys/bus/pci/devices").glob("*")}
    for path in Path("/sys/class/infiniband").glob("*/ports/*/gids/*"):
        found.add(path.read_text().strip())
    return found - {"", "root", "::", "00:00:00:00:00:00"}


def test_a_report_of_this_machine_has_none_of_its_names(tmp_path):
    path = tmp_path / "report.json"
    options = ["--no-bench", "--no-suites", "--report", str(path)]
    subprocess.run([sys.executable, "-P", "-m", "aiote", "prove", "sim", *options], check=True, capture_output=True)
    written = path.read_text() + path.with_suffix(".txt").read_text()
    facts = facts_of_this_machine()
    assert len(facts) > 1
    assert not [fact for fact in facts if re.search(rf"(?<![\w.]){re.escape(fact)}(?![\w.])", written)]
    report = json.loads(path.read_text())
    assert private(report["machine"], names_here()) == report["machine"]
