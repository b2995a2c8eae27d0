"""What the HTTP servers of examples/kvcache bear: heads, bodies and readers that are long or slow."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from support.process.examples import EXAMPLES, PATIENCE_S

TOKEN = "a token"
HEAD = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "kvcache"), *sys.path])
    import web

    return web


@pytest.fixture
def soon(web, monkeypatch):
    """Make a limit short: what is tested is that there is one."""
    return lambda name: monkeypatch.setattr(web, name, 0.2)


def asked(web, ask, produce=None):
    """Serve an application that echoes bodies and streams what `produce` does; return what a client makes of it."""
    return anyio.run(served, web, ask, produce)


async def served(web, ask, produce):
    calls = web.Calls()

    async def echo(request):
        return web.JSONResponse(await web.body_of(request, dict))

    async def stream(_):
        return web.Answer(calls, produce, "text/plain")

    app = web.application([web.Route("/echo", echo, methods=["POST"]), web.Route("/stream", stream)])
    args = argparse.Namespace(host="127.0.0.1", port=0, advertise=None)
    with anyio.fail_after(PATIENCE_S):
        async with web.http(app, args, SimpleNamespace(), TOKEN, calls) as url:
            port = int(url.rpartition(":")[2])
            return await anyio.to_thread.run_sync(connected, port, ask)


def connected(port, ask):
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        return ask(client)


def until_closed(client):
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("said", [b"", b"GET /stream HTTP/1.1\r\nHost: loc"], ids=["nothing", "a part"])
def test_who_does_not_finish_a_head_is_disconnected(web, soon, said):
    soon("HEAD_S")

    def ask(client):
        client.sendall(said)
        return until_closed(client)

    assert asked(web, ask) == b""


def test_the_head_of_a_second_request_has_a_limit_too(web, soon):
    soon("HEAD_S")

    def ask(client):
        client.sendall(f"GET /nothing HTTP/1.1\r\n{HEAD}\r\n".encode())
        answered = b""
        while not answered.endswith(b"}}"):
            piece = client.recv(65536)
            assert piece, answered
            answered += piece
        client.sendall(b"GET /nothing HTTP/1.1\r\n")
        return until_closed(client)

    assert asked(web, ask) == b""


@pytest.mark.parametrize("target", ["[", "//[", "/%ff%00", "*", "http://[/"])
def test_an_odd_target_is_not_found(web, target):
    def ask(client):
        client.sendall(f"GET {target} HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n".encode())
        return until_closed(client)

    assert asked(web, ask).split(b" ")[1] in (b"400", b"404")


def test_a_head_that_is_too_long_is_refused(web):
    def ask(client):
        client.sendall(f"GET /stream HTTP/1.1\r\n{HEAD}X: {'x' * (web.HEAD_BYTES + 1)}".encode())
        return until_closed(client)

    assert asked(web, ask).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_takes_long_is_refused(web, soon):
    soon("BODY_S")

    def ask(client):
        head = f"POST /echo HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\nContent-Length: 10\r\n\r\n"
        client.sendall(head.encode() + b"{")
        return until_closed(client)

    answer = asked(web, ask)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the body did not arrive")


def test_a_body_that_ends_at_no_length_is_refused(web):
    def ask(client):
        head = f"POST /echo HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(2 * web.BODY_BYTES // 0x10000):
                client.sendall(piece)
        except OSError:
            pass  # the server has stopped reading
        return client.recv(65536)

    assert asked(web, ask).startswith(b"HTTP/1.1 413 ")


def test_who_does_not_read_ends_its_own_request(web, soon):
    soon("SEND_S")
    over = threading.Event()

    async def produce(emit):
        try:
            while True:
                await emit(b"x" * 65536)
        except anyio.get_cancelled_exc_class():
            over.set()
            raise

    def ask(client):
        client.sendall(f"GET /stream HTTP/1.1\r\n{HEAD}\r\n".encode())
        return over.wait(PATIENCE_S)

    assert asked(web, ask, produce)
