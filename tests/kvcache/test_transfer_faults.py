"""What goes wrong: prefillers that die, stall, refuse; decoders that die or lose interest. In virtual time.

After each, the pages that came back are stamped, and must stay as they are for as long as anything could still land.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest

import aiote
from aiote import service
from aiote.kvcache import CacheLayout, Decoder, Prefiller, PrefillError
from aiote.kvcache.fill import FillRequest, Prefill, Progress
from aiote.service.background import to_the_end
from aiote.testing import Fabric, run
from kvcaches import SMALL, DecodeRank, Deployment, PrefillRank, deployed, pool_of, prefill_rank, tail_of, until_idle

TOKENS = list(range(100, 143))
STAMP = 0xEE
LIMITS = {"stall_limit": 4.0, "confirm_limit": 1.0}
HEARTBEAT, DRAIN = 3.0, 1.0
SLACK = 0.5
BIG = CacheLayout(layers=4, kv_heads=4, head_size=64, page_tokens=16, dtype="uint8")


def virtually(main: Callable[[Fabric], Coroutine[Any, Any, None]], seed: int = 0, rails: int = 2) -> None:
    run(main, seed=seed, rails=rails)


async def nothing_lands(decode: DecodeRank, seconds: float = 60.0) -> None:
    """Check that all pages are free, and that nobody writes to them any more."""
    assert decode.decoder.free_pages == decode.decoder.pages
    decode.memory[:] = STAMP
    await asyncio.sleep(seconds)
    assert (decode.memory == STAMP).all()


@pytest.mark.parametrize("how", ["computes", "ignores"])
def test_a_prefiller_that_stalls_is_left_within_the_limits(how):
    async def main(fabric: Fabric) -> None:
        async def stall() -> None:
            async for job in slow.prefiller.jobs():
                if how == "computes":
                    async with job:
                        await job.chunk(0, 16, range(4)).done(0)
                        await asyncio.sleep(1e6)

        async with deployed(fabric.open_engine, **LIMITS) as deployment, prefill_rank(fabric.open_engine) as slow:
            (decode,) = deployment.decode
            task = asyncio.ensure_future(stall())
            started = fabric.now
            with pytest.raises(PrefillError, match=r"nothing has come for 4.0 s"):
                async with decode.decoder.request(TOKENS, [slow.engine.address]) as slot:
                    await slot.arrived()
            assert fabric.now - started < LIMITS["stall_limit"] * 1.25 + SLACK
            assert decode.decoder.revoked == 0, "it answered, so its leases are kept"
            async with decode.decoder.request(TOKENS, [slow.engine.address], alternatives=[deployment.group]) as slot:
                await slot.arrived()
                assert slot.round == 2
                decode.check(slot)
            await nothing_lands(decode)
            await until_idle(deployment)
            assert slow.prefiller.live == 0
            task.cancel()

    virtually(main)


class Mute(Prefill):
    """A prefiller that takes requests and says nothing, not even when they are cancelled."""

    def __init__(self) -> None:
        self.released = anyio.Event()

    @service.method
    async def fill(self, request: FillRequest) -> AsyncIterator[Progress]:
        await to_the_end(self.released.wait)
        yield "queued"


def test_a_prefiller_that_does_not_answer_loses_its_leases_and_nobody_else():
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, **LIMITS) as deployment, fabric.open_engine() as mute:
            (decode,), silent = deployment.decode, Mute()
            started = fabric.now
            async with service.serve(mute, silent):
                async with decode.decoder.request(TOKENS, [mute.address], alternatives=[deployment.group]) as slot:
                    async with decode.decoder.request(TOKENS, deployment.group) as other:
                        await other.arrived()
                    await slot.arrived()
                assert LIMITS["stall_limit"] < fabric.now - started
                assert fabric.now - started < LIMITS["stall_limit"] * 1.25 + LIMITS["confirm_limit"] + DRAIN + SLACK
                assert (decode.decoder.revoked, decode.decoder.grants) == (1, 1)
                await nothing_lands(decode)
                silent.released.set()
            await until_idle(deployment)

    virtually(main)


def test_an_engine_that_serves_nothing_is_left_within_the_limits():
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, **LIMITS) as deployment, fabric.open_engine() as idle:
            (decode,) = deployment.decode
            async with decode.decoder.request(TOKENS, [idle.address], alternatives=[deployment.group]) as slot:
                await slot.arrived()
                assert slot.round == 2
            assert decode.decoder.revoked == 0, "it was asked for nothing"
            async with service.serve(idle, Other()):
                with pytest.raises(PrefillError, match="Other/1.nothing"):
                    async with decode.decoder.request(TOKENS, [idle.address]) as slot:
                        await slot.arrived()
            await nothing_lands(decode)
            await until_idle(deployment)

    virtually(main)


class Other(service.Service):
    @service.method
    async def nothing(self) -> None:
        return None


def test_a_prefiller_that_refuses_gives_its_reason_and_the_next_is_tried():
    async def main(fabric: Fabric) -> None:
        other = CacheLayout(layers=3, kv_heads=4, head_size=2, page_tokens=4, dtype="uint8", order="NHD")
        async with (
            deployed(fabric.open_engine, **LIMITS) as deployment,
            prefill_rank(fabric.open_engine, other) as odd,
            prefill_rank(fabric.open_engine, queue=1) as full,
            prefill_rank(fabric.open_engine) as drained,
            prefill_rank(fabric.open_engine, rank=1, ranks=2) as second,
        ):
            (decode,) = deployment.decode
            await drained.prefiller.drain()
            async with decode.decoder.request(TOKENS, [full.engine.address]):
                await asyncio.sleep(0.1)
                bad = [[each.engine.address] for each in (odd, full, drained, second)]
                with pytest.raises(PrefillError) as failure:
                    async with decode.decoder.request(TOKENS, bad[0], alternatives=bad[1:]) as slot:
                        await slot.arrived()
            for reason, text in zip(
                failure.value.reasons,
                ("another layout", "1 requests wait already", "no more requests", "rank 1 of 2, not 0 of 1"),
                strict=True,
            ):
                assert text in reason
            assert full.prefiller.live == 0
            await nothing_lands(decode)

    virtually(main)


def test_an_error_of_the_model_reaches_the_decoder_and_goes_on_as_it_is():
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, serving=False, **LIMITS) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill

            async def break_down() -> None:
                job = await anext(prefill.prefiller.jobs())
                with pytest.raises(ZeroDivisionError):
                    async with job:
                        await job.chunk(0, 16, range(4)).done_to(3)
                        raise ZeroDivisionError("in a kernel")

            async with anyio.create_task_group() as group:
                group.start_soon(break_down)
                with pytest.raises(PrefillError, match="ZeroDivisionError: in a kernel"):
                    async with decode.decoder.request(TOKENS, deployment.group) as slot:
                        await slot.arrived()
            assert decode.decoder.revoked == 0
            await nothing_lands(decode)
            await until_idle(deployment)

    virtually(main)


async def through(
    fabric: Fabric, deployment: Deployment, victim: aiote.Engine | None, after: float, fault: str, group: Any
) -> None:
    """Run a request with a fault in the middle; it arrives from elsewhere, or fails within the limits."""
    (decode,) = deployment.decode
    started = fabric.now
    async with decode.decoder.request(TOKENS, group, alternatives=[deployment.group]) as slot:
        await asyncio.sleep(after)
        if victim is not None:
            getattr(fabric, fault)(victim)
        await slot.arrived()
        decode.check(slot)
        assert slot.tail == tail_of(TOKENS, 24)
        assert fabric.now - started < after + HEARTBEAT + LIMITS["confirm_limit"] + DRAIN + SLACK


@pytest.mark.parametrize("fault", ["crash", "partition"])
@pytest.mark.parametrize("after_us", [*range(0, 1000, 125), *range(1000, 5000, 500)])
def test_a_prefiller_dies_at_any_time_and_the_request_goes_on_elsewhere(fault, after_us):
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, **LIMITS) as deployment:
            (decode,) = deployment.decode
            engine = await fabric.open_engine()
            memory = pool_of(SMALL, 32, 1)
            prefiller = Prefiller(engine, SMALL, memory)
            await prefiller.__aenter__()
            doomed = PrefillRank(engine, memory, prefiller, 0, 1, list(range(32)), 24)
            serving = asyncio.ensure_future(doomed.serve(pause=2e-4))
            await through(fabric, deployment, engine, after_us * 1e-6, fault, [engine.address])
            await nothing_lands(decode, 5.0)
            if fault == "partition":
                fabric.heal(engine)
                await nothing_lands(decode, 20.0)
                await through(fabric, deployment, None, 0, "", [engine.address])
            await until_idle(deployment)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await prefiller.__aexit__(None, None, None)
            await engine.aclose()

    virtually(main, seed=after_us)


@pytest.mark.parametrize("after_us", [*range(0, 1000, 125), *range(1000, 6000, 500)])
@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_is_cancelled_at_any_time_gives_back_pages_that_nobody_writes_to(after_us, again):
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, BIG, serving=False, **LIMITS) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            serving = asyncio.ensure_future(prefill.serve(chunk_tokens=16, pause=2e-4))

            async def ask() -> None:
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    await slot.arrived()
                    await asyncio.sleep(1e6)

            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(after_us * 1e-6)
            started = fabric.now
            asking.cancel()
            if again:
                await asyncio.sleep(1e-6)
                asking.cancel()  # which the shield of anyio does not hold up
            with pytest.raises(asyncio.CancelledError):
                await asking
            while decode.decoder.requests:
                await asyncio.sleep(1e-4)
            assert fabric.now - started < 0.5
            assert decode.decoder.revoked == 0
            await nothing_lands(decode)
            await until_idle(deployment)
            serving.cancel()

    virtually(main, seed=after_us)


@pytest.mark.parametrize("fault", ["crash", "partition"])
@pytest.mark.parametrize("after_us", [0, 300, 600, 1000, 1500, 2000, 3000, 4000])
def test_a_decoder_dies_and_its_prefiller_drops_the_job(fault, after_us):
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, serving=False, **LIMITS) as deployment:
            (prefill,) = deployment.prefill
            serving = asyncio.ensure_future(prefill.serve(pause=1e-3))
            engine = await fabric.open_engine()

            async def ask() -> None:
                memory = bytearray(SMALL.pool_bytes(1, 16))
                async with Decoder(engine, SMALL, memory, tail_bytes=24, **LIMITS) as decoder:
                    async with decoder.request(TOKENS, deployment.group) as slot:
                        await slot.arrived()
                        await asyncio.sleep(1e6)

            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(after_us * 1e-6)
            getattr(fabric, fault)(engine)
            await asyncio.sleep(HEARTBEAT + DRAIN + SLACK)
            await until_idle(deployment)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await engine.aclose()
            await through(fabric, deployment, None, 0, "", deployment.group)
            serving.cancel()

    virtually(main, seed=after_us)


@pytest.mark.parametrize("after_us", range(0, 3000, 300))
def test_a_request_ends_whenever_the_prefillers_task_is_cancelled(after_us):
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, BIG, serving=False, **LIMITS) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            serving = asyncio.ensure_future(prefill.serve(chunk_tokens=16, pause=1e-4))
            try:
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    await asyncio.sleep(after_us * 1e-6)
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
                    again = asyncio.ensure_future(prefill.serve())
                    await slot.arrived()
                    decode.check(slot)
            except PrefillError as error:
                assert "cancelled" in str(error)
            assert decode.decoder.revoked == 0
            await nothing_lands(decode)
            await until_idle(deployment)
            again.cancel()

    virtually(main, seed=after_us)


@pytest.mark.parametrize("seed", range(12))
def test_pages_come_back_when_leases_are_revoked_in_the_middle_of_slow_writes(seed):
    """Pages come back when the last write is over, which takes longer than the prefiller is given to say so."""

    async def main(fabric: Fabric) -> None:
        limits = {"stall_limit": 10.0, "confirm_limit": 1e-4}
        async with deployed(fabric.open_engine, BIG, serving=False, **limits) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            serving = asyncio.ensure_future(prefill.serve(chunk_tokens=16))
            async with decode.decoder.request(TOKENS, deployment.group) as slot:
                await slot.arrived()
            for rail in range(2):
                fabric.slow_rail(decode.engine, rail, by=0.02)
            async with decode.decoder.request(TOKENS, deployment.group):
                await asyncio.sleep(1e-3 + seed * 1.5e-3)
            assert decode.decoder.revoked == 1
            await nothing_lands(decode, 5.0)
            await until_idle(deployment)
            async with decode.decoder.request(TOKENS, deployment.group) as slot:
                await slot.arrived()
                decode.check(slot)
            serving.cancel()

    virtually(main, seed)


@pytest.mark.parametrize("count", [400, 5000])  # in one frame, and in some
@pytest.mark.parametrize("seed", range(40))
def test_a_cancellation_never_overtakes_its_request(seed, count):
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, pages=1500, serving=False, **LIMITS) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill

            async def serve() -> None:
                async for job in prefill.prefiller.jobs():
                    async with job:
                        chunk = job.chunk(0, len(job.tokens), list(range(64)) * 20)
                        await chunk.done_to(3)
                        await asyncio.sleep(1e6)

            serving = asyncio.ensure_future(serve())
            await decode.engine.connect(prefill.engine.address)
            async with decode.decoder.request(range(count), deployment.group):
                await asyncio.sleep(seed * 1e-6)
            await nothing_lands(decode, 1.0)
            await until_idle(deployment)
            assert decode.decoder.revoked == 0
            serving.cancel()

    virtually(main, seed)


@pytest.mark.parametrize("again", [1e-6, 1e-3, 5e-3])
def test_a_job_is_not_left_before_its_writes_are_over_however_often_it_is_cancelled(again):
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, BIG, serving=False, **LIMITS) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            for rail in range(2):
                fabric.slow_rail(decode.engine, rail, by=0.02)
            async with decode.decoder.request(TOKENS, deployment.group):
                job = await anext(prefill.prefiller.jobs())
                computing = asyncio.ensure_future(prefill.compute(job, 16))
                while not job.in_flight:
                    await asyncio.sleep(1e-4)
                while not computing.done():
                    computing.cancel()
                    await asyncio.sleep(again)
                # `compute` has checked that nothing is in flight.
                assert computing.cancelled()
            await nothing_lands(decode)
            await until_idle(deployment)

    virtually(main)


def test_a_job_that_computes_hears_of_its_decoders_death():
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, serving=False) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill

            async def compute() -> None:
                async with job:
                    await asyncio.sleep(1e6)

            async def ask() -> None:
                async with decode.decoder.request(TOKENS, deployment.group) as slot:
                    await slot.arrived()

            asking = asyncio.ensure_future(ask())
            job = await anext(prefill.prefiller.jobs())
            computing = asyncio.ensure_future(compute())
            await asyncio.sleep(0.1)
            fabric.crash(decode.engine)
            await asyncio.wait_for(computing, HEARTBEAT + SLACK)
            assert "the decoder is lost" in job.reason
            assert prefill.prefiller.live == 0
            await asyncio.gather(asking, return_exceptions=True)

    virtually(main)


def test_a_decoder_that_ends_gives_its_memory_back_untouched():
    async def main(fabric: Fabric) -> None:
        async with deployed(fabric.open_engine, serving=False) as deployment:
            (prefill,) = deployment.prefill
            serving = asyncio.ensure_future(prefill.serve(pause=1e-3))
            for after in (0, 1e-4, 1e-3, 3e-3):
                async with fabric.open_engine() as engine:
                    memory = bytearray(SMALL.pool_bytes(1, 16))
                    async with Decoder(engine, SMALL, memory, tail_bytes=24) as decoder:

                        async def ask(decoder: Decoder = decoder) -> None:
                            async with decoder.request(TOKENS, deployment.group) as slot:
                                await slot.arrived()
                                await asyncio.sleep(0.1)

                        asking = asyncio.ensure_future(ask())
                        await asyncio.sleep(after)
                    memory[:] = bytes([STAMP]) * len(memory)
                    await asyncio.sleep(10)
                    (error,) = await asyncio.gather(asking, return_exceptions=True)
                    assert error is None or isinstance(error, aiote.ClosedError)
                    assert set(memory) == {STAMP}
                await until_idle(deployment)
            serving.cancel()

    virtually(main)
