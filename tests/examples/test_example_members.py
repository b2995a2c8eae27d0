"""Servers are found by their role, share the calls, and leave in order."""

from __future__ import annotations

import re
import signal

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def who(client) -> list[str]:
    assert client.end() == 0
    assert client.err == ""
    return re.findall(r"says (square-\d+)", client.out)


def test_calls_are_shared_and_go_to_who_is_there(start):
    registry = start("members.py", "registry")
    where = registry.address()
    waiting = start("members.py", "call", where, 2, 3)
    servers = [start("members.py", "serve", where)]
    names = [servers[0].address()]
    assert who(waiting) == names * 2
    assert waiting.out.startswith("2 * 2 = 4, says")
    servers += [start("members.py", "serve", where) for _ in range(2)]
    names += [server.address() for server in servers[1:]]
    assert set(who(start("members.py", "call", where, *range(200)))) == set(names)
    servers[0].send(signal.SIGKILL)
    servers[0].end()
    servers[1].send(signal.SIGINT)
    assert servers[1].end() == 1
    assert servers[1].err == "members.py: interrupted\n"
    assert set(who(start("members.py", "call", where, *range(10)))) == {names[2]}


def test_what_is_no_registry_is_named(start):
    other = start("members.py", "serve", "nonsense")
    assert other.end() == 2
    assert "members.py: error: argument registry" in other.err
