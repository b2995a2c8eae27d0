"""Trainers bring weights to inference ranks in processes of their own; killed ones are named, and others go on."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def addresses(programs) -> list[str]:
    return [program.address() for program in programs]


def test_every_rank_has_every_version(start, provider):
    infer = [start("weights/infer.py", "--rank", str(n), "--ranks", "2", "--provider", provider) for n in range(2)]
    train = start("weights/train.py", *addresses(infer), "--provider", provider, "--steps", "3")
    assert train.end() == 0, train.err
    lines = train.out.splitlines()
    assert [line.split(" in ")[0] for line in lines] == [f"version {n}: {10 << 20} bytes" for n in (1, 2, 3)]
    for program in infer:
        program.until(lambda program=program: "version 3" in program.out, "the last version")
        versions = [line for line in program.out.splitlines() if line.startswith("version")]
        assert versions == [f"version {n}: qkv {n}.0000, out {n}.0000" for n in (1, 2, 3)]
        program.send(signal.SIGINT)
        assert program.end() == 1
        assert program.err == "infer.py: interrupted\n"


def test_a_rank_that_was_killed_is_named(start):
    infer = [start("weights/infer.py", "--rank", str(n), "--ranks", "2") for n in range(2)]
    where = addresses(infer)
    infer[0].send(signal.SIGKILL)
    infer[0].end()
    train = start("weights/train.py", *where, "--steps", "1")
    assert train.end() == 1
    assert train.err.startswith("train.py: ")
    assert "qkv" in train.err or where[0] in train.err
