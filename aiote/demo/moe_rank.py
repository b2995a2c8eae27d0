"""The processes of `aiote demo moe`: `python -m aiote.demo.moe_rank ROLE SETTINGS`, a rank's number or "alone".

    all             {"ready": address}; "alone" has no address
    to a rank       {"members": [addresses]}, or {"replace": rank, "address": address}; it answers {"joined": epoch}
    to a rank       {"begin": true} a text; {"next": true} token of it: {"token": t, "logits": crc, "without": {...}}
    to "alone"      {"rank": whose text, "without": {...}}; it answers {"rank": r, "tokens": [[t, crc], ...]}

`without` maps each rank whose experts are left out to the first such round of the text. A round is one layer of one
token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

import aiote
from aiote.demo.life import Orders, ParentRequests, live, tell
from aiote.demo.moe_model import LOCAL, PROMPTS, MoeModel, MoeSettings
from aiote.demo.request_cache import Floats
from aiote.moe import MoeGroup, open_group

__all__ = ["main"]


class GeneratedText:
    """A text that a rank generates; `without` maps a rank to the first round whose sums lacked its experts."""

    def __init__(self, model: MoeModel, moe: MoeGroup, settings: MoeSettings) -> None:
        self.without: dict[int, int] = {}
        self.tokens = model.generate(PROMPTS[moe.rank], settings.tokens, self._mix)
        self._model, self._moe = model, moe
        self._round = 0

    async def _mix(self, layer: int, normed: Floats) -> Floats:
        model, moe = self._model, self._moe
        under_way = moe.dispatch_send(normed, *model.route(layer, normed))
        shared = model.shared(layer, normed)  # while rows are in flight
        batch = await under_way.dispatch_recv()
        for number, count in enumerate(batch.expert_num_tokens):
            rows = batch.x[number, :count]
            batch.y[number, :count] = model.expert(layer, moe.rank * LOCAL + number, rows)
        routed: Floats = await moe.combine(batch)
        assert batch.answered is not None
        for rank in np.flatnonzero(~batch.answered).tolist():
            self.without.setdefault(rank, self._round)
        self._round += 1
        return shared + routed


async def be_rank(number: int, settings: MoeSettings, orders: Orders, asked: AsyncIterator[dict[str, Any]]) -> None:
    """Hold the rank's experts and generate its text, one token for each request of the parent, until ordered to end."""
    model = await anyio.to_thread.run_sync(MoeModel, settings)

    async def serve() -> None:
        members = (await anext(asked))["members"]
        async with open_group(engine, members, number, settings.config()) as moe:
            tell(joined=moe.epoch)
            text = GeneratedText(model, moe, settings)
            async for order in asked:
                match order:
                    case {"replace": rank, "address": address}:
                        await moe.replace(rank, address)
                        tell(joined=moe.epoch)
                    case {"begin": _}:
                        text = GeneratedText(model, moe, settings)
                    case {"next": _}:
                        token, crc = await anext(text.tokens)
                        tell(token=token, logits=crc, without=text.without)

    async with aiote.open_engine(settings.provider) as engine:
        tell(ready=str(engine.address))
        await orders.while_wanted(serve)


async def be_alone(settings: MoeSettings, orders: Orders, asked: AsyncIterator[dict[str, Any]]) -> None:
    """Generate whole texts, with all experts or without some ranks' from given rounds on, until ordered to end."""
    model = await anyio.to_thread.run_sync(MoeModel, settings)

    async def serve() -> None:
        async for order in asked:
            tell(rank=order["rank"], tokens=[one async for one in _text(model, settings, **order)])

    tell(ready="alone")
    await orders.while_wanted(serve)


async def _text(
    model: MoeModel, settings: MoeSettings, rank: int, without: dict[str, int]
) -> AsyncGenerator[tuple[int, int], None]:
    rounds = iter(range(settings.tokens * model.layers))

    async def mix(layer: int, normed: Floats) -> Floats:
        await anyio.lowlevel.checkpoint()  # an order to end may have come
        now = next(rounds)
        return model.compute_locally(layer, normed, {int(one) for one, first in without.items() if first <= now})

    async with aclosing(model.generate(PROMPTS[rank], settings.tokens, mix)) as tokens:
        async for one in tokens:
            yield one


async def _asked(work: Callable[[Orders, AsyncIterator[dict[str, Any]]], Awaitable[None]], orders: Orders) -> None:
    """Work on the parent's requests."""
    with ParentRequests() as requests:
        await work(orders, aiter(requests))


def main(role: str, settings: MoeSettings) -> int:
    """Do the work of a role until the parent ends it; return the exit status."""
    if role == "alone":
        return live("one process", partial(_asked, partial(be_alone, settings)))
    return live(f"rank {role}", partial(_asked, partial(be_rank, int(role), settings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], MoeSettings(**json.loads(sys.argv[2]))))
