"""Updates between processes of which one is killed or stopped at a random moment, again and again.

What must hold: every update ends, and every target is idle soon; a target has one version whole, or none; a `shadow`
keeps it whatever happens; no version runs backwards; a source that goes on after it was lost writes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from support.engines.opening import LOST_SOON, PATIENCE_S
from support.machine import LONG
from support.process.children import Child

pytestmark = pytest.mark.blocking_allowed("starts processes, and no engine runs here")

HARMS = 5
"""In each part, of 100 or 2; with two providers that makes 1000, and 20."""
PARTS = range(100 if LONG else 2)
KINDS = ("shadow", "inplace")


class Processes:
    """Two sources, two targets and a controller; whoever was killed is started anew."""

    def __init__(self, provider: str, child: Callable[[], Child], seed: int) -> None:
        self.provider, self.child, self.rng = provider, child, random.Random(seed)
        self.all: dict[str, Child] = {}
        self.versions: dict[str, int] = {}

    async def start(self, name: str) -> None:
        one = self.all[name] = self.child()
        await one.open(self.provider, **LOST_SOON)
        kind, number = name[:-1], int(name[-1])
        if kind == "source":
            await one.ask("source", rank=number)
        elif kind == "target":
            await one.ask("target", rank=number, versions=KINDS[number])
            self.versions[name] = -1

    def tell_update(self, version: int) -> None:
        sides = [[str(self.all[f"{kind}{number}"].address) for number in range(2)] for kind in ("source", "target")]
        self.all["control0"].tell("update", sources=sides[0], targets=sides[1], version=version)

    async def look(self, name: str) -> dict[str, Any]:
        """Wait until a target is idle, check what it has, and return it."""
        while not (found := await self.all[name].ask("look"))["idle"]:
            await anyio.sleep(0.01)
        version = found["version"]
        if name == "target0" and self.versions[name] >= 0:
            assert version is not None, "a shadow has lost its version"
        if version is not None:
            assert found["right"], (name, version)
            assert version >= self.versions[name]
            self.versions[name] = version
        return found

    async def harm(self, version: int) -> str:
        """Update, and kill or stop somebody meanwhile; return what was done."""
        name = self.rng.choice(list(self.all))
        stop = self.rng.random() < 0.4
        victim = self.all[name]
        for number in range(2):
            await self.all[f"source{number}"].ask("train", version=version)
        self.tell_update(version)
        await anyio.sleep(self.rng.uniform(0, 0.15))
        if stop:
            await victim.stop()
        else:
            victim.kill()
        if name != "control0":
            await self.all["control0"].answer()
        others = [f"target{number}" for number in range(2) if name != f"target{number}"]
        before = {one: await self.look(one) for one in others}
        if stop:
            # It goes on with what it was at, for which its leases have ended.
            victim.resume()
            if name == "control0":
                await victim.answer()
            elif name.startswith("source"):
                await victim.ask("train", version=version)
            after = {one: await self.look(one) for one in others}
            if name != "control0":
                assert after == before
            victim.kill()
        await victim.gone()
        victim.end()
        await self.start(name)
        return name + (" stopped" if stop else " killed")


@pytest.mark.parametrize("provider", ["local", "socket"])
@pytest.mark.parametrize("part", PARTS)
async def test_processes_that_are_killed_and_stopped(provider, part, child: Callable[[], Child]):
    with anyio.fail_after(2.5 * PATIENCE_S):
        processes = Processes(provider, child, seed=part)
        for name in ("source0", "source1", "target0", "target1", "control0"):
            await processes.start(name)
        done = [await processes.harm(version) for version in range(1, HARMS + 1)]
        for number in range(2):
            await processes.all[f"source{number}"].ask("train", version=HARMS + 1)
        processes.tell_update(HARMS + 1)
        answer = await processes.all["control0"].answer()
        assert answer["committed"] == ["r0", "r1"], (answer, done)
        for name in ("target0", "target1"):
            assert (await processes.look(name))["version"] == HARMS + 1
