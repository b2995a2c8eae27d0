"""`aiote demo kvcache` as a user runs it: real processes, real providers, real kills."""

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

from support.process.examples import alive

pytestmark = pytest.mark.libfabric

TEXT = "The beads stopped. He did not wait for the morning. He put the drawers back, empty, and told the harbour why."
SMALL = ["--layers", "2", "--requests", "3", "--new-tokens", "6", "--page-tokens", "8", "--chunk-tokens", "32"]
# Enough pages and time that a kill at a third of them meets a transfer.
LONG = ["--layers", "4", "--requests", "2", "--new-tokens", "4"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "aiote", "demo", "kvcache", *arguments]


def demo(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), input=stdin, capture_output=True, timeout=100)


def shown(done: subprocess.CompletedProcess[bytes], code: int = 0) -> dict:
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tcp() -> dict:
    """One run on tcp that several tests look at."""
    return shown(demo(TEXT, *SMALL, "--provider", "tcp", "--json"))


def texts(run: dict) -> list[str]:
    return [request["text"] for request in run["requests"]]


def check(run: dict, provider: str) -> None:
    assert run["ok"] is run["tokens_equal"] is run["cache_equal"] is True
    assert run["provider"] == provider
    assert run["pages_held"] == {"prefill": 0, "decode": 0}
    assert [request["prompt_tokens"] for request in run["requests"]] == [len(TEXT) + 1, len(TEXT) + 4, len(TEXT) + 4]
    pages = sum(2 * -(-request["prompt_tokens"] // 8) for request in run["requests"])
    page_bytes = 2 * run["model"]["kv_heads"] * 8 * run["model"]["head_size"] * 4
    assert sum(request["pages"] for request in run["requests"]) == run["transfer"]["pages"] == pages
    assert run["transfer"]["bytes"] == pages * page_bytes + 3 * 4 * run["model"]["vocabulary"]
    assert run["transfer"]["gib_per_s"] > 0
    assert all(len(request["tokens"]) == 6 for request in run["requests"])
    assert len(set(texts(run))) == 3
    assert len(set(run["pids"].values())) == 3


def test_a_run_over_tcp_generates_the_text_of_one_process(tcp):
    check(tcp, "tcp")
    assert all(rail["provider"] and rail["library"] for rail in tcp["rails"])


def test_a_run_over_shm_generates_the_same_text(tcp):
    run = shown(demo(TEXT, *SMALL, "--provider", "shm", "--concurrency", "3", "--json"))
    check(run, "shm")
    assert texts(run) == texts(tcp)


@pytest.mark.parametrize("provider", ["verbs", "verbs;ofi_rxm"])
def test_a_run_over_rdma_devices_generates_the_same_text(tcp, provider, monkeypatch):
    monkeypatch.setenv("FI_UNIVERSE_SIZE", "16")
    run = shown(demo(TEXT, *SMALL, "--provider", provider, "--json"))
    check(run, provider)
    assert texts(run) == texts(tcp)


@pytest.mark.one_library
def test_auto_reads_standard_input_and_weights_from_a_file(tcp, tmp_path):
    """The same prompt and the same weights by another way give the same answers, seen by a person."""
    path = tmp_path / "w.safetensors"
    made = [sys.executable, "-P", "-m", "aiote", "demo", "weights", str(path), "--layers", "2"]
    assert subprocess.run(made, capture_output=True, timeout=60).returncode == 0
    done = demo("--prompt-file", "-", "--weights", str(path), *SMALL[2:], stdin=TEXT.encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"All 18 tokens equal those of the one-process generation." in done.stdout
    # The sample stands in a box, where lines may be broken anywhere.
    words = "".join(c for c in done.stdout.decode() if not c.isspace() and c != "│")
    assert "".join(texts(tcp)[0].split()) in words


@pytest.mark.parametrize("provider", ["tcp", "shm", "verbs"])
def test_a_prefiller_killed_in_the_middle_fails_the_run_and_frees_its_pages(provider):
    done = demo(*LONG, "--provider", provider, "--kill-prefiller-after", "0.3", "--json")
    run = shown(done, 1)
    assert re.search(
        rf"the prefiller \(pid {run['pid']}\) died while requests? \d( and \d)* (was|were) being transferred "
        r"\(killed by SIGKILL\); the decoder freed its pages \(0 of \d+ held\)",
        run["error"],
    )
    assert done.stderr.decode() == f"aiote: {run['error']}\n"
    assert run["pages_held"] == 0
    assert run["pages_total"] > 0
    assert run["requests"]


def children(pid: int) -> dict[str, int]:
    """Return the pids of a run's child processes by their role."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == pid and b"aiote.demo.child" in words:
            found[words[words.index(b"aiote.demo.child") + 1].decode()] = int(entry.name)
    return found


def eventually(what, limit_s: float = 30.0):
    end = time.monotonic() + limit_s
    while not (value := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return value


@pytest.fixture
def started():
    """Start a long run and wait for its two children; whatever is left is killed."""
    process = subprocess.Popen(
        command("--requests", "50", "--layers", "4", "--provider", "tcp"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    roles: dict[str, int] = {}
    try:
        eventually(lambda: {"prefill", "decode"} <= children(process.pid).keys())
        roles.update(children(process.pid))
        yield process, roles
    finally:
        process.kill()
        process.communicate()
        eventually(lambda: not any(map(alive, roles.values())))


@pytest.mark.one_library
@pytest.mark.parametrize(("role", "name"), [("prefill", "prefiller"), ("decode", "decoder")])
def test_a_child_killed_from_outside_fails_the_run_by_its_name(started, role, name):
    process, roles = started
    os.kill(roles[role], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.match(rf"aiote: the {name} \(pid {roles[role]}\) (died|ended).*killed by SIGKILL", errors.decode())
    assert not any(map(alive, roles.values()))


@pytest.mark.one_library
def test_an_interrupt_ends_all_processes(started):
    process, roles = started
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b"aiote: interrupted\n"
    assert not any(map(alive, roles.values()))


@pytest.mark.one_library
def test_children_do_not_outlive_their_parent(started):
    process, roles = started
    process.kill()
    process.communicate()
    eventually(lambda: not any(map(alive, roles.values())))


@pytest.mark.one_library
def test_an_unknown_provider_is_a_usage_error():
    done = demo(TEXT, "--provider", "pigeon", "--json")
    assert done.returncode == 2
    assert "pigeon" in json.loads(done.stdout)["error"]
