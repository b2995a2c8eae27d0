"""`aiote prove --pull-rail` between two machines: it takes an interface down, and up again however the run ends."""

from __future__ import annotations

import signal
import subprocess
import time

import anyio
import pytest

import aiote
from aiote.cli import prove_link
from aiote.testing.contract import NotHere
from support.network.namespaces import Network, end_of
from support.process.prove_sides import AIOTE, connected, listening, statuses

CABLES = 3
RAILS = ("--rails", "cable1,cable2")
PLACE = ("10.0.0.1", 18516)
GATEWAYS = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0
eth1 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""
NONE, SOME = "0" * 32, "fe80" + "0" * 27 + "1"
GATEWAYS_6 = f"""{NONE} 00 {NONE} 00 {NONE} 00000400 1 0 00000001 eth1
{NONE} 00 {NONE} 00 {SOME} 00000400 1 0 00000003 eth2
"""


def is_up(network: Network, cable: str) -> bool:
    return b",UP" in network.run(1, "ip", "-oneline", "link", "show", "dev", cable)


def down(network: Network, run: subprocess.Popen[str]) -> bool:
    """Wait until the last rail's cable is down; return whether it is, or the run is over."""
    while is_up(network, "cable2") and run.poll() is None:
        time.sleep(0.01)
    return run.poll() is None


@pytest.mark.needs_namespaces
def test_an_interface_is_taken_down_and_up_again(tmp_path):
    with (
        Network(CABLES) as network,
        listening("socket", *RAILS, at=f"{end_of(0, 0)}:0", before=network.enter(0)) as (_, there),
    ):
        status, report, said = connected(tmp_path, "socket", there, *RAILS, "--pull-rail", before=network.enter(1))
        assert (status, said) == (0, ""), report
        assert is_up(network, "cable2")
    assert set(statuses(report).values()) == {"passed"}
    pulled = next(outcome for outcome in report["outcomes"] if outcome["name"] == "pulled-rail")
    assert pulled["detail"].startswith("the interface of a rail was taken down, and up again")


@pytest.mark.needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_interface_comes_up_again_when_the_run_ends_early(number, tmp_path):
    with (
        Network(CABLES) as network,
        listening("socket", *RAILS, at=f"{end_of(0, 0)}:0", before=network.enter(0)) as (_, there),
    ):

        def end(run: subprocess.Popen[str]) -> None:
            assert down(network, run)
            run.send_signal(number)

        options = (*RAILS, "--pull-rail")
        status, report, _ = connected(
            tmp_path, "socket", there, *options, before=network.enter(1), after="stopped-peer", act=end
        )
        assert status == (130 if number == signal.SIGINT else -number)
        while not is_up(network, "cable2"):
            time.sleep(0.01)
    if number == signal.SIGINT:
        assert report["partial"] == "interrupted during pulled-rail"


@pytest.fixture
def machine(monkeypatch):
    """A machine with three interfaces and a process that may take one down."""
    hosts = {"127.0.0.1": "lo", "10.0.0.9": "eth0", "10.0.1.9": "eth1", "10.0.2.9": "eth2"}
    monkeypatch.setattr(prove_link, "addresses", lambda: hosts)
    monkeypatch.setattr(prove_link, "_toward", lambda place: "eth0")
    monkeypatch.setattr(prove_link, "_with_gateway", lambda: {"eth2"})
    monkeypatch.setattr(prove_link, "_may_administer", lambda: True)


def test_the_last_rail_s_interface_is_chosen(machine):
    assert prove_link.to_pull("socket", ["10.0.0.9", "10.0.1.9"], PLACE) == "eth1"
    assert prove_link.to_pull("tcp", ["eth2", "eth1"], PLACE) == "eth1"


@pytest.mark.parametrize(
    ("provider", "rails", "says"),
    [
        ("socket", ["eth1"], "two rails on each machine"),
        ("socket", [], "two rails on each machine"),
        ("socket", ["eth1", "10.0.1.9"], "another rail needs"),
        ("socket", ["eth1", "lo"], "another rail needs"),
        ("socket", ["eth1", "eth0"], "the connection to the other machine"),
        ("socket", ["eth1", "eth2"], "routes through a gateway"),
        ("efa", ["rdmap0", "rdmap1"], "no interface carries rail rdmap1"),
    ],
)
def test_an_interface_that_should_stay_is_refused_with_a_sentence(machine, provider, rails, says):
    with pytest.raises(aiote.UsageError, match=says) as told:
        prove_link.to_pull(provider, rails, PLACE)
    assert "\n" not in str(told.value)


def test_without_root_the_sentence_says_so(machine, monkeypatch):
    monkeypatch.setattr(prove_link, "_may_administer", lambda: False)
    with pytest.raises(aiote.UsageError, match="eth1 of rail eth1 down and up again, which needs root"):
        prove_link.to_pull("socket", ["eth0", "eth1"], PLACE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--connect", "127.0.0.1:1", "--rails", "127.0.0.1"], "two rails on each machine"),
        (["--listen", "127.0.0.1:0"], "for the machine that connects"),
    ],
)
def test_the_command_refuses_before_any_check(options, says):
    done = subprocess.run([*AIOTE, "socket", "--pull-rail", *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


def test_interfaces_with_a_gateway_are_read(tmp_path):
    assert prove_link._with_gateway(tmp_path) == set()
    (tmp_path / "route").write_text(GATEWAYS)
    (tmp_path / "ipv6_route").write_text(GATEWAYS_6)
    assert prove_link._with_gateway(tmp_path) == {"eth0", "eth2"}


def test_an_interface_that_cannot_be_switched_is_not_run():
    """The process that switches it says why, as it does without root."""

    async def run() -> None:
        async with prove_link.link_down("no-such-if")(None):
            raise AssertionError

    with pytest.raises(NotHere, match="No such device"):
        anyio.run(run)
