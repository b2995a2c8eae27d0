"""`aiote top`: rates from two pages, and the picture in a real terminal."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from aiote.cli.top import GIB, Rates, picture
from aiote.observe.processes import this_process
from aiote.observe.status_page import (
    MAGIC,
    VERSION,
    VERSIONED,
    EngineStatus,
    PeerStatus,
    RailStatus,
    ServiceStatus,
)
from support.engines.opening import PATIENCE_S

ALONE = """
import os, pathlib
from aiote.observe import status_page
# Engines of this user's other programs, and of other tests, are not looked for.
status_page.folders = lambda: (pathlib.Path(os.environ["XDG_RUNTIME_DIR"], "aiote"),)
"""
TOP = f"""{ALONE}
import runpy, sys
sys.argv[:1] = ["aiote", "top"]
runpy.run_module("aiote", run_name="__main__")
"""
COMMAND = [sys.executable, "-P", "-c", TOP]
LOAD = f"""{ALONE}
import asyncio, aiote
async def main():
    async with aiote.open_engine("local") as left, aiote.open_engine("local") as right:
        source, target = left.register(bytearray(1 << 20)), left.attach(right.register(bytearray(1 << 20)).descriptor)
        print("open", flush=True)
        while True:
            await left.write(source, target)
            await asyncio.sleep(0.005)
asyncio.run(main())
"""


def status(
    *, pid: int = 1, ns: int = 0, carried: int = 0, counts: dict[str, int] | None = None, **more
) -> EngineStatus:
    rails = [RailStatus("lo", "socket", "up", carried, None, carried // 100, 1)]
    place = f"aiote://127.0.0.1:{pid}/ab"
    known = {"peers": 1, **(counts or {})}
    services = more.get("services", [])
    program, peers = "python3 -P serve.py --big", more.get("peers", [])
    return EngineStatus(pid, program, place, 0, ns, rails, peers, known, {"peer.lost": 2}, services)


def text(engines: list, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(engines))
    return console.export_text()


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**13)), min_size=2, max_size=5))
def test_a_rate_is_that_between_the_last_two_pages(steps):
    rates, ns, carried, before = Rates(), 0, 0, (0, 0)
    shown = rates.look([status(ns=0)])
    assert shown[0]["rails"][0]["out_gib_s"] == 0
    for more_ns, more in steps:
        before = (ns, carried) if more_ns else before
        ns, carried = ns + more_ns, carried + (more if more_ns else 0)
        (engine,) = rates.look([status(ns=ns, carried=carried)])
        seconds = (ns - before[0]) * 1e-9
        wanted = (carried - before[1]) / seconds / GIB if seconds else 0
        assert engine["rails"][0]["out_gib_s"] == pytest.approx(wanted)
        assert engine["rails"][0]["in_gib_s"] == 0


def test_an_engine_that_went_is_forgotten_and_another_s_counts_are_not_its():
    rates = Rates()
    rates.look([status(pid=1, carried=GIB), status(pid=2)])
    assert [engine["pid"] for engine in rates.look([status(pid=2, ns=10**9)])] == [2]
    (back,) = rates.look([status(pid=1, ns=2 * 10**9, carried=2 * GIB)])
    assert back["rails"][0]["out_gib_s"] == 0


@pytest.mark.parametrize(
    ("counts", "carried", "stalled"), [({"queued": 1}, 0, True), ({"queued": 1}, 900, False), ({}, 0, False)]
)
def test_work_that_does_not_move_is_called_stalled(counts, carried, stalled):
    rates = Rates()
    rates.look([status(counts=counts)])
    (engine,) = rates.look([status(ns=10**9, carried=carried, counts=counts)])
    assert engine["stalled"] is stalled
    assert ("STALLED" in text([engine])) is stalled


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_its_window(width):
    peers = [PeerStatus(f"aiote://10.0.0.{n}:7000/ab", n) for n in range(1, 9)]
    engines = Rates().look([status(ns=time.time_ns() - 10**11, peers=peers)])
    lines = text(engines, width).splitlines()
    assert max(map(len, lines)) <= width
    whole = "\n".join(lines)
    assert "serve.py" in whole
    assert "aiote://" not in whole
    if width == 200:
        assert "silent for 1.7 m" in whole
        assert "2 peer.lost" in whole
        assert "transfers to 10.0.0.1:7000 1, " in whole
        assert "python3" not in whole


def test_the_states_of_services_are_shown():
    services = [ServiceStatus("Search/1, Index/2", True, 3, 0), ServiceStatus("Old/1", False, 1, 7)]
    (engine,) = Rates().look([status(services=services)])
    assert [service["names"] for service in engine["services"]] == ["Search/1, Index/2", "Old/1"]
    lines = [line.strip() for line in text([engine]).splitlines()]
    assert "serves Search/1, Index/2: 3 running" in lines
    assert "serves Old/1: 1 running, 7 waiting, draining" in lines


@pytest.mark.parametrize(
    ("carried", "shown"), [(0, "0 B/s"), (5 << 20, "5.0 MiB/s"), (GIB, "1.00 GiB/s"), (25 * GIB, "25.00 GiB/s")]
)
def test_a_speed_has_the_unit_that_shows_it(carried, shown):
    rates = Rates()
    rates.look([status()])
    assert f" {shown} " in text(rates.look([status(ns=10**9, carried=carried)]))


def test_a_page_commands_no_terminal():
    evil = "\x1b]0;title\x07\x1b[2J\r\n\x9b31m[red]"
    rails = [RailStatus(evil, "socket", evil, 0, None, 0, 0)]
    peers = [PeerStatus(f"aiote://{evil}/ab", 1)]
    services = [ServiceStatus(evil, True, 0, 0)]
    shown = text(Rates().look([EngineStatus(1, evil, evil, 0, 0, rails, peers, {"peers": 1}, {evil: 1}, services)]))
    assert not {one for one in shown if not one.isprintable()} - {"\n"}
    assert len(shown.splitlines()) == 5
    assert "[red]" in shown


def test_nobody_is_said_to_be_there(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--once", "--interval", "0.1"], capture_output=True, text=True, env=alone(tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "this user runs no engine" in done.stdout


@pytest.mark.parametrize("wrong", [["--interval", "0"], ["--interval", "often"], ["--count", "-1"], ["--what"]])
def test_wrong_arguments_are_refused(wrong, tmp_path):
    done = subprocess.run([*COMMAND, *wrong], capture_output=True, text=True, env=alone(tmp_path))
    assert done.returncode == 2
    assert wrong[0] in done.stderr


def test_a_page_of_another_version_is_named_and_not_parsed(tmp_path):
    folder = tmp_path / "aiote"
    folder.mkdir(mode=0o700)
    page = folder / f"{this_process()}-1.page"
    page.write_bytes(VERSIONED.pack(MAGIC, VERSION + 1) + b"\x1b[2J")
    page.chmod(0o600)

    def said(*options: str) -> str:
        command = [*COMMAND, "--once", "--interval", "0.1", *options]
        return subprocess.run(command, capture_output=True, text=True, env=alone(tmp_path), check=True).stdout

    assert json.loads(said("--json")) == {
        "engines": [],
        "other_versions": [{"pid": os.getpid(), "version": VERSION + 1}],
    }
    shown = said()
    assert f"{os.getpid()} page of version {VERSION + 1}" in shown
    assert "\x1b" not in shown


def alone(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "100"}


@pytest.fixture
def load(tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes from one engine of its to another."""
    with subprocess.Popen([sys.executable, "-P", "-c", LOAD], stdout=subprocess.PIPE, env=alone(tmp_path)) as child:
        assert child.stdout.readline() == b"open\n"
        yield child
        child.kill()


def of(engines: list[dict], pid: int) -> list[dict]:
    return [engine for engine in engines if engine["pid"] == pid]


def test_json_has_the_rates_of_a_process_under_load(load, tmp_path):
    with subprocess.Popen(
        [*COMMAND, "--json", "--interval", "0.2"], stdout=subprocess.PIPE, env=alone(tmp_path)
    ) as top:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline
            engines = of(json.loads(top.stdout.readline())["engines"], load.pid)
            out = sum(rail["out_gib_s"] for engine in engines for rail in engine["rails"])
            taken = sum(rail["in_gib_s"] for engine in engines for rail in engine["rails"])
            if len(engines) == 2 and out and taken:
                break
        top.send_signal(signal.SIGINT)
        assert top.wait(PATIENCE_S) == 0
    assert {engine["counts"]["peers"] for engine in engines} == {1}


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux (Debian: apt-get install tmux)")
def test_a_terminal_shows_it_live_until_ctrl_c(load, tmp_path):
    name, tmux = f"aiote-top-{os.getpid()}", ["tmux", "-L", f"aiote-{os.getpid()}", "-f", "/dev/null"]

    def screen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p", "-t", name], capture_output=True, text=True).stdout

    def until(wanted: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in (shown := screen()):
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        return shown

    script = tmp_path / "top.py"
    script.write_text(TOP)
    shell = ["env", f"XDG_RUNTIME_DIR={tmp_path}", "sh"]
    subprocess.run([*tmux, "new-session", "-d", "-s", name, "-x", "100", "-y", "30", *shell], check=True)
    try:
        subprocess.run(
            [
                *tmux,
                "send-keys",
                "-t",
                name,
                shlex.join([sys.executable, "-P", str(script), "--interval", "0.2"]),
                "Enter",
            ],
            check=True,
        )
        shown = until(f"{load.pid} ")
        assert "out  " in until("MiB registered"), shown
        load.kill()
        until("this user runs no engine")
        subprocess.run([*tmux, "send-keys", "-t", name, "C-c"], check=True)
        subprocess.run([*tmux, "send-keys", "-t", name, "echo it ended with $?", "Enter"], check=True)
        shown = until("it ended with 0")
        assert "Traceback" not in shown
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


def test_json_lines_are_of_what_they_say(load, tmp_path):
    done = subprocess.run([*COMMAND, "--json", "--once", "--interval", "0.1"], capture_output=True, env=alone(tmp_path))
    (line,) = done.stdout.splitlines()
    for engine in of(json.loads(line)["engines"], load.pid):
        assert msgspec.convert(engine["rails"][0]["carried"], int) >= 0
        assert engine["up_s"] >= 0
