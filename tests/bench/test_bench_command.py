"""`aiote bench` as users run it: every kind of work on real providers, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiote.bench.contestants import Contestant, Setting, start
from aiote.bench.work import OPS, Work
from aiote.cli import main
from support.machine import LONG

AIOTE = [sys.executable, "-P", "-m", "aiote", "bench"]
QUICK = ["--runs", "2", "--seconds", "0.02"]
# Each kind of work at one size; the sizes of a real measurement only fill and check more memory.
ONE_SIZE = [] if LONG else ["--sizes", "16K"]


def bench(*arguments: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AIOTE, *arguments], capture_output=True, text=True, timeout=timeout)


@pytest.mark.libfabric
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    # Pairs that spin share the cores with the other runs of the tests, at the pace of the scheduler.
    ("provider", "mode", "ops"),
    [
        ("local", "default", OPS),
        ("socket", "default", OPS),
        ("local", "event", ("pages", "send")),
        ("tcp", "event", OPS),
        ("shm", "event", ("pages", "send")),
        ("shm", "spin", ("write", "read")),
    ],
)
def test_everything_is_measured_beside_the_raw_loops(provider, mode, ops, tmp_path):
    file = tmp_path / "records.json"
    done = bench("compare", *ops, "--provider", provider, "--mode", mode, *ONE_SIZE, *QUICK, "--json", str(file))
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert told["format"] == 1
    assert told["machine"]["cores"] == os.cpu_count()
    records = told["records"]
    assert {(r["op"], r["contestant"]) for r in records} == {(op, who) for op in ops for who in ("raw", "aiote")}
    for record in records:
        assert record["runs"] == 2
        assert 0 < record["value"]["least"] <= record["value"]["median"] <= record["value"]["most"]
        assert record["cold"] > 0
        assert record["cpu_initiator"] > 0
        assert record["cpu_target"] > 0
        assert (record["ratio"] is None) == (record["contestant"] == "raw")
        assert (record["p99_us"] is None) == (record["op"] != "latency")
        assert (record["congestion"] == "") == (provider in ("shm", "local"))
    # Both were given the same library.
    if provider in ("tcp", "shm"):
        assert len({re.match(r"libfabric \d+\.\d+", r["library"])[0] for r in records}) == 1
    else:
        assert len({r["library"] for r in records}) == 1


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.parametrize("loop", ["uvloop", "trio"])
def test_benchmarks_run_on_other_loops_and_by_the_native_thread(loop):
    done = bench("latency", "--provider", "shm", "--loop", loop, "--progress", "thread", "--mode", "default", *QUICK)
    assert done.returncode == 0, done.stderr
    assert f"aiote ({loop})" in done.stdout


@pytest.mark.libfabric
@pytest.mark.blocking_allowed("no engine runs here")
@pytest.mark.parametrize("provider", ["shm", "local", "socket"])
def test_runs_of_few_messages_after_others_are_verified(provider):
    """They begin where the last run's receives ended, not at the first."""
    library = os.environ.get("AIOTE_LIBFABRIC", "") if provider == "shm" else ""
    with start(Contestant("raw", "raw"), Setting(provider, library=library)) as pair:
        for seed, count in enumerate([3, 400, 80, 16, 257, 80, 1], 1):
            initiator, target = pair.run(Work("send", 16384, 16, count, seed=seed).line())
            assert initiator["verified"]
            assert target["verified"], count


@pytest.mark.libfabric
@pytest.mark.one_library
def test_the_raw_loops_alone_are_measured_and_plotted(tmp_path):
    file = tmp_path / "picture.png"
    done = bench(
        "raw", "write", "--provider", "shm", "--sizes", "4K,64KiB", "--window", "3", *QUICK, "--plot", str(file)
    )
    assert done.returncode == 0, done.stderr
    assert "write 64K, 3 out" in done.stdout
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.needs_namespaces
def test_the_reno_option_measures_in_a_namespace_with_reno():
    done = bench("rate", "--reno", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "TCP congestion control reno" in done.stdout


@pytest.mark.libfabric
@pytest.mark.one_library
def test_two_machines_measure_and_the_listener_says_what_it_served():
    with subprocess.Popen(
        [*AIOTE, "write", "--listen", "--host", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as listener:
        try:
            place = re.search(r"127\.0\.0\.1:\d+", listener.stdout.readline())[0]
            done = bench("compare", "write", "--provider", "tcp", "--sizes", "64K", *QUICK, "--connect", place)
            assert done.returncode == 0, done.stderr
            assert "aiote (asyncio)" in done.stdout
            # It says what it served when that has ended, a moment after the other side.
            served = {listener.stdout.readline() for _ in range(2)}
            assert served == {"127.0.0.1: aiote over tcp\n", "127.0.0.1: raw over tcp\n"}
        finally:
            listener.send_signal(signal.SIGINT)
            _, error = listener.communicate(timeout=30)
        assert listener.returncode == 130
        assert "Traceback" not in error


def orphans() -> set[str]:
    """Return the files in /dev/shm of raw workers that have ended: libfabric's names, which begin with a process."""
    names = [name for name in os.listdir("/dev/shm") if re.fullmatch(r"\d+:\d+:\d+", name)]
    return {name for name in names if not os.path.exists(f"/proc/{name.partition(':')[0]}")}


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.parametrize("victim", ["aiote.bench.worker", "aiote-bench-raw"])
def test_a_worker_that_is_killed_ends_the_run_with_its_name(victim, tmp_path):
    before = orphans()
    command = [*AIOTE, "compare", "rate", "--provider", "shm", "--runs", "50", "--seconds", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        kill_one(process, victim)
        _, error = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "target" in error or "initiator" in error
    assert "Traceback" not in error
    assert orphans() <= before


@pytest.mark.libfabric
@pytest.mark.one_library
def test_ctrl_c_ends_everything():
    command = [*AIOTE, "write", "--provider", "shm", "--runs", "500"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        found = workers(process, "aiote.bench.worker")
        time.sleep(0.1)  # they are in the middle of their imports
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert not any(os.path.exists(f"/proc/{pid}") for pid in found)


def workers(bench: subprocess.Popen[str], name: str) -> list[int]:
    """Wait for the two processes of that name that a bench started."""
    parent, children = bench.pid, []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and bench.poll() is None:
        # A process that has only just been forked has its parent's command line, and no children of that name.
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        found = [int(pid) for pid in children if name in Path(f"/proc/{pid}/cmdline").read_text()]
        if len(found) == 2:
            return found
        time.sleep(0.05)
    ended = "" if bench.poll() is None else f": status {bench.returncode}, {bench.stderr.read()}"
    raise AssertionError(f"no workers among {children}{ended}")


def kill_one(bench: subprocess.Popen[str], name: str) -> None:
    found = workers(bench, name)
    time.sleep(1)
    os.kill(found[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("write", "--sizes", "12"), "a multiple of 8"),
        (("write", "--sizes", "many"), "'many' is not a size"),
        (("write", "--sizes", "16G", "--window", "16"), "ask for smaller"),
        (("compare", "fly"), "'fly' cannot be measured"),
        (("raw", "fly"), "'fly' cannot be measured"),
        (("write", "--library", "/nowhere/libfabric.so.1"), "/nowhere/libfabric.so.1"),
        (("compare", "--with", "/nowhere"), "--with"),
        (("write", "--mode", "fast"), "Invalid value"),
        (("write", "--runs", "0"), "Invalid value"),
        (("fly",), "No such command"),
        (("send", "--memory", "cuda"), "messages are of host memory"),
        (("raw", "write", "--memory", "cuda-host"), "the raw loops move only host memory"),
        (("compare", "write", "--memory", "host-cuda"), "the raw loops move only host memory"),
        (("write", "--memory", "rocm"), "Invalid value"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(arguments, why, capfd):
    assert main(["bench", *arguments]) == 2
    said = capfd.readouterr().err
    assert why in said
    assert "Traceback" not in said


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("write", "--connect", "127.0.0.1:1"), "--listen"),
        (("write", "--listen", "--host", "127.0.0.1:99999"), "99999"),
        (("send", "--provider", "shm", "--sizes", "128K", *QUICK), "65536"),
    ],
)
def test_a_benchmark_that_fails_says_why(arguments, why, capfd):
    assert main(["bench", *arguments]) == 1
    said = capfd.readouterr().err
    assert why in said
    assert "Traceback" not in said


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.parametrize("command", [("write",), ("raw", "write"), ("compare",)], ids=" ".join)
def test_a_provider_that_is_not_there_is_explained_before_anything_runs(command, capfd):
    assert main(["bench", *command, "--provider", "nonsense"]) == 2
    said = capfd.readouterr()
    assert "provider='nonsense'" in said.err
    assert "offers none of that name on this machine; `fi_info -l` lists" in said.err
    assert (said.out, "Traceback" in said.err) == ("", False)
