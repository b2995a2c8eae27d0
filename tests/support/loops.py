"""A pytest plugin: which event loop a coroutine test runs on.

A coroutine test runs on asyncio in debug mode (pytest-asyncio), unless it is marked `anyio`, alone or by its module's
`pytestmark`; then it runs on every loop of `LOOPS` (anyio's plugin). Fixtures that are coroutines are declared with
`pytest_asyncio.fixture` for the first kind and with `pytest.fixture` for the second.

With `--loops 1`, 2 or 3 each of the second kind runs on one loop only, chosen by its name, so that every loop has its
third of them, and another third in each of the three: `make test` has three runs, with two libraries and in the guest.
"""

from __future__ import annotations

import inspect
import zlib

import pytest

from blocking import TaskSteps

LOOPS = [
    pytest.param(("asyncio", {"debug": True}), id="asyncio"),
    pytest.param(("asyncio", {"debug": True, "use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {"instruments": [TaskSteps()]}), id="trio"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loops", choices=["all", "1", "2", "3"], default="all", help="run each test on one event loop")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--loops") == "all":
        return
    third = int(config.getoption("--loops"))
    config.hook.pytest_deselected(items=[item for item in items if not _has_its_turn(item, third)])
    items[:] = [item for item in items if _has_its_turn(item, third)]


def _has_its_turn(item: pytest.Item, third: int) -> bool:
    """Whether a test is one that runs on no particular loop, or on the one that its name falls to."""
    case = getattr(item, "callspec", None)
    if case is None or "anyio_backend" not in case.params:
        return True
    turn = case.indices["anyio_backend"]
    name = item.nodeid.replace(str(LOOPS[turn].id), "", 1)
    return (zlib.crc32(name.encode()) + third) % len(LOOPS) == turn


@pytest.fixture(scope="module", params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """Run what is marked `anyio` on every loop that aiote promises."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Hand a coroutine test that names no plugin to pytest-asyncio."""
    function = obj.hypothesis.inner_test if hasattr(obj, "hypothesis") else obj
    if not collector.funcnamefilter(name) or not inspect.iscoroutinefunction(function):
        return
    marks = {mark.name for mark in (*collector.iter_markers(), *getattr(obj, "pytestmark", ()))}
    if not marks & {"anyio", "asyncio"}:
        pytest.mark.asyncio(obj)
