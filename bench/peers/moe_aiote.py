"""Rounds of dispatch and combine by aiote.moe: one rank, over the rail that the engine chooses.

Variants: "" takes the defaults; "packed" and "direct" name the placement, the second with tokens in `moe.inputs()`;
"rank" sends a token once to a rank and has experts' sums sent back; "rails" uses no memory that ranks share.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiote
import moe
from aiote.moe import Batch, MoeConfig, open_group

WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "packed": {"placement": "packed"},
    "direct": {"placement": "direct"},
    "rank": {"copies": "rank", "reduce": "expert"},
    "rails": {"shared_memory": "off"},
}


class AioteRounds(moe.Rounds):
    """A group for each case, with a number of its own: another rank may be in the last one still."""

    numbers = itertools.cycle(range(32))

    def __init__(self, data: moe.Data, engine: aiote.Engine, members: list[str], variant: str) -> None:
        super().__init__(data)
        self.engine, self.members, self.variant = engine, members, variant
        self.tolerance *= 2 if variant == "rank" else 1
        self.stack = AsyncExitStack()
        self.batch: Batch | None = None
        self.given = [data.mine(version) for version in (0, 1)]
        self.ids = data.ids[data.rank].astype(np.int32)
        self.sums = np.zeros((self.case.tokens, moe.HIDDEN), np.uint16)

    async def open(self) -> None:
        config = MoeConfig(
            experts=moe.EXPERTS,
            top_k=moe.TOP_K,
            hidden=moe.HIDDEN,
            tokens=self.case.tokens,
            dtype="float8_e4m3fn",
            scales=moe.SCALES,
            layout="contiguous",
            **WAYS[self.variant],
        )
        self.moe = await self.stack.enter_async_context(
            open_group(self.engine, self.members, self.data.rank, config, group=next(self.numbers))
        )
        if self.variant == "direct":
            self.inputs = self.moe.inputs(np.empty(0, np.uint8))

    async def dispatch(self, version: int) -> None:
        x, scales = self.given[version]
        self.batch = await self.moe.dispatch(x, self.ids, self.data.weights, scales)

    async def combine(self) -> None:
        assert self.batch is not None
        await self.moe.combine(self.batch, out=self.sums)

    def arrived(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        assert self.batch is not None
        count = int(self.batch.offsets[-1])
        return self.batch.x[:count].view(np.uint8), self.batch.scales[:count]

    def answer(self, first: int, rows: moe.Bits) -> None:
        assert self.batch is not None
        self.batch.y[first : first + len(rows)] = rows

    def out(self) -> moe.Bits:
        return self.sums

    async def close(self) -> None:
        await self.stack.aclose()


class RegisteredRounds(AioteRounds):
    """Tokens are where a layer would have put them: in the group's own memory. They are put there off the clock."""

    def prepare(self, version: int) -> None:
        for there, here in zip(self.inputs, self.given[version], strict=True):
            there.view(np.uint8)[...] = here.view(np.uint8)

    async def dispatch(self, version: int) -> None:
        self.batch = await self.moe.dispatch(self.inputs[0], self.ids, self.data.weights, self.inputs[1])


def exchange(folder: Path, rank: int, ranks: int, address: str) -> list[str]:
    """Return the addresses of all ranks, each of which writes its own to a file."""
    beside = folder / f"address.{rank}.new"
    beside.write_text(address)
    beside.rename(folder / f"address.{rank}")
    files = [folder / f"address.{one}" for one in range(ranks)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    return [file.read_text() for file in files]


async def main() -> None:
    arguments = moe.parse()
    worker = moe.Worker(arguments.folder, arguments.rank, f"aiote {aiote.__version__}")
    # Answers are made and checked on the loop's thread, for seconds where ranks share processors.
    # A ring holds what a rank has under way toward another: who is not running does not make the sender sleep.
    async with aiote.open_engine(heartbeat_timeout=60) as engine:
        members = exchange(arguments.folder, arguments.rank, arguments.ranks, str(engine.address))

        def make(variant: str, data: moe.Data) -> moe.Rounds:
            kind = RegisteredRounds if variant == "direct" else AioteRounds
            return kind(data, engine, members, variant)

        await worker.serve(make)


if __name__ == "__main__":
    asyncio.run(main())
