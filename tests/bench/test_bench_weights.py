"""The benchmark of weight updates: what it lays out and checks, its arithmetic, and a whole run of aiote alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

TINY = ["--hidden", "64", "--layers", "1", "--experts", "2", "--runs", "1", "--updates", "1"]


@pytest.fixture
def weights(worker):
    """The updates as the workers have them."""
    return worker("weights")


@pytest.fixture
def tool(weights, program):
    """The program, as a module."""
    return program("weights")


@pytest.mark.parametrize("case", ["sharded 4-2", "sharded 4-4", "replicated 4-2", "fp8 4-2"])
def test_all_that_targets_hold_is_held_by_sources_once(weights, case):
    made = weights.Model(case, 128, 1, 4)
    sources = [made.source(rank) for rank in range(weights.SOURCES)]
    nbytes = 0
    for rank in range(made.case.targets):
        target = weights.Memory(made, "target", rank)
        nbytes += sum(array.nbytes for array in target.arrays.values())
        for name, box in target.boxes.items():
            shared = [weights.overlap(box, held[name]) for held in sources]
            assert sum(weights.size_of(one) for one in shared if one) == weights.size_of(box)
    assert made.nbytes == nbytes
    replicas = made.case.targets if made.case.replicated else 1
    held = [name for rank in range(made.case.targets) for name in made.target(rank) if ".experts." in name]
    assert len(held) == replicas * 4 * 3


@pytest.mark.parametrize("case", ["sharded 4-2", "replicated 4-2"])
def test_the_check_sees_a_byte_that_is_of_another_version(weights, case):
    made = weights.Model(case, 64, 1, 2)
    target = weights.Memory(made, "target", 1)
    sources = [weights.Memory(made, "source", rank) for rank in range(weights.SOURCES)]
    for source in sources:
        source.fill(3)
        for name, box in target.boxes.items():
            if shared := weights.overlap(box, source.boxes[name]):
                there = target.arrays[name][weights.within(shared, box)]
                there[...] = source.arrays[name][weights.within(shared, source.boxes[name])]
    assert target.check(3)
    assert not target.check(4)
    target.arrays["layers.0.o"].view(np.uint8)[5, 7] ^= 1
    assert not target.check(3)


def test_fp8_is_rounded_as_the_library_rounds(weights):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(1).uniform(-448, 448, 100_000).astype(np.float32)
    values = np.concatenate([values, values * 2**-12, values * 2**-17, np.float32([0, 448, -448, 464 - 17, 2**-10])])
    assert np.array_equal(weights.e4m3(values), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_ratios_are_of_one_run_and_shown(tool, capsys):
    rows = {
        "memcpy": [[0.1, 0.1, 0.2], [0.1]],
        "aiote": [[0.5, 0.4, 0.6], [1.0]],
        "gloo-full": [[1.0, 2.0, 1.5], [4.0]],
    }
    told = tool.record("sharded 4-2", 1 << 30, rows, dict.fromkeys(rows, "one 1.0"))
    found = told["contestants"]
    assert found["gloo-full"]["x_aiote"] == [3.5, 3.0, 4.0]
    assert found["aiote"]["seconds"] == 0.75
    tool.show(told)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].split() == ["gloo-full", "2750.0", "0.36", "4%", "3.50", "(3.00-4.00)"]


@pytest.mark.blocking_allowed("the processes are the program's")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--cases", "sharded 4-3"], "no such case: sharded 4-3; there are sharded 4-2"),
        (["--hidden", "100", "--cases", "sharded 4-2"], "--hidden a multiple of 64"),
        (["--hidden", "64"], "--hidden a multiple of 512"),
        (["--updates", "0"], "are 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(run, arguments, why):
    done = run("weights", *arguments)
    assert done.returncode == 1
    assert why in done.stderr


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.blocking_allowed("the processes are the program's")
def test_a_whole_run_is_checked_and_recorded(run, tmp_path):
    file = tmp_path / "records.json"
    done = run("weights", *TINY, "--cases", "sharded 4-2", "--only", "aiote-inplace", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(file.read_text())["cases"]
    found = case["contestants"]["aiote-inplace"]
    assert len(found["runs"][0]) == 1
    assert found["seconds"] > 0
    assert found["library"].startswith("aiote ")
    assert "aiote-inplace" in done.stdout
