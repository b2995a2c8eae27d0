"""What a spawned process does with an engine; a module of its own, so that the child imports nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import aiote

SIZE = 1 << 20


def exchange(provider: str, progress: str, mine: Any, theirs: Any, results: Any, number: int) -> None:
    """Tell the other process where we are, exchange data with it, and report."""
    try:
        asyncio.run(asyncio.wait_for(_exchange(provider, progress, mine, theirs, number), 25))
        results.put((number, "ok"))
    except BaseException as error:
        results.put((number, repr(error)))
        raise


async def _exchange(provider: str, progress: str, mine: Any, theirs: Any, number: int) -> None:
    config = aiote.EngineConfig(progress=progress, largest_message=SIZE // 10)
    async with aiote.open_engine(provider, config=config) as engine:
        target = np.zeros(SIZE, np.uint8)
        theirs.put(engine.register(target).descriptor)
        remote = engine.attach(await asyncio.to_thread(mine.get))
        source = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)
        expected = np.random.default_rng(1 - number).integers(0, 256, SIZE, np.uint8)
        await engine.write_imm(engine.register(source), remote, 1)
        await engine.counter(1).wait(1)
        assert np.array_equal(target, expected), "the bytes of the other process are wrong"
        back = np.zeros(SIZE, np.uint8)
        await engine.read(remote, engine.register(back))
        assert np.array_equal(back, source), "what was read back is wrong"
        await engine.send(remote.owner, b"%d is done" % number)
        message = await engine.recv()
        assert message.data == b"%d is done" % (1 - number)
