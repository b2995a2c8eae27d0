"""What comes before its connection is quite there, which only a simulated network does each time."""

from __future__ import annotations

import asyncio

from aiote.testing import UNRULY, Fabric, NicModel, run

LATE_ANSWERS = NicModel(name="late answers", latency_us=0, answer_us=1000)


def test_a_message_that_overtakes_the_end_of_the_handshake_arrives():
    """Its receiver ran in circles until the connection was made; in virtual time, which then stood still, for ever."""

    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            receiving = [asyncio.ensure_future(left.recv()) for _ in range(2)]
            connecting = asyncio.ensure_future(left.connect(right.address))
            while not right.peers:
                await asyncio.sleep(1e-5)
            early = asyncio.ensure_future(right.send(left.address, b"early"))
            await asyncio.sleep(5e-4)
            assert not left.peers
            await connecting
            await early
            await right.send(left.address, b"late")
            assert sorted([(await each).data for each in receiving]) == [b"early", b"late"]

    run(main, 1, model=LATE_ANSWERS)


def test_messages_that_overtake_each_other_by_more_than_a_pool_all_arrive():
    """Taken out of their order, they gave back more than the window that their receiver checks numbers against."""

    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine(message_pool=4) as left, fabric.open_engine() as right:
            sending = [asyncio.ensure_future(right.send(left.address, bytes([n]))) for n in range(200)]
            assert sorted([(await left.recv()).data[0] for _ in range(200)]) == list(range(200))
            await asyncio.gather(*sending)

    for seed in range(20):
        run(main, seed, model=UNRULY, rails=2)
