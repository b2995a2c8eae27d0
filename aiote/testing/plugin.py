"""The pytest plugin: simulated networks as fixtures, and tests in virtual time.

`fabric(seed)` makes networks that are closed after the test, `engine_pair(seed)` two connected engines on one network.
Both are plain fixtures, so they work with any plugin for coroutine tests, on asyncio and on trio. A coroutine test
marked `virtual_time` needs no such plugin, because this plugin runs it, in virtual time.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from ..engine import Engine
    from .fabric import Fabric

__all__ = ["engine_pair", "fabric"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "virtual_time(seed=0, limit=3600, **fabric): run this coroutine in virtual time, within a Fabric of this seed",
    )


def coroutine_function(obj: Any) -> Callable[..., Any] | None:
    """Return the coroutine function of a test, also if another plugin has wrapped it to run it by itself."""
    if inspect.iscoroutinefunction(obj):
        return cast("Callable[..., Any]", obj)
    wrapped = getattr(obj, "__wrapped__", None)
    if not inspect.iscoroutinefunction(wrapped):
        return None
    if inspect.ismethod(obj) and not inspect.ismethod(wrapped):
        return partial(wrapped, obj.__self__)
    return cast("Callable[..., Any]", wrapped)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked coroutine test in virtual time. If the test has an argument `seed`, it is the network's seed."""
    mark = pyfuncitem.get_closest_marker("virtual_time")
    function = coroutine_function(pyfuncitem.obj)
    if mark is None or function is None:
        return None
    from .virtual_run import run

    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    settings = {"seed": given.get("seed", 0), **mark.kwargs}
    try:
        run(function(**given), *mark.args, **settings)
    except BaseException as error:
        error.add_note(f"in virtual time, with seed {settings['seed']}")
        raise
    return True


@pytest.fixture
def fabric() -> Iterator[Callable[..., Fabric]]:
    """Make simulated networks, `fabric(seed, rails=..., model=...)`; they are closed after the test."""
    from .fabric import Fabric

    made: list[Fabric] = []

    def make(seed: int = 0, **more: Any) -> Fabric:
        made.append(Fabric(seed, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def engine_pair(fabric: Callable[..., Fabric]) -> Callable[..., AbstractAsyncContextManager[tuple[Engine, Engine]]]:
    """Open two connected engines: `async with engine_pair(seed, rails=..., config=...) as (left, right)`."""

    @asynccontextmanager
    async def pair(seed: int = 0, *, config: Any = None, **more: Any) -> AsyncIterator[tuple[Engine, Engine]]:
        network = fabric(seed, **more)
        async with network.open_engine(config=config) as left, network.open_engine(config=config) as right:
            await left.connect(right.address)
            yield left, right

    return pair
