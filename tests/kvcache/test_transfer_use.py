"""How programs use decoders and prefillers: layers as they come, words that models bump, pages for what follows."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import anyio
import numpy as np
import pytest

import aiote
from aiote.kvcache import (
    Decoder,
    Job,
    JobEnded,
    PagesExhausted,
    PageTable,
    Prefiller,
    PrefillError,
    PrefillStatistics,
    Slot,
)
from aiote.testing import Fabric, run
from engines import PATIENCE_S, pair, until
from kvcaches import SMALL, DecodeRank, Deployment, PrefillRank, cache_of, calls, deployed, pool_of, tail_of, until_idle

TOKENS = list(range(40, 59))


def compute_layer(prefill: PrefillRank, job: Job, layer: int, pages: list[int]) -> None:
    prefill.memory[layer, pages] = cache_of(SMALL, job.tokens, layer, 0, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["sim", "local"])
async def test_nothing_is_asked_for_before_the_first_await(provider):
    """A program may prepare its pages in the block, and NICs write whenever they are asked to."""
    with anyio.fail_after(PATIENCE_S):
        async with deployed(provider) as deployment:
            (decode,) = deployment.decode
            for _ in range(3):
                before = decode.engine._runtime.core.statistics()
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    after = decode.engine._runtime.core.statistics()
                    assert [after[name] - before[name] for name in ("posted", "queued")] == [0, 0]
                    decode.memory[:, slot.pages] = 0
                    await slot.arrived()
                    decode.check(slot)
                await until_idle(deployment)


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["sim", "tcp"])
async def test_layers_come_in_order_while_the_next_one_is_computed(provider):
    async def prefill_slowly() -> None:
        async with await anext(prefill.prefiller.jobs()) as job:
            chunk = job.chunk(0, len(TOKENS), range(5))
            for layer in range(SMALL.layers):
                if layer:
                    # Not before the decoder has seen the layer before this one.
                    await until(lambda layer=layer: len(seen) >= layer)
                compute_layer(prefill, job, layer, list(range(5)))
                await chunk.done(layer)
            await job.tail(tail_of(TOKENS, 24))

    seen: list[int] = []
    with anyio.fail_after(PATIENCE_S):
        async with deployed(provider, serving=False) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            async with anyio.create_task_group() as group:
                group.start_soon(prefill_slowly)
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    async for layer in slot.layers():
                        decode.check(slot, layers=[layer])
                        seen.append(layer)
                    assert slot.complete
                    assert [layer async for layer in slot.layers()] == [0, 1, 2]
            assert seen == [0, 1, 2]
            await until_idle(deployment)


@pytest.mark.anyio
@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
async def test_a_watched_value_that_the_model_raises_sends_several_layers_at_once(dtype):
    word = np.full(1, 254, dtype)  # of one byte, it wraps around

    async def model() -> None:
        job = await anext(prefill.prefiller.jobs())
        async with job:
            for layer in range(SMALL.layers):
                compute_layer(prefill, job, layer, list(range(5)))
            first, second = job.chunk(0, 9, range(5)), job.chunk(9, len(TOKENS), PageTable(range(2, 5), 64, 2))
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: first.follow(word, base=254))
                group.start_soon(lambda: second.follow(word, base=254 + SMALL.layers))
                for bump, missing in ((1, (2, 3)), (4, (0, 1)), (1, (0, 0))):
                    word[0] += np.array(bump, dtype)
                    await until(lambda missing=missing: (first.missing, second.missing) == missing)
            assert (first.missing, second.missing) == (0, 0)
            await job.tail(np.frombuffer(tail_of(TOKENS, 24), np.uint8))

    with anyio.fail_after(PATIENCE_S):
        async with deployed("sim", serving=False) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            async with anyio.create_task_group() as group:
                group.start_soon(model)
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    await slot.arrived()
                    decode.check(slot)
                    assert slot.tail == tail_of(TOKENS, 24)
            await until_idle(deployment)


@pytest.mark.virtual_time
async def test_a_request_takes_more_pages_for_generated_tokens():
    async with deployed("sim", pages=8) as deployment:
        (decode,) = deployment.decode
        async with decode.decoder.request(TOKENS, deployment.group) as slot:
            await slot.arrived()
            assert (len(slot.pages), slot.capacity, slot.table.pool) == (5, 20, 8)
            await slot.extend(1)
            assert slot.capacity == 20
            await slot.extend(2)
            assert (len(slot.pages), slot.capacity) == (6, 24)
            decode.check(slot)
            with pytest.raises(aiote.UsageError):
                await slot.extend(1000)
            async with decode.decoder.request([1], deployment.group) as other, anyio.create_task_group() as group:
                await slot.extend(4)
                group.start_soon(slot.extend, 5)
                await asyncio.sleep(1)
                with pytest.raises(PagesExhausted):
                    await other.extend(8)
                group.cancel_scope.cancel()
        with pytest.raises(aiote.UsageError, match="over"):
            await slot.extend(1)
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_requests_wait_for_pages_in_turn():
    async with deployed("sim", pages=10, slots=4, line=3) as deployment:
        (decode,) = deployment.decode
        order: list[int] = []

        async def ask(number: int) -> None:
            async with decode.decoder.request(np.arange(20) + number, deployment.group) as slot:
                await slot.arrived()
                decode.check(slot)
                order.append(number)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(ask(number))
                await asyncio.sleep(0.01)
            assert (decode.decoder.requests, decode.decoder.waiting) == (2, 3)
            with pytest.raises(aiote.QueueFull):
                await ask(5)
        assert order == [0, 1, 2, 3, 4]
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_a_job_that_is_wrongly_used_says_how_and_refuses_the_request():
    async def misuse(job: Job) -> None:
        with pytest.raises(aiote.UsageError, match="enter the job"):
            job.chunk(0, 4, range(5))
        with pytest.raises(aiote.UsageError, match="without its tail|tokens in chunks"):
            async with job:
                with pytest.raises(aiote.UsageError, match="expected to begin at 0"):
                    job.chunk(4, 8, range(5))
                with pytest.raises(aiote.UsageError, match="does not have the places"):
                    job.chunk(0, 8, range(1))
                chunk = job.chunk(0, 8, range(5))
                await chunk.done(1)
                with pytest.raises(aiote.UsageError, match="done before"):
                    await chunk.done(1)
                with pytest.raises(aiote.UsageError):
                    await chunk.done(3)
                await chunk.done_to(3)
                with pytest.raises(aiote.UsageError, match="once"):
                    await job.__aenter__()
        with pytest.raises(JobEnded, match="8 of 19 tokens"):
            await job.tail(bytes(24))

    async with deployed("sim", serving=False) as deployment:
        (decode,), (prefill,) = deployment.decode, deployment.prefill
        async with anyio.create_task_group() as group:
            with pytest.raises(PrefillError, match="8 of 19 tokens"):
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    group.start_soon(misuse, await anext(prefill.prefiller.jobs()))
                    await slot.arrived()
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_a_job_whose_request_was_cancelled_ends_at_its_first_await():
    async with deployed("sim", serving=False) as deployment:
        (decode,), (prefill,) = deployment.decode, deployment.prefill
        async with decode.decoder.request(TOKENS, deployment.group):
            job = await anext(prefill.prefiller.jobs())
        assert job.cancelled
        async with job:
            await asyncio.sleep(0)
            raise AssertionError("the body has been cancelled")
        assert "cancelled" in job.reason
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_a_request_without_the_part_of_one_decode_rank_fails_in_time():
    async with deployed("sim", decode=2, serving=False, confirm_limit=1.0) as deployment:
        here, _ = deployment.decode
        with pytest.raises(PrefillError, match="decode ranks 1 have not asked for it within 10.0 s"):
            async with here.decoder.request(TOKENS, deployment.group, request_id=b"r") as slot:
                await slot.arrived()
        assert here.decoder.revoked == 0
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_one_decode_rank_leaves_and_the_other_one_is_told():
    async with deployed("sim", decode=2, prefill=2, serving=False) as deployment:
        one, two = deployment.decode
        async with two.decoder.request(TOKENS, deployment.group, request_id=b"r") as slot:
            async with one.decoder.request(TOKENS, deployment.group, request_id=b"r"):
                await asyncio.sleep(0.1)
            assert isinstance(slot, Slot)
        other = deployment.prefill[0].prefiller
        assert other.live == 0
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_drained_prefillers_finish_what_they_have():
    async with deployed("sim") as deployment:
        (decode,), (prefill,) = deployment.decode, deployment.prefill
        async with decode.decoder.request(TOKENS, deployment.group) as slot:
            while not prefill.prefiller.live:
                await asyncio.sleep(1e-6)
            await prefill.prefiller.drain()
            await slot.arrived()
            decode.check(slot)
        await until_idle(deployment)


@pytest.mark.anyio
async def test_an_engine_that_cannot_call_is_refused():
    async with pair("sim", message_bytes=2048) as (engine, _):
        for kind in (Decoder, Prefiller):
            with pytest.raises(aiote.UsageError, match="message_bytes of at least 4096"):
                await kind(engine, SMALL, pool_of(SMALL, 4, 1)).__aenter__()


@pytest.mark.anyio
async def test_wrong_arguments_of_decoders_and_requests_are_refused():
    async with pair("sim") as (engine, other):
        memory = pool_of(SMALL, 4, 1)
        for wrong in ({"rank": 1}, {"ranks": 3}, {"slots": 0}, {"stall_limit": 0}, {"imm_base": (1 << 28) - 4}):
            with pytest.raises(aiote.UsageError):
                Decoder(engine, SMALL, memory, **wrong)  # type: ignore[arg-type]
        for bad in (bytearray(7), bytes(SMALL.pool_bytes(1, 4))):
            for kind in (Decoder, Prefiller):
                with pytest.raises(aiote.UsageError):
                    await kind(engine, SMALL, bad).__aenter__()
        async with Decoder(engine, SMALL, memory) as decoder:
            with pytest.raises(aiote.UsageError):
                await decoder.__aenter__()
            for tokens, group in (([], [other.address]), ([-1], [other.address]), ([1], []), ([1], ["x"])):
                with pytest.raises(aiote.UsageError):
                    async with decoder.request(tokens, group):
                        raise AssertionError("unreachable")
            with pytest.raises(aiote.UsageError, match="twice"):
                async with decoder.request([1], [other.address] * 2):
                    raise AssertionError("unreachable")
            with pytest.raises(aiote.UsageError, match="17 pages|5 pages"):
                async with decoder.request(range(17), [other.address]):
                    raise AssertionError("unreachable")
            async with decoder.request([1], [engine.address]) as slot:
                with pytest.raises(aiote.UsageError, match="first"):
                    _ = slot.tail
                with pytest.raises(PrefillError, match="own"):
                    await slot.arrived()
        with pytest.raises(aiote.ClosedError):
            async with decoder.request([1], [other.address]):
                raise AssertionError("unreachable")


def test_a_wait_for_a_request_that_is_left_ends_with_an_error():
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, serving=False) as deployment:
            (decode,) = deployment.decode
            async with decode.decoder.request(TOKENS, deployment.group) as slot:
                waiting = asyncio.ensure_future(slot.arrived())
                await asyncio.sleep(0.1)
            with pytest.raises(aiote.ClosedError, match="left"):
                await waiting

    run(main)


@pytest.mark.virtual_time
async def test_a_prefiller_counts_what_it_has_written():
    """Of two requests, one of which is cancelled in the middle; the time of both is counted once."""

    async def prefill() -> None:
        async for job in prefiller.jobs():
            group.start_soon(rank.compute, job, 8, 1.0)

    async with deployed("sim", serving=False) as deployment:
        (decode,), (rank,) = deployment.decode, deployment.prefill
        prefiller = rank.prefiller
        assert prefiller.statistics() == PrefillStatistics(0, 0, 0, 0.0)
        async with anyio.create_task_group() as group:
            group.start_soon(prefill)
            begun = anyio.current_time()
            async with decode.decoder.request(TOKENS, deployment.group) as slot:
                await slot.arrived()
            await until_idle(deployment)
            whole = prefiller.statistics()
            # Three chunks of three layers, and the tail; every page of the layers is written once.
            assert whole.transfers == 10
            assert whole.bytes == 3 * SMALL.pages_for(len(TOKENS)) * SMALL.page_bytes(1) + 24
            assert whole.in_flight == 0
            assert 0 < whole.busy_s < (anyio.current_time() - begun) / 2
            async with decode.decoder.request(TOKENS, deployment.group) as slot:
                await until(lambda: prefiller.statistics().transfers == 12)
            await until_idle(deployment)
            group.cancel_scope.cancel()
        later = prefiller.statistics()
        assert (later.transfers, later.in_flight) == (12, 0)
        assert whole.bytes < later.bytes < 2 * whole.bytes
        assert later.busy_s > whole.busy_s


def test_layers_done_in_a_row_let_the_loop_run_between_them():
    """Where the loop's clock stands still during a turn, as this one and uvloop's, the number of layers is bounded."""

    async def main(fabric: Fabric) -> None:
        def turn() -> None:
            rows.append(0)

        async with deployed(fabric.open_engine, layout, serving=False) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            asking = asyncio.ensure_future(ask(decode, deployment))
            async with await anext(prefill.prefiller.jobs()) as job:
                chunk = job.chunk(0, len(TOKENS), range(5))
                for layer in range(layout.layers):
                    await chunk.done(layer)
                    rows[-1] += 1
                    if rows[-1] == 1:
                        asyncio.get_running_loop().call_soon(turn)
                await job.tail(tail_of(job.tokens, 24))
            await asking

    async def ask(decode: DecodeRank, deployment: Deployment) -> None:
        async with decode.decoder.request(TOKENS, deployment.group) as slot:
            await slot.arrived()

    rows = [0]
    layout = replace(SMALL, layers=100)
    run(main)
    assert sum(rows) == layout.layers
    assert 4 < max(rows) <= 16, rows


@pytest.mark.virtual_time
async def test_a_delivered_request_is_not_cancelled_when_it_is_left():
    """The decoder needs no message for that, and what the program does in its block afterwards is its own matter."""
    async with deployed("sim", serving=False) as deployment:
        (decode,), (prefill,) = deployment.decode, deployment.prefill

        async def go_on() -> None:
            async with await anext(prefill.prefiller.jobs()) as job:
                await job.chunk(0, len(TOKENS), range(5)).done_to(SMALL.layers)
                await job.tail(tail_of(TOKENS, 24))
                await asyncio.sleep(100)
                ends.append(job.cancelled)

        ends: list[bool] = []
        async with anyio.create_task_group() as group:
            group.start_soon(go_on)
            async with decode.decoder.request(TOKENS, deployment.group) as slot:
                await slot.arrived()
            assert (decode.decoder.requests, calls(decode.engine)) == (0, 1)
        assert ends == [False]
        await until_idle(deployment)


@pytest.mark.virtual_time
async def test_two_decoders_of_one_engine_get_a_cache_each():
    """Of one prefiller, too; their immediates differ."""
    async with deployed("sim") as deployment:
        (decode,) = deployment.decode
        memory = pool_of(SMALL, 8, 1)
        async with Decoder(decode.engine, SMALL, memory, tail_bytes=24, imm_base=1 << 20) as second:
            for decoder, here in ((decode.decoder, decode), (second, DecodeRank(decode.engine, memory, second))):
                async with decoder.request(TOKENS, deployment.group) as slot:
                    await slot.arrived()
                    here.check(slot)
        await until_idle(deployment)
