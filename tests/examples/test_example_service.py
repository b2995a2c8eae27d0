"""The service answers over every provider, and outlives requests that make no sense."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def test_both_sides_in_one_process(start, provider):
    program = start("service.py", "--provider", provider, "--text", "aabbbc")
    assert program.end() == 0
    assert program.out == "6 bytes; most often: 'b' 3, 'a' 2, 'c' 1\n"
    assert program.err == ""


def test_many_clients_and_one_that_makes_no_sense(start):
    service = start("service.py", "--listen")
    # Its first message is taken for a request, whose text and descriptor are nonsense; it never gets an answer.
    stranger = start("ping.py", "--connect", service.address())
    service.until(lambda: "a request failed" in service.err, "complaint")
    texts = ["x", "xx"]
    clients = [start("service.py", "--connect", service.address(), "--text", text) for text in texts]
    for client, text in zip(clients, texts, strict=True):
        assert client.end() == 0
        assert client.out.startswith(f"{len(text)} bytes; most often: 'x' {len(text)}, ")
    service.send(signal.SIGINT)
    assert service.end() == 130
    assert stranger.end() == 1


def test_a_client_of_a_killed_service_says_so(start):
    # A program that takes requests and never answers.
    service = start("ping.py", "--listen")
    client = start("service.py", "--connect", service.address())
    service.until(lambda: "a client failed" in service.err, "request")
    service.send(signal.SIGKILL)
    assert client.end() == 1
    assert client.err.startswith("service.py: peer aiote://127.0.0.1")
    assert client.out == ""


def test_a_text_longer_than_a_message_is_refused(start):
    program = start("service.py", "--text", "x" * 20000)
    assert program.end() == 1
    assert "the peer takes at most 16384" in program.err


def test_two_roles_at_once_are_refused(start):
    program = start("service.py", "--listen", "--connect", "aiote://127.0.0.1:1")
    assert program.end() == 2
    assert "--listen and --connect" in program.err
