"""A request starts natively, or in Python if it needs a closer look: both say and do the same.

A choice of rail is such a need, so the same call with `rail=0` goes the other way.
"""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import PATIENCE_S, across, noise, pair

pytestmark = [pytest.mark.anyio]
WAYS = {"native": {}, "checked": {"rail": 0}}
PAGE, COUNT = 64, 32


def pages(region: aiote.Region | aiote.RemoteRegion, index: object) -> aiote.Pages:
    return aiote.Pages(region, index, PAGE, PAGE)


async def told(call) -> str:
    """Return what a call says of a mistake, "" if it does what it should."""
    try:
        await call
    except aiote.AioteError as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def connected(left: aiote.Engine, right: aiote.Engine) -> None:
    await left.send(right.address, b"hello")
    await right.recv()


@pytest.mark.parametrize("verb", ["write_pages", "read_pages", "write", "read", "write_imm"])
async def test_both_ways_bring_the_bytes(verb):
    forth, back = np.random.default_rng(3).permutation(COUNT), np.random.default_rng(4).permutation(COUNT)
    with anyio.fail_after(PATIENCE_S):
        async with pair("local") as (left, right):
            await connected(left, right)
            for way in WAYS.values():
                here, there = noise(PAGE * COUNT), noise(PAGE * COUNT)
                ours, theirs = left.register(here), across(left, right, there)
                ours_index, theirs_index = np.arange(COUNT), np.arange(COUNT)
                before = (here if verb.startswith("write") else there).copy().reshape(COUNT, PAGE)
                if verb.endswith("pages"):
                    ours_index, theirs_index = forth, back
                    args = (pages(ours, forth), pages(theirs, back))
                else:
                    args = (ours, theirs)
                if verb.startswith("read"):
                    args = args[::-1]
                await getattr(left, verb)(*args, *([5] if verb == "write_imm" else []), **way)
                after = (there if verb.startswith("write") else here).reshape(COUNT, PAGE)
                source, target = (ours_index, theirs_index) if verb.startswith("write") else (theirs_index, ours_index)
                assert np.array_equal(after[target], before[source])
            if verb == "write_imm":
                await right.counter(5).wait(len(WAYS))


async def test_both_ways_refuse_the_same_in_the_same_words():
    with anyio.fail_after(PATIENCE_S):
        async with pair("local") as (left, right):
            await connected(left, right)
            plain, frozen = left.register(noise(PAGE * 2)), left.register(b"r" * PAGE * 2)
            theirs = left.attach(right.register(noise(PAGE * 2), "read-write").descriptor)
            fixed = across(left, right, b"w" * PAGE * 2)
            hidden = left.attach(right.register(noise(PAGE * 2), "write").descriptor)
            closed = left.register(noise(PAGE * 2))
            await closed.aclose()
            short = theirs[0:PAGE]
            both = [0, 1]
            calls = {
                "read into what is read-only": lambda way: left.read(theirs, frozen, **way),
                "read of what cannot be read": lambda way: left.read(hidden, plain, **way),
                "write to what is read-only": lambda way: left.write(plain, fixed, **way),
                "write from a closed region": lambda way: left.write(closed, theirs, **way),
                "other lengths": lambda way: left.write(plain, short, **way),
                "a large immediate": lambda way: left.write_imm(plain, theirs, 1 << 28, **way),
                "pages into what is read-only": lambda way: left.read_pages(
                    pages(theirs, both), pages(frozen, both), **way
                ),
                "pages of what cannot be read": lambda way: left.read_pages(
                    pages(hidden, both), pages(plain, both), **way
                ),
                "pages to what is read-only": lambda way: left.write_pages(
                    pages(plain, both), pages(fixed, both), **way
                ),
                "fewer pages": lambda way: left.write_pages(pages(plain, both), pages(theirs, [0]), **way),
                "a stream for host memory": lambda way: left.read(theirs, plain, stream=1, **way),
            }
            for name, call in calls.items():
                texts = {await told(call(way)) for way in WAYS.values()}
                assert len(texts) == 1, (name, texts)
                assert texts != {""}, name


async def test_both_ways_obey_a_lease_and_the_limit():
    with anyio.fail_after(PATIENCE_S):
        async with pair("local", max_transfers=2) as (left, right):
            await connected(left, right)
            memory = right.register(noise(PAGE * 2), "read-write")
            lease = memory.lease(slice(0, PAGE * 2), right.peers[0])
            theirs, ours = left.attach(lease.descriptor), left.register(noise(PAGE * 2))
            both = [0, 1]
            for way in WAYS.values():
                await left.read_pages(pages(theirs, both), pages(ours, both), **way)
                started = [left.submit_write_pages(pages(ours, both), pages(theirs, both), **way) for _ in range(2)]
                with pytest.raises(aiote.QueueFull):
                    left.submit_read_pages(pages(theirs, both), pages(ours, both), **way)
                await left.read_pages(pages(theirs, both), pages(ours, both), **way)
                for one in started:
                    await one
            await lease.revoke()
            texts = {
                await told(left.read_pages(pages(theirs, both), pages(ours, both), **way)) for way in WAYS.values()
            }
            assert len(texts) == 1
            assert "lease" in texts.pop()
