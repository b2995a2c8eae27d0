"""Peers on this host are reached through shared memory without being asked for, others never."""

from __future__ import annotations

import resource

import anyio
import numpy as np
import pytest

import aiote
import aiote.runtime
from support.engines.opening import PATIENCE_S, across, opened

pytestmark = pytest.mark.libfabric


async def moved(left: aiote.Engine, right: aiote.Engine) -> list[str]:
    """Move bytes and a message between two engines, and return the providers of the rails that are joined."""
    source, target = np.arange(100_000, dtype=np.uint8), np.zeros(100_000, np.uint8)
    await left.write_imm(left.register(source), across(left, right, target), 3)
    await right.counter(3).wait(1)
    assert np.array_equal(source, target)
    await right.send(left.address, b"hello")
    assert (await left.recv()).data == b"hello"
    (link,) = left._runtime.core.peers
    return [left.rails[link.rail_of(i)].provider.partition(";")[0] for i in range(8) if link.rail_of(i) >= 0]


async def test_on_one_host_auto_goes_through_shared_memory():
    with anyio.fail_after(PATIENCE_S):
        async with opened("auto") as left, opened("auto") as right:
            assert [rail.provider.partition(";")[0] for rail in left.rails] == ["socket", "local"]
            assert await moved(left, right) == ["local"]


@pytest.mark.parametrize("sizes", [(1 << 17, 4 << 20), (2 << 20, 1 << 19)])
async def test_each_side_chooses_how_long_its_ring_is(sizes):
    """Three times what the longest holds, both ways at once, and not a multiple of anything."""
    one, other = (np.random.default_rng(size).integers(0, 256, (12 << 20) + 3, np.uint8) for size in sizes)
    with anyio.fail_after(PATIENCE_S):
        async with opened("local", ring_bytes=sizes[0]) as left, opened("local", ring_bytes=sizes[1]) as right:
            targets = [np.zeros_like(one), np.zeros_like(other)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(left.write, left.register(one), across(left, right, targets[0]))
                tasks.start_soon(right.write, right.register(other), across(right, left, targets[1]))
    assert np.array_equal(targets[0], one)
    assert np.array_equal(targets[1], other)


async def test_auto_takes_sockets_where_files_may_not_be_as_large_as_rings():
    """A ring is a file to the kernel, which ends a process that goes over that limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        async with opened("auto") as engine:
            assert [rail.provider.partition(";")[0] for rail in engine.rails] == ["socket"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_between_hosts_auto_goes_through_sockets(monkeypatch):
    hosts = iter((b"a" * 32, b"b" * 32))
    monkeypatch.setattr(aiote.runtime, "host_identity", lambda: next(hosts))
    with anyio.fail_after(PATIENCE_S):
        async with opened("auto") as left, opened("auto") as right:
            assert await moved(left, right) == ["socket"]


@pytest.mark.parametrize(
    ("one", "other"), [("auto", "socket"), ("socket", "auto"), ("auto", "local"), ("local", "auto")]
)
async def test_auto_goes_through_what_the_other_side_has(one, other):
    with anyio.fail_after(PATIENCE_S):
        async with opened(one) as left, opened(other) as right:
            assert await moved(left, right) == [({one, other} - {"auto"}).pop()]


async def test_a_provider_that_is_named_is_the_only_one_taken():
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp") as left, opened("tcp") as right:
            assert len(left.rails) == 1
            assert await moved(left, right) == ["tcp"]
