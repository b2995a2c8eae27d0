"""A pytest plugin: which event loop a coroutine test runs on.

A coroutine test runs on asyncio in debug mode (pytest-asyncio), unless it is marked `anyio`, alone or by its module's
`pytestmark`; then it runs on every loop of `LOOPS` (anyio's plugin). Fixtures that are coroutines are declared with
`pytest_asyncio.fixture` for the first kind and with `pytest.fixture` for the second.
"""

from __future__ import annotations

import inspect

import pytest

from support.plugins.blocking import TaskSteps

LOOPS = [
    pytest.param(("asyncio", {"debug": True}), id="asyncio"),
    pytest.param(("asyncio", {"debug": True, "use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {"instruments": [TaskSteps()]}), id="trio"),
]


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
