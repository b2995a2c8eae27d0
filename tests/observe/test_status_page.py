"""The page that an engine shares with its user: written whole, read with distrust, gone with its engine."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote import service
from aiote.observe import status_page
from aiote.observe.processes import ProcessId, _born, this_process
from aiote.observe.status_page import (
    HEADER,
    LARGEST,
    MAGIC,
    SHOWN_PEERS,
    VERSION,
    EngineStatus,
    ServiceStatus,
    other_versions,
    packed,
    pages,
    read_page,
)
from support.engines.opening import linked, pair, until

PATIENCE_S = 60
NAME = f"{this_process()}-1.page"
FOUND = EngineStatus(os.getpid(), "it", "aiote://it", 1, 2, [], [], {}, {})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The user's own folder, which nobody else has."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(status_page, "folders", lambda: (tmp_path / "aiote",))
    return tmp_path / "aiote"


def own() -> list[EngineStatus]:
    return [status for status in pages() if status.pid == os.getpid()]


async def test_an_engine_is_seen_from_its_opening_to_its_close(folder):
    async with linked("local") as (left, right):
        await left.write(left.register(bytearray(64)), left.attach(right.register(bytearray(64)).descriptor))
        left._lifetime.page.write()
        by_address = {status.address: status for status in own()}
        assert set(by_address) == {str(left.address), str(right.address)}
        status = by_address[str(left.address)]
        assert [rail.carried for rail in status.rails] == list(left.statistics().carried)
        assert [peer.address for peer in status.peers] == [str(right.address)]
        assert status.counts["registered_bytes"] == 64
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        await right.aclose()
        await until(lambda: not left.peers)
        assert [(one.address, one.peers) for one in own()] == [(str(left.address), [])]
    assert not list(folder.iterdir())


async def test_a_page_is_renewed_with_the_heartbeats(folder):
    async with linked("local", heartbeat_interval=0.05, heartbeat_timeout=30) as (left, _):
        left._lifetime.page._next = 0
        first = next(one for one in own() if one.address == str(left.address)).written_ns
        await until(lambda: next(one for one in own() if one.address == str(left.address)).written_ns > first)


class Slow(service.Service):
    """What runs until its caller leaves."""

    @service.method
    async def wait(self) -> None:
        """Wait."""
        await anyio.sleep_forever()


async def test_a_page_has_the_states_of_the_engine_s_services(folder):
    def states() -> list[ServiceStatus]:
        right._lifetime.page.write()
        return next(status.services for status in own() if status.address == str(right.address))

    async with linked("local") as (left, right):
        assert states() == []
        limits = service.Limits(calls=1)
        async with service.serve(right, Slow(), limits=limits) as server, anyio.create_task_group() as tasks:
            assert states() == [ServiceStatus("Slow/1", True, 0, 0)]
            slow = service.client(left, right.address, Slow)
            tasks.start_soon(slow.wait)
            tasks.start_soon(slow.wait)
            await until(lambda: server.queued == 1)
            assert states() == [ServiceStatus("Slow/1", True, 1, 1)]
            server.draining = True
            assert not states()[0].serving
            tasks.cancel_scope.cancel()
        assert states() == []


@pytest.mark.parametrize("setting", ["off", "sim"])
async def test_who_does_not_want_to_be_seen_is_not(folder, setting):
    provider, settings = ("local", {"status_page": False}) if setting == "off" else ("sim", {})
    async with linked(provider, **settings):
        assert not folder.exists()


@pytest.mark.parametrize("trouble", ["a file", "others may enter", "a link", "a full disk"])
async def test_what_cannot_be_written_is_left_out(folder, trouble, tmp_path, monkeypatch):
    if trouble == "a file":
        folder.write_text("")
    elif trouble == "others may enter":
        folder.mkdir()
        folder.chmod(0o755)
    elif trouble == "a link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    else:

        def fail(*_):
            raise OSError(28, "no space")

        monkeypatch.setattr(status_page, "_replace", fail)
    async with linked("local") as (left, right):
        await left.send(right.address, b"x")
        assert not own()
    if folder.is_dir():
        assert not list(folder.iterdir())


def test_the_page_of_a_killed_engine_is_removed(folder, tmp_path):
    program = (
        "import asyncio, aiote\nasync def main():\n async with aiote.open_engine('local'):\n"
        "  print('open', flush=True)\n  await asyncio.sleep(1e6)\nasyncio.run(main())"
    )
    command = [sys.executable, "-P", "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    ) as child:
        assert child.stdout.readline() == b"open\n"
        assert [status.pid for status in pages()] == [child.pid]
        child.send_signal(signal.SIGKILL)
    assert not list(pages())
    assert not list(folder.iterdir())


async def test_a_child_of_a_fork_leaves_the_parent_s_page(folder):
    async with pair("local") as (left, _):
        child = os.fork()
        if child == 0:
            left.abort()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once
        assert len(own()) == 2


# What a page may be that is none.


def write(folder: Path, data: bytes) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / NAME
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_a_page_says_what_was_written(folder):
    assert read_page(write(folder, packed(FOUND))) == FOUND


@given(st.binary(max_size=200), st.integers(0, 3))
def test_no_bytes_harm_the_reader(tmp_path_factory, body, how):
    folder = tmp_path_factory.getbasetemp() / "pages"
    header = HEADER.pack(MAGIC, VERSION, len(body), zlib.crc32(body))
    good = packed(FOUND)
    data = (body, header + body, good[: len(body)], good[: len(good) - len(body)] + body)[how]
    found = read_page(write(folder, data))
    assert found is None or data == packed(found) or how == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"pid": -1},
        {"rails": [["x"] * 7]},
        {"peers": [{"address": "x", "unfinished": 1}] * (SHOWN_PEERS + 1)},
        {"program": "x" * 513},
        {"counts": {"x": "many"}},
    ],
)
def test_lies_are_refused(folder, lie):
    body = msgspec.msgpack.encode({**msgspec.to_builtins(FOUND), **lie})
    assert read_page(write(folder, HEADER.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body)) is None


def test_other_versions_and_too_much_are_refused(folder):
    good = packed(FOUND)
    assert read_page(write(folder, good[:8] + struct.pack("<I", VERSION + 1) + good[12:])) is None
    assert read_page(write(folder, good + bytes(LARGEST))) is None


@pytest.mark.parametrize(
    ("age_s", "local", "named"), [(0, True, True), (3600, True, True), (0, False, True), (3600, False, False)]
)
def test_a_page_of_another_version_is_named_while_its_process_lives(folder, age_s, local, named):
    good, written = packed(FOUND), time.time() - age_s
    path = write(folder, good[:8] + struct.pack("<I", VERSION + 1) + b"anything")
    os.utime(path, (written, written))
    writer = this_process() if local else this_process()._replace(namespace=1)
    path.rename(folder / f"{writer}-1.page")
    assert list(other_versions()) == [(os.getpid(), VERSION + 1)] * named
    assert not list(pages())


@pytest.mark.parametrize("data", [b"", MAGIC, b"no page." + bytes(20), packed(FOUND), packed(FOUND)[:12]])
def test_no_other_version_is_named_of_what_is_none(folder, data):
    write(folder, data)
    assert not list(other_versions())


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "absent"])
def test_what_is_no_file_is_refused_and_never_waited_for(folder, kind, tmp_path):
    folder.mkdir(mode=0o700)
    path = folder / NAME
    if kind == "link":
        (tmp_path / "real").write_bytes(packed(FOUND))
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    assert read_page(path) is None


def test_a_page_that_names_another_process_is_not_shown(folder):
    write(folder, packed(msgspec.structs.replace(FOUND, pid=FOUND.pid + 1)))
    assert not list(pages())
    write(folder, packed(FOUND))
    assert list(pages()) == [FOUND]


def test_a_page_with_one_wrong_byte_is_not_shown(folder):
    good = packed(msgspec.structs.replace(FOUND, program="a" * 100))
    torn = good.replace(b"a" * 100, b"a" * 99 + b"b")
    assert torn != good
    assert read_page(write(folder, torn)) is None
    assert read_page(write(folder, good[:-1])) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_page_that_others_may_open_is_refused(folder, mode):
    path = write(folder, packed(FOUND))
    path.chmod(mode)
    assert read_page(path) is None


def test_what_the_dead_have_left_is_removed_whatever_it_is(folder):
    own = this_process()
    folder.mkdir(mode=0o700)
    # Its number was given to this process since.
    for name in (f"{own._replace(born=own.born - 1)}-1.page", f"{own._replace(born=own.born - 1)}-1.new"):
        (folder / name).write_bytes(b"not a page")
    kept = [f"{own}-1.page", f"{own}-1.new", f"{own._replace(namespace=1)}-1.page", "notes.page", "notes"]
    for name in kept:
        (folder / name).write_bytes(b"not a page")
    assert not list(pages())
    assert {path.name for path in folder.iterdir()} == set(kept)


@pytest.mark.parametrize(("age_s", "shown"), [(0, True), (3600, False), (-3600, False)])
def test_of_another_container_a_page_is_shown_while_it_is_fresh(folder, age_s, shown):
    status = msgspec.structs.replace(FOUND, pid=7, written_ns=time.time_ns() - age_s * 10**9)
    write(folder, packed(status)).rename(folder / f"{ProcessId(1, 7, 1)}-1.page")
    assert list(pages()) == [status] * shown
    assert len(list(folder.iterdir())) == 1


def test_a_child_that_nobody_waited_for_is_dead():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        one = this_process()._replace(pid=child.pid, born=_born(child.pid))
        assert one.alive
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not one.alive
    assert not one.alive
    assert this_process().alive


@given(st.builds(ProcessId, *[st.integers(0, 1 << 31)] * 3), st.sampled_from(["", "-1.page"]))
def test_a_process_is_its_text(one, more):
    assert ProcessId.parse(f"{one}{more}") == one


@pytest.mark.parametrize("text", ["", "1", "1-2", "1-2-", "x-1-2-3", "1--2-3", "1-2-3x", "-1-2-3", "1-99999999999-3"])
def test_what_is_no_process_is_refused(text):
    assert ProcessId.parse(text) is None


async def test_a_page_that_cannot_be_made_costs_no_peer(monkeypatch, capsys):
    async with linked("socket", heartbeat_interval=0.05, heartbeat_timeout=30) as (left, right):
        sent = left.statistics().heartbeats_sent
        left._links.heartbeats.afterwards = lambda now: 1 / 0
        left._links.heartbeats.check_soon()
        await until(lambda: left._links.heartbeats.afterwards is None)
        await until(lambda: left.statistics().heartbeats_sent > sent + 1)
        await left.send(right.address, b"x")
        assert (await right.recv()).data == b"x"
    assert "ZeroDivisionError" in capsys.readouterr().err


async def test_more_peers_than_fit_are_counted(monkeypatch):
    monkeypatch.setattr(status_page, "SHOWN_PEERS", 1)
    async with aiote.open_engine("local") as hub, linked("local") as (left, right):
        for each in (left, right):
            await each.connect(hub.address)
        await until(lambda: len(hub.peers) == 2)
        status = status_page.status_of(hub, 0)
        assert (len(status.peers), status.counts["peers"]) == (1, 2)
