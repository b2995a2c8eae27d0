"""Whom the servers of examples/kvcache answer, and the URL that others are told."""

from __future__ import annotations

import argparse
import os
import sys
from types import SimpleNamespace

import httpx
import pytest
from starlette.responses import PlainTextResponse

from support.process.examples import EXAMPLES

TOKEN = "a token"
RIGHT = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "kvcache"), *sys.path])
    import web

    return web


ASKED = [
    ("GET", "/", RIGHT, "127.0.0.1:8000", 200),
    ("POST", "/", {"authorization": f"bearer {TOKEN}"}, "[::1]:8000", 200),
    ("GET", f"/?token={TOKEN}", {}, "localhost:8000", 200),
    ("GET", "/", RIGHT, "router.example", 200),
    ("POST", f"/?token={TOKEN}", {}, "localhost:8000", 401),  # what a form of another page could send
    ("GET", "/", {}, "localhost", 401),
    ("GET", "/health", {}, "localhost", 200),
    ("GET", "/health", {}, "evil.example", 403),
    ("GET", "/metrics", {}, "localhost", 401),
    ("GET", "/?token=", {}, "localhost", 401),
    ("GET", "/", {"authorization": f"Basic {TOKEN}"}, "localhost", 401),
    ("GET", "/?token=\u00e9", {"authorization": "Bearer a"}, "localhost", 401),
    ("GET", "/", RIGHT, "evil.example:8000", 403),  # a page whose own name was resolved to this address
    ("GET", "/", RIGHT, "127.0.0.1.evil.example", 403),
    ("GET", "/", RIGHT, "[::1", 403),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path", "headers", "host", "status"), ASKED)
async def test_only_requests_with_the_token_and_a_known_host_are_answered(web, method, path, headers, host, status):
    app = web.Guard(PlainTextResponse("well"), TOKEN, ("router.example",), "http://here")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        answer = await client.request(method, path, headers={**headers, "host": host})
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("0.0.0.0", None, "10.0.0.1"),
        ("::", None, "10.0.0.1"),
        ("0.0.0.0", "router.example", "router.example"),
    ],
)
def test_what_others_are_told_can_be_reached(web, host, advertise, told):
    engine = SimpleNamespace(address=SimpleNamespace(host="10.0.0.1"))
    assert web.reachable(argparse.Namespace(host=host, advertise=advertise), engine) == told


def test_a_member_without_the_token_does_not_start(start):
    environment = {name: "" for name in ("KVCACHE_TOKEN",) if name in os.environ}
    program = start("kvcache/decode.py", "--registry", "aiote://127.0.0.1:1", **environment)
    assert program.end() == 1
    assert "KVCACHE_TOKEN is not set" in program.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--page-tokens", "0"], "--page-tokens: expected at least 1, got 0"),
        (["--slots", "0"], "--slots: expected at least 1, got 0"),
        (["--layers", "0"], "--layers: expected at least 1, got 0"),
        (["--port", "65536"], "--port: expected from 0 to 65535, got 65536"),
        (["--lease", "nan"], "--lease: expected from 0.1 to 600.0, got nan"),
        (["--prefill", "-1"], "--prefill: expected at least 0, got -1"),
        (["--decode", "two"], "--decode: invalid number value: 'two'"),
    ],
)
def test_numbers_that_make_no_cluster_are_refused_before_anything_is_started(web, monkeypatch, capsys, given, says):
    import cluster

    monkeypatch.setattr(sys, "argv", ["cluster.py", *given])
    with pytest.raises(SystemExit, match="2"):
        cluster.arguments()
    assert says in capsys.readouterr().err


def test_numbers_of_a_cluster_are_as_they_were_given(web, monkeypatch):
    import cluster

    monkeypatch.setattr(sys, "argv", ["cluster.py", "--prefill", "3", "--slower", "0.5"])
    given = cluster.arguments()
    assert (given.prefill, given.decode, given.slower, given.port) == (3, 2, 0.5, 8000)
