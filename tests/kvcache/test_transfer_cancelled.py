"""Cancellations that must cost nobody but the one who was cancelled. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import pytest

from aiote.kvcache import CacheLayout
from aiote.service.endpoint import Endpoint
from aiote.testing import Fabric, run
from kvcaches import DecodeRank, PrefillRank, decode_rank, prefill_rank

TOKENS, OTHERS = list(range(100, 143)), list(range(200, 243))
LIMITS = {"stall_limit": 4.0, "confirm_limit": 1.0}
BIG = CacheLayout(layers=4, kv_heads=4, head_size=64, page_tokens=16, dtype="uint8")


async def ask(decode: DecodeRank, prefill: PrefillRank, tokens: list[int]) -> None:
    async with decode.decoder.request(tokens, [prefill.engine.address]) as slot:
        await slot.arrived()
        decode.check(slot)


def test_a_scope_cancelled_around_a_decoder_leaves_a_shielded_shutdown_its_requests():
    """There are pages for one request: the second one gets those of the first, once nobody writes to them."""

    async def shut_down(fabric: Fabric, decode: DecodeRank, prefill: PrefillRank, cancel: Callable[[], None]) -> None:
        for rail in range(2):
            fabric.slow_rail(decode.engine, rail, by=0.02)
        async with decode.decoder.request(TOKENS, [prefill.engine.address]) as slot:
            while not prefill.prefiller.statistics().in_flight:
                await asyncio.sleep(1e-4)
            cancel()
            second = asyncio.ensure_future(ask(decode, prefill, OTHERS))
            await asyncio.wait_for(slot.arrived(), 10)
            assert decode.decoder.waiting == 1
            decode.check(slot)
        await asyncio.wait_for(second, 10)

    async def main(fabric: Fabric) -> None:
        async with prefill_rank(fabric.open_engine, BIG, tail_bytes=24) as prefill:
            serving = asyncio.ensure_future(prefill.serve(chunk_tokens=16))
            with anyio.CancelScope() as scope:
                async with decode_rank(fabric.open_engine, BIG, 3, tail_bytes=24, **LIMITS) as decode:
                    # In a task of its own: in this one the cancellation would hide what it raises.
                    shutdown = asyncio.ensure_future(shut_down(fabric, decode, prefill, scope.cancel))
                    with anyio.CancelScope(shield=True):
                        await asyncio.wait([shutdown])
            await shutdown
            serving.cancel()

    run(main, rails=2)


@pytest.mark.parametrize("busy_s", [2.0, 60.0])
def test_a_cancelled_request_whose_prefiller_is_busy_costs_no_other_one_its_leases(busy_s):
    """Nor are its pages anybody's before that prefiller has answered, or has lost its leases when nobody uses them."""

    async def main(fabric: Fabric) -> None:
        async with (
            prefill_rank(fabric.open_engine, BIG, tail_bytes=24) as prefill,
            decode_rank(fabric.open_engine, BIG, 18, tail_bytes=24, **LIMITS) as decode,
        ):
            serving = asyncio.ensure_future(prefill.serve(chunk_tokens=16, pause=0.5))
            first = asyncio.ensure_future(ask(decode, prefill, TOKENS))
            others = [asyncio.ensure_future(ask(decode, prefill, OTHERS)) for _ in range(5)]
            await asyncio.sleep(0.6)
            endpoint = Endpoint.of(prefill.engine)
            hear, late = endpoint._cancel, []
            # The prefiller is busy: it hears of no cancellation.
            endpoint._cancel = lambda link, frame: late.append((link, frame))  # type: ignore[method-assign]
            first.cancel()
            await asyncio.sleep(LIMITS["confirm_limit"] + 0.3)
            assert (decode.decoder.free_pages, decode.decoder.revoked) == (0, 0)
            asyncio.get_running_loop().call_later(busy_s, lambda: [hear(*one) for one in late])
            await asyncio.gather(*others)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(first, 2)
            assert (decode.decoder.free_pages, decode.decoder.revoked) == (18, 1)
            decode.memory[:] = 0xEE
            await asyncio.sleep(100)
            assert (decode.memory == 0xEE).all()
            await ask(decode, prefill, TOKENS)
            serving.cancel()

    run(main, rails=2)
