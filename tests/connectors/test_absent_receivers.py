"""Receivers that a number promises and that never come, and what those that come raise: the sender hears of both."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import aiote
from aiote.connectors.bucket_broadcast import BroadcastError, IncomingUpdate
from aiote.testing import Fabric, run
from support.connectors.broadcasts import Rollout, Trainer, tensors_of

BUCKET = 4096


async def served(fabric: Fabric, group: Any, rollouts: int) -> tuple[Trainer, list[Rollout]]:
    trainer = Trainer(await fabric.open_engine(), BUCKET)
    group.start_soon(trainer.serve)
    await trainer.served.wait()
    return trainer, [Rollout(await fabric.open_engine(), 2, BUCKET) for _ in range(rollouts)]


async def closed(group: Any, *parts: Any) -> None:
    group.cancel_scope.cancel()
    with anyio.CancelScope(shield=True):
        for part in parts:
            await part.engine.aclose()


@pytest.mark.parametrize("shapes", [[(100,)], [(1000,)] * 20], ids=["one bucket", "many"])
def test_a_receiver_that_never_asks_ends_the_update_for_all(shapes):
    """However many buckets there are: those that came may have everything by then, or wait for more."""

    async def main(fabric: Fabric) -> None:
        async with anyio.create_task_group() as group:
            trainer, (rollout,) = await served(fabric, group, 1)
            outgoing = trainer.announce("1", 2)
            here, limit, came = str(trainer.engine.address), trainer.engine.config.connect_timeout, []

            async def receive() -> None:
                try:
                    await rollout.receive("1", [here])
                except BroadcastError as error:
                    came.append(str(error))
                else:
                    came.append("")

            group.start_soon(receive)
            begun = fabric.now
            with pytest.raises(BroadcastError) as caught:
                await trainer.send(outgoing, tensors_of(1, shapes))
            assert fabric.now - begun < limit + 1
            text = f"1 of 2 receivers asked for update 1 within connect_timeout, {limit} s: {rollout.engine.address}"
            assert str(caught.value) == text
            await anyio.sleep(1)
            assert len(came) == 1
            assert not came[0] or text in came[0]
            await closed(group, trainer, rollout)

    run(main, seed=1)


def test_receivers_that_are_known_and_do_not_ask_are_named():
    async def main(fabric: Fabric) -> None:
        async with anyio.create_task_group() as group:
            trainer, rollouts = await served(fabric, group, 2)
            addresses = [str(one.engine.address) for one in rollouts]
            outgoing = trainer.announce("1", 2, addresses=addresses)
            with pytest.raises(BroadcastError, match="0 of 2 receivers asked") as caught:
                await trainer.send(outgoing, tensors_of(1, [(100,)]))
            assert str(caught.value).endswith(f"; not {', '.join(addresses)}")
            await closed(group, trainer, *rollouts)

    run(main, seed=1)


def test_a_sender_that_has_nothing_yet_waits_for_its_host():
    """A host that gathers its first tensor for minutes keeps nobody from asking."""

    async def main(fabric: Fabric) -> None:
        async with anyio.create_task_group() as group:
            trainer, (rollout,) = await served(fabric, group, 1)
            outgoing = trainer.announce("1", 1)
            sending = anyio.Event()

            async def send() -> None:
                await trainer.send(outgoing, tensors_of(1, [(100,)]))
                sending.set()

            await anyio.sleep(10 * trainer.engine.config.connect_timeout)
            group.start_soon(send)
            await rollout.receive("1", [str(trainer.engine.address)])
            await sending.wait()
            await closed(group, trainer, rollout)

    run(main, seed=1)


def test_the_sender_hears_what_a_receiver_raised():
    async def main(fabric: Fabric) -> None:
        async with anyio.create_task_group() as group:
            trainer, (rollout, other) = await served(fabric, group, 2)
            outgoing = trainer.announce("1", 2)
            here, ended = str(trainer.engine.address), []

            async def fail() -> None:
                incoming = IncomingUpdate(rollout.engine, "1", [here], rollout.region, BUCKET)
                await incoming.next()
                await incoming.aclose("RuntimeError: layer.0 has another shape")

            async def receive() -> None:
                with pytest.raises(BroadcastError, match="layer.0 has another shape"):
                    await other.receive("1", [here])
                ended.append(1)

            group.start_soon(fail)
            group.start_soon(receive)
            with pytest.raises(BroadcastError) as caught:
                await trainer.send(outgoing, tensors_of(1, [(1000,)] * 20))
            assert str(caught.value) == f"receiver {rollout.engine.address}: RuntimeError: layer.0 has another shape"
            await anyio.sleep(1)
            assert ended
            await closed(group, trainer, rollout, other)

    run(main, seed=1)


def test_what_a_receiver_says_is_bounded():
    async def main(fabric: Fabric) -> None:
        async with anyio.create_task_group() as group:
            trainer, (rollout,) = await served(fabric, group, 1)
            outgoing = trainer.announce("1", 1)
            incoming = IncomingUpdate(rollout.engine, "1", [str(trainer.engine.address)], rollout.region, BUCKET)
            await incoming.aclose("x" * 100_000)
            with pytest.raises(aiote.AioteError) as caught:
                await trainer.send(outgoing, tensors_of(1, [(100,)]))
            assert "xxx" in str(caught.value)
            assert len(str(caught.value)) < 3000
            await closed(group, trainer, rollout)

    run(main, seed=1)
