"""A pytest plugin: which combinations of its parameters a test is tried with.

A test of two providers, three loops and five verbs is thirty cases, and most of what they find is found where two of
the values meet. So there are four choices (`--combinations`):

| all    | the full product: `make test-all`, and pytest without this option                                         |
| pairs  | each two values of two parameters of a test meet in one of its cases                                      |
| values | each value of a test's own parameters, so each row of a table, comes: `make test`, on the newest library; |
|        | of files whose cases are processes, or seconds (DEAR), as with `tests`                                    |
| tests  | each test has a case: `make check`, and the system's library and the guest in `make test`                 |

Provider, loop and the way of progress are parameters of nearly every test: they are the environment. With `pairs` each
value of them comes in every test, and each two meet in one of the tests of each file. With the other choices each value
comes in one of the tests of each file, and each two meet in the file MEETING. Which ones meet elsewhere differs by the
file's name. Parameters that vary together, from one `parametrize`, are one. A choice is the same each time; `--turn`
makes another run choose others.

Covering arrays: Cohen et al., "The AETG system", IEEE TSE 23(7), 1997; chosen greedily here, among the cases there are.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import TESTS

ENVIRONMENT = {"provider", "kind", "anyio_backend", "progress", "threaded"}
Pair = tuple[Hashable, ...]
DEAR = (
    "bench",
    "demo",
    "engine/test_closing_mid_transfer",
    "examples",
    "link_loss",
    "links/test_busy_loop",
    "moe/test_storm",
    "process_death",
    "rails/test_efa",
    "rails/test_prove",
    "soak",
    "testing",
)
"""Folders and files, by how their names begin, whose cases start processes or take seconds."""
MEETING = "engine/test_writes.py"
"""The file in which each two values of the environment meet: its cases take milliseconds."""


@dataclass(frozen=True)
class Parameter:
    """What varies as one: its names, the value of each case, and whether it is of the environment."""

    name: str
    values: tuple[Hashable, ...]
    environment: bool


@dataclass
class Wanted:
    """The values that each case brings to its test (`own`), and to the environments of its file (`shared`)."""

    own: list[set[Pair]]
    shared: list[set[Pair]]


def wanted(parameters: Sequence[Parameter], cases: int, choice: str, *, meeting: bool = False) -> Wanted:
    """Say what each case of a test is good for. meeting: any two values of the environment have to meet in the file."""
    own: list[set[Pair]] = []
    shared: list[set[Pair]] = []
    for case in range(cases):
        here, there = set[Pair](), set[Pair]()
        if choice in ("pairs", "values"):
            asked = [one for one in parameters if choice == "pairs" or not one.environment]
            here |= {(one.name, one.values[case]) for one in asked}
        for one, two in itertools.combinations(sorted(parameters, key=lambda item: item.name), 2):
            pair = one.name, one.values[case], two.name, two.values[case]
            if one.environment and two.environment:
                there |= {pair} if meeting or choice == "pairs" else set()
            elif choice == "pairs":
                here.add(pair)
        there |= {(one.name, one.values[case]) for one in parameters if one.environment}
        own.append(here or {()})
        shared.append(there)
    return Wanted(own, shared)


def choose(tests: Sequence[Wanted], turn: int = 0, start: int = 0) -> list[list[int]]:
    """Choose cases of each test of a file, greedily: what brings most for its test, then most for the file.

    start: a number that differs between files, so that they begin with different cases.
    """
    met: set[Pair] = set()
    chosen: list[list[int]] = []
    for place, test in enumerate(tests, start):
        cases = len(test.own)
        # Another run, and another file, begins elsewhere; a prime, so that no two turns are alike.
        first = (turn * 7919 + place) % cases
        left = [*range(first, cases), *range(first)]
        missing = set().union(*test.own)
        mine: list[int] = []
        while missing:
            best = max(left, key=lambda case: (len(test.own[case] & missing), len(test.shared[case] - met)))
            left.remove(best)
            mine.append(best)
            missing -= test.own[best]
            met |= test.shared[best]
        chosen.append(mine)
    for test, mine in zip(tests, chosen, strict=True):
        for case, pairs in enumerate(test.shared):
            if case not in mine and pairs - met:
                mine.append(case)
                met |= pairs
    return chosen


def _parameters(items: Sequence[pytest.Function]) -> list[Parameter]:
    """Return what a test's cases differ in."""
    together: dict[tuple[int, ...], list[str]] = {}
    values: dict[str, list[Any]] = {}
    for name in items[0].callspec.params:
        values[name] = [item.callspec.params[name] for item in items]
        numbers: dict[str, int] = {}
        pattern = tuple(numbers.setdefault(repr(value), len(numbers)) for value in values[name])
        together.setdefault(pattern, []).append(name)
    return [
        Parameter(
            "+".join(_common(name) for name in sorted(names)),
            tuple("+".join(_said(values[name][case]) for name in sorted(names)) for case in range(len(items))),
            all(_is_environment(name, values[name][0]) for name in names),
        )
        for names in together.values()
    ]


def _is_environment(name: str, value: Any) -> bool:
    return name in ENVIRONMENT and (name != "kind" or hasattr(value, "provider"))


def _common(name: str) -> str:
    """Return one name for what the suites of engines and of rails call differently."""
    return {"kind": "provider", "threaded": "progress"}.get(name, name)


def _said(value: Any) -> str:
    return str(getattr(value, "provider", None) or repr(value))


def _varies(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item, "callspec")


def is_dear(path: Path) -> bool:
    """Tell whether a file of tests has one case of each with `values`, too."""
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix().startswith(DEAR)


def reduced(items: Iterable[pytest.Item], choice: str, turn: int) -> set[pytest.Item]:
    """Return the cases to be tried; what has no parameters is among them."""
    kept: set[pytest.Item] = set()
    files: dict[Path, dict[str, list[pytest.Function]]] = {}
    for item in items:
        if _varies(item):
            assert isinstance(item, pytest.Function)
            test = item.nodeid.partition("[")[0]
            files.setdefault(item.path, {}).setdefault(test, []).append(item)
        else:
            kept.add(item)
    for path, tests in files.items():
        cases, start = list(tests.values()), zlib.crc32(path.name.encode())
        here = "tests" if choice == "values" and is_dear(cases[0][0].path) else choice
        meeting = path == TESTS / MEETING
        needs = [wanted(_parameters(items), len(items), here, meeting=meeting) for items in cases]
        for items, numbers in zip(cases, choose(needs, turn, start), strict=True):
            kept.update(items[number] for number in numbers)
    return kept


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--combinations", choices=["all", "pairs", "values", "tests"], default="all", help="of parameters")
    parser.addoption("--turn", type=int, default=0, help="choose other combinations than another run")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_counts] = (0, 0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = sum(map(_varies, items))
    choice = config.getoption("--combinations")
    if choice != "all":
        kept = reduced(items, choice, config.getoption("--turn"))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    config.stash[_counts] = sum(map(_varies, items)), everything


_counts = pytest.StashKey[tuple[int, int]]()


@pytest.fixture(scope="session", autouse=True)
def combinations_are_counted(request: pytest.FixtureRequest, record_testsuite_property: Any) -> None:
    """Tell the report how many combinations run, of how many there are."""
    for name, count in zip(("combinations", "all_combinations"), request.config.stash[_counts], strict=True):
        record_testsuite_property(name, count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    run, there_are = terminalreporter.config.stash[_counts]
    terminalreporter.write_line(f"combinations of parameters: {run} of {there_are}")
