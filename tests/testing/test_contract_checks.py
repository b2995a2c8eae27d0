"""`aiote.testing.contract`: every check passes on rails of this host, or says why it is not run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

import aiote
from aiote.testing import Fabric
from aiote.testing.contract import (
    CHECKS,
    Check,
    EnginePair,
    NotHere,
    child_command,
    joined,
    pulled_by_engine,
    pulled_in_fabric,
)

RAILS = {"local": None, "socket": ["127.0.0.1", "127.0.0.1"]}
NOT_HERE = {
    ("sim", "killed-peer"): "one process",
    ("sim", "stopped-peer"): "one process",
    ("local", "pulled-rail"): "shared memory",
}


@asynccontextmanager
async def pair_of(provider: str) -> AsyncIterator[EnginePair]:
    """Open two connected engines, with two rails each where that can be."""
    if provider == "sim":
        with Fabric(seed=1, rails=2) as fabric:
            async with fabric.open_engine() as left, fabric.open_engine() as right:
                async with joined(left, right, pull=pulled_in_fabric(fabric)) as pair:
                    yield pair
        return
    rails = RAILS[provider]
    async with aiote.open_engine(provider, rails) as left, aiote.open_engine(provider, rails) as right:
        child = child_command(provider, rails)
        async with joined(left, right, child=child, pull=pulled_by_engine) as pair:
            yield pair


@pytest.mark.parametrize("provider", ["sim", "local", "socket"])
def test_every_check_passes_on(provider: str):
    """One test for all: none of them may be left out with some of the parameters."""

    async def run(check: Check) -> str:
        try:
            async with pair_of(provider) as pair:
                return await check.run(pair)
        except NotHere as reason:
            return f"not here: {reason}"

    said = {check.name: anyio.run(run, check) for check in CHECKS}
    assert all(said.values()), said
    for name, text in said.items():
        assert NOT_HERE.get((provider, name), "") in text
        assert text.startswith("not here") == ((provider, name) in NOT_HERE), text


def test_engines_without_a_child_or_a_pull_say_so():
    async def run(name: str) -> None:
        async with aiote.open_engine("local") as left, aiote.open_engine("local") as right:
            async with joined(left, right) as pair:
                await next(check for check in CHECKS if check.name == name).run(pair)

    for name in ("killed-peer", "pulled-rail"):
        with pytest.raises(NotHere):
            anyio.run(run, name)


def test_a_rail_of_one_cannot_be_pulled():
    async def run() -> None:
        async with aiote.open_engine("socket") as left, aiote.open_engine("socket") as right:
            async with joined(left, right, pull=pulled_by_engine) as pair:
                await next(check for check in CHECKS if check.name == "pulled-rail").run(pair)

    with pytest.raises(NotHere, match="two on each side"):
        anyio.run(run)


def test_a_write_that_fails_while_a_rail_is_lost_is_told():
    """Not wrapped in a group of errors: the report has its text."""

    @asynccontextmanager
    async def lost(pair: EnginePair) -> AsyncIterator[str]:
        # Until this is cancelled, because a write has failed: no write may be in flight at one of these moments, and
        # the next one connects anew.
        for _ in range(100_000):
            if (peer := pair.left.find_peer(pair.address)) is not None:
                peer.disconnect("the whole peer")
            await anyio.lowlevel.checkpoint()
        yield "everything"

    async def run() -> None:
        async with aiote.open_engine("local") as left, aiote.open_engine("local") as right:
            async with joined(left, right, pull=lost) as pair:
                await next(check for check in CHECKS if check.name == "pulled-rail").run(pair)

    with pytest.raises(aiote.AioteError):
        anyio.run(run)
