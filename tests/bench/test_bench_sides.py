"""Workers that fail, hang, end or lie, and what the driver makes of them."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from aiote.bench.contestants import Contestant, Setting
from aiote.bench.measure import Measurement, RunPlan, arena_for, measure
from aiote.bench.order_statistics import Spread
from aiote.bench.remote import Listener, TargetMachine, parse_place, parse_request
from aiote.bench.sides import BenchError, LocalSide, Pair, Unsupported
from aiote.bench.work import Work

FAKE = textwrap.dedent(
    """
    import json, sys
    def say(**answer):
        print(json.dumps(answer), flush=True)
    say(address="here", library="fake 1.0")
    result = dict(RESULT)
    for line in sys.stdin:
        word = line.split()[0]
        if word == "peer": say(ready=True)
        elif word == "run":
            count = int(dict(w.split("=") for w in line.split()[1:])["count"])
            REFUSE
            say(prepared=True)
        elif word == "go":
            say(**{name: value * count if name in ("seconds", "cpu") else value for name, value in result.items()})
        elif word == "quit": break
    """
)
GOOD = {"seconds": 0.001, "cpu": 0.001, "verified": True}


def fake(result=GOOD, refuse="pass") -> LocalSide:
    program = FAKE.replace("RESULT", repr(result)).replace("REFUSE", refuse)
    return LocalSide("fake", [sys.executable, "-c", program])


def side(program: str) -> LocalSide:
    return LocalSide("odd", [sys.executable, "-c", program])


def pair(name="aiote", target=GOOD, initiator=GOOD, refuse="pass") -> Pair:
    made = Pair(name, fake(target, refuse), fake(initiator, refuse))
    made.meet()
    return made


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("", "ended without an answer"),
        ("print('nonsense', flush=True); input()", "not an answer"),
        ("print('[1]', flush=True); input()", r"\[1\]"),
        ('print(\'{"error": "no memory"}\', flush=True); input()', "odd: no memory"),
        ("import time; time.sleep(60)", "no answer within 0 s"),
    ],
)
def test_what_is_no_answer_is_an_error_with_the_reason(program, why):
    worker = side(program)
    try:
        with pytest.raises(BenchError, match=why):
            worker.receive(0.3 if "sleep" in program else 20)
    finally:
        worker.close()


def test_a_worker_that_does_not_end_is_killed():
    worker = side(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True)\ntime.sleep(60)"
    )
    worker.receive()
    before = time.monotonic()
    worker.close()
    assert time.monotonic() - before < 30
    assert worker._process.returncode == -9


def test_telling_a_worker_that_is_gone_says_what_it_said_last():
    worker = side('print(\'{"error": "out of luck"}\', flush=True)')
    worker._process.wait()
    try:
        with pytest.raises(BenchError, match="out of luck"):
            for _ in range(3):
                worker.send("run")
    finally:
        worker.close()


def test_what_one_side_cannot_do_leaves_the_pair_usable():
    with pair(
        refuse="say(unsupported='no reads') if 'op=read' in line else None; \n        if 'op=read' in line: continue"
    ) as made:
        with pytest.raises(Unsupported, match="no reads"):
            made.run(Work("read", 8, 1, 1).line())
        assert made.run(Work("write", 8, 1, 1).line())[0]["verified"]


def test_runs_alternate_and_the_cold_one_is_kept_apart():
    with (
        pair("raw", initiator={**GOOD, "seconds": 0.001}) as raw,
        pair("aiote", initiator={**GOOD, "seconds": 0.002}) as ours,
    ):
        entries = [Measurement(raw), Measurement(ours, "asyncio")]
        records = measure(entries, Work("rate", 8, 4, 4), Setting("shm", mode="event"), RunPlan(runs=3, seconds=0.8))
    base, record = records
    assert [r.contestant for r in records] == ["raw", "aiote"]
    assert base.ratio is None
    assert record.ratio == Spread(0.5, 0.5, 0.5)
    assert (record.runs, record.unit, record.cold, record.library) == (3, "ops/s", 500.0, "fake 1.0")
    assert record.value == Spread(500.0, 500.0, 500.0)
    assert entries[0].count == 2 * entries[1].count, "each is given what takes as long"
    assert (record.congestion, record.disturbed) == ("", 0)


def test_a_spinning_process_that_shares_its_core_is_measured_again_and_it_is_said():
    with pair("aiote", target={**GOOD, "cpu": 0.0005}) as ours:
        work = Work("rate", 8, 4, 4)
        spinning = measure([Measurement(ours)], work, Setting("shm", mode="spin"), RunPlan(runs=2, seconds=0.02))
        sleeping = measure([Measurement(ours)], work, Setting("shm", mode="event"), RunPlan(runs=2, seconds=0.02))
    assert (spinning[0].runs, spinning[0].disturbed) == (2, 5)
    assert (sleeping[0].runs, sleeping[0].disturbed) == (2, 0)


def test_wrong_data_are_no_measurement():
    with (
        pair(target={**GOOD, "verified": False}) as made,
        pytest.raises(BenchError, match="target: the data are wrong"),
    ):
        measure([Measurement(made)], Work("write", 8, 1, 1), Setting("shm"), RunPlan(runs=1, seconds=0.01))


def test_another_library_s_failure_is_a_note_and_ends_nobody_else_s_measurement():
    with pair("raw") as raw, pair("theirs", target={**GOOD, "verified": False}) as theirs:
        for _ in range(2):
            entries = [Measurement(raw), Measurement(theirs, optional=True)]
            ours, other = measure(entries, Work("rate", 8, 1, 1), Setting("shm", mode="event"), RunPlan(2, 0.01))
            assert (ours.runs, other.runs, other.ratio) == (2, 0, None)
            assert "the data are wrong" in other.note


def test_workers_whose_threads_may_poll_are_stopped_between_their_runs():
    """Else they would take the processors of those that are measured meanwhile."""
    sides = fake(), fake()

    def states() -> list[str]:
        return [Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[0] for one in sides]

    with Pair("theirs", *sides, stops=sides) as made:
        made.meet()
        assert states() == ["T", "T"]
        for count in (1, 2):
            found, _ = made.run(Work("rate", 8, 1, count).line())
            assert found["verified"]
            assert states() == ["T", "T"]


def test_half_a_result_is_no_measurement():
    with pair(initiator={"verified": True}) as made, pytest.raises(BenchError, match="not a result"):
        measure([Measurement(made)], Work("write", 8, 1, 1), Setting("shm"), RunPlan(runs=1, seconds=0.01))


def test_what_nobody_can_do_is_a_line_without_a_figure():
    with pair(refuse="say(unsupported='never'); continue") as made:
        (record,) = measure([Measurement(made)], Work("read", 8, 1, 1), Setting("shm"), RunPlan(runs=1, seconds=0.01))
    assert (record.runs, record.ratio) == (0, None)
    assert "never" in record.note


def test_an_arena_holds_every_kind_of_work_in_whole_huge_pages():
    works = [Work("write", 16 << 20, 4, 4), Work("pages", 32768, 4, 4, 2048)]
    assert arena_for(works) % (2 << 20) == 0
    assert all(arena_for(works) >= work.used + 8 for work in works)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", ("h", 18515)),
        ("far", ("far", 18515)),
        ("far:7", ("far", 7)),
        (":7", ("h", 7)),
        ("1.2.3.4:0", ("1.2.3.4", 0)),
        ("[::1]:7", ("::1", 7)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", 18515)),
    ],
)
def test_a_place_without_host_or_port_has_the_defaults(text, place):
    assert parse_place(text, default_host="h") == place


@pytest.mark.parametrize("text", ["far:x", "far:70000", "far:-1", "::1", "::1:7", "[::1", "[::1]7"])
def test_a_place_with_no_port_number_is_refused(text):
    with pytest.raises(ValueError):
        parse_place(text, default_host="h")


ASKED = {"kind": "raw", "provider": "tcp", "rails": "", "mode": "spin", "loop": "asyncio", "progress": "adaptive"}


def asked(**changes) -> bytes:
    import json

    return json.dumps({**ASKED, "arena": 4096, **changes}).encode()


def test_a_request_for_a_worker_is_parsed():
    kind, fields = parse_request(asked())
    assert kind == "raw"
    assert Setting(**fields) == Setting("tcp", arena=4096)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        asked(kind="other"),
        asked(kind=["raw"]),
        asked(provider="tcp --library /tmp/evil.so"),
        asked(rails="a b"),
        asked(mode="fast"),
        asked(arena=0),
        asked(arena=True),
        asked(arena=1 << 40),
        asked(library="/tmp/evil.so"),
        asked(provider=7),
    ],
)
def test_what_a_listener_does_not_start_is_refused(line):
    with pytest.raises(BenchError):
        parse_request(line)


@pytest.fixture
def listener():
    """A listener whose workers are fakes; `heard` is what it reported."""
    heard: list[str] = []

    def command(kind, fields, host):
        heard.append(f"{kind} {fields['provider']} {host}")
        return [sys.executable, "-c", FAKE.replace("RESULT", repr(GOOD)).replace("REFUSE", "pass")]

    with Listener("127.0.0.1", 0, command, heard.append) as server:
        server.heard = heard
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_target_on_another_machine_is_started_and_run(listener):
    connection = TargetMachine(*listener.server_address)
    assert connection.local_host == "127.0.0.1"
    target = connection.spawn("aiote", "aiote", Setting("tcp", library="/only/here.so"))
    with Pair("aiote", target, fake()) as made:
        made.meet()
        initiator, there = made.run(Work("write", 8, 1, 3).line())
    assert initiator["seconds"] == there["seconds"] == 0.003
    assert listener.heard[0] == "aiote tcp 127.0.0.1"


def test_a_stranger_is_told_why_and_the_listener_goes_on(listener):
    with socket.create_connection(listener.server_address) as sock:
        sock.sendall(b'{"kind": "shell"}\n')
        assert b"error" in sock.makefile("rb").readline()
    assert TargetMachine(*listener.server_address).local_host


def test_the_worker_ends_with_its_connection(listener):
    connection = TargetMachine(*listener.server_address)
    target = connection.spawn("raw", "raw", Setting("tcp"))
    target.receive()
    target.close()
    deadline = time.monotonic() + 60
    while "127.0.0.1: raw over tcp" not in listener.heard and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "127.0.0.1: raw over tcp" in listener.heard


def test_other_libraries_are_not_started_elsewhere(listener):
    with pytest.raises(BenchError, match="one machine"):
        TargetMachine(*listener.server_address).spawn("nixl", "other", Setting("tcp"))


def test_connecting_where_nobody_listens_says_what_to_start():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    with pytest.raises(BenchError, match="--listen"):
        TargetMachine(*place)


def test_other_libraries_are_read_from_lines(tmp_path):
    file = tmp_path / "peers.jsonl"
    file.write_text('{"name": "n", "python": "p", "worker": "w", "args": ["-x"], "providers": ["tcp"]}\n')
    assert Contestant.others(file) == [Contestant("n", "other", ("p", "w", "-x"), ("tcp",))]
    file.write_text("{}\n")
    with pytest.raises(BenchError, match="line 1"):
        Contestant.others(file)


def test_a_descriptor_is_not_left_behind():
    before = set(os.listdir("/proc/self/fd"))
    with pair():
        pass
    assert set(os.listdir("/proc/self/fd")) == before
