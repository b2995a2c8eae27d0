"""The demo of weight updates as people run it: real trainers under FSDP2 and EP, real inference ranks, real kills."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.process import examples as programs
from support.process.examples import alive

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.one_library,
    pytest.mark.needs_torch,
    # Six processes import torch, one after another where there are two processors.
    pytest.mark.timeout(600),
]
RUN = "weights/moe/run.py"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(programs, "PATIENCE_S", 250.0)


@pytest.fixture
def begun(start):
    """Start a long run and wait for its first version; return it with its children by file and rank."""
    program = start(RUN, "--updates", "500", "--letters", "4")
    program.until(lambda: "version  1" in program.out, "first version")
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in program.children()}
    return program, {f"{Path(said[1].decode()).stem} {said[2].decode()}": pid for pid, said in words.items()}


def test_what_was_learned_is_what_is_said(start):
    program = start(RUN, "--updates", "3", "--steps", "4", "--letters", "24")
    assert program.end() == 0, program.err
    versions = re.findall(r"version +(\d) +loss +([\d.]+) +(\d+) bytes .* logits within (\S+)", program.out)
    assert [number for number, *_ in versions] == ["1", "2", "3"]
    losses = [float(loss) for _, loss, *_ in versions]
    assert losses == sorted(losses, reverse=True)
    assert {int(size) for *_, size, _ in versions} == {944_640}
    assert all(float(error) <= 1e-4 for *_, error in versions)
    text = " ".join(program.out.split())
    assert "3 updates: every byte of both inference ranks was the trainers', and so were the logits" in text
    assert re.search(r"the text changed [12] times\.", text)


@pytest.mark.parametrize(("role", "name"), [("trainer 1", "trainer 1"), ("server 0", "inference rank 0")])
def test_a_rank_that_was_killed_is_named_and_ends_the_others(begun, role, name):
    program, ranks = begun
    assert len(ranks) == 6
    os.kill(ranks[role], signal.SIGKILL)
    assert program.end() == 1
    assert f"{name} (pid {ranks[role]}) was killed by signal 9 while the ranks were " in program.err
    assert len(program.err.splitlines()) == 1
    assert not any(map(alive, ranks.values()))


def test_an_interrupt_ends_everything(begun):
    program, ranks = begun
    program.send(signal.SIGINT)
    assert program.end() == 130
    assert program.err == "run.py: interrupted\n"
    assert not any(map(alive, ranks.values()))
