"""The benchmark of dispatch and combine: what has to arrive, its arithmetic, and a whole run of aiote alone."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.fixture
def moe(worker):
    """The rounds as the workers have them."""
    return worker("moe")


@pytest.fixture
def tool(moe, program):
    """The program, as a module."""
    return program("moe")


def alone(moe, data):
    """Rounds that do in one process what a library does between several."""

    class Alone(moe.Rounds):
        async def dispatch(self, version):
            raise NotImplementedError

        async def combine(self):
            raise NotImplementedError

        def arrived(self):
            found = [self.data.tokens(source, 0, tokens) for _, source, tokens in self.data.arriving()]
            return np.concatenate([x for x, _ in found]), np.concatenate([s for _, s in found])

        def answer(self, first, rows):
            raise NotImplementedError

        def out(self):
            total, _ = self.data.sums()
            return (total.view(np.uint32) + 0x7FFF >> 16).astype(np.uint16)

    return Alone(data)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one"])
def test_every_choice_arrives_once(moe, routing):
    case = moe.Case(4, 12, routing)
    arriving = [moe.Data(case, rank).arriving() for rank in range(4)]
    found = sorted((e, s, t) for several in arriving for e, s, tokens in several for t in tokens.tolist())
    ids = moe.Data(case, 0).ids
    assert found == sorted((e, s, t) for s in range(4) for t in range(12) for e in ids[s][t].tolist())
    assert all(len(set(row)) == moe.TOP_K for several in ids for row in several.tolist())
    if routing == "one":
        assert not any(len(tokens) for several in arriving[1:] for _, _, tokens in several)


def test_the_check_sees_a_byte_and_a_sum_that_are_others(moe):
    data = moe.Data(moe.Case(2, 6, "uniform"), 1)
    right = alone(moe, data)
    assert right.check_rows(0) == ""
    assert right.check_sums() == ""
    assert "not those that were sent" in right.check_rows(1)
    rows, scales = right.arrived()
    rows[3, 7] ^= 1
    right.arrived = lambda: (rows, scales)
    assert "not those that were sent" in right.check_rows(0)
    sums = right.out()
    sums[2, 5] ^= 0x100
    right.out = lambda: sums
    assert right.check_sums() == f"1 of {sums.size} sums are wrong"


def test_figures_are_of_rounds_and_of_each_rounds_slowest_rank(tool, capsys):
    quick = {"dispatch": [1e-3, 2e-3, 3e-3], "combine": [1e-3] * 3, "cpu": 0.003, "sleeps": 12}
    slow = {"dispatch": [4e-3, 1e-3, 1e-3], "combine": [1e-3] * 3, "cpu": 0.006, "sleeps": 6}
    found = tool.figures([quick, slow])
    assert found["round"] == {"p50_us": 2000, "p99_us": 5000, "slowest_us": 4000}
    assert found["dispatch"]["slowest_us"] == 3000
    assert found["cpu_ms"] == 3
    assert found["sleeps"] == 3
    case = {"ranks": 2, "tokens": 3, "routing": "one", "library": ""}
    half = tool.figures([{**quick, "dispatch": [5e-4] * 3, "combine": [5e-4] * 3}] * 2)
    records = tool.rated(
        [
            {**case, "contestant": "aiote", **half},
            {**case, "contestant": "aiote-direct", **half},
            {**case, "contestant": "gloo-alltoall", **found},
            {**case, "contestant": "memcpy", **half},
        ]
    )
    assert records[2]["x_aiote"] == 4
    assert records[2]["of_memcpy"] == 0.5
    tool.show(records)
    tool.summary(records)
    assert "4.00 gloo-alltoall" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("load", "busy"), [(0.5, False), (0.51, True), (6.0, True)])
def test_a_run_on_a_busy_machine_is_marked(tool, monkeypatch, load, busy):
    monkeypatch.setattr(tool.os, "getloadavg", lambda: (load, 0.0, 0.0))
    about = tool.load_before()
    assert about == {"load": (load, 0.0, 0.0), "busy": busy}
    assert ("BUSY" in tool.load_text(about)) is busy
    assert tool.load_text(about).startswith(f"load {load:.2f}")


@pytest.mark.blocking_allowed("the processes are the program's")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--routing", "even"], "no such routing: even; there are uniform"),
        (["--ep", "3"], "--ep is of 1, 2, 4"),
        (["--tokens", "x"], "numbers with commas"),
    ],
)
def test_what_makes_no_sense_is_refused(run, arguments, why):
    done = run("moe", *arguments)
    assert done.returncode == 1
    assert why in done.stderr


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.blocking_allowed("the processes are the program's")
def test_a_whole_run_is_checked_and_recorded(run, tmp_path):
    file = tmp_path / "records.json"
    only = ["--ep", "2", "--tokens", "3", "--routing", "zipf", "--rounds", "2", "--only", "aiote,memcpy"]
    done = run("moe", *only, "--json", str(file))
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())["records"]
    names = ["aiote", "aiote-packed", "aiote-direct", "aiote-rank", "aiote-rails", "memcpy"]
    assert [one["contestant"] for one in records] == names
    assert all(one["rounds"] == 2 and one["round"]["p50_us"] > 0 for one in records)
    assert "aiote-rank" in done.stdout
