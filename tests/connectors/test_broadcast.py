"""Updates from senders to receivers: every tensor arrives everywhere, and whatever ends one ends it for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiote
from aiote.connectors.bucket_broadcast import BroadcastError
from aiote.testing import CONNECTX7_400G, Fabric, run
from support.connectors.broadcasts import Rollout, Tensors, Trainer, assert_same, tensors_of
from support.engines.opening import each_provider, go_round, opened

BUCKET = 4096
SHAPES = [(100,), (0,), (), (33, 31), (3000,), (1024,), (1025,), (5, 0), (7,), (512, 3)]


class World:
    """So many trainers and rollouts, each with an engine of its own."""

    def __init__(self, trainers: list[Trainer], rollouts: list[Rollout]) -> None:
        self.trainers, self.rollouts = trainers, rollouts
        self.outcomes: dict[Any, Exception | None] = {}

    @property
    def senders(self) -> list[str]:
        return [str(one.engine.address) for one in self.trainers]

    async def update(self, name: str, tensors: Tensors, **more: Callable[[str], object]) -> None:
        """Make an update; `outcomes` has the error of each rank, or None. `consume0` and so on hear of tensors."""
        self.outcomes = {}
        addresses = [str(one.engine.address) for one in self.rollouts]
        count = len(self.trainers)
        announced = [
            one.announce(name, len(addresses), index=index, senders=count, addresses=addresses)
            for index, one in enumerate(self.trainers)
        ]
        async with anyio.create_task_group() as group:
            for index, one in enumerate(self.trainers):
                group.start_soon(self._rank, ("trainer", index), one.send, announced[index], tensors)
            for index, rollout in enumerate(self.rollouts):
                consume = more.get(f"consume{index}", lambda _: None)
                group.start_soon(self._rank, ("rollout", index), rollout.receive, name, self.senders, consume)

    async def _rank(self, who: Any, function: Any, *arguments: Any) -> None:
        try:
            await function(*arguments)
        except (aiote.AioteError, ZeroDivisionError) as error:
            self.outcomes[who] = error
        else:
            self.outcomes[who] = None

    def check(self, tensors: Tensors) -> None:
        assert set(self.outcomes.values()) == {None}, self.outcomes
        for rollout in self.rollouts:
            assert_same(rollout.got, tensors)

    def failed(self) -> dict[Any, str]:
        return {who: str(error) for who, error in self.outcomes.items() if error is not None}


@asynccontextmanager
async def world(
    open_one: Callable[[], Any], trainers: int, rollouts: int, nbytes: int = BUCKET
) -> AsyncIterator[World]:
    async with anyio.create_task_group() as group:
        engines = [open_one() for _ in range(trainers + rollouts)]
        made: list[aiote.Engine] = []
        try:
            for opening in engines:
                made.append(await opening.__aenter__())
            senders = [Trainer(engine, nbytes) for engine in made[:trainers]]
            for one in senders:
                group.start_soon(one.serve)
                await one.served.wait()
            yield World(senders, [Rollout(engine, 2 * trainers, nbytes) for engine in made[trainers:]])
        finally:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for engine in made:
                    await engine.aclose()


@pytest.mark.anyio
@each_provider
async def test_every_tensor_arrives_everywhere(provider):
    async with world(lambda: opened(provider), 2, 2) as made:
        for version in range(3):
            tensors = tensors_of(version, SHAPES)
            await made.update(str(version), tensors)
            made.check(tensors)


@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 1), (1, 3), (2, 3), (3, 2), (4, 4)])
def test_any_number_of_senders_and_receivers(trainers, rollouts):
    async def main(fabric: Fabric) -> None:
        async with world(fabric.open_engine, trainers, rollouts) as made:
            for version, shapes in enumerate([SHAPES, SHAPES * 5, [], [(0,)], [(9000,)]]):
                tensors = tensors_of(version, shapes)
                await made.update(str(version), tensors)
                made.check(tensors)

    run(main, seed=trainers * 10 + rollouts)


@pytest.mark.anyio
async def test_a_bucket_stays_until_the_next_is_asked_for():
    """However far the senders are ahead: a consumer that looks again, and again, sees the same."""
    async with world(lambda: opened("sim"), 2, 1) as made:
        tensors = tensors_of(1, [(1000,)] * 40)
        rollout = made.rollouts[0]
        seen: list[bytes] = []

        def look(_: str) -> None:
            seen.append(rollout.memory.tobytes())

        await made.update("1", tensors, consume0=look)
        made.check(tensors)
        assert len(set(seen)) > 4


@pytest.mark.anyio
async def test_a_slow_receiver_holds_its_senders_and_loses_nothing():
    async with world(lambda: opened("sim"), 2, 2) as made:
        tensors = tensors_of(1, [(1000,)] * 20)
        trainer, rollout = made.trainers[0], made.rollouts[0]
        outgoing = [one.announce("1", 1, index=index, senders=2) for index, one in enumerate(made.trainers)]
        async with anyio.create_task_group() as group:
            for index, one in enumerate(made.trainers):
                group.start_soon(one.send, outgoing[index], tensors)
            await go_round(200)
            assert trainer.exchange.outgoing, "nobody has taken anything"
            assert_same(await rollout.receive("1", made.senders), tensors)


@pytest.mark.anyio
async def test_an_unknown_update_is_refused():
    async with world(lambda: opened("sim"), 1, 1) as made:
        with pytest.raises(BroadcastError, match=r"update 9: sender 0, .*: update 9 is not under way at this sender"):
            await made.rollouts[0].receive("9", made.senders)


@pytest.mark.anyio
async def test_a_receiver_too_many_is_refused():
    async with world(lambda: opened("sim"), 1, 2) as made:
        tensors = tensors_of(1, SHAPES)
        outgoing = made.trainers[0].announce("1", 1)
        async with anyio.create_task_group() as group:
            group.start_soon(made.trainers[0].send, outgoing, tensors)
            begun = anyio.Event()

            async def first() -> None:
                made_of = await made.rollouts[0].receive("1", made.senders, lambda _: begun.set())
                assert_same(made_of, tensors)

            async def second() -> None:
                with pytest.raises(BroadcastError, match=r"has all of its \d receivers|is not under way"):
                    await made.rollouts[1].receive("1", made.senders)

            group.start_soon(first)
            await begun.wait()
            group.start_soon(second)


@pytest.mark.anyio
async def test_senders_that_have_other_tensors_are_found():
    async with world(lambda: opened("sim"), 2, 1) as made:
        tensors = tensors_of(1, [(1000,)] * 4)
        others = {f"other {name}": tensor for name, tensor in tensors.items()}
        outgoing = [one.announce("1", 1, index=index, senders=2) for index, one in enumerate(made.trainers)]
        errors = []

        async def send(index: int, what: Tensors) -> None:
            try:
                await made.trainers[index].send(outgoing[index], what)
            except BroadcastError as error:
                errors.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(send, 0, tensors)
            group.start_soon(send, 1, others)
            with pytest.raises(BroadcastError, match=r"sender 1, .*: it ended with .* sender 0 with .*: other tensors"):
                await made.rollouts[0].receive("1", made.senders)
        assert len(errors) == 2


@pytest.mark.anyio
async def test_a_consumer_that_fails_ends_the_update_and_the_next_works():
    async with world(lambda: opened("sim"), 2, 3) as made:
        tensors = tensors_of(1, [(1000,)] * 20)
        await made.update("1", tensors, consume1=lambda name: 1 / (name != "layer.5"))
        failed = made.failed()
        assert set(failed) == set(made.outcomes)
        assert "ZeroDivision" in repr(made.outcomes["rollout", 1])
        assert "it ended the update before it had all of it" in failed["trainer", 0] + failed["trainer", 1]
        assert str(made.rollouts[1].engine.address) in failed["rollout", 0]
        await made.update("2", tensors)
        made.check(tensors)


@pytest.mark.anyio
async def test_a_sender_whose_host_fails_tells_everybody_why():
    async with world(lambda: opened("sim"), 2, 2) as made:
        tensors = tensors_of(1, [(1000,)] * 20)

        def fail(name: str) -> None:
            if name == "layer.5":
                made.trainers[0].exchange.outgoing["1"].fail("sender 0: out of memory")

        await made.update("1", tensors, consume0=fail)
        failed = made.failed()
        assert set(failed) == set(made.outcomes)
        assert failed["trainer", 0] == "sender 0: out of memory"
        assert any("sender 0: out of memory" in failed["rollout", index] for index in range(2))
        await made.update("2", tensors)
        made.check(tensors)


@pytest.mark.parametrize("victim", ["trainer", "rollout"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_rank_that_dies_is_named_within_the_limit(victim, when):
    """And ranks that live make the next update without it."""

    async def main(fabric: Fabric) -> None:
        async with world(fabric.open_engine, 2, 3) as made:
            tensors = tensors_of(1, [(1000,)] * 30)
            ranks: list[Any] = made.trainers if victim == "trainer" else made.rollouts
            dead, limit = ranks[-1].engine, ranks[0].engine.config.heartbeat_timeout

            async def harm(_: str = "") -> None:
                fabric.crash(dead)

            started = fabric.now
            if when == "before":
                await harm()
                await made.update("1", tensors)
            else:
                await made.update("1", tensors, consume0=lambda name: fabric.crash(dead) if name == "layer.5" else None)
            alive = set(made.outcomes) - {(victim, len(ranks) - 1)}
            assert alive <= set(made.failed()), made.outcomes
            bound = made.rollouts[0].engine.config.connect_timeout if when == "before" else limit
            assert fabric.now - started < bound + 1
            assert any(str(dead.address) in text for text in made.failed().values())
            ranks.pop()
            await made.update("2", tensors)
            made.check(tensors)

    run(main, seed=1)


def test_counts_and_counters_are_flat_over_many_updates():
    async def main(fabric: Fabric) -> None:
        async with world(fabric.open_engine, 2, 2) as made:
            tensors = tensors_of(1, [(700,)] * 9)
            seen = []
            for number in range(50):
                await made.update(str(number), tensors)
                made.check(tensors)
                engines = [one.engine for one in (*made.trainers, *made.rollouts)]
                assert not any(one.exchange.outgoing for one in made.trainers)
                seen.append([engine.statistics().counters for engine in engines])
            assert seen[5] == seen[-1]

    run(main, seed=3)


def test_senders_share_the_bytes():
    """Each writes 1/n of them to each receiver, so that no NIC carries more than the update, times receivers / n."""

    async def main(fabric: Fabric) -> None:
        async with world(fabric.open_engine, 4, 4) as made:
            tensors = tensors_of(1, [(1024,)] * 64)
            before = [written(one.engine) for one in made.trainers]
            await made.update("1", tensors)
            made.check(tensors)
            total = sum(tensor.nbytes for tensor in tensors.values())
            sent = [written(one.engine) - was for one, was in zip(made.trainers, before, strict=True)]
            assert max(sent) <= 1.05 * total
            assert sum(sent) >= 4 * total

    run(main, seed=3)


def test_as_many_senders_as_receivers_reach_the_bound_of_a_nic():
    """On simulated ConnectX-7: one sender's NIC is the bound, four senders use each receiver's."""
    nbytes, count = 256 * BUCKET, 32

    def took(senders: int) -> float:
        async def main(fabric: Fabric) -> float:
            async with world(fabric.open_engine, senders, 4, nbytes) as made:
                await made.update("1", tensors_of(1, [(16,)]))
                tensors = tensors_of(2, [(nbytes // 4,)] * count)
                started = fabric.now
                await made.update("2", tensors)
                elapsed = fabric.now - started
                made.check(tensors)
                return elapsed

        return run(main, seed=1, model=CONNECTX7_400G)

    times = {senders: took(senders) for senders in (1, 2, 4)}
    assert times[2] < 0.6 * times[1], times
    assert times[4] < 0.7 * times[2], times
    assert count * nbytes / times[4] > 25e9


def written(engine: aiote.Engine) -> int:
    return sum(engine.statistics().carried)
