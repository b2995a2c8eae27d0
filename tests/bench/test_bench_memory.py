"""`aiote bench` with memory of a GPU, on the stand-in: what is moved, checked, recorded and refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import aiote.gpu
from aiote.bench.contestants import Contestant, Setting, aiote_worker, start, worker_command
from aiote.bench.measured_loops import Arena
from aiote.bench.remote import parse_request
from aiote.bench.sides import BenchError
from aiote.bench.work import MEMORIES, Work, pattern
from support.gpu.standin_cuda import standin_path

AIOTE = [sys.executable, "-P", "-m", "aiote", "bench"]
QUICK = ["--sizes", "4K", "--window", "2", "--mode", "event", "--runs", "1", "--seconds", "0.01"]
OF_GPUS = [name for name in MEMORIES if name != "host"]
WORKS = [
    Work("write", 4096, 2, 6, seed=1),
    Work("pages", 512, 2, 4, pages=5, seed=2),
    Work("read", 4096, 2, 6, seed=3),
    Work("rate", 8, 4, 8, seed=4),
    Work("latency", 8, 1, 4, seed=5),
]


class Engine:
    """As much of an engine as an arena asks for before anything is moved."""

    def register(self, array):
        return array


@pytest.fixture(autouse=True)
def standin(monkeypatch):
    monkeypatch.setenv("AIOTE_LIBCUDA", standin_path())


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AIOTE, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("memory", OF_GPUS)
def test_a_record_says_which_memory_was_measured(memory, tmp_path, monkeypatch):
    # These providers need none.
    monkeypatch.setenv("AIOTE_LIBFABRIC", "/nowhere/libfabric.so.1")
    file = tmp_path / "records.json"
    done = bench("write", "--provider", "local,socket", "--memory", memory, *QUICK, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert f"memory {memory}, GPU sharing on" in done.stdout
    records = json.loads(file.read_text())["records"]
    assert [record["provider"] for record in records] == ["local", "socket"]
    assert [bool(record["congestion"]) for record in records] == [False, True]
    for record in records:
        assert (record["memory"], record["gpu_sharing"], record["runs"]) == (memory, True, 1)
        assert record["value"]["least"] > 0
    sides = [side for side, of in zip(("initiator", "target"), MEMORIES[memory], strict=True) if of == "cuda"]
    assert records[0]["note"] == "", "these processes can share"
    assert re.findall(r"(\w+) \w+ staged: socket copies", records[1]["note"]) == sides


@pytest.mark.parametrize("provider", ["local", "socket"])
@pytest.mark.parametrize("memory", OF_GPUS)
def test_every_kind_of_work_is_verified(provider, memory):
    with start(Contestant("aiote", "aiote"), Setting(provider, mode="event", memory=memory, arena=2 << 20)) as pair:
        for work in WORKS:
            for answer in pair.run(work.line()):
                assert answer["verified"] is True, work


def test_processes_that_share_nothing_say_that_they_stage():
    setting = Setting("local", mode="event", memory="cuda", arena=2 << 20, gpu_sharing=False)
    with start(Contestant("aiote", "aiote"), setting) as pair:
        for answer in pair.run(WORKS[0].line()):
            assert answer["verified"] is True
            assert answer["staged"][0].startswith("local staged: local copies with the processor")


def test_a_target_that_listens_has_the_memory_that_it_is_asked_for(monkeypatch):
    command = [*AIOTE, "write", "--listen", "--host", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listener:
        try:
            place = re.search(r"127\.0\.0\.1:\d+", listener.stdout.readline())[0]
            monkeypatch.setenv("AIOTE_LIBCUDA", "/nowhere/libcuda.so.1")
            asked = ["write", "--provider", "socket", "--no-gpu-sharing", *QUICK, "--connect", place]
            done = bench(*asked, "--memory", "host-cuda")
            assert done.returncode == 0, done.stderr
            assert "memory host-cuda, GPU sharing off" in done.stdout
            done = bench(*asked, "--memory", "cuda-host")
            assert done.returncode == 1
            assert "/nowhere/libcuda.so.1" in done.stderr
        finally:
            listener.send_signal(signal.SIGINT)
            listener.communicate(timeout=30)


def test_what_is_compared_are_the_bytes_of_the_gpu():
    work = Work("write", 64, 2, 2)
    there = Arena(Engine(), 256, "cuda")
    with there.gpu:
        there.prepare(work, fills=True)
        assert there.verify(work)
        wrong = there.words.copy()
        wrong[9] ^= np.uint64(1)
        aiote.gpu.copy(there.gpu, wrong)
        assert np.array_equal(there.words[:16], pattern(work.seed, 16))
        assert not there.verify(work)
        there.prepare(work, fills=False)
        aiote.gpu.copy(wrong, there.gpu)
        assert not wrong[:16].any()


def test_messages_are_never_of_a_gpu():
    there = Arena(Engine(), 4096, "cuda")
    with there.gpu, pytest.raises(ValueError, match="host memory"):
        there.prepare(Work("send", 64, 2, 2), fills=True)


@pytest.mark.libfabric
@pytest.mark.one_library
def test_a_provider_without_gpus_is_named():
    done = bench("write", "--provider", "shm", "--memory", "cuda", *QUICK)
    assert done.returncode == 1
    assert "cannot be registered with shm" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_is_told_of_its_own_side_and_nothing_of_defaults():
    setting = Setting("local", memory="cuda-host", gpu_sharing=False)
    assert aiote_worker("initiator", setting)[-4:] == ["--memory", "cuda", "--gpu-sharing", "off"]
    assert "--memory" not in aiote_worker("target", setting)
    # A worker of an earlier commit, which `make bench-guard` starts, does not know these.
    assert not {"--memory", "--gpu-sharing"} & set(
        worker_command(Contestant("aiote", "aiote"), "target", Setting("local"), 0)
    )


@pytest.mark.parametrize("kind", ["raw", "other"])
def test_nobody_else_s_worker_is_started_for_memory_of_a_gpu(kind):
    with pytest.raises(BenchError, match="only aiote's own loops"):
        worker_command(Contestant("theirs", kind), "target", Setting("local", memory="host-cuda"), 0)


ASKED = {"kind": "aiote", "provider": "local", "rails": "", "mode": "spin", "loop": "asyncio", "progress": "adaptive"}


def asked(**changes) -> bytes:
    return json.dumps({**ASKED, "arena": 4096, **changes}).encode()


def test_a_listener_is_asked_for_memory():
    _, fields = parse_request(asked(memory="host-cuda", gpu_sharing=False))
    assert Setting(**fields) == Setting("local", arena=4096, memory="host-cuda", gpu_sharing=False)
    _, fields = parse_request(asked())
    assert Setting(**fields) == Setting("local", arena=4096)


@pytest.mark.parametrize(
    "changes", [{"memory": "rocm"}, {"memory": 1}, {"memory": ["cuda"]}, {"gpu_sharing": "off"}, {"gpu_sharing": 1}]
)
def test_memory_that_no_worker_has_is_not_asked_for(changes):
    with pytest.raises(BenchError, match="is not accepted"):
        parse_request(asked(**changes))
