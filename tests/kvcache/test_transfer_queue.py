"""Requests that wait behind others at a prefiller, and one that must cost nobody but itself. In virtual time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio
import pytest

from aiote.kvcache import Job, PrefillError
from aiote.testing import Fabric, run
from kvcaches import SMALL, DecodeRank, PrefillRank, decode_rank, deployed, prefill_rank, until_idle

STALL_S = 4.0
PROMPT_S = 4.5
"""What a prompt takes: more than the limit of a stall, though no layer does."""
PAUSE_S = PROMPT_S / 3 / SMALL.layers
TOKENS = list(range(24))


async def ask(decode: DecodeRank, prefill: PrefillRank, number: int) -> None:
    tokens = [token + number for token in TOKENS]
    async with decode.decoder.request(tokens, [prefill.engine.address]) as slot:
        await slot.arrived()
        decode.check(slot)


async def serve_in_line(prefill: PrefillRank) -> None:
    async for job in prefill.prefiller.jobs():
        await prefill.compute(job, pause=PAUSE_S)


async def serve_in_turn(prefill: PrefillRank) -> None:
    """Take all jobs at once, each of which then waits for its turn in its own block, as the demo's do."""
    turn = anyio.Lock()

    async def compute(job: Job) -> None:
        async with turn:
            await prefill.compute(job, pause=PAUSE_S)

    async with asyncio.TaskGroup() as group:
        async for job in prefill.prefiller.jobs():
            group.create_task(compute(job))


@pytest.mark.parametrize("serve", [serve_in_line, serve_in_turn])
def test_a_queue_that_moves_does_not_count_as_a_stall(serve):
    """Of two decoders: what one of them waits for may be the other one's."""

    async def main(fabric: Fabric) -> None:
        async with AsyncExitStack() as stack:
            prefill = await stack.enter_async_context(prefill_rank(fabric.open_engine))
            decode = [
                await stack.enter_async_context(decode_rank(fabric.open_engine, pages=24, stall_limit=STALL_S))
                for _ in range(2)
            ]
            serving = asyncio.ensure_future(serve(prefill))
            await asyncio.gather(*(ask(decode[number // 2 % 2], prefill, number) for number in range(8)))
            assert fabric.now > 7 * PROMPT_S
            serving.cancel()

    run(main)


def test_a_job_that_is_passed_over_stalls_however_much_moves_behind_it():
    async def main(fabric: Fabric) -> None:
        async with (
            prefill_rank(fabric.open_engine) as prefill,
            decode_rank(fabric.open_engine, pages=24, stall_limit=STALL_S) as decode,
        ):
            first = asyncio.ensure_future(ask(decode, prefill, 0))
            await anext(prefill.prefiller.jobs())  # and forget it
            serving = asyncio.ensure_future(serve_in_line(prefill))
            others = [asyncio.ensure_future(ask(decode, prefill, number)) for number in range(3)]
            with pytest.raises(PrefillError, match=r"nothing has come for 4.0 s"):
                await asyncio.wait_for(first, 2 * STALL_S)
            assert sum(other.done() for other in others) <= 1
            await asyncio.gather(*others)
            serving.cancel()

    run(main)


def test_requests_behind_a_job_that_stalls_fail_as_soon_as_it_does():
    async def main(fabric: Fabric) -> None:
        async with (
            prefill_rank(fabric.open_engine) as prefill,
            decode_rank(fabric.open_engine, pages=24, stall_limit=STALL_S) as decode,
        ):
            asking = [asyncio.ensure_future(ask(decode, prefill, number)) for number in range(3)]
            await anext(prefill.prefiller.jobs())  # and compute nothing any more
            found = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 3 * STALL_S)
            assert all("nothing has come for 4.0 s" in str(error) for error in found)

    run(main)


def test_a_decoder_with_another_tail_length_fails_its_own_requests_alone():
    async def main(fabric: Fabric) -> None:
        async with (
            deployed(fabric.open_engine, tail_bytes=24) as deployment,
            decode_rank(fabric.open_engine, tail_bytes=25) as odd,
        ):
            (prefill,), (decode,) = deployment.prefill, deployment.decode
            for _ in range(2):
                with pytest.raises(PrefillError, match="24 bytes, the decoder expects 25"):
                    await ask(odd, prefill, 0)
                await ask(decode, prefill, 1)
            await until_idle(deployment)

    run(main)
