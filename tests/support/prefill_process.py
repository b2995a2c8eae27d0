"""A prefiller in a process of its own, to be stopped and killed: `prefill_process.py PROVIDER PAUSE`.

It prints its engine's address and serves until its input ends. PAUSE is the seconds that a layer takes.
"""

from __future__ import annotations

import functools
import sys

import anyio
import anyio.to_thread

from engines import LOST_SOON, opened
from kvcaches import SMALL, prefill_rank

TAIL_BYTES = 24


async def main(provider: str, pause: float) -> None:
    open_engine = functools.partial(opened, provider, **LOST_SOON)
    async with prefill_rank(open_engine, SMALL, tail_bytes=TAIL_BYTES) as rank, anyio.create_task_group() as group:
        group.start_soon(functools.partial(rank.serve, pause=pause))
        print(rank.engine.address, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], float(sys.argv[2]))
