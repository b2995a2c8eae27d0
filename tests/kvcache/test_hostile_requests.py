"""Requests of decoders that lie: each is refused with a sentence or fails by itself, and harms nobody else.

The hostile decoder is an engine of the cluster, with memory of its own, that calls the prefiller's service as it likes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

import aiote
from aiote import service
from aiote.core.descriptor import RegionDescriptor
from aiote.kvcache import CacheLayout
from aiote.kvcache.fill import LAST_IMMEDIATE, FillRefused, FillRequest, Prefill, Ranks, fingerprint
from aiote.testing import Fabric, run
from kvcaches import SMALL, Deployment, calls, deployed, until_idle

TOKENS = np.arange(43, dtype=np.uint32)
PAGES, TAIL, STAMP = 16, 24, 0xEE
OTHER = CacheLayout(layers=3, kv_heads=4, head_size=2, page_tokens=4, dtype="uint8", order="NHD")


@dataclasses.dataclass
class Liar:
    """A decoder of its own making."""

    deployment: Deployment
    engine: aiote.Engine
    memory: np.ndarray
    region: aiote.Region
    right: FillRequest
    client: Prefill

    def ask(self, **lies: Any) -> Any:
        """Return the stream of a request that is right but for some fields."""
        return self.client.fill(msgspec.structs.replace(self.right, **lies))

    async def hear(self, **lies: Any) -> None:
        async for _ in self.ask(**lies):
            pass

    async def check(self) -> None:
        """See that an honest decoder is served, byte by byte, and that nothing is left."""
        (decode,) = self.deployment.decode
        async with decode.decoder.request(TOKENS + 1, self.deployment.group) as slot:
            await slot.arrived()
            decode.check(slot)
        await until_idle(self.deployment)


@asynccontextmanager
async def lying(fabric: Fabric, limits: service.Limits | None = None, *, serving: bool = True) -> AsyncIterator[Liar]:
    async with (
        deployed(fabric.open_engine, tail_bytes=TAIL, serving=serving) as deployment,
        fabric.open_engine() as engine,
    ):
        peer = await engine.connect(deployment.group[0])
        memory = np.full(SMALL.pool_bytes(1, PAGES) + TAIL, STAMP, np.uint8)
        region = engine.register(memory)
        pool = region.lease(slice(0, SMALL.pool_bytes(1, PAGES)), peer)
        tails = region.lease(slice(SMALL.pool_bytes(1, PAGES), len(memory)), peer)
        right = FillRequest(
            round=1,
            ranks=Ranks(0, 1, 0, 1),
            imm=100,
            pool_pages=PAGES,
            tail_offset=0,
            tail_bytes=TAIL,
            request=b"hostile",
            print=fingerprint(SMALL),
            pool=pool.descriptor,
            tails=tails.descriptor,
            tokens=TOKENS,
            pages=np.arange(11, dtype=np.uint32),
        )
        yield Liar(deployment, engine, memory, region, right, service.client(engine, peer, Prefill, limits=limits))


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another layout": ({"print": fingerprint(OTHER)}, "another layout"),
    "another rank": ({"ranks": Ranks(1, 2, 0, 1)}, "this is prefill rank 0 of 1, not 1 of 2"),
    "no rank of its group": ({"ranks": Ranks(0, 1, 7, 4)}, "writes nothing to decode rank 7"),
    "a group that cannot be": ({"ranks": Ranks(0, 1, 0, 3)}, "the decode group"),
    "a group of millions": ({"ranks": Ranks(0, 1, 0, 1 << 24)}, "Expected `int` <= 1024"),
    "a rank below 0": ({"ranks": Ranks(-1, 1, 0, 1)}, "Expected `int` >= 0"),
    "an immediate of more bits": ({"imm": LAST_IMMEDIATE}, "more than 28 bits"),
    "no immediate": ({"imm": 1 << 40}, "Expected `int`"),
    "no pages in the pool": ({"pool_pages": 0}, "pool"),
    "a larger pool than was lent": ({"pool_pages": 1 << 50}, "has not"),
    "a smaller pool than was lent": ({"pool_pages": PAGES - 1}, "has not"),
    "a page outside of the pool": ({"pages": rows(*range(10), PAGES)}, "outside|0 to 15"),
    "a page twice": ({"pages": rows(*range(10), 3)}, "twice"),
    "too few pages": ({"pages": rows(1)}, "1 pages for 43 tokens"),
    "pages of more dimensions": ({"pages": np.arange(11, dtype=np.uint32).reshape(11, 1)}, "rows of numbers"),
    "tokens of no dimension": ({"tokens": np.array(7, np.uint32)}, "rows of numbers"),
    "no tokens": ({"tokens": rows(), "pages": rows()}, "0 pages for 0 tokens"),
    "tokens of another type": ({"tokens": TOKENS.astype(np.float64)}, "uint32 is expected"),
    "too many tokens": ({"tokens": np.zeros((1 << 23) + 1, np.uint32)}, "tokens at most"),
    "a tail outside of its memory": ({"tail_offset": 1}, "leaves its 24 bytes"),
    "a tail far away": ({"tail_offset": (1 << 62) - 1}, "leaves its 24 bytes"),
    "a tail without memory": ({"tails": b""}, "descriptor|bytes"),
    "a long name": ({"request": bytes(65)}, "length <= 64"),
    "a long descriptor": ({"pool": bytes(5000)}, "length <= 4096"),
    "no descriptor": ({"pool": b"\1" * 90}, "."),
}


@pytest.mark.parametrize(("lies", "sentence"), LIES.values(), ids=LIES)
def test_a_request_that_lies_is_refused_with_a_sentence(lies, sentence):
    async def main(fabric: Fabric) -> None:
        async with lying(fabric) as liar:
            with pytest.raises((FillRefused, aiote.UsageError), match=sentence):
                await liar.hear(**lies)
            await liar.check()
            assert (liar.memory == STAMP).all()

    run(main)


def changed(**fields: Any) -> Callable[[Liar], bytes]:
    return lambda liar: bytes(dataclasses.replace(RegionDescriptor.from_bytes(liar.right.pool), **fields))


def whole(liar: Liar) -> bytes:
    """Return what anybody may write to, which is no lease."""
    return liar.region[: SMALL.pool_bytes(1, PAGES)].descriptor


def stolen(liar: Liar) -> bytes:
    """Return the lease of an honest decoder, which this very prefiller holds."""
    (grant,) = liar.deployment.decode[0].decoder._context.lender._grants.values()
    return grant.pool.descriptor


DESCRIPTORS: dict[str, tuple[Callable[[Liar], bytes], str]] = {
    "no lease": (whole, "not lent by its own decoder"),
    "another's lease": (stolen, "not lent by its own decoder"),
    "not to be written": (changed(writable=False), "not lent by its own decoder"),
    "held by another": (changed(holder=b"x" * 16), "granted to another engine"),
    "of the largest length": (changed(length=(1 << 64) - 1, address=0), "."),
    "a longer one": (changed(length=1 << 40), "has not"),
}


@pytest.mark.parametrize(("descriptor", "sentence"), DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_memory_that_was_not_lent_is_not_written_to(descriptor, sentence):
    async def main(fabric: Fabric) -> None:
        async with lying(fabric) as liar:
            await liar.check()
            (honest,) = liar.deployment.decode
            honest.memory[:] = STAMP
            with pytest.raises((FillRefused, aiote.UsageError), match=sentence):
                await liar.hear(pool=descriptor(liar))
            assert (honest.memory == STAMP).all()
            await liar.check()
            assert (liar.memory == STAMP).all()

    run(main)


WRITTEN: dict[str, Callable[[Liar], bytes]] = {
    "a lease that there is not": changed(lease=12345),
    "other keys": lambda liar: changed(
        keys=tuple(
            dataclasses.replace(key, key=key.key ^ 0xFFFF) for key in RegionDescriptor.from_bytes(liar.right.pool).keys
        )
    )(liar),
    "one key": lambda liar: changed(keys=RegionDescriptor.from_bytes(liar.right.pool).keys[:1])(liar),
    "sixteen keys": lambda liar: changed(keys=RegionDescriptor.from_bytes(liar.right.pool).keys[:1] * 16)(liar),
}


@pytest.mark.parametrize("descriptor", WRITTEN.values(), ids=WRITTEN)
def test_a_lie_that_is_found_out_by_a_write_stops_its_own_job_alone(descriptor):
    """The prefiller's program, which serves all, goes on; the peer may be lost by that."""

    async def main(fabric: Fabric) -> None:
        async with lying(fabric) as liar:
            with suppress(aiote.AioteError):
                async with asyncio.timeout(20):
                    await liar.hear(pool=descriptor(liar))
            await liar.check()

    run(main, rails=2)


def test_a_peer_gets_as_many_requests_in_the_queue_as_there_is_room_for():
    async def main(fabric: Fabric) -> None:
        async with lying(fabric, serving=False) as liar:
            prefiller = liar.deployment.prefill[0].prefiller
            hearing = [asyncio.ensure_future(liar.hear(request=bytes((number,)))) for number in range(200)]
            await asyncio.sleep(1)
            assert (prefiller.waiting, prefiller.live) == (64, 64)
            refused = [task.exception() for task in hearing if task.done()]
            assert len(refused) == 136
            assert all("64 requests wait already" in str(error) for error in refused)
            for task in hearing:
                task.cancel()
            await asyncio.gather(*hearing, return_exceptions=True)
            await asyncio.sleep(1)
            assert (prefiller.waiting, prefiller.live) == (0, 0)
            liar.deployment.prefill[0].engine.find_peer(liar.engine.address).disconnect("enough")
            await until_idle(liar.deployment)

    run(main)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_written_for_a_stream_that_was_left(seed):
    """Whenever it is left: from when `aclose` has returned."""

    async def main(fabric: Fabric) -> None:
        draw = random.Random(seed)
        async with lying(fabric) as liar:
            for _ in range(8):
                stream = liar.ask()
                reading = asyncio.ensure_future(anext(stream, None))
                await asyncio.sleep(draw.choice([0, draw.uniform(0, 1e-3)]))
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await stream.aclose()
                liar.memory[:] = STAMP
                await asyncio.sleep(draw.choice([0, 0.1]))
                assert (liar.memory == STAMP).all()
            await liar.check()

    run(main, seed=seed, rails=2)


def test_a_decoder_that_reads_nothing_holds_up_its_own_call_alone():
    """The prefiller has more to say of a job that waits than it may be ahead of its reader."""

    async def main(fabric: Fabric) -> None:
        async with lying(fabric, service.Limits(stream_items=1), serving=False) as liar:
            (rank,) = liar.deployment.prefill
            first = asyncio.ensure_future(liar.hear(tail_bytes=0))
            job = await anext(rank.prefiller.jobs())
            waits = liar.ask(request=b"which waits")
            begun = asyncio.ensure_future(anext(waits))
            async with job:
                chunk = job.chunk(0, len(TOKENS), range(11))
                for layer in range(SMALL.layers):
                    await asyncio.sleep(1)
                    await chunk.done(layer)
            await first
            assert await begun == "queued"
            (await anext(rank.prefiller.jobs())).refuse("enough")
            assert rank.prefiller.live == 0
            serving = asyncio.ensure_future(rank.serve())
            (decode,) = liar.deployment.decode
            async with decode.decoder.request(TOKENS, liar.deployment.group) as slot:
                await slot.arrived()
            await asyncio.sleep(1)
            assert calls(rank.engine) == 1
            with pytest.raises(FillRefused, match="enough"):
                while True:
                    await anext(waits)
            await until_idle(liar.deployment)
            serving.cancel()

    run(main)
