"""The pytest plugin, in a process of its own: fixtures on asyncio and trio, and tests in virtual time."""

from __future__ import annotations

import sys

import pytest

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


def test_the_plugin_s_fixtures_and_marks(pytester: pytest.Pytester):
    pytester.makepyfile(SOURCE)
    pytester.makeini("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(passed=9, failed=2)
    result.stdout.fnmatch_lines(["*in virtual time, with seed 11", "*virtual time stands still*"])
