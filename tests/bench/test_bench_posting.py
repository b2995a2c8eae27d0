"""`aiote bench scatter`: what it measures, where bytes are moved and where none are, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import aiote
from aiote.cli.app import app
from aiote.testing import NULL_NIC, Fabric

pytestmark = pytest.mark.blocking_allowed("a command has a loop of its own")


def bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", "scatter", *arguments])
    return done.exit_code, done.output


def test_both_ways_are_measured_over_each_rail(tmp_path):
    file = tmp_path / "records.json"
    code, said = bench(
        "--rails", "null, local", "--peers", "1,3", "--pages", "40", "--size", "64", "--runs", "3", "--json", str(file)
    )
    assert code == 0, said
    records = json.loads(file.read_text())["records"]
    works = [
        (rail, op, peers) for rail in ("null", "local") for op, peers in (("scatter", 1), ("scatter", 3), ("pages", 1))
    ]
    assert [(r["rail"], r["op"], r["peers"], r["prepared"]) for r in records] == [
        (*work, prepared) for work in works for prepared in (False, True)
    ]
    for record in records:
        assert 0 < record["least"] <= record["median"]
        assert record["unit"] == ("us" if record["op"] == "scatter" else "ns/page")
        assert record["verified"] is (True if record["rail"] == "local" else None)
        assert record["runs"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--peers", "8,none"], 2, "numbers from 1 to 256"),
        (["--peers", "0"], 2, "numbers from 1 to 256"),
        (["--rails", "nothing-like-it"], 1, "nothing-like-it"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, code, text):
    status, said = bench(*arguments, "--runs", "1")
    assert status == code
    assert text in said


async def test_the_null_nic_ends_everything_and_moves_nothing():
    """More than its queue takes at a time, too."""
    memory = np.zeros(1 << 20, np.uint8)
    with Fabric(model=NULL_NIC) as fabric:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            source = left.register(np.ones(1 << 20, np.uint8))
            remote = left.attach(right.register(memory).descriptor)
            numbers = np.arange(1 << 14)
            for _ in range(2):
                await left.write_pages(aiote.Pages(source, numbers, 64), aiote.Pages(remote, numbers[::-1], 64), 1)
            await left.write_imm(source, remote, 1)
            assert left.statistics().outstanding == 0
            assert right.counter(1).value == 0
            assert not memory.any()
