"""Harm to ranks of KV caches: networks that fail in virtual time, and processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess

import aiote
from aiote.testing import Fabric
from support.process.modules import command

__all__ = ["Child", "break_things"]


class Child:
    """A process that runs a module of these; it prints its address first."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = aiote.Address.parse(self._process.stdout.readline().decode().strip())

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


async def break_things(fabric: Fabric, draw: random.Random, victims: list[aiote.Engine], slowed: aiote.Engine) -> None:
    """Partition one of the victims, kill or silence one of its two rails, or slow a rail of another engine; up to three
    times, and never for good.
    """
    for _ in range(draw.randint(0, 3)):
        await asyncio.sleep(draw.uniform(0, 0.02))
        victim = draw.choice(victims)
        kind = draw.choice(["partition", "rail", "silent", "slow"])
        if victim.closed:
            continue
        if kind == "partition":
            fabric.partition(victim)
            await asyncio.sleep(draw.choice([0.1, 2, 5]))
            fabric.heal(victim)
        elif kind == "slow":
            fabric.slow_rail(slowed, 0, by=draw.choice([1e-4, 1e-2]))
        else:
            fabric.kill_rail(victim, draw.randrange(2), silently=kind == "silent")
            await asyncio.sleep(draw.choice([0.1, 5]))
            fabric.restore_rail(victim, 0)
            fabric.restore_rail(victim, 1)
