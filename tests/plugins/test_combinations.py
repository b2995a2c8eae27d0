"""What a choice of combinations still has: every value, and every two values that it promises to bring together."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.plugins.combinations import DEAR, MEETING, TESTS, Parameter, Wanted, choose, is_dear, wanted

PROVIDERS = {"tcp", "shm", "local", "socket", "sim", "local+cuda", "socket+cuda"}
ENVIRONMENTS = PROVIDERS | {"asyncio", "uvloop", "trio", "adaptive", "thread"}
NAMES = ["provider", "progress", "anyio_backend", "verb", "size"]
SIZES = st.lists(st.integers(1, 3), min_size=len(NAMES), max_size=len(NAMES))


@st.composite
def files(draw: st.DrawFn) -> list[list[Parameter]]:
    """Draw some tests: which of the names each has, and which cases of the product there are."""
    sizes = dict(zip(NAMES, draw(SIZES), strict=True))
    tests = []
    for names in draw(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=4)):
        product = list(itertools.product(*(range(sizes[name]) for name in sorted(names))))
        cases = draw(st.lists(st.sampled_from(product), min_size=1, unique=True)) if draw(st.booleans()) else product
        tests.append(
            [
                Parameter(name, tuple(case[place] for case in cases), name in NAMES[:3])
                for place, name in enumerate(sorted(names))
            ]
        )
    return tests


def met(parameters: list[Parameter], cases: list[int]) -> set[tuple]:
    """Return every two values that meet in some cases, with the names of their parameters."""
    return {
        (one.name, one.values[case], two.name, two.values[case])
        for one, two in itertools.permutations(parameters, 2)
        for case in cases
    }


def is_environment(pair: tuple) -> bool:
    return pair[0] in NAMES[:3] and pair[2] in NAMES[:3]


@given(files(), st.sampled_from(["pairs", "values", "tests"]), st.booleans(), st.integers(0, 5))
def test_every_promised_value_and_pair_is_met(tests, choice, meeting, turn):
    """Against a plain reading of the promise: what the chosen cases have is what all cases have."""
    needs = [wanted(parameters, len(parameters[0].values), choice, meeting=meeting) for parameters in tests]
    chosen = choose(needs, turn)
    all_shared, met_shared = set(), set()
    for parameters, cases in zip(tests, chosen, strict=True):
        everything = list(range(len(parameters[0].values)))
        assert cases
        assert len(set(cases)) == len(cases)
        for one in parameters:
            if choice == "pairs" or (choice == "values" and not one.environment):
                assert {one.values[case] for case in cases} == set(one.values), one.name
        before, after = met(parameters, everything), met(parameters, cases)
        if choice == "pairs":
            assert {pair for pair in before if not is_environment(pair)} <= after
        if meeting or choice == "pairs":
            all_shared |= {pair for pair in before if is_environment(pair)}
            met_shared |= {pair for pair in after if is_environment(pair)}
        for one in parameters:
            if one.environment:
                all_shared |= {(one.name, value) for value in one.values}
                met_shared |= {(one.name, one.values[case]) for case in cases}
    assert met_shared == all_shared


def product(*sizes: int) -> Wanted:
    """Return what the cases of a test bring whose parameters are all its own."""
    cases = list(itertools.product(*map(range, sizes)))
    parameters = [Parameter(str(n), tuple(case[n] for case in cases), False) for n in range(len(sizes))]
    return wanted(parameters, len(cases), "pairs")


@pytest.mark.parametrize(("sizes", "most"), [((4, 4, 4), 24), ((10, 4, 2, 5), 60), ((3, 3, 3, 3), 18)])
def test_pairs_are_far_fewer_than_the_product(sizes, most):
    (chosen,) = choose([product(*sizes)])
    assert len(chosen) <= most


def test_another_turn_chooses_others():
    needs = [product(4, 4, 4)]
    assert {tuple(sorted(choose(needs, turn)[0])) for turn in range(3)} != {tuple(sorted(choose(needs, 0)[0]))}


def test_any_two_of_the_environment_meet_in_one_file():
    """In cases of the suite itself, by the names of its providers, loops and ways of progress."""
    told = {}
    for choice in ("all", "values"):
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--combinations={choice}", str(TESTS / MEETING)]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *options], capture_output=True, text=True, timeout=100
        )
        cases = [set(found[1].split("-")) for found in re.finditer(r"\[(.*)\]$", done.stdout, re.MULTILINE)]
        told[choice] = {pair for case in cases for pair in itertools.combinations(sorted(case & ENVIRONMENTS), 2)}
    assert told["values"] == told["all"]
    assert {"local+cuda", "trio"} in map(set, told["all"])
    assert {"socket", "thread"} in map(set, told["all"])


def test_dear_files_are_there_and_others_are_not():
    files = [path for path in TESTS.rglob("test_*.py") if is_dear(path)]
    assert all(any(path.relative_to(TESTS).as_posix().startswith(name) for path in files) for name in DEAR)
    assert not is_dear(TESTS / "lint" / "test_mutants.py")
    assert not is_dear(Path("/elsewhere/failure/test_a.py"))


SOURCE = """
import pytest

@pytest.mark.parametrize("provider", ["tcp", "shm", "sim"])
@pytest.mark.parametrize("progress", ["adaptive", "thread"])
@pytest.mark.parametrize(("verb", "says"), [("write", 1), ("read", 2), ("send", 3)])
def test_of_three(provider, progress, verb, says):
    pass

@pytest.mark.parametrize("size", range(5))
def test_of_one(size):
    pass

def test_of_none():
    pass
"""


@pytest.mark.parametrize(
    ("choice", "of_three", "of_one"), [("all", 18, 5), ("pairs", 9, 5), ("values", 3, 5), ("tests", 1, 1)]
)
def test_a_run_has_its_choice_and_says_so(
    choice, of_three, of_one, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
):
    """`verb` and `says` vary together, so they are one; each value of an environment comes with any choice."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    pytester.makeconftest("pytest_plugins = ['support.plugins.combinations']")
    pytester.makepyfile(SOURCE)
    options = ["-q", "-p", "no:cacheprovider", "-rA", f"--combinations={choice}"]
    result = pytester.run(sys.executable, "-m", "pytest", *options)
    passed = [line for line in result.outlines if line.startswith("PASSED")]
    count = sum("test_of_three" in line for line in passed)
    environments = {tuple(line.split("-")[-2:]) for line in passed if "test_of_three" in line}
    assert count == of_three if choice in ("all", "pairs") else count >= of_three
    assert len({value for pair in environments for value in pair}) == 5
    assert len(environments) == 6 or choice in ("values", "tests")
    assert sum("test_of_one" in line for line in passed) == of_one
    assert sum("test_of_none" in line for line in passed) == 1
    assert f"combinations of parameters: {count + of_one} of 23" in result.outlines
