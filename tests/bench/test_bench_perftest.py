"""linux-rdma's perftest as a contestant: what is started, and what is made of what it says."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.bench import perftest
from aiote.bench.contestants import perftest as contestants
from aiote.bench.perftest import WorkerError, command_of, result_of
from aiote.bench.records import value_of
from aiote.bench.work import Work

LINE = "-" * 87
BANDWIDTH = f"""{LINE}
 local address: LID 0000 QPN 0x0011 PSN 0x63d16e RKey 0x000290 VAddr 0x00000040587000
{LINE}
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
%s
{LINE}
"""
LATENCY = f"""{LINE}
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99%% percentile[usec]   99.9%% percentile[usec]
%s
{LINE}
"""  # noqa: E501 - its words


def test_bandwidth_as_6_06_says_it():
    work = Work("write", 65536, 16, 500)
    answer = result_of(work, BANDWIDTH % " 65536      500              691.13             582.34 \t\t   0.009317")
    assert value_of(work, answer) * 1024 == pytest.approx(582.34, rel=1e-3)


def test_latency_as_6_06_says_it():
    row = " 8       500          68.92          307.46       81.03    \t 84.92 \t13.86  \t\t144.15  \t\t307.46 "
    answer = result_of(Work("latency", 8, 1, 500), LATENCY % row)
    assert answer["p50_us"] == pytest.approx(162.06)
    assert answer["p99_us"] == pytest.approx(288.3)
    assert answer["max_us"] == pytest.approx(614.92)
    assert answer["seconds"] == pytest.approx(500 * 2 * 84.92e-6)


@pytest.mark.parametrize(
    "row",
    [
        " 65536      500              0.00               0.00   \t\t   0.000000",
        " 65536      500              inf               inf   \t\t   inf",
        " 65536      500              nan               nan   \t\t   nan",
    ],
)
def test_a_clock_that_does_not_run_is_told(row):
    with pytest.raises(WorkerError, match="cycle counter"):
        result_of(Work("write", 65536, 16, 500), BANDWIDTH % row)
    lowest = " 65536       500          inf            inf          inf      \t  inf   \t-nan   \t\tinf     \t\tinf    "
    with pytest.raises(WorkerError, match="cycle counter"):
        result_of(Work("latency", 65536, 1, 500), LATENCY % lowest)


@given(st.text(), st.sampled_from(["write", "latency", "rate"]))
def test_any_output_is_a_result_or_an_error(said, op):
    work = Work(op, 8, 1, 5)
    for text in (said, f" 8  5  {said}", f" 8 5 1 2 3 {said}"):
        try:
            assert result_of(work, text)["seconds"] > 0
        except WorkerError:
            continue


def test_the_command_of_perftest_is_that_of_the_work():
    place = "rxe0:1:3"
    write = command_of(Work("write", 65536, 16, 900), "spin", place)
    assert " ".join(write) == "ib_write_bw -d rxe0 -i 1 -x 3 -F -s 65536 -n 900 -t 16"
    assert command_of(Work("latency", 8, 1, 900), "spin", place)[0] == "ib_write_lat"
    assert command_of(Work("latency", 8, 1, 900), "event", place)[:2] == ["ib_send_lat", "-e"]
    assert "-e" in command_of(Work("send", 8, 1, 900), "event", place)
    assert command_of(Work("read", 8, 64, 900), "spin", place)[-2:] == ["-t", "16"]
    # Of fewer than five requests they want to hear nothing.
    assert command_of(Work("rate", 8, 1, 1), "spin", place)[-3:-2] == ["5"]
    with pytest.raises(WorkerError, match="cannot measure pages"):
        command_of(Work("pages", 8, 1, 1, 5), "spin", place)


def test_a_machine_without_perftest_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert contestants("") == []
    for name in {*perftest.BANDWIDTH.values(), "ib_write_lat", "ib_send_lat"}:
        program(tmp_path / name, "exit 0")
    (one,) = contestants("mlx5_0")
    assert one.providers == ("verbs",)
    assert one.command[-1] == "--rails=mlx5_0"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


LISTENS = """
for word; do last=$word; done
case "$*" in
  *--version*) echo "Version: 9.99";;
  *127.0.0.1*) {client};;
  *) {server};;
esac
"""


@pytest.mark.parametrize(
    ("client", "server", "why"),
    [
        ("exit 0", "echo cannot bind; exit 1", "cannot bind"),
        ("echo no route; exit 3", "{listen}", "exit status 3: no route"),
        ("echo hello", "{listen}", "no figures in its output: 'hello'"),
    ],
)
def test_a_perftest_that_fails_says_why(tmp_path, client, server, why):
    """With programs that fail in its place, on a tree that has a port."""
    serve = "import socket, sys, time; kept = socket.create_server((str(), int(sys.argv[1]))); time.sleep(9)"
    listen = f"exec {sys.executable} -P -c '{serve}' $last"
    text = LISTENS.format(client=client, server=server.replace("{listen}", listen))
    for name in ("ib_write_bw", "ib_write_lat"):
        program(tmp_path / name, text)
    answers = speak(tmp_path)
    assert any(why in str(answer) for answer in answers), answers
    assert not any("Traceback" in str(answer) for answer in answers)


def speak(folder: Path) -> list[dict[str, object]]:
    """Start both sides with these programs, on a made-up port, and return what they answer until one fails."""
    stub = f"import aiote.bench.perftest as p; p.ports_of = lambda *_: [({PORT}, {GID})]; raise SystemExit(p.main())"
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    sides = {
        role: subprocess.Popen(
            [sys.executable, "-P", "-c", f"from types import SimpleNamespace as N; {stub}", "--role", role, *REST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for role in ("target", "initiator")
    }
    answers = []

    def ask(role: str, line: str) -> bool:
        sides[role].stdin.write(f"{line}\n")
        sides[role].stdin.flush()
        return hear(role)

    def hear(role: str) -> bool:
        answers.append(json.loads(sides[role].stdout.readline()))
        return not {"error", "unsupported"} & set(answers[-1])

    run = Work("write", 8, 1, 5).line()
    try:
        assert hear("target")
        place = answers[-1]["address"]
        assert hear("initiator")
        steps = [("initiator", f"peer {place}"), ("target", "peer -"), ("target", run), ("initiator", run)]
        _ = all(ask(role, line) for role, line in steps) and ask("initiator", "go")
    finally:
        for side in sides.values():
            side.stdin.close()
            side.stdout.close()
            side.wait(20)
    return answers


PORT = "N(device='rxe0', number=1)"
GID = "N(index=1)"
REST = ["--provider", "verbs", "--mode", "spin", "--arena", "1", "--cpu", "-1"]
