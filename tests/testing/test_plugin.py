"""The pytest plugin, in a process of its own: fixtures on asyncio and trio, and tests in virtual time."""

from __future__ import annotations

import sys

import pytest

from support.plugins.inner_pytest import INI

SOURCE = """
import asyncio
import aiote
import pytest
from aiote.testing import VirtualLoop

@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param

async def exchange(left, right):
    pool = bytearray(100_000)
    target = left.attach(right.register(pool).descriptor)
    await left.write_imm(left.register(b"x" * 100_000), target, 3)
    await right.counter(3).wait(1)
    assert pool == b"x" * 100_000

@pytest.mark.anyio
async def test_a_pair(engine_pair):
    async with engine_pair(7, rails=2) as (left, right):
        await exchange(left, right)

@pytest.mark.anyio
async def test_a_fabric(fabric):
    network = fabric(3, rails=4)
    async with network.open_engine() as left, network.open_engine() as right:
        await exchange(left, right)

@pytest.mark.virtual_time(rails=2)
@pytest.mark.parametrize("seed", range(5))
async def test_virtual(seed, engine_pair):
    async with aiote.open_engine("sim") as left, aiote.open_engine("sim") as right:
        await exchange(left, right)
        await asyncio.sleep(1000)
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
    async with engine_pair(seed) as (left, right):
        await exchange(left, right)

@pytest.mark.virtual_time(seed=11)
async def test_that_fails():
    assert asyncio.get_running_loop().time() > 0

@pytest.mark.virtual_time
async def test_that_hangs():
    await asyncio.get_running_loop().create_future()
"""


def test_the_plugins_fixtures_and_marks_work_and_a_failure_names_its_seed(pytester: pytest.Pytester):
    pytester.makepyfile(SOURCE)
    pytester.makeini(INI)
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(passed=9, failed=2)
    result.stdout.fnmatch_lines(["*in virtual time, with seed 11", "*virtual time stands still*"])


BESIDE = """
import asyncio
import pytest
from aiote.testing import VirtualLoop

@pytest.mark.virtual_time
async def test_alone(fabric):
    assert isinstance(asyncio.get_running_loop(), VirtualLoop)

class TestMany:
    @pytest.mark.virtual_time
    async def test_one(self, fabric):
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        await asyncio.sleep(1000)

async def test_real():
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
"""


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_the_plugin_works_beside_pytest_asyncio(pytester: pytest.Pytester, mode):
    """Where that takes every coroutine for its own the mark goes before it."""
    pytester.makepyfile(BESIDE if mode == "auto" else BESIDE[: BESIDE.index("async def test_real")])
    asyncio_ini = f"asyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\n" if mode == "auto" else ""
    pytester.makeini(INI + asyncio_ini)
    without = ["-p", "no:asyncio"] if mode == "none" else []
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *without)
    result.assert_outcomes(passed=3 if mode == "auto" else 2)
