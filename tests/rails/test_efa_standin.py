"""EFA's part of the engine, over a stand-in for its provider (tests/standin_efa), with each libfabric that is here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout.compiled import module
from support.rails.standin_efa import SOURCES, environment, libraries, spoken

pytestmark = [pytest.mark.libfabric, pytest.mark.timeout(300)]


def run(wire: Path, library: str, case: str, **behaviour: str) -> str:
    """Run a case in a process of its own; return what it printed."""
    command = [sys.executable, "-P", str(SOURCES / "child.py"), case]
    env = environment(wire, library, **behaviour)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("library", libraries(), ids=spoken)
@pytest.mark.parametrize("mtu", ["8192", "1024"])
def test_bytes_counts_and_messages_are_exact_over_unordered_fragments(tmp_path: Path, library: str, mtu: str) -> None:
    run(tmp_path, library, "transfers", EFA_STANDIN_MTU=mtu)
    assert not list(tmp_path.iterdir())


def test_pieces_of_messages_that_are_under_way_at_once_are_told_apart(tmp_path: Path) -> None:
    run(tmp_path, libraries()[0], "messages", EFA_STANDIN_MTU="1024")


def test_memory_that_peers_may_only_write_is_not_read(tmp_path: Path) -> None:
    assert run(tmp_path, libraries()[0], "unreadable").split()


@pytest.mark.parametrize("behaviour", ["old", "no-write"])
def test_a_library_whose_efa_cannot_be_used_is_refused_by_name_and_auto_takes_another(
    tmp_path: Path, behaviour: str
) -> None:
    is_refused(tmp_path, behaviour)


def test_a_library_whose_immediates_take_no_receives_is_refused_by_name(tmp_path: Path) -> None:
    is_refused(tmp_path, "unsolicited")


def is_refused(tmp_path: Path, behaviour: str) -> None:
    said = run(tmp_path, libraries()[0], "refused", EFA_STANDIN=behaviour)
    assert "no usable EFA NIC" in said
    assert "2.4" in said
    assert "auto: socket" in said


@pytest.mark.parametrize("behaviour", ["", "old", "unsolicited", "no-write", "no-wait", "no room"])
def test_auto_would_take_a_proven_efa_where_it_can_be_used_and_goes_on_elsewhere(
    tmp_path: Path, behaviour: str
) -> None:
    """It does not take it yet. Peers of one host use `local` beside it. The rails that are named are not EFA's."""
    named = {"EFA_STANDIN_QPS": "0"} if behaviour == "no room" else {"EFA_STANDIN": behaviour}
    said = run(tmp_path, libraries()[0], "proven", **named)
    usable, unusable = ["auto: efa socket local", "carried: 0 0 1000"], ["auto: socket local", "carried: 0 1000"]
    assert said.splitlines() == ["named: socket local", *(unusable if behaviour else usable)]


def test_an_endpoint_that_is_shut_is_posted_on_no_more(tmp_path: Path) -> None:
    """The stand-in crashes who uses a closed endpoint."""
    built, wire = tmp_path / "built", tmp_path / "wire"
    built.mkdir()
    wire.mkdir()
    module(SOURCES / "shut_endpoint.pyx", built)
    command = [sys.executable, "-X", "faulthandler", "-P", str(SOURCES / "shut.py"), str(built)]
    done = subprocess.run(command, env=environment(wire, libraries()[0]), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def doctor(wire: Path, **behaviour: str) -> tuple[int, list[dict[str, str]]]:
    """Run the command as users do; return its status and its findings."""
    env = environment(wire, libraries()[0], **behaviour)
    command = [sys.executable, "-P", "-m", "aiote", "doctor", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, [found for found in json.loads(done.stdout)["findings"] if found["about"] == "EFA"]


@pytest.mark.parametrize("behaviour", ["old", "unsolicited", "no-write", "no-wait"])
def test_doctor_says_why_efa_cannot_be_used(tmp_path: Path, behaviour: str) -> None:
    status, (finding,) = doctor(tmp_path, EFA_STANDIN=behaviour)
    assert status == 1
    assert finding["level"] == "wrong"
    assert ("fi_cq_open" if behaviour == "no-wait" else "no usable EFA NIC") in finding["what"]


def test_doctor_says_that_efa_can_be_used_and_that_auto_does_not_take_it(tmp_path: Path) -> None:
    _, (finding,) = doctor(tmp_path, EFA_STANDIN_NICS="2")
    assert finding["level"] == "hint"
    assert "standin0-rdm, standin1-rdm can be used" in finding["what"]
    assert "auto does not choose it" in finding["what"]


def test_doctor_says_that_a_nic_has_no_queue_pair_left(tmp_path: Path) -> None:
    _, (finding,) = doctor(tmp_path, EFA_STANDIN_QPS="0")
    assert finding["level"] == "wrong"
    assert "no queue pair left" in finding["what"]


def test_a_socket_carries_a_peer_for_which_a_nic_has_no_queue_pair_left(tmp_path: Path) -> None:
    said = run(tmp_path, libraries()[0], "crowded", EFA_STANDIN_QPS="1")
    assert "the NIC has no endpoint left for it" in said
    assert "the peer's NIC has no endpoint left for this engine" in said
    assert "efa socket (0, 1000)" in said


def test_without_the_fallback_such_a_peer_is_refused_and_no_socket_is_open(tmp_path: Path) -> None:
    rails, *errors = run(tmp_path, libraries()[0], "without_fallback", EFA_STANDIN_QPS="1").splitlines()
    assert rails == "rails: efa efa"
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("PeerError ")
        assert "the NIC has no queue pair left: it has 1 for all processes of this host" in error
    assert not list(tmp_path.iterdir())
