"""`aiote prove` over two machines, and a run that ends early: Ctrl-C, or the other machine is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from aiote.cli import prove_wire
from aiote.cli.prove_wire import FarLost, FarRefused, Frames, Greeting, exchange, place, serve
from aiote.testing.contract import CHECKS
from support.network import namespaces
from support.process.prove_sides import AIOTE, KEY, OTHER_KEY, connected, listening, statuses

NAMES = [check.name for check in CHECKS]


@pytest.mark.parametrize("what", ["socket", "local"])
def test_every_check_passes_between_two_processes(what, tmp_path):
    with listening(what) as (_, there):
        status, report, said = connected(tmp_path, what, there)
    assert (status, said) == (0, "")
    assert statuses(report) == {**dict.fromkeys(NAMES, "passed"), "pulled-rail": "not run"}
    assert report["far"]["aiote"] == report["machine"]["aiote"]
    assert report["far"]["host"] == "the same"


@pytest.mark.needs_namespaces
def test_socket_passes_between_two_namespaces_and_local_is_not_tried(tmp_path):
    with namespaces.Network() as network:
        near, far = network.enter(1), network.enter(0)
        for what, wanted in (("socket", (0, "passed")), ("local", (2, "not run"))):
            with listening(what, at=f"{namespaces.HOSTS[0]}:0", before=far) as (_, there):
                status, report, _ = connected(tmp_path, what, there, before=near)
            found = statuses(report)
            assert found.pop("pulled-rail") == "not run"
            assert (status, set(found.values())) == (wanted[0], {wanted[1]})
            assert not any(host in json.dumps(report) for host in namespaces.HOSTS)


def test_a_lost_listener_makes_the_report_partial(tmp_path):
    with listening("socket") as (one, there):
        status, report, _ = connected(tmp_path, "socket", there, after="exact-counts", act=lambda _: one.kill())
    assert status == 2
    assert report["partial"].startswith("the other machine was lost during")
    assert "PARTIAL" in report["conclusion"]
    found = statuses(report)
    assert list(found) == NAMES
    assert found["writes"] == "passed"
    assert (found["registration"], set(found.values())) == ("not run", {"passed", "not run"})


def test_after_an_interrupt_the_report_is_partial(tmp_path):
    with listening("socket") as (_, there):
        interrupt = lambda run: run.send_signal(signal.SIGINT)  # noqa: E731
        status, report, said = connected(tmp_path, "socket", there, after="exact-counts", act=interrupt)
        assert (status, said) == (130, "aiote: interrupted\n")
        assert report["partial"].startswith("interrupted during")
        # The listener serves the next one.
        _, report, _ = connected(tmp_path, "socket", there, after="writes", act=interrupt)
        assert statuses(report)["writes"] == "passed"


@pytest.mark.parametrize(
    ("what", "key", "says"),
    [("socket", OTHER_KEY, "another cluster key"), ("local", KEY, "the other side proves socket, this one local")],
)
def test_a_side_that_does_not_fit_is_one_sentence(what, key, says, tmp_path):
    with listening("socket") as (_, there):
        status, report, said = connected(tmp_path, what, there, key=key)
    assert (status, report, said.count("\n")) == (2, {}, 1)
    assert says in said


def test_without_a_listener_the_sentence_says_what_to_start(tmp_path):
    with listening("socket") as (one, there):
        one.kill()
        one.wait()
        status, _, said = connected(tmp_path, "socket", there)
    assert (status, said.count("\n")) == (2, 1)
    assert "aiote prove socket --listen" in said


def test_a_listener_without_a_key_stays_on_loopback():
    environment = {name: value for name, value in os.environ.items() if name != "AIOTE_CLUSTER_KEY"}
    done = subprocess.run([*AIOTE, "socket", "--listen", "0.0.0.0"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "AIOTE_CLUSTER_KEY" in done.stderr


@contextlib.asynccontextmanager
async def connection() -> AsyncIterator[tuple[anyio.abc.SocketStream, anyio.abc.SocketStream]]:
    """Yield both ends of a TCP connection."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        near = await anyio.connect_tcp("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        async with near, await listener.listeners[0].accept() as far:
            yield near, far


async def greeted(ours: Greeting, theirs: Greeting) -> list[str]:
    """Have two sides greet each other; return both sentences, empty for a side that accepts the other."""
    said = ["", ""]

    async def greet(side: int, stream: anyio.abc.SocketStream, greeting: Greeting) -> None:
        try:
            await exchange(Frames(stream), greeting)
        except (FarRefused, FarLost) as error:
            said[side] = str(error)

    async with connection() as (near, far), anyio.create_task_group() as tasks:
        tasks.start_soon(greet, 0, far, ours)
        tasks.start_soon(greet, 1, near, theirs)
    return said


def test_another_version_is_told_on_both_sides(monkeypatch):
    versions = iter(("0.2.0", "0.1.0"))
    monkeypatch.setattr(prove_wire.metadata, "version", lambda _: next(versions))
    told = anyio.run(greeted, Greeting(True, "efa", b"key"), Greeting(False, "efa", b"key"))
    assert all("install one version on both" in each for each in told)
    assert all("0.1.0" in each and "0.2.0" in each for each in told)


@pytest.mark.parametrize("keys", [(b"one", b"other"), (None, b"one"), (b"one", None)])
def test_another_key_is_refused_by_both_sides(keys):
    told = anyio.run(greeted, Greeting(True, "efa", keys[0]), Greeting(False, "efa", keys[1]))
    assert all("another cluster key" in each for each in told)


@pytest.mark.parametrize("key", [None, b"key"])
def test_sides_that_fit_accept_each_other(key):
    assert anyio.run(greeted, Greeting(True, "efa", key), Greeting(False, "efa", key)) == ["", ""]


def test_the_roles_are_part_of_the_proof():
    assert all("another cluster key" in each for each in anyio.run(greeted, *[Greeting(True, "efa", b"key")] * 2))


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\0\0\0\1\xc0", b"\0\0\0\2\x91\1", b""]
)
def test_a_stranger_is_refused(sent):
    async def run() -> None:
        async with connection() as (stranger, stream):
            await (stranger.send(sent) if sent else stranger.send_eof())
            with pytest.raises((FarRefused, FarLost)):
                await exchange(Frames(stream), Greeting(True, "efa", b"key"))

    anyio.run(run)


def test_a_question_ends_with_its_connection():
    """A listener whose engine waits for a count does not wait for a side that is gone."""

    async def run() -> None:
        async def answer(name: str, arguments: list[Any]) -> None:
            asked.set()
            await anyio.sleep_forever()

        asked = anyio.Event()
        async with connection() as (near, far), anyio.create_task_group() as tasks:
            tasks.start_soon(serve, Frames(far), answer)
            await Frames(near).send(["wait", [7, 1]])
            await asked.wait()
            await near.aclose()

    anyio.run(run)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h", ("h", 18516)),
        ("h:5", ("h", 5)),
        (":5", ("127.0.0.1", 5)),
        ("[::1]", ("::1", 18516)),
        ("[::1]:5", ("::1", 5)),
    ],
)
def test_a_place_is_read(text, found):
    assert place(text) == found
