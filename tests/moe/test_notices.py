"""What ranks tell each other beside their rounds: that one broke the group, has left, or came later than it was due."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote import service
from aiote.moe import GroupBrokenError, MoeConfig, MoeGroup, open_group
from aiote.moe.epochs import Epochs
from aiote.moe.joining import service_of
from aiote.moe.posting import Posting
from aiote.testing import Fabric, run
from support.engines.opening import until
from support.moe.ranks import Tokens, all_of, compute, ranks, whole_round

HEARTBEAT = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.2, "drain_timeout": 0.1}
LIMIT_S = 0.2 + 0.1 + 0.5
RAISE = MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, rows=30, placement="packed")
MASK = MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, on_loss="mask")


class Other(service.Service):
    """What an engine serves before it is a rank."""

    @service.method
    async def ready(self) -> bool:
        """Return whether it is ready."""
        return True


def given(count: int = 3) -> list[Tokens]:
    """Return tokens of so many ranks."""
    return [Tokens(np.random.default_rng(rank), RAISE, 5) for rank in range(count)]


def opened(fabric: Fabric) -> Any:
    """Return what opens an engine that soon notices a lost peer."""
    return lambda: fabric.open_engine(**HEARTBEAT)


def test_only_a_rank_itself_says_that_it_broke_or_left_the_group():
    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), 3, RAISE) as groups, opened(fabric)() as stranger:
            for engine in (stranger, groups[1].engine):
                client = service.client(engine, groups[0].engine.address, groups[0].service)
                for rank in (0, 2, 3, 77):
                    await client.left(rank, 1, [0])
                    await client.broke(rank, 1, "somebody says so")
                for call in (client.left(-5, 1, [0]), client.broke(-2, 1, "somebody says so")):
                    with pytest.raises(service.InvalidCallError, match="Expected `int` >= 0"):
                        await call
            assert not groups[0].membership.departed
            await whole_round(groups, given())
            await client.left(1, 1, [1])
            assert list(groups[0].membership.departed) == [1]
            await client.broke(1, 1, "it says so itself")
            assert "it says so itself" in str(groups[0].membership.failure)

    run(main, 1, rails=1, limit=30)


def test_a_newcomer_may_open_the_group_later_than_it_is_waited_for():
    async def main(fabric: Fabric) -> None:
        async with opened(fabric)() as engine, ranks(opened(fabric), 3, RAISE) as groups:
            members = [group.engine.address for group in groups]
            members[1] = engine.address
            groups[1].engine.abort()

            async def newcomer() -> None:
                async with service.serve(engine, Other()):
                    await until(lambda: groups[0].epoch == groups[2].epoch == 2)
                    await anyio.sleep(0.05)
                    async with open_group(engine, members, 1, RAISE) as group:
                        groups[1] = group
                        await groups.over.wait()

            groups.tasks.start_soon(newcomer)
            await all_of(*(lambda g=groups[rank]: g.replace(1, engine.address) for rank in (0, 2)))
            await until(lambda: groups[1].engine is engine)
            await whole_round(groups, given())

    run(main, 1, rails=1, limit=30)


def test_who_hears_that_the_group_is_broken_passes_it_on():
    """Who broke it may die in the middle of telling."""

    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), 3, RAISE) as groups:
            client = service.client(groups[2].engine, groups[1].engine.address, groups[1].service)
            await client.broke(2, 1, "it was killed")
            await until(lambda: groups[0].membership.failure is not None)
            assert "rank 2: it was killed" in str(groups[0].membership.failure)

    run(main, 1, rails=1, limit=30)


def test_a_reset_that_one_rank_did_not_end_is_heard_of_by_the_others_when_it_resets_again():
    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), 3, RAISE) as groups:
            await all_of(*(group.reset for group in groups))
            groups[0].membership.break_by(GroupBrokenError("rank 0 could not reset the group"))
            tokens = given()

            async def again(group: MoeGroup) -> None:
                with pytest.raises(GroupBrokenError):
                    own = tokens[group.rank]
                    await group.dispatch(own.x, own.ids, own.weights)
                await group.reset()

            await all_of(groups[0].reset, *(lambda g=group: again(g) for group in groups[1:]))
            await whole_round(groups, tokens)

    run(main, 1, rails=1, limit=30)


@pytest.mark.parametrize("count", [3, 6])
def test_a_rank_that_is_cut_off_leaves_within_one_limit(count):
    """In virtual time: not within one for each of the ranks that it cannot tell."""

    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), count, RAISE) as groups:
            for group in groups[1:]:
                fabric.partition(group.engine)
            before = anyio.current_time()
            await groups[0].leave()
            assert anyio.current_time() - before <= 1.5 * HEARTBEAT["drain_timeout"]

    run(main, 1, rails=1, limit=30)


def test_a_reset_ends_when_a_rank_is_lost_meanwhile():
    """Each of the others is broken then, and answers nobody: they must not wait for each other."""

    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), 4, RAISE) as groups:

            async def loses(group: MoeGroup) -> None:
                with pytest.raises(aiote.PeerError, match="rank 3|peer"):
                    await group.reset()

            async def dies() -> None:
                await until(lambda: all(group.epoch == 2 for group in groups[:3]))
                fabric.crash(groups[3].engine)

            before = anyio.current_time()
            await all_of(dies, *(lambda g=group: loses(g) for group in groups[:3]))
            assert anyio.current_time() - before < LIMIT_S

    run(main, 1, rails=1, limit=30)


def test_ranks_that_open_hear_that_another_broke_the_epoch_and_go_on_in_the_next():
    """It was there before them: it had their inboxes while they still waited for each other's."""

    async def main(fabric: Fabric) -> None:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(opened(fabric)()) for _ in range(3)]
            members = [engine.address for engine in engines]
            groups: dict[int, MoeGroup] = {}
            over = anyio.Event()

            async def live(rank: int) -> None:
                async with open_group(engines[rank], members, rank, RAISE) as group:
                    groups[rank] = group
                    await over.wait()

            async def breaks() -> None:
                digest = MoeGroup(engines[2], members, 2, RAISE)._epochs.digest
                clients = [service.client(engines[2], members[rank], service_of(0)) for rank in range(2)]
                for client in clients:
                    while True:
                        with suppress(service.NotServedError):
                            await client.meet(2, 1, digest)
                            break
                        await anyio.sleep(0.01)
                await all_of(*(lambda c=client: c.broke(2, 1, "it was cancelled") for client in clients))
                await live(2)

            async def rounds() -> None:
                await until(lambda: len(groups) == 3)
                assert [groups[rank].epoch for rank in range(3)] == [2, 2, 2]
                await whole_round([groups[rank] for rank in range(3)], given())
                over.set()

            await all_of(lambda: live(0), lambda: live(1), breaks, rounds)

    run(main, 1, rails=1, limit=30)


@pytest.mark.parametrize("opens", [True, False])
def test_who_gives_up_while_others_make_rounds_already_tells_them(opens, monkeypatch):
    """Ranks 0 and 1 have met rank 2, which is cancelled just before it could begin, in its opening or in a reset."""
    attach = Epochs._attach_inboxes

    async def main(fabric: Fabric) -> None:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(opened(fabric)()) for _ in range(3)]
            members = [engine.address for engine in engines]
            last, scope = anyio.Event(), anyio.CancelScope()
            entered: list[int] = []
            heard: list[int] = []

            async def stuck(epochs: Epochs, found: Any) -> Posting:
                if epochs._host.rank == 2 and (opens or epochs._membership.epoch > 1):
                    last.set()
                    await anyio.sleep_forever()
                return await attach(epochs, found)

            async def live(rank: int) -> None:
                async with open_group(engines[rank], members, rank, RAISE) as group:
                    if not opens:
                        entered.append(rank)
                        await until(lambda: len(entered) == 3)
                        await group.reset()
                    own = given()[rank]
                    with pytest.raises((GroupBrokenError, aiote.PeerLostError), match="rank 2"):
                        await group.dispatch(own.x, own.ids, own.weights)
                    heard.append(rank)
                    await until(lambda: len(heard) == 2)

            async def cancelled() -> None:
                with scope:
                    async with open_group(engines[2], members, 2, RAISE) as group:
                        entered.append(2)
                        await until(lambda: len(entered) == 3)
                        try:
                            await group.reset()
                        finally:
                            with anyio.CancelScope(shield=True):
                                await until(lambda: len(heard) == 2)

            async def cancel() -> None:
                await last.wait()
                await anyio.sleep(0.05)
                scope.cancel()

            monkeypatch.setattr(Epochs, "_attach_inboxes", stuck)
            await all_of(lambda: live(0), lambda: live(1), cancelled, cancel)

    run(main, 1, rails=1, limit=30)


@pytest.mark.parametrize("config", [RAISE, MASK], ids=["raise", "mask"])
def test_statistics_say_who_was_slow_and_whose_rows_came(config):
    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), 3, config) as groups:
            tokens = given()

            async def one(group: MoeGroup) -> None:
                own = tokens[group.rank]
                for _ in range(3):
                    await anyio.sleep(0.05 * (group.rank == 1))
                    batch = await group.dispatch(own.x, own.ids, own.weights)
                    await group.combine(batch, compute(group, batch))

            await all_of(*(lambda g=group: one(g) for group in groups))
            for group in groups:
                counted = group.statistics()
                slow = counted.waited_for.round(2)
                assert slow.tolist() == ([0, 0, 0] if group.rank == 1 else [0, 0.15, 0])
                held = [np.isin(one.ids, (2 * group.rank, 2 * group.rank + 1)).sum() for one in tokens]
                assert counted.rank_rows.tolist() == [3 * rows for rows in held]
                assert counted.rank_rows.sum() == counted.expert_rows.sum()

    run(main, 1, rails=1, limit=30)
