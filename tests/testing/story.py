"""A story of three engines that meets most of what there is; run as a program it prints what happened."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiote
from aiote.testing import Fabric, run

SIZE = 300_000


async def tell(fabric: Fabric) -> list[Any]:
    """Three engines connect to each other at once, write, page, read and send; a rail gets slow, an engine crashes."""
    outcomes: list[Any] = []
    a, b, c = [await aiote.open_engine("sim") for _ in range(3)]
    await asyncio.gather(*(x.connect(y.address) for x in (a, b, c) for y in (a, b, c) if x is not y))
    pool, source = bytearray(SIZE), a.register(bytes(range(250)) * (SIZE // 250))
    target = a.attach(b.register(pool).descriptor)
    fabric.slow_rail(b, 1, by=1e-4)
    writes = [a.submit_write_imm(source, target, 7) for _ in range(5)]
    pages = aiote.Pages(source, list(range(30)), 1000), aiote.Pages(target, list(range(30))[::-1], 1000)
    await asyncio.gather(
        *writes, a.write_pages(*pages, 8), b.counter(7).wait(5), b.counter(8).wait(30), *(send(x, b) for x in (a, c))
    )
    outcomes += [sorted([(await b.recv()).data for _ in range(30)])[::13]]
    doomed = [a.submit_write_imm(source, target, 9) for _ in range(20)]
    await asyncio.sleep(60e-6)
    fabric.crash(b)
    for transfer in doomed:
        outcomes.append(await ended(transfer))
    await c.send(a.address, b"on we go")
    outcomes.append((await a.recv()).data)
    await asyncio.sleep(100)
    for engine in (a, c):
        await engine.aclose()
    return outcomes


async def send(here: aiote.Engine, there: aiote.Engine) -> None:
    for number in range(15):
        await here.send(there.address, b"%d" % number)


async def ended(transfer: aiote.Transfer) -> str:
    try:
        await transfer
    except aiote.AioteError as error:
        return type(error).__name__
    return "done"


def told(seed: int) -> tuple[Any, ...]:
    """Run the story, and return all that can be seen of it."""
    seen: list[Any] = []

    async def main(fabric: Fabric) -> None:
        seen.append(await tell(fabric))
        seen.extend([fabric.trace(), fabric.digest, fabric.events, asyncio.get_running_loop().time()])

    run(main, seed, rails=2)
    return tuple(seen)


if __name__ == "__main__":
    story = told(int(sys.argv[1]))
    print(story[2], story[3], repr(story[4]), len(story[1]), hash(tuple(story[1])))
