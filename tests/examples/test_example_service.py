"""The service answers many clients over every provider, cancels what they cancel, and outlives those that fail."""

from __future__ import annotations

import re
import signal

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def address(program) -> str:
    program.until(lambda: "examples/client.py" in program.out, "address")
    return re.search(r"'(aiote://[^']*)'", program.out)[1]


def test_clients_are_answered_and_one_changes_its_mind(start, provider):
    service = start("service.py", provider)
    where = address(service)
    impatient = start("client.py", where, "--provider", provider, "--patience", "0", "one", "two")
    assert impatient.end() == 0
    assert impatient.out == "no answer within 0.0 s; 0 of 512 numbers had arrived\n"
    clients = [start("client.py", where, "--provider", provider, "one", "two") for _ in range(2)]
    for client in clients:
        assert client.end() == 0
        assert client.err == ""
        lines = client.out.splitlines()
        assert [line.split(":")[0] for line in lines] == ["one", "two"]
        assert all(line.endswith("... (256 numbers)") for line in lines)
    assert clients[0].out == clients[1].out
    service.send(signal.SIGINT)
    assert service.end() == 1
    assert service.err == "service.py: interrupted\n"


def test_a_client_of_a_killed_service_says_so(start):
    service = start("service.py")
    where = address(service)
    service.send(signal.SIGKILL)
    service.end()
    client = start("client.py", where, "word")
    assert client.end() == 1
    assert client.err.startswith("client.py: Embed/1.embed: peer aiote://127.0.0.1")


def test_a_peer_that_serves_nothing_is_named(start):
    # It takes messages and answers none of these.
    other = start("ping.py", "--listen")
    client = start("client.py", other.address(), "word", AIOTE_CONNECT_TIMEOUT="3")
    assert client.end() == 1
    assert "did not answer within connect_timeout; does it run aiote.service.serve?" in client.err
