"""The ping in one command and in two, with a key, and with either side interrupted or killed."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

FOREVER = ("--count", "1000000000")
REPORT = re.compile(r"(local|socket|tcp|shm)\S*: (\d+) round trips of (\d+) bytes: p50 [\d.]+ us, p99 [\d.]+ us\n")
KEY = "a secret of sixteen bytes or more"


def test_one_command_runs_both_sides(start, provider):
    program = start("ping.py", "--provider", provider, "--count", 20, "--size", 70000)
    assert program.end() == 0
    assert REPORT.fullmatch(program.out).groups() == (provider, "20", "70000")
    assert program.err == ""


def test_two_sides_with_a_key_measure_and_end(start):
    server = start("ping.py", "--listen", "--once", AIOTE_CLUSTER_KEY=KEY)
    client = start("ping.py", "--connect", server.address(), "--count", 5, AIOTE_CLUSTER_KEY=KEY)
    assert client.end() == 0
    assert REPORT.fullmatch(client.out)
    assert server.end() == 0
    assert server.err == ""


def test_another_key_is_refused(start):
    server = start("ping.py", "--listen", "127.0.0.1", AIOTE_CLUSTER_KEY=KEY)
    address = server.address()
    other = start("ping.py", "--connect", address, AIOTE_CLUSTER_KEY="another secret of enough bytes")
    none = start("ping.py", "--connect", address, AIOTE_CLUSTER_KEY="")
    assert (other.end(), none.end()) == (1, 1)
    assert "cluster keys differ" in other.err
    assert "the acceptor has a cluster key and the initiator has none" in none.err
    assert other.out == none.out == ""


WRONG = [
    (["--count", "0"], 2, "'0' is not a positive number"),
    (["--size", "x"], 2, "'x' is not a positive number"),
    (["--listen", "--connect", "aiote://127.0.0.1:1"], 2, "--listen and --connect"),
    (["--once"], 2, "--once needs --listen"),
    (["--connect", "nowhere"], 1, "'nowhere'"),
    (["--connect", "aiote://127.0.0.1:1"], 1, "its control port cannot be reached"),
    (["--listen", "0.0.0.0"], 1, "loopback only"),
]


def test_wrong_arguments_are_refused_with_the_reason(start):
    programs = [start("ping.py", *arguments, AIOTE_CLUSTER_KEY="") for arguments, _, _ in WRONG]
    for program, (_, status, said) in zip(programs, WRONG, strict=True):
        assert program.end() == status
        assert said in program.err
        assert program.out == ""


def test_the_answering_side_outlives_a_killed_client(start):
    server = start("ping.py", "--provider", "shm", "--listen")
    doomed = start("ping.py", "--provider", "shm", "--connect", server.address(), *FOREVER)
    server.until(lambda: "a client at 127.0.0.1" in server.err, "client")
    doomed.send(signal.SIGKILL)
    assert doomed.end() == -signal.SIGKILL
    client = start("ping.py", "--provider", "shm", "--connect", server.address(), "--count", 5)
    assert client.end() == 0
    assert REPORT.fullmatch(client.out)


@pytest.mark.parametrize(
    ("provider", "number", "status"),
    [("tcp", signal.SIGINT, 130), ("tcp", signal.SIGKILL, -signal.SIGKILL), ("shm", signal.SIGKILL, -signal.SIGKILL)],
)
def test_the_measuring_side_ends_with_the_answering_one(start, provider, number, status):
    server = start("ping.py", "--provider", provider, "--listen")
    client = start("ping.py", "--provider", provider, "--connect", server.address(), *FOREVER)
    server.until(lambda: "a client at 127.0.0.1" in server.err, "client")
    server.send(number)
    assert server.end() == status
    assert client.end() == 1
    assert client.err.startswith("ping.py: ")
    assert client.out == ""


def test_interrupting_one_command_ends_both_sides(start, provider):
    program = start("ping.py", "--provider", provider, *FOREVER)
    program.until(program.children, "other side")
    (other,) = program.children()
    program.send(signal.SIGINT)
    assert program.end() == 130
    assert program.err.endswith("ping.py: interrupted\n")
    assert not Path(f"/proc/{other}").exists()


def libraries() -> list[str]:
    """Return the wheel's libfabric and the system's."""
    found = [Path(sys.prefix, "lib", "mpich", "libfabric.so.1"), *Path("/usr/lib").glob("*-linux-gnu/libfabric.so.1")]
    return [str(path) for path in found if path.exists()]


@pytest.mark.skipif(len(libraries()) < 2, reason="needs two versions of libfabric: the extra and the system's")
def test_two_versions_of_libfabric_refuse_each_other(start, provider):
    newer, older = libraries()[:2]
    server = start("ping.py", "--provider", provider, "--listen", AIOTE_LIBFABRIC=newer)
    client = start("ping.py", "--provider", provider, "--connect", server.address(), AIOTE_LIBFABRIC=older)
    assert client.end() == 1
    assert "no rail in common" in client.err
    assert client.out == ""
